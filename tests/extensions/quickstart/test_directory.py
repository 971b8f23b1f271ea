"""A quickstart starts in a new directory or its own, and never touches the files of something else."""

import pytest

from rl4llm.cli import main
from rl4llm.config import CONFIGS
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.quickstart import command
from rl4llm.extensions.quickstart.directory import check_directory, mark_directory
from rl4llm.extensions.quickstart.real import quickstart_real
from rl4llm.extensions.quickstart.run import quickstart


def files(directory):
    return {path: path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", [[], ["--real"]])
@pytest.mark.parametrize(
    "names", [["data/train.jsonl"], ["model/weights.bin", "notes.txt"], ["warm/a", "warmup/a", "grpo/a"]]
)
def test_quickstart_refuses_a_directory_with_other_files(kind, names, tmp_path, capsys, monkeypatch):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for starts in ("_toy", "_real"):
        monkeypatch.setattr(command, starts, pytest.fail)
    before = files(tmp_path)
    assert main(["quickstart", *kind, "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "has files that are not of a quickstart" in said.err
    assert not said.out  # nothing started
    assert files(tmp_path) == before


def begun(directory, seed, *, real):
    check_directory(directory, seed, real=real)
    mark_directory(directory, seed, real=real)
    (directory / "data").mkdir(exist_ok=True)


@pytest.mark.parametrize(("seed", "real"), [(7, False), (0, True)])
def test_quickstart_refuses_other_options_in_its_directory(seed, real, tmp_path):
    begun(tmp_path, 0, real=False)
    wanted = f"{'--real ' if real else ''}--seed {seed}"
    with pytest.raises(ConfigError, match=f"is of `rl4llm quickstart --seed 0`, not {wanted}. Next"):
        check_directory(tmp_path, seed, real=real)


def test_quickstart_accepts_any_options_before_it_wrote_files(tmp_path):
    mark_directory(tmp_path, 0, real=False)
    (tmp_path / ".quickstart.tmp-0a1b2c3d").touch()
    begun(tmp_path, 7, real=True)
    begun(tmp_path, 7, real=True)


def test_quickstart_removes_what_a_killed_start_left(tmp_path):
    begun(tmp_path, 0, real=False)
    for name in ("model.tmp-1", "warm.tmp-1", "model", "notes.tmp-1"):
        (tmp_path / name).mkdir()
    for name in (
        "model.tmp-1/config.json",
        "data/train.jsonl.tmp-1",
        "data/train.jsonl",
        "data/test.jsonl.tmp-1",
    ):
        (tmp_path / name).touch()
    begun(tmp_path, 0, real=False)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {".quickstart", "data", "data/train.jsonl", "model", "notes.tmp-1"}


def test_quickstart_marks_its_directory_before_it_writes(tmp_path, model_dir, monkeypatch):
    """A start that ends at its first file has marked the directory."""

    def ends(*_):
        raise KeyboardInterrupt

    for writer in ("run._write_demonstrations", "real.write_sums"):
        monkeypatch.setattr(f"rl4llm.extensions.quickstart.{writer}", ends)
    with pytest.raises(KeyboardInterrupt):
        quickstart(tmp_path / "toy", seed=0, configs=CONFIGS)
    with pytest.raises(KeyboardInterrupt):
        quickstart_real(tmp_path / "real", seed=0, configs=CONFIGS, model=model_dir)
    for name in ("toy", "real"):
        assert [path.name for path in (tmp_path / name).iterdir()] == [".quickstart"]

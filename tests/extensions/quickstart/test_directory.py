"""A quickstart starts in a new directory or its own, and never touches the files of something else."""

import pytest

from rl4llm.cli import main
from rl4llm.config import CONFIGS
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.quickstart.directory import check_directory, mark_directory
from rl4llm.extensions.quickstart.run import quickstart


def files(directory):
    return {path: path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "names", [["data/train.jsonl"], ["model/weights.bin", "notes.txt"], ["warm/a", "warmup/a", "grpo/a"]]
)
def test_quickstart_refuses_a_directory_with_other_files(names, tmp_path, capsys, monkeypatch):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    monkeypatch.setattr("rl4llm.extensions.quickstart.run.quickstart", pytest.fail)
    before = files(tmp_path)
    assert main(["recipe", "quickstart", "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "has files that are not of a quickstart" in said.err
    assert not said.out  # nothing started
    assert files(tmp_path) == before


def begun(directory, seed):
    check_directory(directory, seed)
    mark_directory(directory, seed)
    (directory / "data").mkdir(exist_ok=True)


def test_quickstart_refuses_other_options_in_its_directory(tmp_path):
    begun(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"is of `rl4llm recipe quickstart --seed 0`, not --seed 7\. Next"):
        check_directory(tmp_path, 7)


def test_quickstart_accepts_any_options_before_it_wrote_files(tmp_path):
    mark_directory(tmp_path, 0)
    (tmp_path / ".quickstart.tmp-0a1b2c3d").touch()
    begun(tmp_path, 7)
    begun(tmp_path, 7)


def test_quickstart_removes_what_a_killed_start_left(tmp_path):
    begun(tmp_path, 0)
    for name in ("model.tmp-1", "warm.tmp-1", "model", "notes.tmp-1"):
        (tmp_path / name).mkdir()
    for name in ("model.tmp-1/config.json", "data/train.jsonl.tmp-1", "data/train.jsonl"):
        (tmp_path / name).touch()
    begun(tmp_path, 0)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {".quickstart", "data", "data/train.jsonl", "model", "notes.tmp-1"}


def test_quickstart_marks_its_directory_before_it_writes(tmp_path, monkeypatch):
    """A start that ends at its first file has marked the directory."""

    def ends(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rl4llm.extensions.quickstart.run.write_atomically", ends)
    with pytest.raises(KeyboardInterrupt):
        quickstart(tmp_path / "toy", seed=0, configs=CONFIGS)
    files = [path.name for path in (tmp_path / "toy").rglob("*") if path.is_file()]
    assert files == [".quickstart"]

import json
import os
import signal
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from rl4llm.core.errors import RunDirError
from rl4llm.runs.run_dir import RunDir, is_full, replace_directory, write_atomically

FINGERPRINT = {"model": "tiny", "algorithm": {"name": "grpo", "clip": 0.2}, "seed": 1}

OWNER = """
import os, sys, time
from rl4llm.runs.run_dir import RunDir
run = RunDir.open(sys.argv[1], {"seed": 1})
if sys.argv[2] == "with-child" and os.fork() == 0:
    time.sleep(60)
print("open", flush=True)
time.sleep(60)
"""


def owner(path, kind="alone"):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path), kind],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "open\n"
    return process


def test_a_run_keeps_its_identity_when_it_is_opened_again(tmp_path):
    with RunDir.open(tmp_path / "a" / "run", FINGERPRINT) as first:
        assert not first.resumed
    with RunDir.open(tmp_path / "a" / "run", FINGERPRINT) as second:
        assert second.resumed
        assert (second.run_id, second.created) == (first.run_id, first.created)
    assert set(json.loads(first.run_file.read_text())) == {
        "run_id",
        "created",
        "rl4llm",
        "fingerprint",
        "settings",
        "contents",
    }


def test_a_second_trainer_is_refused_with_the_first_ones_pid(tmp_path):
    process = owner(tmp_path / "run")
    try:
        with pytest.raises(RunDirError):
            RunDir.open(tmp_path / "run", {"seed": 1})
    finally:
        process.kill()
        process.wait()


def test_a_second_trainer_in_the_same_process_is_refused_too(tmp_path):
    with RunDir.open(tmp_path, FINGERPRINT), pytest.raises(RunDirError):
        RunDir.open(tmp_path, FINGERPRINT)
    RunDir.open(tmp_path, FINGERPRINT).close()


@pytest.mark.parametrize("kind", ["alone", "with-child"])
def test_a_killed_trainers_children_do_not_hold_its_lock(tmp_path, kind):
    process = owner(tmp_path / "run", kind)
    process.kill()
    process.wait()
    try:
        with RunDir.open(tmp_path / "run", {"seed": 1}) as run:
            assert run.resumed
    finally:
        if kind == "with-child":
            os.killpg(process.pid, signal.SIGKILL)


def test_an_unsigned_lock_still_refuses_a_second_trainer(tmp_path):
    with RunDir.open(tmp_path, FINGERPRINT):
        (tmp_path / ".lock").write_text("")
        with pytest.raises(RunDirError):
            RunDir.open(tmp_path, FINGERPRINT)


def test_a_directory_with_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunDirError):
        RunDir.open(tmp_path, FINGERPRINT)
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_remains_of_a_killed_first_start_are_removed(tmp_path):
    (tmp_path / ".lock").write_text("")
    (tmp_path / "run.json.tmp-00ff00ff").write_text("{")
    (tmp_path / "model.tmp-00ff00ff/critic").mkdir(parents=True)
    with RunDir.open(tmp_path, FINGERPRINT) as run:
        assert not run.resumed
    assert sorted(item.name for item in tmp_path.iterdir()) == [".lock", "run.json"]


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirError):
            RunDir.open(path, FINGERPRINT)


def test_another_fingerprint_is_refused_with_the_difference(tmp_path):
    RunDir.open(tmp_path, FINGERPRINT).close()
    given = {"model": "tiny", "algorithm": {"name": "dapo", "clip": 0.2}, "seed": 2, "data": [1]}
    with pytest.raises(RunDirError) as caught:
        RunDir.open(tmp_path, given)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:4] == ["algorithm.name: 'grpo' -> 'dapo'", "data: nothing -> [1]", "seed: 1 -> 2"]
    assert "--force" in lines[-1] and "output.dir" in lines[-1]
    RunDir.open(tmp_path, FINGERPRINT).close()


def test_allowed_changes_are_reported_and_become_the_fingerprint(tmp_path):
    RunDir.open(tmp_path, FINGERPRINT).close()
    with RunDir.open(tmp_path, {**FINGERPRINT, "seed": 7}, allow_changes=True) as run:
        assert run.changes == ("seed: 1 -> 7",)
    with RunDir.open(tmp_path, {**FINGERPRINT, "seed": 7}) as run:
        assert run.changes == ()


def test_contents_are_compared_whatever_their_name(tmp_path):
    def start(digest, name="tokenizer of models/token", **options):
        run = RunDir.planned(tmp_path, FINGERPRINT, **options)
        run.hold({name: digest})
        with run:
            run.claim()

    for _ in range(2):
        start("8ce1d0f1a2b3c4d5")
    with pytest.raises(RunDirError, match=r"tokenizer of models/token: 8ce1d0f1a2b3c4d5 -> 0\n"):
        start("0")
    start("0", "another")
    start("1", "another", allow_changes=True)
    start("1", "another")


def test_a_run_older_than_a_key_resumes_only_with_its_default(tmp_path):
    defaults = {"rollout.max_staleness": 0, "launch.gpu": None}
    RunDir.open(tmp_path, FINGERPRINT, settings={"threads": 1}).close()
    newer, settings = ({**FINGERPRINT, "rollout.max_staleness": 0}, {"threads": 1, "launch.gpu": None})
    with RunDir.open(tmp_path, newer, settings=settings, defaults=defaults) as run:
        assert run.changes == ()
    with pytest.raises(RunDirError, match=r"rollout\.max_staleness: 0 -> 1"):
        RunDir.open(tmp_path, {**newer, "rollout.max_staleness": 1}, defaults=defaults)


def test_equal_numbers_and_tuples_as_lists_do_not_differ(tmp_path):
    RunDir.open(tmp_path, {"lr": 1, "betas": (0.9, 0.95)}).close()
    with RunDir.open(tmp_path, {"lr": 1.0, "betas": (0.9, 0.95)}) as run:
        assert run.changes == ()


def test_a_damaged_identity_is_refused_by_name(tmp_path):
    RunDir.open(tmp_path, FINGERPRINT).close()
    for text in ("", "{", "[]", '{"run_id": "x"}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunDirError):
            RunDir.open(tmp_path, FINGERPRINT)


def test_a_full_disk_leaves_only_the_old_file(tmp_path, files_of_at_most):
    with RunDir.open(tmp_path, FINGERPRINT) as run:
        run.write_text("config.yaml", "seed: 1\n")
        before = sorted(item.name for item in tmp_path.iterdir())
        with (
            files_of_at_most(1000),
            pytest.raises(RunDirError),
        ):
            run.write_text("config.yaml", "x" * 5000)
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    assert sorted(item.name for item in tmp_path.iterdir()) == before


def test_a_full_disk_leaves_the_old_directory(tmp_path):
    def write(directory):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    replace_directory(tmp_path / "model", lambda directory: (directory / "old").touch())
    with pytest.raises(RunDirError):
        replace_directory(tmp_path / "model", write, lambda: 4000)
    assert [str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*")] == ["model", "model/old"]


def test_a_write_without_a_directory_raises_run_dir_error(tmp_path):
    with pytest.raises(RunDirError):
        write_atomically(tmp_path / "no" / "file", b"x")


def test_a_library_that_wraps_the_systems_error_is_understood():
    assert is_full(RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert is_full(OSError(27, "File too large"))
    assert not is_full(RuntimeError("os error 2"))
    assert not is_full(OSError(2, "No space left, it says"))


def test_settings_may_change_between_starts_and_are_reported(tmp_path):
    def changes(fingerprint=FINGERPRINT, **settings):
        with RunDir.open(tmp_path / "run", fingerprint, settings=settings, allow_changes=True) as run:
            return run.changes

    assert changes(max_steps=4, processes=2) == ()
    assert changes(max_steps=6, processes=2) == ("max_steps: 4 -> 6",)
    assert changes(max_steps=6, processes=2) == ()
    told = changes({**FINGERPRINT, "seed": 9}, max_steps=6)
    assert told[0].startswith("seed: ") and told[1:] == ("processes: 2 -> nothing",)

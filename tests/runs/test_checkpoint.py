import json
import os
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl4llm.core.errors import CheckpointError
from rl4llm.runs.checkpoint import latest_checkpoint, read_checkpoint, save_checkpoint, unfinished_saves

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def save(root, step, keep=2, size=1000):
    def write(directory):
        (directory / "model").mkdir()
        save_file({"weight": torch.full((size,), float(step))}, directory / "model" / "weights.safetensors")
        (directory / "optimizer.json").write_text(json.dumps({"lr": step}))

    return save_checkpoint(root, step, write, {"step": step, "lr": 1 / 3, "cursor": [step, None]}, keep)


def names(root):
    return sorted(path.name for path in root.iterdir())


def check_whole(checkpoint):
    assert checkpoint.state == {"step": checkpoint.step, "lr": 1 / 3, "cursor": [checkpoint.step, None]}
    weights = load_file(checkpoint.path / "model" / "weights.safetensors")
    assert (weights["weight"] == checkpoint.step).all()


def in_a_child(work):
    """Run `work` in a forked process; returns its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_and_die_at(root, step, change, keep):
    """Save, but be killed just before the `change`-th change to the filesystem; False when there are fewer."""
    left = change

    def count(event, _):
        nonlocal left
        if event in CHANGES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def work():
        sys.addaudithook(count)
        save(root, step, keep)

    status = in_a_child(work)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_checkpoint_loads_and_only_the_newest_are_kept(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    checkpoint = latest_checkpoint(tmp_path)
    check_whole(checkpoint)
    assert (checkpoint.step, checkpoint.skipped) == (15, ())
    assert names(tmp_path) == ["latest", "step-000010", "step-000015"]
    check_whole(read_checkpoint(tmp_path / "step-000010"))


def test_nothing_saved_is_none(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "never") is None


def test_a_killed_save_leaves_the_old_step_or_the_new_one(tmp_path, sweep):
    every = 1 if sweep else 2
    change, found = 1 - every, []  # the first, the third and so on
    while True:
        change += every
        root = tmp_path / str(change)
        save(root, 1)
        save(root, 2)
        if not save_and_die_at(root, 3, change, keep=1):
            break
        checkpoint = latest_checkpoint(root)
        check_whole(checkpoint)
        found.append(checkpoint.step)
        partial = [path.name for path in unfinished_saves(root)]
        assert all(any(name in line for line in checkpoint.skipped) for name in partial)
        save(root, 4, keep=1)
        assert names(root) == ["latest", "step-000004"]
    assert found == sorted(found) and set(found) == {2, 3}
    assert every * len(found) > 15


def test_a_killed_second_save_never_loses_the_step(tmp_path, sweep):
    change = 0
    while True:
        change += 1 if sweep else 2
        root = tmp_path / str(change)
        save(root, 7)
        if not save_and_die_at(root, 7, change, keep=1):
            break
        check_whole(latest_checkpoint(root))
        save(root, 7)
        assert names(root) == ["latest", "step-000007"]


@pytest.mark.parametrize(
    "name", ["model/weights.safetensors", "optimizer.json", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["truncated", "missing", "emptied", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, name, harm):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    if harm == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif harm == "missing":
        file.unlink()
    elif harm == "flipped":
        flip_a_bit(file)
    else:
        os.truncate(file, 0)
    checkpoint = latest_checkpoint(tmp_path)
    check_whole(checkpoint)
    assert checkpoint.step == 1
    assert checkpoint.skipped[0].startswith("step-000002: ")
    assert name in checkpoint.skipped[0] or (harm, name) == (
        "flipped",
        "manifest.json",
    )  # then it names another file
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "step-000002")


def test_every_flipped_bit_in_a_manifest_is_found_or_harmless(tmp_path):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "manifest.json"
    whole = file.read_bytes()
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 1
        file.write_bytes(content)
        check_whole(latest_checkpoint(tmp_path))


def test_a_run_without_a_good_checkpoint_is_refused(tmp_path):
    for step in (1, 2):
        flip_a_bit(save(tmp_path, step) / "state.json")
    with pytest.raises(CheckpointError):
        latest_checkpoint(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step-00000{step}").rename(tmp_path.parent / f"gone-{step}")
    with pytest.raises(CheckpointError):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [None, "", "step-000001\n", "step-999999\n", "\x00\x00"])
def test_the_newest_good_checkpoint_wins_over_latest(tmp_path, content):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_text(content)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint.step == 2 and not checkpoint.skipped


def test_a_renamed_checkpoint_is_not_used_as_another_step(tmp_path):
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    one.rename(tmp_path / "step-000009")
    two.rename(tmp_path / "step-000002x")
    with pytest.raises(CheckpointError):
        latest_checkpoint(tmp_path)


def test_a_checkpoint_of_another_run_is_passed_over_or_refused(tmp_path):
    for step, run in ((1, "one"), (2, "other")):
        save_checkpoint(tmp_path, step, lambda directory: None, {"run": run}, 3)
    found = latest_checkpoint(tmp_path, "one")
    assert found.step == 1
    assert found.skipped[0] == "step-000002: it belongs to the run other, but this run is one"
    assert latest_checkpoint(tmp_path).step == 2
    with pytest.raises(CheckpointError):
        latest_checkpoint(tmp_path, "third")


def test_a_save_after_a_fallback_removes_later_steps(tmp_path):
    save(tmp_path, 1)
    flip_a_bit(save(tmp_path, 3) / "state.json")
    assert latest_checkpoint(tmp_path).step == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"]
    assert latest_checkpoint(tmp_path).skipped == ()


@pytest.mark.parametrize("size", [3000, 200])
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, size, files_of_at_most):
    save(tmp_path, 1)
    with files_of_at_most(size), pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2)
    assert "free" not in str(caught.value)  # which a limit on files does not depend on
    assert names(tmp_path) == ["latest", "step-000001"]
    check_whole(latest_checkpoint(tmp_path))


def test_a_full_disk_leaves_nothing_of_a_save(tmp_path):
    def write(directory):
        (directory / "half").write_bytes(b"x" * 100)
        with open("/dev/full", "wb") as file:
            file.write(b"x")

    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, 1, write, {}, 2, num_bytes=9000)
    assert names(tmp_path) == []


def test_a_full_disk_while_sealing_is_the_same(tmp_path, files_of_at_most):
    def write(directory):
        (directory / "weights").write_bytes(b"x" * 100)

    save_checkpoint(tmp_path, 1, write, {}, 2)
    with files_of_at_most(150), pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, 2, write, {}, 2)
    assert names(tmp_path) == ["latest", "step-000001"]


def test_a_callers_exception_passes_through_and_leaves_no_file(tmp_path):
    def write(directory):
        (directory / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, write, {}, 1)
    assert names(tmp_path) == []
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path, 1, lambda directory: 1 / 0, {}, 1)
    assert names(tmp_path) == []


def test_an_interrupted_first_save_is_reported_and_not_used(tmp_path):
    assert save_and_die_at(tmp_path, 1, 5, keep=1)
    assert latest_checkpoint(tmp_path) is None
    assert len(unfinished_saves(tmp_path)) == 1

"""Extensions that are compiled at the start: no dead lock is waited for, and no build goes on for ever in silence."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.deepspeed.builds import STALE_S, remove_dead_locks, watched_builds


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """lock(age_s): the lock of an extension, as torch leaves it, in the directory where extensions are compiled."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def make(age_s):
        directory = tmp_path / "py311_cpu" / "some_op"
        directory.mkdir(parents=True)
        (directory / "lock").touch()
        os.utime(directory / "lock", (time.time() - age_s,) * 2)
        return directory / "lock"

    return make


@contextmanager
def working_in(directory):
    """A process that stays in the directory, as compilers do."""
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=directory, stdin=subprocess.PIPE) as builder:
        try:
            yield
        finally:
            builder.communicate(b"\n")


def test_the_lock_of_a_build_that_has_just_begun_stays(lock, tmp_path):
    young = lock(age_s=STALE_S - 30)
    assert remove_dead_locks(tmp_path) == []
    assert young.exists()


def test_an_old_lock_is_removed_if_no_builder_works_there(lock, tmp_path, caplog):
    old = lock(age_s=STALE_S + 1)
    with working_in(old.parent):
        assert remove_dead_locks(tmp_path) == []
    assert remove_dead_locks(tmp_path) == [old]
    assert not old.exists()
    assert "some_op" in caplog.text


@pytest.fixture(
    params=[signal.default_int_handler, signal.SIG_IGN], ids=["in a terminal", "in the background"]
)
def started_from_a_shell(request):
    """Where processes ignore Ctrl-C that a shell started in the background."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    assert signal.signal(signal.SIGINT, before) == request.param


@pytest.mark.usefixtures("started_from_a_shell")
def test_hanging_start_logs_its_reason_and_ends_at_the_deadline(lock, caplog):
    held = lock(age_s=0)
    with (
        working_in(held.parent),
        caplog.at_level(logging.WARNING),
        pytest.raises(ConfigError),
        watched_builds("The start", deadline_s=0.3, say_every_s=0.1),
    ):
        end = time.monotonic() + 20
        while held.exists() and time.monotonic() < end:  # as torch waits
            time.sleep(0.01)
    assert caplog.text.count("some_op") >= 2


def test_start_detects_a_killed_builder_behind_a_young_lock(lock, monkeypatch):
    monkeypatch.setattr("rl4llm.extensions.deepspeed.builds.STALE_S", 0.3)
    young = lock(age_s=0)
    with watched_builds("The start", deadline_s=60.0):
        assert not young.exists()


def test_start_does_not_wait_for_a_killed_builder(lock, monkeypatch):
    monkeypatch.setattr("rl4llm.extensions.deepspeed.builds.STALE_S", 0.1)
    held, builder = lock(age_s=0), ExitStack()
    builder.enter_context(working_in(held.parent))
    with builder, watched_builds("The start", deadline_s=60.0, say_every_s=0.05):
        builder.close()
        while held.exists():  # as torch waits
            time.sleep(0.01)


def test_interrupted_start_does_not_report_a_deadline(lock):
    with pytest.raises(KeyboardInterrupt), watched_builds("The start", deadline_s=60.0):
        raise KeyboardInterrupt


def test_start_in_time_logs_nothing(lock, caplog):
    with working_in(lock(age_s=0).parent), watched_builds("The start", deadline_s=60.0):
        pass
    assert not caplog.text

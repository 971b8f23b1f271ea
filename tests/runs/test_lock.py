"""Locks lie where other users can make files too, so nothing that another user made is opened, entered or emptied."""

import os

import pytest

from rl4llm.core.errors import RunDirError
from rl4llm.extensions.servers.sync import shared_memory
from rl4llm.extensions.servers.sync.wrappers import Claims
from rl4llm.runs.lock import DirectoryLock, private_directory
from rl4llm.runs.run_dir import RunDir

URL = "http://127.0.0.1:30000"
NAME = f"rl4llm-{os.getuid()}"


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A directory that everyone may write to, in the place of /tmp and of /dev/shm."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setattr(shared_memory, "SHARED", shared)
    return shared


@pytest.fixture
def thesis(tmp_path):
    """A file that must keep its content."""
    file = tmp_path / "thesis.tex"
    file.write_text("all of it")
    yield file
    assert file.read_text() == "all of it"


@pytest.mark.parametrize("made", ["by another user", "a link", "open to all"])
@pytest.mark.parametrize("opens", ["servers", "memory"])
def test_directory_that_others_could_fill_is_not_entered(shared, thesis, monkeypatch, made, opens):
    name = NAME
    if made == "by another user":
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        name = f"rl4llm-{os.getuid()}"
    elsewhere = shared / name
    if made == "a link":
        elsewhere = shared.parent / "elsewhere"
        (shared / name).symlink_to(elsewhere)
    for directory in ("servers/localhost-30000", "1234/weights"):
        (elsewhere / directory).mkdir(parents=True)
        (elsewhere / directory / ".lock").symlink_to(thesis)
    (shared / name).chmod(0o777 if made == "open to all" else 0o700)
    monkeypatch.setattr(DirectoryLock, "__init__", lambda *_: pytest.fail("a lock was opened"))
    with pytest.raises(PermissionError):
        Claims([URL]).take() if opens == "servers" else shared_memory.place_of(shared.parent / "run")
    assert (elsewhere / "1234").exists()


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_lock_that_is_a_link_is_refused_and_its_target_kept(tmp_path, thesis, link):
    run = tmp_path / "run"
    run.mkdir()
    getattr(run / ".lock", link)(thesis)
    with pytest.raises(OSError):
        DirectoryLock(run)
    with pytest.raises(RunDirError):
        RunDir.open(run, {})


def test_cron_and_a_login_session_use_the_same_directory(shared, monkeypatch):
    login = shared.parent / "login"
    login.mkdir()
    under_cron = private_directory()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    assert private_directory() == under_cron == shared / NAME
    assert private_directory(login) == login / NAME
    (login / NAME).chmod(0o755)
    assert private_directory(login).stat().st_mode & 0o777 == 0o700

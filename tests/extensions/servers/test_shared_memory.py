"""Weights go through shared memory if every server is a process of this machine, and leave nothing behind."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from fault_server import FaultServer, small_model, started

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.config.keys import SyncConfig
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import TensorSpec
from rl4llm.extensions.servers.sync import shared_memory
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore

FLOAT32 = torch.float32


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """The directory that is used as shared memory."""
    monkeypatch.setattr(shared_memory, "SHARED", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def listening():
    """The address of a process of this machine that listens: this one."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def play(tokenizer, tmp_path):
    """Run `story(server, publisher, backend, lines)` with a store that may use shared memory."""

    def run(story):
        async def main():
            server, lines = FaultServer(small_model(tokenizer), tokenizer), []
            backend = TorchBackend(small_model(tokenizer, seed=1), lr=1e-3)
            async with started(server, tokenizer) as client:
                where = tmp_path / "weights", [server.url], FLOAT32, lines.append
                publisher = FilesystemPublisher(client, shared_memory.open_store(SyncConfig(), *where))
                await story(server, publisher, backend, lines)
                await publisher.close()

        return asyncio.run(main())

    return run


def test_weights_for_a_local_server_are_in_memory_until_close(play, memory, tmp_path):
    async def story(server, publisher, backend, lines):
        weight_ref = await publisher.publish(backend, 1)
        assert weight_ref.path.startswith(str(memory)) and not (tmp_path / "weights").exists()
        assert server.weight_version == "1" and len(lines) == 1 and str(memory) in lines[0]
        assert (await publisher._client.generate([5, 6], SamplingParams(max_tokens=2))).version == 1

    play(story)
    assert list((memory / f"rl4llm-{os.getuid()}").iterdir()) == []


def test_without_room_weights_are_on_the_disk(play, memory, tmp_path, monkeypatch):
    async def story(server, publisher, backend, lines):
        monkeypatch.setattr(shared_memory, "_available", lambda: 1000)
        weight_ref = await publisher.publish(backend, 1)
        assert weight_ref.path == str(tmp_path / "weights" / "v000001")
        assert "GiB are needed" in lines[0] and len(lines) == 1

    play(story)


def test_full_memory_continues_on_the_disk(play, tmp_path, memory, monkeypatch):
    async def story(server, publisher, backend, lines):
        write = WeightStore._write_tensors

        def full(self, directory, *given):
            if directory.is_relative_to(memory):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, directory, *given)

        monkeypatch.setattr(WeightStore, "_write_tensors", full)
        assert (await publisher.publish(backend, 1)).path == str(tmp_path / "weights" / "v000001")

    play(story)


def test_other_machines_and_forwarders_get_files(listening, monkeypatch):
    assert shared_memory.unusable([listening], 10) is None
    assert shared_memory.unusable([listening, "http://192.0.2.7:30000"], 10) == ""
    assert shared_memory.unusable(["http://127.0.0.1:1"], 10) == ""  # nobody listens
    monkeypatch.setattr(psutil.Process, "exe", lambda self: "/usr/bin/ssh")
    assert shared_memory.unusable([listening], 10) == ""


def test_a_container_with_other_memory_gets_files(listening, memory, monkeypatch):
    stat, other = os.stat, os.stat("/")
    monkeypatch.setattr(os, "stat", lambda path: other if str(path).startswith("/proc") else stat(path))
    assert "in a container" in shared_memory.unusable([listening], 10)


def test_a_directory_of_another_user_is_not_used(listening, memory, tmp_path, monkeypatch):
    lines, me = [], os.getuid()
    (memory / f"rl4llm-{me + 1}").mkdir()
    store = shared_memory.open_store(SyncConfig(), tmp_path / "weights", [listening], FLOAT32, lines.append)
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    weights = {"a": torch.zeros(2, 2)}
    ref = store.write(1, [TensorSpec.of("a", weights["a"])], iter(weights.items()))
    assert (
        ref.path == str(tmp_path / "weights" / "v000001")
        and "is not a directory that only this user" in lines[0]
    )
    store.close()


def test_a_directory_that_was_chosen_is_used(tmp_path, listening):
    given = SyncConfig(dir=str(tmp_path / "mine"))
    store = shared_memory.open_store(given, tmp_path / "weights", [listening], FLOAT32, pytest.fail)
    assert store.root == tmp_path / "mine" and not store.leave_memory()


HOLDS = """
import sys, time
from pathlib import Path
from rl4llm.extensions.servers.sync import shared_memory
from rl4llm.runs.lock import DirectoryLock
shared_memory.SHARED = Path(sys.argv[1])
weights = shared_memory.place_of(Path(sys.argv[2]))
weights.mkdir(parents=True)
lock = DirectoryLock(weights)
(weights / "v000001").mkdir()
print("ready", flush=True)
time.sleep(600)
"""


def test_memory_of_a_killed_run_is_freed_at_the_next_start(memory, tmp_path):
    command = [sys.executable, "-c", HOLDS, str(memory), str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        [held] = (memory / f"rl4llm-{os.getuid()}").iterdir()
        shared_memory.place_of(tmp_path / "next")
        assert (held / "weights" / "v000001").exists()  # its process lives
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    # the run itself resumes in its directory
    assert shared_memory.place_of(tmp_path / "killed").parent == held
    assert held.exists()
    time.sleep(0.01)
    shared_memory.place_of(tmp_path / "next")
    assert not held.exists()

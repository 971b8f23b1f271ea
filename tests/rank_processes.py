"""Functions of a test run on several processes that form a gloo group, as `torchrun` would start them.

    def norms(ranks, tensor):                      # at the top of a test file; the processes import that file
        return ranks.total(tensor).norm().item()

    def test_all_ranks_say_the_same(on_ranks):
        first, second = on_ranks(norms, torch.ones(3))

The processes start at the first call and serve further ones. Arguments and results are pickled. A function that
fails on any rank, or is not done within the deadline, fails the test with what every rank was doing; the next call then
starts new processes.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist
from forked_python import forks

from rl4llm.compose import setup
from rl4llm.runtime.ranks import join_ranks
from rl4llm.tracking.run import RunTracker

GRACE_S = 2.0  # for the others to fail by themselves, once one has


class RankProcesses:
    """`size` processes, each with one thread; `environ` are further environment variables, as text."""

    def __init__(self, size: int = 2, deadline_s: float = 120.0, **environ: str):
        self.size = size
        self.deadline_s = deadline_s
        self.environ = environ
        self._processes = []

    def __call__(self, function, *args, deadline_s: float | None = None):
        """What `function(ranks, *args)` returned, by rank; raises AssertionError when it failed on any."""
        self.begin(function, *args)
        return self.end(deadline_s)

    def begin(self, function, *args) -> None:
        """Have all ranks call `function`; `end` waits for it."""
        if not self._processes:
            self._start()
        task = pickle.dumps(
            (inspect.getsourcefile(function), function.__module__, function.__qualname__, args)
        )
        for connection in self._connections:
            connection.send_bytes(task)
        self._called = function.__qualname__

    def end(self, deadline_s: float | None = None):
        """Return what the ranks returned; raise AssertionError if any failed, died or hangs, and leave none of them."""
        answers = self._answers(time.monotonic() + (deadline_s or self.deadline_s))
        failures = {rank: value for rank, (failed, value) in answers.items() if failed}
        if len(answers) == self.size and not failures:
            return [answers[rank][1] for rank in range(self.size)]
        told = [
            f"--- rank {rank} " + (failures.get(rank) or self._state(rank, answers.get(rank)))
            for rank in sorted(range(self.size), key=lambda rank: rank not in failures)
        ]
        self.close()
        raise AssertionError(
            f"{self._called} failed on {len(failures)} of {self.size} ranks.\n" + "\n".join(told)
        )

    def kill(self, *victims: int) -> None:
        """Kill these ranks with `kill -9`."""
        for rank in victims:
            self._processes[rank].kill()

    def dead(self, rank: int) -> bool:
        """Return whether a rank died before the deadline without finishing its function."""
        wait([self._processes[rank].sentinel, self._connections[rank]], timeout=self.deadline_s)
        self._processes[rank].join(1.0)
        return not self._processes[rank].is_alive()

    def over_within(self, seconds: float) -> bool:
        """Return whether a rank is done, with any result, within the given time."""
        return bool(wait(self._connections, timeout=seconds))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = Path(tempfile.mkdtemp(prefix="ranks-"))
        fork = forks()
        self._connections = []
        for rank in range(self.size):
            ours, theirs = fork.Pipe()
            environ = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size), "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                **self.environ,
            }  # fmt: skip
            process = fork.Process(
                target=_serve, args=(theirs, environ, self._stacks / str(rank)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for connection in self._connections:
            connection.recv_bytes()  # it has joined

    def _answers(self, deadline: float) -> dict[int, tuple[bool, object]]:
        """(whether it failed, result or traceback) by rank, of the ranks that answered in time."""
        found = {}
        while len(found) < self.size:
            open_ones = [self._connections[rank] for rank in range(self.size) if rank not in found]
            ready = wait(open_ones, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                found[self._connections.index(connection)] = answer = _answer(connection)
                if answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return found

    def _state(self, rank: int, answer: tuple[bool, object] | None) -> str:
        process, stacks = self._processes[rank], self._stacks / str(rank)
        if answer and not answer[0]:
            return "was done."
        process.join(1.0 if answer else 0.0)
        if not process.is_alive():
            return f"died with exit code {process.exitcode}.\n" + stacks.read_text()
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "was not done in time:\n" + stacks.read_text()


def _answer(connection: Connection) -> tuple[bool, object]:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return True, ""  # it died


def _serve(connection: Connection, environ: dict[str, str], stacks: Path) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    setup.multiplies_bfloat16 = lambda: False  # both as in the process of the tests
    RunTracker._draw_curve = lambda self, step: None
    with open(stacks, "w") as file:
        faulthandler.enable(file=file)  # a crash leaves the stacks of all threads
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        ranks = join_ranks(timeout_s=60.0)
        connection.send_bytes(b"")
        while True:
            try:
                task = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_run(task, ranks))


def _run(task: bytes, ranks) -> bytes:
    try:
        file, module_name, function_name, args = pickle.loads(task)
        torch.manual_seed(0)
        return pickle.dumps((False, getattr(_imported(file, module_name), function_name)(ranks, *args)))
    except Exception:  # noqa: BLE001 - the test that asked for it shows it
        return pickle.dumps((True, "failed:\n" + traceback.format_exc()))


def _imported(file: str, name: str):
    if getattr(sys.modules.get(name), "__file__", None) != file:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]

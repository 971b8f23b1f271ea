"""What a level of the sandbox contains, tested with a canary for each property."""

from __future__ import annotations

import ast
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.extensions.sandbox.levels import LEVELS
from rl4llm.extensions.sandbox.program import Limits, Outcome, Program

LIMITS = Limits(wall_s=20.0, total_s=30.0, memory_bytes=256 * 1024**2, processes=16)
BOUNDED = ("processes", "memory")
APART = ("network", "host_files", "host_processes", *BOUNDED)
NEEDED = (*APART, "user_namespaces")
REMOTE = "remote"
_CANARY = """
import os, signal, socket
seen = {{}}

def tried(name, attempt):
    try:
        seen[name] = not attempt()
    except Exception:
        seen[name] = True

def connects():
    socket.create_connection(("127.0.0.1", {port}), 2).close()
    return True

def reads_or_writes():
    try:
        return open({file!r}).read() == {word!r}
    except OSError:
        open({file!r} + ".written", "w").close()
        return True

def forks():
    children = []
    try:
        for _ in range({processes} + 8):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    except OSError:
        return False
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return True

def allocates():
    return len(bytearray({memory})) > 0

def unshares():
    import ctypes
    return ctypes.CDLL(None).unshare(0x10000000) == 0

tried("network", connects)
tried("host_files", reads_or_writes)
tried("host_processes", lambda: open("/proc/{pid}/stat").read().split()[21] == {started!r})
tried("processes", forks)
tried("memory", allocates)
tried("user_namespaces", unshares)
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
seen["seccomp"] = status.get("Seccomp", "0").strip() == "2"
seen["capabilities"] = int(status.get("CapEff", "1").strip(), 16) == 0
print(seen)
"""


@dataclass(frozen=True, slots=True)
class LevelProbe:
    """A level, and for each property whether it is contained. `problem` says why the level cannot be used."""

    level: str
    rank: int
    properties: Mapping[str, bool] = field(default_factory=dict)
    problem: str = ""

    @property
    def holds(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        if self.problem:
            return f"sandbox {self.level}: {self.problem}"
        contained = ", ".join(name for name, holds in self.properties.items() if holds)
        open_ = ", ".join(name for name, holds in self.properties.items() if not holds)
        return f"sandbox {self.level}: contains {contained}{'; does NOT contain ' + open_ if open_ else ''}"


def probe_level(name: str, run: Callable[[Program, Limits], Outcome]) -> LevelProbe:
    """Let a canary program try everything that the level should stop; return what it found.

    It tries this machine's files, network and processes, also if the level runs on another machine.
    """
    rank = 2 if name == REMOTE else LEVELS[name].rank
    word = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="rl4llm-canary-") as directory,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        os.chmod(directory, 0o777)
        file = Path(directory) / "canary"
        file.write_text(word)
        file.chmod(0o644)
        canary = _CANARY.format(
            port=server.getsockname()[1],
            file=str(file),
            word=word,
            processes=LIMITS.processes,
            memory=2 * LIMITS.memory_bytes,
            pid=os.getpid(),
            started=Path("/proc/self/stat").read_text().split()[21],
        )
        outcome = run(Program(canary), LIMITS)
        written = Path(f"{file}.written").exists()
    if outcome.status != "ok":
        return LevelProbe(name, rank, problem=f"it does not start: {outcome.reason or outcome.stderr[-300:]}")
    properties = dict(ast.literal_eval(outcome.stdout))
    properties["host_files"] = properties["host_files"] and not written
    needed = APART if name == REMOTE else NEEDED if rank > 1 else BOUNDED
    missing = [name for name in needed if not properties[name]]
    problem = f"the canary test shows that it does not contain {', '.join(missing)}" if missing else ""
    return LevelProbe(name, rank, properties, problem)

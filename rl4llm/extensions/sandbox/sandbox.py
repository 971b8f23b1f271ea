"""The sandbox for the rest of the code: `run(program, limits) -> Outcome`, from any thread."""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError, SandboxError, unknown
from rl4llm.core.schema import Count, checked
from rl4llm.extensions.sandbox.levels import LEVELS, find_bwrap, find_python, may_use, slot_uids
from rl4llm.extensions.sandbox.packages import Mounted, mounted
from rl4llm.extensions.sandbox.probe import REMOTE, LevelProbe, probe_level
from rl4llm.extensions.sandbox.program import Limits, Outcome, Program, outcome_of
from rl4llm.extensions.sandbox.remote import ELSEWHERE, GRACE_S, RemoteSlot

ATTEMPTS = 3
SLOT_TIMEOUT_S = 1800.0
_ROOT = str(Path(__file__).parents[3])
_MAIN = "import sys; sys.path.insert(0, {!r}); from rl4llm.extensions.sandbox import supervisor; supervisor.main()"
logger = logging.getLogger(__name__)


class Sandbox:
    """Sandboxes on this or another machine.

    Args:
        level: "auto" for the strongest that works on this machine, one of `rl4llm.extensions.sandbox.LEVELS`, or
            ``package.module:Name`` of a callable that starts `rl4llm.extensions.sandbox.serve` on another machine, see
            `rl4llm.extensions.sandbox.remote`.
        allow_weak: whether to allow a level that does not isolate programs from the host's files and network.
        slots: number of simultaneous programs, each with a separate supervising process.
        packages: installed packages that programs may import, such as numpy, with those that they need; an entry with a
            slash is a directory to import from. All of them are read-only.
        loopback: whether programs may connect to themselves over 127.0.0.1 and ::1; there is no other network.
        limits: limits of programs without specific ones.

        >>> sandbox = Sandbox()
        >>> sandbox.run(Program("print(6 * 7)")).stdout
        '42\\n'

    Nothing starts before the first use. Then the level is tested with a canary for each property; SandboxError lists
    what is missing if no level can be used. `run` may be called from several threads; it blocks. `counts` has totals of
    outcomes by status, and of retried programs.
    """

    @checked("sandbox")
    def __init__(
        self,
        level: str = "auto",
        *,
        allow_weak: bool = False,
        slots: Count = 2,
        packages: Sequence[str] = (),
        loopback: bool = False,
        limits: Limits | None = None,
    ):
        self._elsewhere = ELSEWHERE[level] if ":" in level else None
        if level not in ("auto", *LEVELS) and self._elsewhere is None:
            raise ConfigError(unknown("sandbox.level", level, ("auto", *LEVELS)))
        self.level = level
        self.allow_weak = allow_weak
        self.slots = slots
        if self._elsewhere is not None and packages:
            raise ConfigError(f"sandbox.packages has no effect with {level=}: install them there.")
        self._entries = tuple(packages)
        self.packages, self._modules = mounted(packages)
        self.loopback = loopback
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        self.active: LevelProbe | None = None  # the level that is in use
        self._reset()

    def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Return the outcome of a program; every failure is an outcome too. Those of the machine are retried first."""
        try:
            self.probe()
        except SandboxError as error:
            return self._counted(Outcome("infra_error", str(error)))
        try:
            slot = self._free.get(timeout=SLOT_TIMEOUT_S)
        except queue.Empty:
            return self._counted(Outcome("infra_error", f"no slot became free in {SLOT_TIMEOUT_S:g} s"))
        try:
            for attempt in range(ATTEMPTS):
                outcome, again = slot.run(program, limits or self.limits)
                if not again:
                    break
                self.counts["again"] += attempt + 1 < ATTEMPTS
                slot.close()
        finally:
            self._free.put(slot)
        return self._counted(outcome)

    def run_script(self, source: str, stdin: str, *, wall_s: float, memory_bytes: int) -> Outcome:
        """Return the outcome of a script with this input, for callers that only have the sandbox."""
        limits = replace(self.limits, wall_s=wall_s, total_s=wall_s, memory_bytes=memory_bytes)
        return self.run(Program(source, stdin=stdin), limits)

    def importing(self, packages: Sequence[str]) -> Sandbox:
        """Return a sandbox like this one whose programs may also import these; on another machine they are installed."""
        options = {name: getattr(self, name) for name in ("allow_weak", "slots", "loopback", "limits")}
        added = () if self._elsewhere else packages
        return Sandbox(self.level, packages=[*self._entries, *added], **options)

    def probe(self) -> LevelProbe:
        """Return the active level and its tested properties. Raises SandboxError if no level can be used."""
        if os.getpid() != self._owner:  # a fork of the trainer gets separate slots
            self._finalizer.detach()
            self._reset()
        with self._lock:
            if self.active is None:
                chosen = self._chosen()
                for slot in self._all:
                    slot.level = chosen.level
                self._import_packages()
                self.active = chosen
                logger.log(logging.INFO if chosen.rank > 1 else logging.WARNING, "%s", chosen)
            return self.active

    def close(self) -> None:
        """End all supervisors and the programs they run; a later use starts new ones."""
        for slot in self._all:
            slot.close()

    def pids(self) -> list[int]:
        """Return the process ids of the running supervisors."""
        return [slot.process.pid for slot in self._all if slot.process is not None]

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.active = None
        self._all: list[_Slot | RemoteSlot] = (
            [_Slot("", uid, self.packages, self.loopback, self.limits) for uid in slot_uids(self.slots)]
            if self._elsewhere is None
            else [RemoteSlot(self._elsewhere) for _ in range(self.slots)]
        )
        self._free: queue.LifoQueue[_Slot | RemoteSlot] = queue.LifoQueue()
        for slot in self._all:
            self._free.put(slot)
        self._finalizer = weakref.finalize(self, _close_all, self._all, self._owner)

    def _chosen(self) -> LevelProbe:
        names = [REMOTE] if self._elsewhere else list(LEVELS) if self.level == "auto" else [self.level]
        problems = []
        for name in names:
            probe = self._probed(name)
            if probe.holds:
                return probe
            problems.append(f"{name}: {probe.problem}")
        if self._elsewhere:
            raise SandboxError(f"sandbox.level={self.level!r} cannot run programs. {problems[0]}")
        raise SandboxError(
            "No sandbox for programs that a model wrote works on this machine. Install bubblewrap 0.8 or newer "
            "(apt-get install bubblewrap), and allow user namespaces if they are disabled (sysctl "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0).\n"
            + "\n".join(problems)
        )

    def _import_packages(self) -> None:
        """Raise SandboxError if the sandbox cannot import a package, whose lack would count as a program's error."""
        for module in self._modules:
            outcome, _ = self._all[0].run(Program(f"import {module}"), self.limits)
            if outcome.status != "ok":
                raise SandboxError(f"sandbox.packages: programs cannot import {module!r}: {outcome.reason}")

    def _probed(self, name: str) -> LevelProbe:
        rank = 2 if name == REMOTE else LEVELS[name].rank
        if rank < 2 and not self.allow_weak:
            return LevelProbe(name, rank, problem=f"it {WEAK}; sandbox.allow_weak=true allows it")
        if name != REMOTE and rank == 2 and find_bwrap() is None:
            return LevelProbe(name, rank, problem="bwrap is not installed")
        slot = self._all[0]
        slot.level = name
        probe = probe_level(name, lambda program, limits: slot.run(program, limits)[0])
        if name != REMOTE:  # keep the other machine for the programs
            slot.close()
        return probe

    def _counted(self, outcome: Outcome) -> Outcome:
        self.counts[outcome.status] += 1
        return outcome


WEAK = "does not isolate a program from the host's files and network, or stop it from creating namespaces"


@dataclass(eq=False, slots=True)
class _Slot:
    """A supervising process, started for the first program."""

    level: str
    uid: int | None
    packages: tuple[Mounted, ...]
    loopback: bool
    limits: Limits
    process: subprocess.Popen[bytes] | None = None
    channel: Connection[Any, Any] | None = None
    log: Any = field(default=None)

    def run(self, program: Program, limits: Limits) -> tuple[Outcome, bool]:
        """Run a program once; return the outcome, and whether a retry may help."""
        try:
            channel = self.channel
            if channel is None or self.process is None or self.process.poll() is not None:
                self.close()
                channel = self._start()
            channel.send_bytes(pickle.dumps((program, limits)))
            if not channel.poll(limits.total_s + GRACE_S):
                raise TimeoutError(f"no answer after {limits.total_s + GRACE_S:g} s")
            answer = json.loads(channel.recv_bytes())
            return outcome_of(answer["outcome"]), answer["again"]
        except (OSError, EOFError) as error:
            reason = f"the supervisor of the sandbox failed: {self._output() or error}"
            self.close()
            return Outcome("infra_error", reason, level=self.level), True

    def close(self) -> None:
        """End the supervisor; it ends its sandboxes when the connection closes."""
        if self.process is None:
            return
        if self.channel is not None:
            self.channel.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.process = None

    def _start(self) -> Connection[Any, Any]:
        python = find_python(self.uid)
        if python is None:
            raise OSError(f"not all users can run {sys.executable} or /usr/bin/python3")
        for host in (mount.host for mount in self.packages):
            if not may_use(host if os.path.isdir(host) else os.path.dirname(host), self.uid):
                raise OSError(f"sandbox.packages: other users cannot read {host}")
        walls = {name: getattr(self, name) for name in ("level", "uid", "packages", "loopback")}
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the supervisor
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _MAIN.format(_ROOT)],
                stdin=theirs.fileno(),
                stdout=self.log,
                stderr=self.log,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
                cwd="/",
                process_group=0,
            )
        self.channel = Connection(ours.detach())
        self.channel.send_bytes(pickle.dumps(({**walls, "python": python}, self.limits, os.getpid())))
        return self.channel

    def _output(self) -> str:
        if self.process is None:
            return ""
        self.log.seek(0)
        return str(self.log.read()[-500:].decode(errors="replace").strip())


def _close_all(slots: Sequence[_Slot | RemoteSlot], owner: int) -> None:
    """Close the slots, in the process that opened them only."""
    if os.getpid() == owner:
        for slot in slots:
            slot.close()

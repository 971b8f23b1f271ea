"""The sandbox itself: what it says of its walls, what it does when they cannot be built, and what becomes of it."""

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from check_abuse import below

from rl4llm.api import GRPOTrainer
from rl4llm.compose.environments import build_sandbox
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, SandboxError
from rl4llm.extensions.sandbox import Asserts, Call, Calls, Limits, Program, Sandbox, Stdin
from rl4llm.extensions.sandbox import cell as cell_module
from rl4llm.extensions.sandbox import sandbox as sandbox_module
from rl4llm.extensions.sandbox.cell import Cell, CellSite, compiled_inside
from rl4llm.extensions.sandbox.levels import FIRST_UID, bubblewrap, find_bwrap, find_python, slot_uids
from rl4llm.extensions.sandbox.probe import NEEDED, probe_level

HELLO = Program("print('hello')")
DOUBLE = Program("def f(x): return 2 * x", Calls((Call("f", (1,), 2),)))


@pytest.fixture
def open_dir():
    """A directory that every user may read; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def gone(pid):
    """Whether a process has ended; where process 1 does not reap, it stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid):
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return gone(pid)


def test_level_is_tested_with_canaries_and_logged(_bubblewrap, caplog):
    with caplog.at_level(logging.INFO):
        sandbox = Sandbox(slots=1)
        probe = sandbox.probe()
    sandbox.close()
    assert probe.level == "prefork"
    assert sorted(probe.properties) == sorted((*NEEDED, "seccomp", "capabilities"))
    assert all(probe.properties.values())
    assert "sandbox prefork: contains network, host_files" in caplog.text


def test_weak_level_is_refused_unless_allowed_and_lists_its_gaps():
    with pytest.raises(SandboxError):
        Sandbox("rlimits").probe()
    sandbox = Sandbox("rlimits", allow_weak=True, slots=1)
    probe = sandbox.probe()
    outcome = sandbox.run(HELLO)
    sandbox.close()
    assert "does NOT contain network, host_files" in str(probe)
    assert probe.properties["memory"]
    assert (outcome.stdout, outcome.level) == ("hello\n", "rlimits")


@pytest.mark.parametrize("missing", ["installed", "working"])
def test_no_program_runs_without_bubblewrap(missing, monkeypatch, open_dir):
    fake = open_dir / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sandbox_module, "find_bwrap", lambda: None if missing == "installed" else str(fake))
    monkeypatch.setenv("PATH", f"{open_dir}:{os.environ['PATH']}")
    sandbox = Sandbox()
    with pytest.raises(SandboxError):
        sandbox.probe()
    assert sandbox.run(HELLO).status == "infra_error"


def test_a_canary_that_gets_out_disqualifies_a_level():
    weak = Sandbox("rlimits", allow_weak=True, slots=1)
    probe = probe_level("prefork", weak.run)
    weak.close()
    assert not probe.holds
    escapes = [name for name in NEEDED if not probe.properties[name]]
    assert escapes == ["network", "host_files", "host_processes", "user_namespaces"]


def test_killed_supervisor_is_replaced_and_the_program_retried(sandbox):
    assert sandbox.run(DOUBLE).status == "ok"
    started_ahead = [child for pid in sandbox.pids() for child in below(pid)]
    for pid in sandbox.pids():
        os.kill(pid, signal.SIGKILL)
    assert sandbox.run(DOUBLE).status == "ok"
    assert all(wait_until_gone(pid) for pid in started_ahead)


@pytest.mark.parametrize(
    "program",
    [HELLO, DOUBLE, replace(HELLO, tests=Stdin((("", "hello"),))), replace(DOUBLE, tests=Asserts(("assert f(1) == 2",)))],
    ids=["script", "calls", "stdin", "asserts"],
)  # fmt: skip
def test_start_of_a_sandbox_takes_no_time_of_the_program(program, monkeypatch, open_dir):
    slow = open_dir / "bwrap"
    slow.write_text(f'#!/bin/sh\nsleep 0.6\nexec {find_bwrap()} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{open_dir}:{os.environ['PATH']}")
    sandbox = Sandbox("bubblewrap", slots=1)
    outcome = sandbox.run(program, Limits(wall_s=0.5, total_s=0.5))
    sandbox.close()
    assert outcome.status == "ok", outcome


def test_a_program_is_ended_at_its_limit_and_the_sandbox_goes_on(sandbox):
    outcome = sandbox.run(Program("while True: pass"), Limits(wall_s=0.3, total_s=0.3))
    assert outcome.status == "model_error"
    assert sandbox.run(DOUBLE).status == "ok"


def test_after_a_call_that_hangs_the_other_calls_still_count(sandbox):
    source = "def f(x):\n    while x == 2: pass\n    return x"
    outcome = sandbox.run(
        Program(source, Calls(tuple(Call("f", (n,), n) for n in (1, 2, 3)))), Limits(wall_s=1.0)
    )
    assert [test.status for test in outcome.tests] == ["ok", "model_error", "ok"]
    assert outcome.passed_share == pytest.approx(2 / 3)


def test_programs_run_from_many_threads_and_inside_an_event_loop(sandbox):
    async def many():
        runs = (asyncio.to_thread(sandbox.run, Program(f"print({number})")) for number in range(12))
        return await asyncio.gather(*runs)

    assert [outcome.stdout for outcome in asyncio.run(many())] == [f"{number}\n" for number in range(12)]


def test_tests_that_do_not_work_are_nobodys_fault_but_theirs(sandbox):
    for tests in (
        Asserts(("assert f(1) ==",)),
        Asserts(("x = 1",)),
        Asserts(("raise SystemExit\nassert f(1) == 1",), setup="1 / 0"),
        Asserts(("assert f(lambda: 1) == 1",)),
        Asserts(("assert len(sorted([1])) == 1",)),
        Calls(()),
        Calls((Call("f", (object(),), 1),)),
    ):
        outcome = sandbox.run(Program("def f(x): return x", tests))
        assert outcome.status == "infra_error", tests


def test_allowed_packages_can_be_imported_but_not_written(_bubblewrap, open_dir):
    (open_dir / "mine.py").write_text("VALUE = 7")
    sandbox = Sandbox(slots=1, packages=[str(open_dir)])
    source = f"import mine\nprint(mine.VALUE)\ntry: open({str(open_dir / 'x')!r}, 'w')\nexcept OSError: print('no')"
    assert sandbox.run(Program(source)).stdout == "7\nno\n"
    sandbox.close()


def test_sandboxes_end_with_the_process_that_uses_them(_bubblewrap):
    source = (
        "import threading, time\nfrom rl4llm.extensions.sandbox import *\ns = Sandbox(slots=1)\ns.probe()\n"
        "threading.Thread(target=s.run, args=(Program('import time; time.sleep(1000)'), Limits(wall_s=999, total_s=999)),"
        " daemon=True).start()\ntime.sleep(0.5)\nprint(*s.pids(), flush=True)\ntime.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    supervisor = int(process.stdout.readline())
    deadline = time.monotonic() + 60  # on a busy machine a sandbox takes seconds to start
    while len(running := below(supervisor)) <= 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(running) > 2
    process.kill()
    process.wait()
    assert all(wait_until_gone(pid) for pid in [supervisor, *running])


def test_a_program_is_judged_in_a_fork_of_the_trainer(sandbox):
    sandbox.run(DOUBLE)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if sandbox.run(DOUBLE).status == "ok" else 1
            sandbox.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sandbox.run(DOUBLE).status == "ok"


@pytest.mark.parametrize(("make", "options"), [
    (Sandbox, {"level": "bublewrap"}), (Sandbox, {"slots": 0}), (Sandbox, {"slots": True}),
    (Limits, {"wall_s": 0}), (Limits, {"memory_bytes": -1}), (Limits, {"processes": float("nan")}),
])  # fmt: skip
def test_options_that_cannot_work_are_refused(make, options):
    with pytest.raises(ConfigError):
        make(**options)


def test_a_sandbox_that_was_started_long_ahead_still_serves(_bubblewrap, monkeypatch):
    (uid,) = slot_uids(1)
    python = find_python(uid)
    owner, _ = os.pipe()
    started = time.monotonic()
    cell = Cell(CellSite("bubblewrap", python, uid, (), owner, compiled_inside(python)), Limits())
    assert select.select([cell._from], [], [], 60)[0]  # it stands, however long that takes on a busy machine
    monkeypatch.setattr(cell_module, "START_TIMEOUT_S", (time.monotonic() - started) / 2)
    cell.play("calls", {"source": "x = 1", "prefix": "", "entry_point": "", "lends": False, "objects": False})
    assert cell.receive(time.monotonic() + 20) == {"loaded": True}
    cell.end()


def test_a_sandbox_that_does_not_start_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(Cell, "_start", lambda *_: 1 / 0)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ZeroDivisionError):
        Cell(CellSite("prefork", sys.executable, None, (), 0, ""), Limits())
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("uid_map", "lowest", "highest"),
    [
        ("0 0 4294967295", FIRST_UID, 2**31),  # root of the machine
        ("0 100000 65536", 60_000, 65_535),  # root of a container
        ("0 1000 1\n1 100000 65536", 60_000, 65_536),
    ],
)
def test_root_gives_each_slot_an_unused_uid(uid_map, lowest, highest):
    uids = slot_uids(8, uid_map)
    assert uids == list(range(uids[0], uids[0] + 8))
    assert lowest <= min(uids) <= max(uids) <= highest


def test_root_that_may_become_nobody_else_stays_what_it_is():
    assert slot_uids(2, "0 1000 1") == [None, None]


def test_sandbox_sees_only_the_interpreter_and_its_libraries():
    bound = " ".join(bubblewrap(["/home/me/bin/python3", "code"], disk_bytes=2**20))
    assert "--ro-bind /home/me/bin/python3 /home/me/bin/python3 --ro-bind /home/me/lib /home/me/lib" in bound
    assert "/home/me /home/me" not in bound
    assert "--ro-bind / /" not in " ".join(bubblewrap(["/bin/python3", "code"], disk_bytes=2**20))


def test_memory_growth_during_tests_is_detected(sandbox):
    source = (
        "import os, time\ndef f(x):\n    for _ in range(6):\n        if os.fork() == 0:\n"
        "            held = bytearray(100 * 2**20)\n            held[::4096] = b'x' * len(held[::4096])\n"
        "            time.sleep(100)\n            os._exit(0)\n    return x"
    )
    tests = Asserts(("assert f(1) == 1\n", "import time\ntime.sleep(8)\nassert time"))
    outcome = sandbox.run(Program(source, tests), Limits(wall_s=20, total_s=30, memory_bytes=300 * 2**20))
    assert [test.status for test in outcome.tests] == ["ok", "model_error"]
    assert "held more" in outcome.reason


FILLED = {
    "sockets": """
import os, socket, time
for _ in range(11):
    if os.fork() == 0:
        held = []
        try:
            while True:
                held.append(pair := socket.socketpair())
                pair[0].setblocking(False)
                try:
                    while True: pair[0].send(b"x" * 65536)
                except BlockingIOError: pass
        except OSError: pass
        time.sleep(100)
time.sleep(100)
""",
    "files": """
import time
for path in ("/tmp/x", "/dev/shm/x"): open(path, "wb").write(bytes(40 * 2**20))
time.sleep(100)
""",
    "files, beside a dead child that nobody reaps": """
import os, time
if os.fork() == 0:
    os._exit(0)
time.sleep(0.2)
for path in ("/tmp/x", "/dev/shm/x"): open(path, "wb").write(bytes(40 * 2**20))
time.sleep(3)
""",
}


@pytest.mark.parametrize("what", FILLED)
def test_memory_held_in_sockets_and_files_counts(sandbox, what):
    limits = Limits(wall_s=20, total_s=30, memory_bytes=72 * 2**20, disk_bytes=96 * 2**20)
    limits = replace(limits, memory_bytes=256 * 2**20) if what == "sockets" else limits
    outcome = sandbox.run(Program(FILLED[what]), limits)
    assert outcome.status == "model_error"
    assert "all its processes held more than" in outcome.reason


def test_an_interpreter_that_cannot_serve_is_named(_bubblewrap, open_dir, monkeypatch):
    python = open_dir / "python3"
    python.write_text("#!/bin/sh\necho 'sandboxes need Python 3.11 or newer' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sandbox_module, "find_python", lambda uid: str(python))
    with pytest.raises(SandboxError, match=rf"{python}: sandboxes need Python"):
        Sandbox().probe()
    monkeypatch.setattr(sandbox_module, "find_python", lambda uid: None)
    with pytest.raises(SandboxError):
        Sandbox().probe()


def test_a_run_that_waits_for_a_slot_gets_it(sandbox):
    sleeper = Program("import time; time.sleep(0.3)")
    slow = [threading.Thread(target=sandbox.run, args=(sleeper,)) for _ in range(sandbox.slots)]
    for thread in slow:
        thread.start()
    assert sandbox.run(HELLO).stdout == "hello\n"
    for thread in slow:
        thread.join()


@pytest.mark.parametrize("asked", [False, True])
def test_the_configuration_decides_about_loopback(asked):
    config = load_config(overrides=["model.path=unused", f"sandbox.loopback={str(asked).lower()}"])
    assert build_sandbox(config).loopback is asked


def test_a_wrong_level_is_refused_where_no_program_runs(model_dir, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Say yes."}], "ground_truth": ""}]
    with pytest.raises(ConfigError):
        GRPOTrainer(
            str(model_dir),
            rows,
            [lambda completions, **_: [0.0 for _ in completions]],
            output={"dir": str(tmp_path / "run")},
            **{"sandbox.level": "bwrapp"},
        )

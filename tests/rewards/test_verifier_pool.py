"""The verifier pool: what hangs, dies or is killed costs its own result and nothing else."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl4llm.rewards import pool as pool_module
from rl4llm.rewards.pool import Crash, RewardFailure, Timeout, Unavailable, VerifierPool

FUNCTIONS = """
import os, signal, sys, time

hoard = []

def note(what):
    with open(__file__ + "." + what, "a") as file:
        file.write(what)

note("import")

def act(what, value=0):
    if what == "sleep":
        note("sleep")
        time.sleep(value)
    elif what == "burn":
        9 ** 9 ** 9
    elif what == "yield":
        if os.path.exists(value):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        started = time.process_time()
        while time.process_time() < started + 0.05:
            pass
    elif what == "eat":
        return len(bytearray(value))
    elif what == "keep":
        hoard.append(bytearray(value))
    elif what == "die":
        os.kill(os.getpid(), value)
    elif what == "die_once":
        if not os.path.exists(value):
            open(value, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        sys.exit(3)
    elif what == "raise":
        raise ValueError("cannot read this")
    elif what == "print":
        print("noise")
        sys.stderr.write("noise" * 100_000)
    elif what == "long":
        return "x" * value
    elif what == "object":
        return object()
    elif what == "environment":
        return dict(os.environ)
    elif what == "pid":
        return os.getpid()
    return value
"""


@pytest.fixture
def entry(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return f"{path}:act"


@pytest.fixture
def make(entry, monkeypatch):
    """Make pools whose tasks may take long on a machine that runs much else; close them."""
    monkeypatch.setattr(pool_module, "PATIENCE", 40)
    pools = []

    def made(timeout_s=30.0, **options):
        pools.append(VerifierPool(entry, timeout_s=timeout_s, **options))
        return pools[-1]

    yield made
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make):
    return make()


def processes(pool, count=2):
    """Wait for the workers of a pool and return its server and them."""
    pool.map([["give", 1]])
    server = psutil.Process(pool._server.process.pid)
    deadline = time.monotonic() + 20
    while len(workers := server.children()) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return [server, *workers]


def left_of(processes):
    return psutil.wait_procs(processes, timeout=20)[1]


def times(entry, what):
    """Return how often a process noted that."""
    return Path(entry.replace(":act", f".{what}")).read_text().count(what)


def test_results_come_back_in_the_order_of_the_tasks(pool):
    before = psutil.Process().children()
    assert pool.map([]) == [] and psutil.Process().children() == before
    assert pool.map([["give", n] for n in range(50)]) == list(range(50))
    assert len(set(pool.map([["sleep", 0.5], ["pid"], ["sleep", 0.5], ["pid"]]))) <= 3
    assert len(processes(pool)) == 3


@pytest.mark.parametrize("bomb", [["sleep", 600], ["burn"]])
def test_a_task_that_hangs_costs_itself_and_is_remembered(make, bomb):
    pool = make(1.5)
    for _ in range(2):
        assert pool.map([["give", 1], bomb, ["give", 2]]) == [1, Timeout("took more than 1.5 s"), 2]
    assert pool.map([["give", 4]]) == [4]
    assert (pool.counts["timeout"], pool.counts["remembered"], pool.counts["started"]) == (2, 1, 1)


def test_the_oldest_timeouts_are_forgotten_first(make, entry, monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_REMEMBERED", 1)
    pool = make(0.4)
    for seconds in (600, 601, 601, 600):
        assert isinstance(pool.map([["sleep", seconds]])[0], Timeout)
    assert times(entry, "sleep") == 3 and pool.counts["remembered"] == 1


def test_a_process_killed_from_outside_costs_no_result(pool, entry, tmp_path):
    marker = str(tmp_path / "died")
    assert pool.map([["die_once", marker], ["give", 1]]) == [marker, 1]
    assert os.path.exists(marker) and times(entry, "import") == 1


@pytest.mark.parametrize("which", [slice(1), slice(1, None), slice(None)], ids=["server", "workers", "all"])
def test_processes_killed_while_idle_are_replaced(pool, which):
    for _ in range(2):
        before = processes(pool)
        for process in before[which]:
            process.kill()
        assert pool.map([["sleep", 0.1], ["give", 1], ["give", 2]]) == [0.1, 1, 2]
        assert not set(before[which]) & set(processes(pool))
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("which", [0, 1])
def test_a_stopped_process_is_no_hang(make, monkeypatch, which):
    monkeypatch.setattr(pool_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(pool_module, "PATIENCE", 2)
    pool = make(1.0, workers=1)
    processes(pool, 1)[which].suspend()
    assert pool.map([["give", 1], ["give", 2]]) == [1, 2]


@pytest.fixture
def busy_processor(tmp_path):
    """Create a file; while it exists, tasks "yield" to a process that keeps their processor busy."""
    code = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    marker = tmp_path / "busy"
    marker.touch()
    yield marker
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_a_task_kept_from_running_gets_more_time(make, busy_processor):
    pool = make(0.4, workers=1)
    worker = processes(pool, 1)[1]

    def let_run():
        os.sched_setscheduler(worker.pid, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(worker.pid, os.sched_getaffinity(0))

    timer = threading.Timer(0.8, let_run)
    timer.start()
    assert pool.map([["yield", str(busy_processor)]]) == [str(busy_processor)]
    timer.join()
    assert worker in processes(pool, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_a_task_that_never_ran_is_unavailable_and_asked_again(make, busy_processor, monkeypatch):
    monkeypatch.setattr(pool_module, "PATIENCE", 6)
    pool = make(0.2, workers=1)
    assert isinstance(pool.map([["yield", str(busy_processor)]])[0], Unavailable)
    busy_processor.unlink()
    monkeypatch.setattr(pool_module, "PATIENCE", 40)
    assert pool.map([["yield", str(busy_processor)]]) == [str(busy_processor)]


def test_a_task_gets_the_memory_of_the_limit_and_no_more(make):
    pool = make(workers=1, memory_bytes=256 * 1024**2)
    (outcome,) = pool.map([["eat", 300 * 1024**2]])
    assert isinstance(outcome, Crash) and "MemoryError" in outcome.reason
    size = 80 * 1024**2
    assert pool.map([["keep", size]] * 6) == [size] * 6  # what one task leaves behind, no other pays for


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (["die", int(signal.SIGSEGV)], "SIGSEGV"),
        (["exit"], "SystemExit"),
        (["raise"], "ValueError: cannot read this"),
        (["long", 10**6], "1000002 bytes"),
        (["object"], "not JSON serializable"),
        (["give", "x" * 10**6], "accepted are 65536"),
    ],
)
def test_a_task_that_always_fails_is_a_crash_with_a_reason(pool, task, reason):
    crash, fine = pool.map([task, ["give", "x" * 30_000]])
    assert isinstance(crash, Crash) and reason in crash.reason
    assert fine == "x" * 30_000


def test_output_and_invalid_unicode_do_not_disturb_the_answers(pool, capfd):
    text = "\ud800 \x00 \U0001f600"
    assert pool.map([["print", 1], ["give", text]]) == [1, text]
    assert capfd.readouterr() == ("", "")


def test_a_pool_answers_in_threads_and_in_an_event_loop(pool):
    answers = {}

    def ask(key):
        answers[key] = pool.map([["give", key], ["give", key + 100]])

    async def ask_in_loop():
        return pool.map([["give", -1]])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [n, n + 100] for n in range(4)}
    assert asyncio.run(ask_in_loop()) == [-1]


def test_an_interrupted_map_leaves_no_late_answers_for_the_next(pool):
    processes(pool)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.map([["sleep", 0.9]] * 20)
    assert pool.map([["give", 5]]) == [5]
    assert all(os.getpgid(process.pid) != os.getpgid(0) for process in processes(pool))


def test_a_forked_child_starts_another_server(pool):
    before = processes(pool)
    answers = []
    busy = threading.Thread(target=lambda: answers.extend(pool.map([["sleep", 0.5]])))
    busy.start()
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            code = 0 if not {pool.map([["pid"]])[0]} & {process.pid for process in before} else 2
            pool.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    busy.join()
    assert answers == [0.5] and processes(pool) == before


def test_a_server_that_cannot_start_is_nobodys_fault(tmp_path):
    path = tmp_path / "later.py"
    path.write_text("import a_module_that_is_not_there")
    pool = VerifierPool(f"{path}:act", workers=1)
    (outcome,) = pool.map([["give", 1]])
    assert isinstance(outcome, Unavailable) and "a_module_that_is_not_there" in outcome.reason
    with pytest.raises(RewardFailure):
        pool.warm_up()
    path.write_text(FUNCTIONS)
    assert pool.map([["give", 1]]) == [1]
    pool.close()


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        ("import time; time.sleep(600)", {"start_timeout_s": 0.3}),
        ("large = bytearray(10**9)", {"memory_bytes": 256 * 1024**2}),
    ],
)
def test_limits_too_tight_for_a_start_are_nobodys_fault(tmp_path, line, limits):
    (tmp_path / "large.py").write_text(line)
    pool = VerifierPool(f"{tmp_path / 'large.py'}:act", **limits)
    assert isinstance(pool.map([["give", 1]])[0], Unavailable)


def test_workers_get_no_keys_and_no_accelerator_and_hash_alike(pool, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setattr(sys, "path", [Path("/what/python/ignores"), *sys.path])
    (environment,) = pool.map([["environment"]])
    assert "secret" not in environment.values()
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize("end", [VerifierPool.close, None], ids=["close", "forget"])
def test_a_closed_or_forgotten_pool_ends_its_processes(entry, end):
    pool = VerifierPool(entry)
    before = processes(pool)
    if end:
        end(pool)
    del pool
    assert left_of(before) == []


PARENT = """
import os, psutil, sys, time
from rl4llm.rewards.pool import VerifierPool
entry, what = os.environ["ENTRY"].split("=")
pool = VerifierPool(entry, workers=2, timeout_s=60.0)
assert pool.map([["give", 1]]) == [1]
while len(children := psutil.Process().children(recursive=True)) < 3:
    time.sleep(0.01)
if what == "forked" and os.fork() == 0:  # holds the sockets
    time.sleep(8)
    os._exit(0)
print([child.pid for child in children], flush=True)
if what == "busy":
    pool.map([["burn"], ["sleep", 600]])
elif what != "end":
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("busy", signal.SIGKILL),
        ("idle", signal.SIGKILL),
        ("forked", signal.SIGKILL),
        ("busy", signal.SIGTERM),
        ("busy", signal.SIGINT),
        ("end", None),
    ],
)
@pytest.mark.parametrize("form", ["stdin", "file"])
def test_no_process_outlives_its_parent(entry, tmp_path, what, number, form):
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, "-" if form == "stdin" else str(script)],
        stdin=script.open(),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ENTRY": f"{entry}={what}"},
    )
    pids = json.loads(parent.stdout.readline())
    if number:
        time.sleep(0.3)
        parent.send_signal(number)
    started = time.monotonic()
    parent.wait()
    assert left_of([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]) == []
    assert time.monotonic() - started < 6


def test_an_importable_function_is_an_entry_too():
    pool = VerifierPool("operator:add", workers=1)
    assert pool.map([[1, 2]]) == [3]
    pool.close()

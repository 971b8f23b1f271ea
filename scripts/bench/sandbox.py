"""What a judged program costs, and how soon a runaway is gone.

    python scripts/bench/sandbox.py

A function with three calls, and three asserts about it, each judged again and again with nothing else running: the median
time at the bubblewrap level and with sandboxes started ahead. Then as many programs as there are slots at a time: runs per
second. Then programs that never end: how long after its limit `run` is back, with nothing of them left. The processor time
of a run, with everything below the supervisor, says what the machine can do when it is not idle.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peer import parser_of

from rl4llm.extensions.sandbox import Asserts, Call, Calls, Limits, Program, Sandbox

SOURCE = "def f(x):\n    return x * x"
CALLS = Program(SOURCE, Calls(tuple(Call("f", (number,), number * number) for number in range(3))))
ASSERTS = Program(SOURCE, Asserts(tuple(f"assert f({number}) == {number * number}" for number in range(3))))
RUNAWAYS = {
    "loop": "while True: pass",
    "processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "held = []\nwhile True: held.append(bytearray(10**6))",
    "output": "while True: print('x' * 1000)",
}
CLOCK_TICKS = 100


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=100)
    arguments = parser.parse_args()
    for level in ("bubblewrap", "prefork"):
        sandbox = Sandbox(level, slots=2)
        print(sandbox.probe())
        for name, program in (("three calls", CALLS), ("three asserts", ASSERTS)):
            times = _one_by_one(sandbox, program, arguments.runs)
            print(
                f"  {name}: median {times[len(times) // 2]:.1f} ms, 90 % within {times[int(len(times) * 0.9)]:.1f} ms"
            )
        _throughput(sandbox, 4 * arguments.runs)
        _runaways(sandbox)
        sandbox.close()


def _one_by_one(sandbox: Sandbox, program: Program, runs: int) -> list[float]:
    """Milliseconds, sorted; the pause lets sandboxes that are started ahead come up."""
    times = []
    for _ in range(runs + 2):
        time.sleep(0.08)
        started = time.perf_counter()
        outcome = sandbox.run(program)
        times.append((time.perf_counter() - started) * 1e3)
        assert outcome.status == "ok", outcome
    return sorted(times[2:])


def _throughput(sandbox: Sandbox, runs: int) -> None:
    used, started = _processor_s(sandbox), time.perf_counter()
    with ThreadPoolExecutor(sandbox.slots) as threads:
        assert all(outcome.status == "ok" for outcome in threads.map(sandbox.run, [CALLS] * runs))
    took = time.perf_counter() - started
    used = _processor_s(sandbox) - used
    print(
        f"  {sandbox.slots} at a time: {runs / took:.0f} runs/s, {used / runs * 1e3:.1f} ms of processor time each"
    )


def _runaways(sandbox: Sandbox) -> None:
    limits = Limits(wall_s=1.0, total_s=1.0)
    for name, source in RUNAWAYS.items():
        times = []
        for _ in range(5):
            started = time.perf_counter()
            outcome = sandbox.run(Program(source), limits)
            times.append(time.perf_counter() - started)
            assert outcome.status == "model_error", outcome
        median, longest = statistics.median(times), max(times)
        print(
            f"  runaway ({name}), limit 1 s: gone after {median:.2f} s, at most {longest:.2f} s: {outcome.reason}"
        )


def _processor_s(sandbox: Sandbox) -> float:
    """Seconds that the supervisors and the processes that they reaped have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in sandbox.pids()]
    return sum(int(number) for line in fields for number in line[11:15]) / CLOCK_TICKS


if __name__ == "__main__":
    main()

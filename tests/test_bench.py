"""The scripts start, those of `scripts/bench` too; what they measure needs time, other programs or a GPU."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked_python import python
from torch.profiler import ProfilerActivity, profile

from rl4llm.extensions.inspect.plan.staleness import Overlap

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
SCRIPTS = [path for path in sorted(BENCH.parent.rglob("*.py")) if "parse_args()" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_prints_its_help(script):
    if script.name == "lm_eval_record.py" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs lm_eval")
    done = python(script, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name}")


def test_methods_starts_where_no_test_runs():
    """It takes its proofs from the tests; the processes of others know the directories of pytest.ini."""
    command = [sys.executable, BENCH.parent / "methods.py", "--help"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sides_take_turns_and_the_first_rounds_do_not_count(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from peer import in_turns, ratios, spread

    calls = []
    sides = {"a": lambda: calls.append("a") or len(calls), "b": lambda: calls.append("b") or len(calls)}
    assert in_turns(sides, 2, warm_up=1) == {"a": [3, 5], "b": [4, 6]} and calls == [*"ababab"]
    assert spread(ratios([3, 8], [1, 2]), ".1f") == "3.5 (3.0 to 4.0)"


def test_update_refuses_to_count_float32_products():
    done = python(BENCH / "update.py")
    assert done.returncode == 2
    assert "only bfloat16 products are counted: give --autocast bfloat16" in done.stderr


def test_update_counts_products_of_layers_with_a_bias(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from update import PRODUCTS

    layer, x = torch.nn.Linear(8, 16, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as trace:
        layer(x)
    assert sum(event.flops for event in trace.key_averages() if event.key in PRODUCTS) == 2 * 4 * 8 * 16


GRADED = [json.loads(line) for line in (BENCH / "graders.jsonl").read_text("utf-8").splitlines()]
GRADERS_PAGE = Path(__file__).parents[1] / "scripts" / "bench" / "README.md"


@pytest.fixture
def graders(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import graders

    return graders


def test_answers_for_graders_are_distinct_and_judged():
    assert len({(row["reply"], row["ground_truth"]) for row in GRADED}) == len(GRADED)
    assert all(type(row["right"]) is bool and row["ground_truth"] and row["kind"] for row in GRADED)


def test_graders_table_counts_both_kinds_of_mistake(graders):
    rights = [True, True, False, False, False, True]
    rows = [{"kind": "a", "right": right} for right in rights[:5]] + [
        {"kind": graders.CHOICE, "right": rights[5]}
    ]
    lines = graders.table(
        rows, {"one": ("1.2", [True, False, True, True, False, False]), "two": ("3", rights)}
    )
    assert lines == [
        "| kind | right, wrong | one 1.2 | two 3 |",
        "|---|---|---|---|",
        "| a | 2, 3 | 1, 2 |  |",
        "| matter of choice | 1, 0 | 1, 0 |  |",
        "| all but matters of choice | 2, 3 | 1, 2 |  |",
    ]
    assert graders.table(rows, {"one": ("1.2", [None] * 6)})[-1] == "| without a verdict | | 6 |"


def test_page_of_benchmarks_has_our_verdicts(graders):
    verdicts = graders.by_rl4llm(GRADED)
    page = GRADERS_PAGE.read_text("utf-8").splitlines()
    for line in graders.table(GRADED, {"rl4llm": ("", verdicts)})[-2:]:
        assert [other for other in page if other.startswith(line)], line
    listed = [line.split("`")[1::2] for line in page if line.startswith("- refused: ")]
    listed += [line.split("`")[1::2] for line in page if line.startswith("- accepted: ")]
    kept = [
        row["reply"]
        for row, verdict in zip(GRADED, verdicts, strict=True)
        if verdict is not row["right"] and row["kind"] != graders.CHOICE
    ]
    assert sorted(reply for replies in listed for reply in replies) == sorted(kept)


@pytest.fixture
def simulated(monkeypatch):
    """Return simulated(bound, key=value): the seconds of a step, 14 by turns, and the shares of waits."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from async_sim import simulate

    def run(bound, length=lambda: 100, **changed):  # rows do not slow each other down
        times = {"base_s": 0.1, "row_s": 0.0, "prefill_s": 0.0, "update_s": 4.0, "publish_s": 0.0}
        times["publish_busy_s"] = 0.0
        shape = {"prompts": 2, "samples": 3, "steps": 31, "warm_up": 7, "shared": 1.0, "prompt_tokens": 0}
        return simulate(SimpleNamespace(**(times | shape | changed)), 1, bound, length)

    return run


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_simulated_steps_are_those_that_the_plan_estimates(simulated, bound):
    step_s, waits, idle = simulated(bound)
    assert step_s == pytest.approx(Overlap(rollout_s=10.0, training_s=4.0).step_s(bound, busy=0.0), rel=0.02)
    assert waits == pytest.approx(1 - 4.0 / step_s, abs=0.02)
    assert idle == pytest.approx(max(0.0, 4.0 / step_s if bound == 0 else 0.0), abs=0.02)
    slow_s = simulated(bound, row_s=0.1)[0]  # six rows take seven times as long as the first token of one
    assert slow_s >= 60.0


@pytest.mark.parametrize("bound, step_s", [(0, 14.0), (1, 9.0), (4, 6.0)])
def test_simulated_cores_slow_each_other_down_while_both_work(simulated, bound, step_s):
    """An update of 4 s takes 6 s beside a busy server, and a rollout of 10 s up to 15 s beside updates."""
    assert simulated(bound, shared=1.5)[0] == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("bound, step_s", [(0, 15.0), (4, 6.0)])
def test_a_simulated_publish_takes_longer_beside_a_busy_server(simulated, bound, step_s):
    assert simulated(bound, publish_s=1.0, publish_busy_s=2.0)[0] == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_the_limit_of_a_bound_is_what_the_source_allows(simulated, bound):
    """Where no row slows another one down, as with slow tools; at the edges a step may be longer."""
    from staleness import least_s

    choose = random.Random(bound)
    lengths = [round(choose.lognormvariate(4.0, 1.0)) for _ in range(207 + bound)]
    steps = [{"time/rollout": length / 10, "time/step": length / 10 + 4.0} for length in lengths]
    step_s = simulated(bound, iter(lengths).__next__, prompts=1, samples=1, steps=207)[0]
    limit_s = least_s(steps[7:207], bound)
    assert 0.94 * step_s < limit_s < step_s + 1e-3


def test_the_prompts_of_unfinished_rows_are_computed_again(simulated):
    """Those of the six rows of a publish take 3 s, which is in one of two steps or in both."""
    apart = simulated(1, prefill_s=0.01, prompt_tokens=50)[0] - simulated(1, prefill_s=0.01)[0]
    assert 1.4 < apart < 3.1
    assert simulated(0, prefill_s=0.01, prompt_tokens=50)[0] == pytest.approx(14.0)  # none is unfinished


def test_the_slowdown_is_that_of_the_updates_of_the_same_steps(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from async_sim import slowdown

    alone = [{"step": step, "time/update": 2.0 * step} for step in (3, 4)]
    beside = [{"step": step, "time/update": 2.5 * step} for step in range(1, 9)]
    assert slowdown(alone, beside) == pytest.approx(1.25)
    assert slowdown(beside[2:4], alone) == 1.0

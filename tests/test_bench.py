"""The scripts of `scripts/bench` start; what they measure needs time, other programs or a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from forked_python import python
from torch.profiler import ProfilerActivity, profile

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
SCRIPTS = [path for path in sorted(BENCH.glob("*.py")) if "ArgumentParser" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_benchmark_prints_its_help(script):
    if script.name == "lm_eval_record.py" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs lm_eval")
    done = python(script, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name}")


def test_update_refuses_to_count_float32_products():
    done = python(BENCH / "update.py", "--products")
    assert done.returncode == 2
    assert "--products requires --autocast bfloat16" in done.stderr


def test_update_counts_products_of_layers_with_a_bias(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from update import PRODUCTS

    layer, x = torch.nn.Linear(8, 16, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as trace:
        layer(x)
    assert sum(event.flops for event in trace.key_averages() if event.key in PRODUCTS) == 2 * 4 * 8 * 16

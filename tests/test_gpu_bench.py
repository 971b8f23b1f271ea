"""`scripts/bench/gpu.py` calls the library correctly; what it measures needs a GPU."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from forked_python import python

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "gpu.py"


def test_parts_of_the_gpu_benchmark_run_on_a_cpu(tmp_path):
    done = python(
        SCRIPT, "numbers", "attention", "head", "update", "decode", "--tiny", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert not [line for line in lines if "error" in line]
    found = {(line["part"], line["what"]): line for line in lines}
    assert [line["part"] for line in lines if line["what"] == "done"] == [
        "numbers",
        "attention",
        "head",
        "update",
        "decode",
    ]
    assert found["numbers", "float32 autocast=none"]["logprob_max"] < 1e-4
    assert found["numbers", "deterministic"]["equal"]
    assert found["update", "0.5b autocast"]["tokens"] > 100
    assert found["update", "1.5b autocast, compiled"]["compiled"]
    assert found["decode", "4 rows, graph"]["tokens_per_s"] > 0


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_gpu_benchmark_steps_in_every_zero_stage(tmp_path):
    done = python(SCRIPT, "deepspeed", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert not [line for line in lines if "error" in line]
    what = [line["what"] for line in lines if "off_s" in line]
    assert what == ["ZeRO-2: offload", "ZeRO-3: offload", "ZeRO-2 offload_optimizer: offload"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_the_gpu_benchmark_refuses_a_machine_without_one():
    done = python(SCRIPT, "head")
    assert done.returncode == 2 and "--tiny" in done.stderr

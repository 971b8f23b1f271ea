"""`scripts/bench/gpu.py` calls the library correctly, and no check stops the next one; what it measures needs a GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from forked_python import python

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "gpu.py"
spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)


def findings(out):
    lines = [json.loads(line) for line in (out / gpu.FILE).read_text().splitlines()]
    return {(line["check"], line["what"]): line for line in lines}


RUNS = ("learn", "train", "images", "stream", "engine", "deepspeed")
"""What other tests train and sample in the same way."""


@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=pytest.mark.sweep if name in RUNS else ()) for name in gpu.CHECKS]
)
def test_every_gpu_check_runs_on_a_cpu(check, tmp_path):
    done = python(SCRIPT, check, "--tiny", "--here", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(tmp_path)
    assert not [line for line in found.values() if "error" in line]
    assert len(found) > 2 and (check, "begin") in found and (check, "end") in found
    laws = {
        "engine": lambda: (
            found[check, "float32 autocast=none, graph"]["mismatch_max"] < 1e-4
            and found[check, "lora autocast"]["mismatch_mean_after_step"] < 0.01
        ),
        "numbers": lambda: found[check, "deterministic"]["equal"],
        "nccl": lambda: found[check, "fsdp2"]["gradient_cosine"] > 0.999,
        "decode": lambda: found[check, "0.5b bf16, 4 rows that end one by one, graph"]["tokens_per_s"] > 0,
        "step": lambda: found[check, "rl4llm, autocast"]["tokens"] > 0,
    }
    assert laws.get(check, lambda: True)()


class Fakes(gpu.Driver):
    """A driver whose checks are short programs."""

    def __init__(self, programs, out, **options):
        super().__init__(list(programs), out, **({"tiny": False, "seconds": 60, "at_once": 2} | options))
        self.programs = programs

    def command(self, name):
        write = (
            f"write = lambda **facts: gpu.write(pathlib.Path({str(self._out)!r}), {name!r}, 'it', **facts); "
        )
        imports = f"import pathlib, sys, time; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu; "
        return [sys.executable, "-c", imports + write + self.programs[name]]


HANGS = (
    "import subprocess; child = subprocess.Popen(['sleep', '100']); write(child=child.pid); time.sleep(100)"
)


def test_checks_that_hang_die_or_fail_do_not_stop_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "CHECKS", gpu.CHECKS | {"machine": 4, "decode": 4})
    programs = {
        "machine": HANGS,
        "engine": "write(error='wrong'); sys.exit(3)",
        "numbers": "import os; os.abort()",
        "decode": HANGS,
        "update": "write(speed=1.0)",
    }
    assert not Fakes(programs, tmp_path).run()
    found = findings(tmp_path)
    assert "see machine.log" in found["machine", "timeout"]["error"]
    assert found["engine", "it"]["error"] == "wrong" and "error" not in found["engine", "done"]
    assert "exit code -6; see numbers.log" in found["numbers", "died"]["error"]
    assert 4 < found["decode", "timeout"]["seconds"] < 20
    assert found["update", "it"]["speed"] == 1.0 and (("update", "done") in found)
    assert sorted(found["all", "end"]["failed"]) == ["decode", "engine", "machine", "numbers"]
    for name in ("machine", "decode"):  # what a check started ends with it
        stat = Path("/proc") / str(found[name, "it"]["child"]) / "stat"
        assert not stat.exists() or stat.read_text().split()[2] in "ZX"

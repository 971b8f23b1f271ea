"""Run the stages of a recipe, each in a separate process, and measure what came out."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl4llm import __version__
from rl4llm.commands.output import say
from rl4llm.config import Config, load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.registry import load
from rl4llm.extensions.recipes.recipe import Recipe, changes
from rl4llm.runs.run_dir import write_atomically
from rl4llm.tracking.tracker import read_jsonl

RECORD = "recipe.json"
GB = 1e9
PRETRAINED = "HuggingFaceTB/SmolLM2-135M-Instruct"


def repeat(
    recipe: Recipe, work: Path, variant: str, seed: int, overrides: Sequence[str], *, stdout: Any = None
) -> int:
    """Run or resume a repetition in `work`; return the exit code of the last stage that ran, 0 if all finished."""
    record = _record(recipe, work, variant, seed, overrides)
    overrides = [*_downloaded(recipe, overrides), *overrides]
    prepare = recipe.preparation(work, variant, seed, overrides)
    if prepare and (code := _process(recipe, prepare, {}, stdout)):
        return code
    for number, command in enumerate(recipe.commands(work, variant, seed, overrides)):
        if number == len(record["stages"]):
            record["stages"].append({"finished": False})
        stage = record["stages"][number]
        if stage["finished"]:
            continue
        code = _process(recipe, command, stage, stdout)
        stage["finished"] = code == 0
        _write(work, record)
        if code:
            return code
    if "weights_sha256" not in record:
        record |= _found(load_config(work / "run" / "config.yaml", of_run=True), work)
        _write(work, record)
    return 0


def _downloaded(recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Return an override with the directory of the quickstart's model, if it is the recipe's; others come from the hub."""
    if recipe.given(overrides).model.path != PRETRAINED:
        return []
    return [
        f"model.path={load('rl4llm.extensions.quickstart.pretrained:smollm2', f'recipe {recipe.name}')()}"
    ]


def measured(recipe: Recipe, work: Path) -> dict[str, Any]:
    """Return the record of a finished repetition with its held-out curve; raise DataError if it is not finished."""
    file = work / RECORD
    record = json.loads(file.read_text()) if file.exists() else {}
    if "weights_sha256" not in record:
        raise DataError(
            f"{work} has no finished repetition of {recipe.name}. Next: `rl4llm recipe run {recipe.name}`."
        )
    curve, problems = _curve(recipe, work)
    stages = record.pop("stages")
    return record | {
        "curve": curve,
        "problems": problems,
        "seconds": round(sum(stage["seconds"] for stage in stages)),
        "cpu_seconds": round(sum(stage["cpu_seconds"] for stage in stages)),
        "peak_memory_gb": round(max(stage["peak_memory_gb"] for stage in stages), 2),
    }


def _record(recipe: Recipe, work: Path, variant: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what earlier starts recorded; raise ConfigError if they had another configuration."""
    file = work / RECORD
    about = {
        "fingerprint": recipe.fingerprint(variant),
        "variant": variant,
        "seed": seed,
        "overrides": changes(overrides),
    }
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        return about | {"stages": []}
    record = json.loads(file.read_text())
    for key, value in about.items():
        if record[key] != value:
            raise ConfigError(
                f"{work} was begun with {key} {record[key]!r}, which is now {value!r}. Next: choose another --dir, or "
                "remove that directory."
            )
    return record


def _write(work: Path, record: dict[str, Any]) -> None:
    write_atomically(work / RECORD, json.dumps(record, indent=1) + "\n")


def _process(recipe: Recipe, command: Sequence[str], stage: dict[str, Any], stdout: Any) -> int:
    """Run a process that can import the recipe's modules; add its time and memory to `stage`; return its exit code."""
    shown = ["rl4llm", *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
    say(f"$ {shlex.join(shown)}")
    started = time.monotonic()
    path = os.pathsep.join([str(recipe.path.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(command, stdout=stdout, env={**os.environ, "PYTHONPATH": path})
    with _signals_to(process):
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait again
    stage["seconds"] = stage.get("seconds", 0.0) + time.monotonic() - started
    stage["cpu_seconds"] = stage.get("cpu_seconds", 0.0) + used.ru_utime + used.ru_stime
    stage["peak_memory_gb"] = max(stage.get("peak_memory_gb", 0.0), used.ru_maxrss * 1024 / GB)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextlib.contextmanager
def _signals_to(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Pass SIGTERM on to the process, which saves and ends; a terminal sends it Ctrl-C by itself."""

    def pass_on(number: int, _: object) -> None:
        if number == signal.SIGTERM:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _curve(recipe: Recipe, work: Path) -> tuple[list[list[float]], int]:
    """Return the steps with their held-out shares, and the number of held-out problems."""
    files = recipe.measured_files(work)
    if files[0].suffix == ".jsonl":
        rows = [row for row in read_jsonl(files[0]) if recipe.metric in row]
        if not rows:
            raise DataError(
                f"{files[0]} has no {recipe.metric}. Next: set eval.every, and metric in recipe.yaml."
            )
        return [[row["step"], row[recipe.metric]] for row in rows], int(rows[-1]["trajectories"])
    results = [json.loads(file.read_text()) for file in files]
    shares = [[place, result["scores"][recipe.metric]["value"]] for place, result in enumerate(results)]
    return shares, len(results[-1]["per_problem"])


def _found(config: Config, work: Path) -> dict[str, Any]:
    """Return the hash of the final weights, None if the run was not deterministic, and where they were computed."""
    start = Path(config.model.path)
    return {
        "weights_sha256": _hash(work / "run" / "model") if config.deterministic else None,
        "machine": {"model": _hash(start)[:12] if start.is_dir() else str(start), **machine(config)},
    }


def machine(config: Config) -> dict[str, Any]:
    """Return what the weights of a deterministic run depend on beside its configuration and its first weights."""
    import torch  # noqa: PLC0415 - after the stages, which need the memory

    device = "cpu" if config.model.device == "cpu" or not torch.cuda.is_available() else "cuda"
    return {
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "threads": config.threads or torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "rl4llm": __version__,
    }


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _hash(directory: Path) -> str:
    """Return the SHA-256 of the weights: of the file if there is one, otherwise of the hashes of all files."""
    hashes = []
    for file in sorted(directory.glob("*.safetensors")):
        with open(file, "rb") as stream:
            hashes.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

"""Run the stages of a recipe, each in a separate process, and measure what came out."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rl4llm import __version__
from rl4llm.commands.output import STOPPED, say
from rl4llm.config import Config, load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.registry import from_extension
from rl4llm.extensions.recipes.recipe import Recipe
from rl4llm.extensions.recipes.results import check_shares
from rl4llm.runs.run_dir import write_atomically
from rl4llm.runtime.supervise import end_with_parent
from rl4llm.runtime.watchdog import stop_signals
from rl4llm.tracking.tracker import read_jsonl

RECORD = "recipe.json"
PRETRAINED = "HuggingFaceTB/SmolLM2-135M-Instruct"


def repeat(
    recipe: Recipe, work: Path, variant: str, seed: int, overrides: Sequence[str], *, stdout: Any = None
) -> int:
    """Run or resume a repetition in `work`; return the exit code of the last stage that ran, 0 if all finished."""
    record = _record(recipe, work, variant, seed, overrides)
    overrides = [*_downloaded(recipe, overrides), *overrides]
    if not record["stages"]:
        _write(work, record)  # so that a start with other overrides is refused even if this one is killed
    with Processes(recipe, stdout) as processes:
        words = recipe.words(work, variant, seed, overrides)
        code = _prepare(recipe, processes, words)
        code = code or _run_stages(processes, recipe.commands(words), work, record)
    if code == 0 and "weights_sha256" not in record:
        config = load_config(work / "run" / "config.yaml", of_run=True)
        begun = recipe.given([*recipe.overrides(variant), *overrides]) if recipe.takes_model else config
        record |= _found(config, work, begun.model.path)
        _write(work, record)
    return code


def _prepare(recipe: Recipe, processes: Processes, words: Mapping[str, Any]) -> int:
    """Make the data if they do not exist; return the exit code. The data appear when they are complete."""
    data = recipe.missing_data(words)
    if data is None:
        return 0
    data.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data.parent, prefix=f"{data.name}.tmp-") as scratch:
        made = Path(scratch) / data.name
        code = processes.run(recipe.preparation(words, made), {})
        if code == 0 and made.exists() and not data.exists():  # another process may have made them
            made.rename(data)
    return code


def _run_stages(
    processes: Processes, commands: Sequence[Sequence[str]], work: Path, record: dict[str, Any]
) -> int:
    """Run the stages that are not finished; return the exit code of the last one that ran."""
    for number, command in enumerate(commands):
        if number == len(record["stages"]):
            record["stages"].append({"finished": False})
        stage = record["stages"][number]
        if stage["finished"]:
            continue
        _remove_output(command, work)
        code = processes.run(command, stage)
        stage["finished"] = code == 0
        _write(work, record)
        if code:
            return code
    return 0


def _remove_output(command: Sequence[str], work: Path) -> None:
    """Remove what an earlier start wrote to the `--out` in `work`: commands refuse a file that exists."""
    words = itertools.chain.from_iterable(word.split("=", 1) for word in command)
    for word, value in itertools.pairwise(words):
        target = Path(value).parent.resolve() / Path(value).name
        if word != "--out" or work.resolve() not in target.parents:
            continue
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _downloaded(recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Return an override with the directory of the quickstart's model, if it is the recipe's; others come from the hub."""
    if recipe.given(overrides).model.path != PRETRAINED:
        return []
    return [f"model.path={from_extension('pretrained_model', f'recipe {recipe.name}')()}"]


def measured(recipe: Recipe, work: Path) -> dict[str, Any]:
    """Return the record of a finished repetition with its held-out curve; raise DataError if it is not finished."""
    file = work / RECORD
    record = json.loads(file.read_text()) if file.exists() else {}
    if "weights_sha256" not in record:
        raise DataError(
            f"{work} has no finished repetition of {recipe.name}. Next: `rl4llm recipe run {recipe.name}`."
        )
    curve, problems = _curve(recipe, work)
    check_shares(recipe.metric, [share for _, share in curve])
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
        "overrides": list(overrides),
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


def _curve(recipe: Recipe, work: Path) -> tuple[list[list[float]], int]:
    """Return the steps with their held-out shares, and the number of held-out problems."""
    files = recipe.measured_files(work)
    if files[0].suffix == ".jsonl":
        rows = [row for row in read_jsonl(files[0]) if recipe.metric in row]
        if not rows:
            raise DataError(
                f"{files[0]} has no {recipe.metric}. Next: set eval.every, and metric in recipe.yaml."
            )
        return [[row["step"], row[recipe.metric]] for row in rows], _problems(rows[-1])
    results = [json.loads(file.read_text()) for file in files]
    shares = [[place, result["scores"][recipe.metric]["value"]] for place, result in enumerate(results)]
    roles = Counter(problem.get("role") for problem in results[-1]["per_problem"])
    return shares, max(roles.values())


def _problems(row: Mapping[str, Any]) -> int:
    """Return the number of held-out problems: of several roles, each has a trajectory of each problem."""
    roles = [count for name, count in row.items() if re.fullmatch("role/[^/]+/trajectories", name)]
    return int(max(roles, default=row["trajectories"]))


def _found(config: Config, work: Path, model: str) -> dict[str, Any]:
    """Return the hash of the final weights, None if the run was not deterministic, and where they were computed."""
    start = Path(model)
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


GB = 1e9


class Processes:
    """Runs processes that can import a recipe's modules.

    SIGTERM is passed on to the process that runs, which saves and ends; a terminal sends it Ctrl-C and SIGHUP by itself.
    After these signals no other process starts.
    """

    def __init__(self, recipe: Recipe, stdout: Any):
        path = [str(recipe.path.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        self._stdout = stdout
        self._pid: int | None = None
        self._received: list[int] = []

    def __enter__(self) -> Self:
        self._signals = stop_signals(self._stop)
        self._signals.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._signals.__exit__(None, None, None)

    def run(self, command: Sequence[str], stage: dict[str, Any]) -> int:
        """Run a process, add its time and memory to `stage`, and return its exit code: 75 if a signal came before it."""
        if self._received:
            return STOPPED
        shown = ["rl4llm", *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
        say(f"$ {shlex.join(shown)}")
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=self._stdout, env=self._environ, preexec_fn=end_with_parent
        )
        self._pid = process.pid
        if self._received:  # before there was a process to signal
            self._pass_on()
        _, status, used = os.wait4(process.pid, 0)
        self._pid = None
        process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait again
        stage["seconds"] = stage.get("seconds", 0.0) + time.monotonic() - started
        stage["cpu_seconds"] = stage.get("cpu_seconds", 0.0) + used.ru_utime + used.ru_stime
        stage["peak_memory_gb"] = max(stage.get("peak_memory_gb", 0.0), used.ru_maxrss * 1024 / GB)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _stop(self, number: int, _: object) -> None:
        self._received.append(number)
        if number == signal.SIGTERM:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)  # not Popen.send_signal, which would reap it during wait4

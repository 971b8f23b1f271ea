"""``rl4llm recipe run``: repeat a run with published results, each stage in a separate process."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4llm.commands.arguments import add_command, add_json, add_overrides
from rl4llm.commands.output import STOPPED, say, show, table, write_json
from rl4llm.core.errors import ConfigError

if TYPE_CHECKING:
    from rl4llm.extensions.recipes.recipe import Recipe

FAILED = 1
KB_PER_GB = 1e9 / 1024


def add(actions: Any) -> None:
    examples = (
        "rl4llm recipe run sums --seed 0 --verify",
        "rl4llm recipe run sums --variant lora model.path=models/SmolLM2-135M-Instruct",
    )
    about = "repeat a recipe, and compare it with its published results"
    command = add_command(actions, "run", run, about, examples, resumes=True)
    command.add_argument("name", help="a recipe, or a directory with recipe.yaml")
    add_overrides(command, "key.sub=value", "override a key of the stages that have {overrides}")
    command.add_argument("--seed", type=int, help="seed of the repetition (default: the recipe's first)")
    command.add_argument("--variant", help="variant to repeat (default: the recipe's first)")
    about = "output directory of all repetitions (default: %(default)s)"
    command.add_argument("--dir", type=Path, default=Path("runs/recipes"), help=about)
    about = (
        f"exit with code {FAILED} unless the last result is comparable and inside the band of the stored ones"
    )
    command.add_argument("--verify", action="store_true", help=about)
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.recipes.recipe import load
    from rl4llm.extensions.recipes.results import compared, measured, outdated, stored

    recipe = load(arguments.name)
    variant = arguments.variant or next(iter(recipe.variants))
    seed = recipe.seeds[0] if arguments.seed is None else arguments.seed
    # refuses a wrong one before anything is downloaded
    recipe.config([*recipe.overrides(variant), f"seed={seed}", *arguments.overrides])
    if variant in outdated(recipe):
        say(f"The stored results of {recipe.name} ({variant}) were measured with an earlier configuration.")
    work = arguments.dir / recipe.name / variant / f"seed-{seed}"
    stdout = sys.stderr if arguments.json else None
    if code := repeat(recipe, work, variant, seed, arguments.overrides, stdout=stdout):
        return code
    results = stored(recipe).get(variant)
    verdict = compared(recipe, results, seed, measured(recipe, work))
    if arguments.json:
        write_json(verdict)
    else:
        means = {step: f"{share:.1%}" for step, share in results.curve()} if results else {}
        lines = [[f"{step:g}", f"{share:.1%}", means.get(step, "")] for step, share in verdict["curve"]]
        show(table(f"held-out {recipe.metric}", ("step", "this run", "stored mean"), lines))
        show(*verdict["lines"], f"`rl4llm view {work / 'run'}` shows the run.")
    return FAILED if arguments.verify and not verdict["within_band"] else 0


def repeat(
    recipe: Recipe, work: Path, variant: str, seed: int, overrides: Sequence[str], *, stdout: Any = None
) -> int:
    """Run or resume a repetition in `work`; return the exit code of the last stage that ran, 0 if all finished."""
    from rl4llm.extensions.recipes.pretrained import HUB_NAME, smollm2
    from rl4llm.extensions.recipes.recipe import command
    from rl4llm.extensions.recipes.results import RECORD, provenance

    file = work / RECORD
    record = _record(file, recipe.fingerprint(variant), variant, seed, overrides)
    words = recipe.words(work, variant, seed, overrides)
    if words["model"] == HUB_NAME:
        words["model"] = str(smollm2())
    processes = Processes(recipe, stdout)
    code = _prepare(recipe, processes, words)
    for stage in recipe.stages[record["finished"] :]:
        if code == 0:
            code = processes.run(command(stage, words), record)
            record["finished"] += code == 0
            _write(file, record)
    if code == 0 and "weights_sha256" not in record:
        _write(file, record | provenance(recipe, work, words["model"]))
    return code


def _record(
    file: Path, fingerprint: str, variant: str, seed: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return what earlier starts recorded; raise ConfigError if they had another configuration."""
    about = {"fingerprint": fingerprint, "variant": variant, "seed": seed, "overrides": list(overrides)}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, about | {"finished": 0, "seconds": 0.0, "peak_memory_gb": 0.0})
    record: dict[str, Any] = json.loads(file.read_text())
    for key, value in about.items():
        if record[key] != value:  # finished stages are not run again
            raise ConfigError(
                f"{file.parent} was begun with {key} {record[key]!r}. Next: remove it, or choose another --dir."
            )
    return record


def _write(file: Path, record: dict[str, Any]) -> None:
    from rl4llm.runs.run_dir import write_atomically

    write_atomically(file, json.dumps(record, indent=1) + "\n")


def _prepare(recipe: Recipe, processes: Processes, words: dict[str, Any]) -> int:
    """Make the data if they do not exist; return the exit code. The data appear when they are complete."""
    from rl4llm.extensions.recipes.recipe import command

    data = Path(words["data"])
    if not recipe.data or data.exists():
        return 0
    data.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data.parent, prefix=f"{data.name}.tmp-") as scratch:
        whole = Path(scratch) / data.name
        code = processes.run(command(recipe.data, words | {"data": whole, "place": data.resolve()}))
        if code == 0 and not data.exists():  # another process may have made them
            whole.rename(data)
    return code


class Processes:
    """Runs one process after another, which can import a recipe's modules.

    SIGTERM is passed on to the process that runs, which saves and ends; a terminal sends it Ctrl-C and SIGHUP by itself.
    After these signals no other process starts.
    """

    def __init__(self, recipe: Recipe, stdout: Any):
        path = [str(recipe.path.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        self._stdout = stdout
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, command: Sequence[str], record: dict[str, Any] | None = None) -> int:
        """Run a process, add its time and memory to `record`, and return its exit code: 75 if a signal came before it."""
        from rl4llm.runtime.supervise import end_with_parent
        from rl4llm.runtime.watchdog import stop_signals

        if self._stopped:
            return STOPPED
        say(f"$ {shlex.join(['rl4llm', *command[3:]] if command[1] == '-m' else ['python', *command[1:]])}")
        started = time.monotonic()
        with stop_signals(self._stop):
            self._process = subprocess.Popen(
                command, stdout=self._stdout, env=self._environ, preexec_fn=end_with_parent
            )
            code = self._process.wait()
        if record is not None:
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / KB_PER_GB
            record["seconds"] += time.monotonic() - started
            record["peak_memory_gb"] = max(record["peak_memory_gb"], peak)
        return code if code >= 0 else 128 - code

    def _stop(self, number: int, _: object) -> None:
        self._stopped = True
        if number == signal.SIGTERM and self._process is not None:
            self._process.terminate()

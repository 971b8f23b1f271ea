"""``rl4llm eval``: measure a model on a held-out set."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4llm.commands.arguments import add_command, add_config, add_json
from rl4llm.commands.output import meanwhile, say, show, write_json
from rl4llm.core.errors import ConfigError, DataError, RunDirError

if TYPE_CHECKING:
    from rich.table import Table

    from rl4llm.evaluate import Evaluation
    from rl4llm.tracking.scores import Difference, Problem, Score

WORSE = 3  # the exit code of --fail-if-worse


def add(commands: Any) -> None:
    examples = (
        "rl4llm eval configs/gsm8k_grpo.yaml eval.limit=null --out before.json",
        "rl4llm eval configs/gsm8k_grpo.yaml eval.temperature=0.8 --samples 8 --k 1,4,8",
        "rl4llm eval configs/gsm8k_grpo.yaml eval.limit=null --compare before.json --fail-if-worse",
        "rl4llm eval configs/gsm8k_grpo.yaml eval.path=math500.jsonl data.prompt_column=problem "
        "data.answer_column=answer data.answer_pattern=null",
    )
    about = "measure a model, or a run's last checkpoint, on the held-out set"
    command = add_command(commands, "eval", run, about, examples)
    add_config(command)
    command.add_argument("--samples", type=int, default=1, metavar="N", help="attempts at each problem (%(default)s)")
    command.add_argument("--k", type=_numbers, metavar="1,4,8", help="for pass@k, each at most N (default: 1 and N)")
    command.add_argument("--out", type=Path, metavar="FILE", help="write all of it there as JSON, each problem too")
    command.add_argument("--compare", type=Path, metavar="FILE", help="with what --out wrote before, problem by problem")
    worse = f"with --compare: exit code {WORSE} where a share is worse by more than chance"
    command.add_argument("--fail-if-worse", action="store_true", help=worse)
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    samples = arguments.samples
    ks = arguments.k or sorted({1, max(1, samples)})
    _check(arguments, ks)
    from rl4llm.config import load_config
    from rl4llm.evaluate import evaluate
    from rl4llm.tracking.scores import differences, scores

    config = load_config(arguments.config, arguments.overrides)
    baseline = None if arguments.compare is None else _read(arguments.compare)
    with meanwhile():
        measured = evaluate(config, samples)
    found = scores(measured.problems, ks)
    result = _result(measured, found)
    changed = {} if baseline is None else differences(measured.problems, baseline, ks)
    if changed:
        result["compared"] = {"with": str(arguments.compare), "differences": _plain(changed)}
    if arguments.out is not None:
        _write(arguments.out, result | {"per_problem": [asdict(problem) for problem in measured.problems]})
    if arguments.json:
        write_json(result)
    else:
        show(_scores_table(arguments.config, measured, found), _metrics_table(measured.metrics))
    if baseline is None:
        return 0
    if not changed:  # what was measured is told all the same
        raise DataError(f"{arguments.compare} has none of these problems, so there is nothing to compare.")
    if not arguments.json:
        show(_differences_table(arguments.compare, changed))
    worse = [name for name, item in changed.items() if name != "reward" and (item.gained.high or 0) < 0]
    if worse and arguments.fail_if_worse:
        say(f"Worse than {arguments.compare} by more than chance: {', '.join(worse)}.")
        return WORSE
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: numbers with commas between, such as 1,4,8") from None


def _check(arguments: argparse.Namespace, ks: Sequence[int]) -> None:
    """What can be wrong without a model."""
    if not 1 <= ks[0] <= ks[-1] <= max(1, arguments.samples):
        given = ",".join(map(str, ks))
        raise ConfigError(f"--k {given} is not accepted with --samples {arguments.samples}: 1 to {arguments.samples}.")
    if arguments.fail_if_worse and arguments.compare is None:
        raise ConfigError("--fail-if-worse needs --compare FILE, than which it could be worse.")
    if arguments.out is None:
        return
    if arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists. Next step: remove it, or write the results to another file.")
    if not arguments.out.parent.is_dir():
        raise RunDirError(f"{arguments.out}: there is no directory {arguments.out.parent}.")
    _write(arguments.out, {})  # a disk that is read-only tells now, not after an hour
    arguments.out.unlink()


def _write(file: Path, result: Mapping[str, Any]) -> None:
    from rl4llm.core.run_dir import write_atomically

    write_atomically(file, json.dumps(result, indent=1) + "\n")


def _read(file: Path) -> list[Problem]:
    from rl4llm.tracking.scores import Problem

    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["per_problem"]
        return [Problem(**{**row, "rewards": tuple(map(float, row["rewards"]))}) for row in rows]
    except OSError as error:
        raise DataError(f"--compare {file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise DataError(f"--compare {file} is not what `rl4llm eval --out` writes: {found}.") from error


def _result(measured: Evaluation, found: Mapping[str, Score]) -> dict[str, Any]:
    from rl4llm.tracking.scores import INTERVALS

    about = {name: value for name, value in asdict(measured).items() if name not in ("metrics", "problems")}
    return {**about, "scores": _plain(found), "intervals": INTERVALS, "metrics": measured.metrics}


def _plain(found: Mapping[str, Score | Difference]) -> dict[str, Any]:
    return {name: asdict(score) for name, score in found.items()}


def _scores_table(config: str, measured: Evaluation, found: Mapping[str, Score]) -> Table:
    from rich.table import Table

    how = f"{measured.samples} sample(s) at temperature {measured.temperature:g}"
    title = f"held-out set of {config}, step {measured.step}, {how}"
    table = Table("score", "value", "95 % interval", "problems", title=title)
    for name, score in found.items():
        table.add_row(name, f"{score.value:.4f}", _interval(score), str(score.problems))
    return table


def _metrics_table(metrics: Mapping[str, float]) -> Table:
    from rich.table import Table

    table = Table("metric", "value", title="of all episodes")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    return table


def _differences_table(file: Path, changed: Mapping[str, Difference]) -> Table:
    from rich.table import Table

    table = Table("score", "before", "difference", "95 % interval", "problems in both", title=f"compared with {file}")
    for name, item in changed.items():
        gained = item.gained
        table.add_row(
            name, f"{item.baseline:.4f}", f"{gained.value:+.4f}", _interval(gained, "+"), str(gained.problems)
        )
    return table


def _interval(score: Score, sign: str = "") -> str:
    return "-" if score.low is None else f"{score.low:{sign}.4f} to {score.high:{sign}.4f}"

"""``rl4llm eval`` measures a model on held-out prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4llm.commands.arguments import add_command, add_config, add_json
from rl4llm.commands.output import meanwhile, say, show, table, write_json
from rl4llm.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.table import Table

    from rl4llm.extensions.evaluate.scores import Difference, Problem, Score

WORSE = 3  # the exit code of --fail-if-worse
SETUP = (
    *("data.system_prompt", "data.prompt_template", "env.", "rewards", "parts.", "eval.temperature"),
    *("rollout.max_tokens", "rollout.top_", "rollout.stop"),
)
"""Keys, or the beginnings of keys, that change the results of a model on the same problems."""
ASKING = ("overrides", "model", "ask", "json")
"""Arguments of a question; all others are of measurements."""
EXAMPLES, EXAMPLE_CHARS = 3, 300  # questions that are shown, and how much of a text


def add(commands: Any) -> None:
    examples = (
        "rl4llm eval gsm8k,math500,humaneval,ifeval --model Qwen/Qwen2.5-0.5B-Instruct --out before.json",
        "rl4llm eval gsm8k --model exported/ --limit 200 --compare before.json inference.name=vllm",
        "rl4llm eval configs/gsm8k_grpo.yaml eval.limit=null --out before.json",
        'rl4llm eval configs/quickstart.yaml --ask "Ann has 37 coins and gets 48 more?"',
        "rl4llm eval configs/gsm8k_grpo.yaml eval.temperature=0.8 --samples 8 --k 1,4,8",
        "rl4llm eval configs/gsm8k_grpo.yaml eval.limit=null --compare before.json --fail-if-worse",
        "rl4llm eval configs/gsm8k_grpo.yaml eval.path=math500.jsonl data.prompt_column=problem "
        "data.answer_column=answer data.answer_pattern=null",
    )
    about = "measure a model on benchmarks, or a run's last checkpoint on its held-out set"
    command = add_command(commands, "eval", run, about, examples)
    add_config(
        command, "a YAML file, configs/NAME.yaml for a bundled one, or benchmarks such as gsm8k,math500"
    )
    command.add_argument(
        "--model", metavar="PATH", help="measure this model and no run: a directory, or a name on the hub"
    )
    command.add_argument(
        "--ask", metavar="QUESTION", help="print the answer to one question instead, as `rl4llm chat` does"
    )
    command.add_argument("--limit", type=int, metavar="N", help="only the first N problems")
    command.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="local rows of a benchmark: a file, or a directory of splits; may be repeated",
    )
    command.add_argument(
        "--samples", type=int, default=1, metavar="N", help="samples per problem (default: %(default)s)"
    )
    command.add_argument(
        "--k",
        type=numbers,
        metavar="1,4,8",
        help="values of k for pass@k, with as many samples as the largest (default: 1 and N)",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write results, per problem too, as JSON")
    command.add_argument("--compare", type=Path, metavar="FILE", help="compare with an earlier --out file")
    worse = f"with --compare: exit with code {WORSE} if a share is worse by more than chance"
    command.add_argument("--fail-if-worse", action="store_true", help=worse)
    add_json(command)
    command.set_defaults(parser=command)


def run(arguments: argparse.Namespace) -> int:
    if arguments.ask is not None:
        return _asked(arguments)
    ks = arguments.k or sorted({1, max(1, arguments.samples)})
    arguments.samples = max(arguments.samples, *ks)
    _check(arguments)
    from rl4llm.extensions.evaluate.named import benchmarks_in
    from rl4llm.extensions.evaluate.scores import other_questions

    before, baseline = (None, None) if arguments.compare is None else _read(arguments.compare)
    names = benchmarks_in(arguments.config)
    report = _by_name(arguments, names, ks) if names else _of_config(arguments, ks)
    changed = {} if baseline is None else report.differences(report.problems, baseline, ks)
    if changed:
        report.result["compared"] = {"with": str(arguments.compare), "differences": _plain(changed)}
    if arguments.out is not None:
        _write(arguments.out, report.result | {"per_problem": list(map(asdict, report.problems))})
    if arguments.json:
        write_json(report.result)
    else:
        show(*report.tables)
    if before is None or baseline is None:
        return 0
    if count := other_questions(report.problems, baseline):
        say(f"{count} problems have the same id in {arguments.compare}, but another question.")
    return _compared(arguments, report, before, changed)


def _asked(arguments: argparse.Namespace) -> int:
    """Print the answer to a question, or all messages after it as JSON; return the exit code."""
    for name, default in vars(arguments.parser.parse_args([arguments.config])).items():
        if name not in ASKING and getattr(arguments, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')} is for measurements. Remove it, or --ask.")
    from rl4llm.extensions.evaluate.chat import conversation
    from rl4llm.extensions.evaluate.chat_command import answered

    with conversation(arguments.config, arguments.overrides, model=arguments.model) as talk:
        if not arguments.json:
            return answered(talk, arguments.ask)
        write_json([message.to_dict() for message in talk.ask(arguments.ask)])
    return 0


def _compared(
    arguments: argparse.Namespace,
    report: _Report,
    before: Mapping[str, Any],
    changed: Mapping[str, Difference],
) -> int:
    """Show the differences from an earlier result, `before`, and what was set otherwise in it; return the exit code."""
    from rl4llm.config import flatten

    if not changed:  # the results are shown before this error
        raise DataError(
            f"{arguments.compare} has none of these problems. Compare results on the same held-out set."
        )
    earlier, later = (flatten(result.get("setup", {})) for result in (before, report.result))
    for key in sorted(earlier.keys() | later.keys()) if "setup" in before else ():
        was, now = earlier.get(key), later.get(key)
        if was != now:
            say(f"{arguments.compare} was measured with {key}={was!r}, now it is {now!r}.")
    for name, item in before.get("benchmarks", {}).items():
        now = report.result.get("benchmarks", {}).get(name, item)
        # A result of fewer problems has another hash.
        other_rows = now["hash"] != item["hash"] and now["problems"] == item["problems"]
        if other_rows or any(now[key] != item[key] for key in ("version", "changed")):
            say(f"{arguments.compare} has another definition: {_definition(name, item)}.")
    gains = {name: item.gained for name, item in changed.items()}
    if not arguments.json:
        columns = ("score", "before", "difference", "95 % interval", "problems in both")
        rows = [
            (name, f"{changed[name].baseline:.4f}", f"{gain.value:+.4f}", _interval(gain, "+"), gain.problems)
            for name, gain in gains.items()
        ]
        show(table(f"compared with {arguments.compare}", columns, rows))
    worse = [name for name, gain in gains.items() if name != "reward" and (gain.high or 0) < 0]
    if worse and arguments.fail_if_worse:
        say(f"Worse than {arguments.compare} by more than chance: {', '.join(worse)}.")
        return WORSE
    return 0


@dataclass(frozen=True, slots=True)
class _Report:
    """What was measured: as JSON, as tables, by problem, and how problems are compared with an earlier result."""

    result: dict[str, Any]
    tables: Sequence[Table | str]
    problems: list[Problem]
    differences: Callable[..., dict[str, Difference]]


def _of_config(arguments: argparse.Namespace, ks: Sequence[int]) -> _Report:
    """Measure the held-out set of a configuration."""
    from rl4llm.config import flatten
    from rl4llm.extensions.evaluate.play import evaluate, load
    from rl4llm.extensions.evaluate.scores import INTERVALS, differences, scores
    from rl4llm.tracking.tracker import rounded

    if arguments.data:
        raise ConfigError(
            f"--data {arguments.data[0]} is for benchmarks. Next: set eval.path={arguments.data[0]}."
        )
    config = load(arguments.config, [*arguments.overrides, *_overrides(arguments)])
    with meanwhile():
        measured = evaluate(config, arguments.samples, of_run=arguments.model is None)
    shares = scores(measured.problems, ks)
    result = measured.about() | {
        "scores": _plain(shares),
        "intervals": INTERVALS,
        "metrics": measured.metrics,
    }
    written = flatten(config.stored())
    result["setup"] = {key: written[key] for key in written if key.startswith(SETUP)}
    how = f"{measured.samples} sample(s) at temperature {measured.temperature:g}"
    title = f"{measured.model} on the held-out set of {arguments.config}, {how}"
    metrics = [(name, rounded(value)) for name, value in measured.metrics.items()]
    averages = table("metrics of all episodes", ("metric", "value"), metrics)
    tables: list[Table | str] = [_scores_table(title, shares), averages, *examples(measured.problems)]
    return _Report(result, tables, measured.problems, differences)


def _by_name(arguments: argparse.Namespace, names: Sequence[str], ks: Sequence[int]) -> _Report:
    """Measure benchmarks, one after the other."""
    from rl4llm.extensions.evaluate.named import measure, plan
    from rl4llm.extensions.evaluate.scores import SHARES, differences_by_part, scores_by_part

    plans = plan(names, [*arguments.overrides, *_overrides(arguments)], arguments.data)
    with meanwhile():
        measured = [measure(item, arguments.samples) for item in plans]
    problems = [problem for item in measured for problem in item.problems]
    shares = scores_by_part(problems, ks)
    about = {item.plan.name: item.about() for item in measured}
    result = {"benchmarks": about, "scores": _plain(shares), "intervals": SHARES}
    title = f"{plans[0].config.model.path}, {arguments.samples} sample(s) per problem"
    tables: list[Table | str] = [_scores_table(title, shares)]
    tables += [_definition(name, item) for name, item in about.items()]
    tables += [line for item in measured for line in examples(item.problems)]
    return _Report(result, tables, problems, differences_by_part)


def examples(problems: Sequence[Problem]) -> list[str]:
    """Return a few questions with the first answer as lines: problems without a success before those that succeeded."""
    failures: list[tuple[str, str]] = []
    successes: list[tuple[str, str]] = []
    for problem in problems:
        if problem.answers:
            lines = (
                f"question {problem.prompt_id}: {_short(problem.question)}",
                f"  answer with reward {problem.rewards[0]:g}: {_short(problem.answers[0])}",
            )
            (failures if problem.successes == 0 else successes).append(lines)
    chosen = failures[: max(EXAMPLES - 1, EXAMPLES - len(successes))]
    chosen += successes[: EXAMPLES - len(chosen)]
    return [line for lines in chosen for line in lines]


def _short(text: str) -> str:
    """Return a text in one line, without its middle if it is long."""
    text = " ".join(text.split())
    half = EXAMPLE_CHARS // 2
    return text if len(text) <= EXAMPLE_CHARS else f"{text[:half]} ... {text[-half:]}"


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the configuration keys that options stand for."""
    options = {"model.path": arguments.model, "eval.limit": arguments.limit}
    return [f"{key}={value}" for key, value in options.items() if value is not None]


def numbers(text: str) -> list[int]:
    """Return positive numbers separated by commas; argparse reports a ValueError."""
    values = sorted({int(word) for word in text.split(",")})
    if values[0] < 1:
        raise ValueError
    return values


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError or RunDirError for arguments that are wrong without a model."""
    if arguments.fail_if_worse and arguments.compare is None:
        raise ConfigError("--fail-if-worse requires --compare FILE.")
    if arguments.out is None:
        return
    if arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists. Next: remove it, or choose another file.")
    _write(arguments.out, {})  # finds a read-only disk now and not after the evaluation
    arguments.out.unlink()


def _write(file: Path, result: Mapping[str, Any]) -> None:
    from rl4llm.runs.run_dir import write_atomically

    write_atomically(file, json.dumps(result, indent=1) + "\n")


def _read(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return an earlier result, and its problems."""
    from rl4llm.extensions.evaluate.scores import Problem

    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        rows = [{**row, "rewards": tuple(map(float, row["rewards"]))} for row in result["per_problem"]]
        return result, [Problem(**row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"--compare {file} was not written by `rl4llm eval --out`: {error!r}.") from error


def _plain(scores: Mapping[str, Score | Difference]) -> dict[str, Any]:
    return {name: asdict(score) for name, score in scores.items()}


def _scores_table(title: str, scores: Mapping[str, Score]) -> Table:
    rows = [(name, f"{score.value:.4f}", _interval(score), score.problems) for name, score in scores.items()]
    return table(title, ("score", "value", "95 % interval", "problems"), rows)


def _definition(name: str, item: Mapping[str, Any]) -> str:
    """Return a line with what must be equal before two results are compared."""
    changed = "".join(f", {key}={value}" for key, value in item["changed"].items())
    return (
        f"{name} version {item['version']}{changed}: {item['problems']} problems (hash {item['hash']}), "
        f"{item['truncated']:.1%} of the answers cut off, {item['failures']} failed"
    )


def _interval(score: Score, sign: str = "") -> str:
    return "-" if score.low is None else f"{score.low:{sign}.4f} to {score.high:{sign}.4f}"

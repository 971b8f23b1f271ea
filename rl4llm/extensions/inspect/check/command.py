"""``rl4llm check``: validate a setup before it trains, or recompute a step that was not finite."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_json
from rl4llm.commands.output import meanwhile, show, show_facts, write_json

PROMPTS = 32
STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def add(commands: Any) -> None:
    examples = (
        "rl4llm check configs/gsm8k_grpo.yaml",
        "rl4llm check configs/gsm8k_grpo.yaml inference.name=sglang --json",
        "rl4llm check configs/gsm8k_grpo.yaml --task --prompts 64",
        "rl4llm check runs/x/failed/step-000012    # where its loss or gradient first went wrong",
    )
    about = "validate a setup (token masks, log-prob parity, weight sync, gradients); exit code 1 when a check fails"
    command = add_command(commands, "check", run, about, examples)
    add_config(
        command, "path to a YAML file, configs/NAME.yaml for a bundled one, or the directory of a failed step"
    )
    command.add_argument(
        "--task",
        action="store_true",
        help="instead sample the model: success, format, truncation, groups with a gradient, what to change; exit "
        "code 1 when no group has a gradient",
    )
    about = f"--task with this number of prompts (default: {PROMPTS})"
    command.add_argument("--prompts", type=int, metavar="N", help=about)
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    if Path(arguments.config).is_dir():
        return _failed_step(arguments)
    if arguments.task or arguments.prompts is not None:
        return _task(arguments)
    from rich.text import Text

    from rl4llm.config import load_config
    from rl4llm.extensions.inspect.check.run import Result, check
    from rl4llm.runtime.terminal import Terminal

    console = Terminal(file=sys.stdout, highlight=False)

    def tell(result: Result) -> None:
        line = Text(f"{result.status:>7}", STYLES[result.status])
        line.append(f"  {result.name:<11} ", "bold").append(result.text, "default")
        console.print(line, soft_wrap=True)

    config = load_config(arguments.config, arguments.overrides)
    with meanwhile():
        results = check(config, (lambda result: None) if arguments.json else tell)
    failed = sum(result.status == "failed" for result in results)
    if arguments.json:
        write_json({"passed": not failed, "checks": [asdict(result) for result in results]})
    else:
        verdict = f"{failed} of {len(results)} checks failed" if failed else "All checks passed"
        console.print(f"{verdict}, {sum(result.seconds for result in results):.0f} s")
    return 1 if failed else 0


def _failed_step(arguments: argparse.Namespace) -> int:
    """Recompute a step whose loss or gradient was not finite."""
    from rl4llm.extensions.inspect.check.replay import replay

    show_facts(replay(Path(arguments.config)), arguments.json)
    return 0


def _task(arguments: argparse.Namespace) -> int:
    """Run the solutions of tasks, then sample the model on its prompts, and show what its groups would teach."""
    from rl4llm.config import load_config
    from rl4llm.extensions.inspect.check.task import examine, faulty_tasks

    config = load_config(arguments.config, arguments.overrides)
    output = sys.stderr if arguments.json else sys.stdout

    def tell(line: str) -> None:
        with redirect_stdout(output):
            show(line)

    with meanwhile():
        faults = faulty_tasks(config, tell)
    if faults:
        write_json({"faulty_tasks": faults}) if arguments.json else None
        return 1
    with meanwhile():
        report = examine(config, PROMPTS if arguments.prompts is None else arguments.prompts)
    if arguments.json:
        write_json(asdict(report))
    else:
        show(*report.lines())
    return 0 if report.teaches else 1

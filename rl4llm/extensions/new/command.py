"""``rl4llm recipe new``: five questions become the files of a task, which is then checked and played."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import say, show
from rl4llm.core.errors import ConfigError

FILES = ("task.py", "task.yaml", "test_task.py", "train.jsonl", "test.jsonl")
PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "input", "query")
ANSWERS = (
    "ground_truth",
    "reward_model.ground_truth",
    "answer",
    "solution",
    "final_answer",
    "output",
    "label",
)
QUESTIONS = {
    "data": "A file or directory with rows? Empty for a few example rows",
    "right": "What is right: the last number (number), the last line (text), or a score that you write (own)?",
    "tools": "Tools: none, a function (function), a database (sqlite) or a picture (picture) for each episode?",
    "turns": "How often may the policy speak in an episode?",
    "model": "The model: a directory, or a name on the hub?",
}
CHOICES = {"right": ("number", "text", "own"), "tools": ("none", "function", "sqlite", "picture")}
DEFAULTS = {"data": "", "right": "number", "tools": "none", "model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
SEES_PICTURES = "Qwen/Qwen2.5-VL-3B-Instruct"
EPISODES, TEXT_CHARS = 8, 160
EPISODES_FILE = "episodes.jsonl"


@dataclass(frozen=True, slots=True)
class Answers:
    """What the five questions got."""

    data: str
    right: str
    tools: str
    turns: int
    model: str


def add(commands: Any) -> None:
    examples = (
        "rl4llm recipe new mytask",
        "rl4llm recipe new sums --data questions.jsonl --right number --tools none --turns 1 --model models/small",
        "rl4llm recipe new sql --tools sqlite --turns 4 --model Qwen/Qwen2.5-0.5B-Instruct",
    )
    about = "write a task: reward or environment, tools, configuration, test; then check it and play eight episodes"
    command = add_command(commands, "new", run, about, examples)
    command.add_argument(
        "dir", nargs="?", type=Path, default=Path("task"), help="directory (default: %(default)s)"
    )
    for name, question in QUESTIONS.items():
        kind: Any = {"type": int} if name == "turns" else {"choices": CHOICES.get(name)}
        command.add_argument(f"--{name}", **kind, help=question.replace("%", "%%"))
    command.add_argument("--write-only", action="store_true", help="neither check the task nor play episodes")


def run(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.dir
    there = [name for name in FILES if (directory / name).exists()]
    if there:
        raise ConfigError(
            f"{directory} has {', '.join(there)} already. Next: name another directory, or remove them."
        )
    answers = asked({name: getattr(arguments, name) for name in QUESTIONS})
    write(directory, answers)
    say(f"Wrote {', '.join(sorted(file.name for file in directory.iterdir()))} into {directory}")
    code = 0
    if not arguments.write_only:
        path = list(sys.path)
        with contextlib.chdir(directory):
            sys.path.insert(0, str(Path.cwd()))  # where the task's module is found
            try:
                code = _tried()
            finally:
                sys.path[:] = path
    show(
        f"Next: cd {quote(str(directory))}, change task.py and task.yaml, then\n"
        "  pytest test_task.py\n  rl4llm check task.yaml --task\n  rl4llm train task.yaml"
    )
    return code


def asked(given: Mapping[str, Any]) -> Answers:
    """Ask on a terminal what no option answers; elsewhere take the defaults. Raises ConfigError for wrong answers."""
    found: dict[str, Any] = {}
    for name, question in QUESTIONS.items():
        default = DEFAULTS.get(name) or ("" if name == "data" else "4" if found["tools"] != "none" else "1")
        default = SEES_PICTURES if name == "model" and found["tools"] == "picture" else default
        value = given[name]
        if value is None and sys.stdin.isatty():
            value = input(f"{question} [{default}] ").strip()
        found[name] = default if value in (None, "") else value
        if name in CHOICES and found[name] not in CHOICES[name]:
            raise ConfigError(
                f"{name}={found[name]!r} is not accepted. Accepted: {', '.join(CHOICES[name])}."
            )
    try:
        found["turns"] = int(found["turns"])
    except ValueError:
        found["turns"] = 0
    least = 1 if found["tools"] == "none" else 2
    if found["turns"] < least:
        why = "" if least == 1 else ", since a call of a tool and the answer are two turns"
        raise ConfigError(f"turns={given['turns']} is not accepted. Accepted: {least} or more{why}.")
    return Answers(**found)


def write(directory: Path, answers: Answers) -> None:
    """Write the task's files. Raises ConfigError or DataError for data that cannot be used."""
    from rl4llm.extensions.new import templates

    files = {
        "task.py": templates.module(answers.right, answers.tools, answers.turns),
        "test_task.py": templates.test(answers.tools, answers.turns),
    }
    data: dict[str, Any] = {"path": "."}
    images = answers.tools == "picture"
    if answers.data:
        data, of_rows = _columns(answers.data)
        images |= of_rows
    else:
        for split in ("train", "test"):
            lines = (json.dumps(row) for row in templates.rows(answers.right, answers.tools, split))
            files[f"{split}.jsonl"] = "".join(f"{line}\n" for line in lines)
    files["task.yaml"] = _yaml(answers, data, images=images)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}.") from error


def _columns(path: str) -> tuple[dict[str, Any], bool]:
    """Return the section `data` for given rows, and whether they have images, as the first row's columns tell."""
    from rl4llm.data.columns import has_column, value_at
    from rl4llm.data.images import COLUMNS
    from rl4llm.data.read import read_rows

    where, row = next(iter(read_rows(path, "train")), ("", None))
    if not isinstance(row, Mapping):
        raise ConfigError(f"{path}: the first row must be a mapping of columns, not {row!r:.60}.")
    prompt = next((name for name in PROMPTS if has_column(row, name)), None)
    answer = next((name for name in ANSWERS if has_column(row, name)), None)
    for what, column, known in (("prompt", prompt, PROMPTS), ("answer", answer, ANSWERS)):
        if column is None:
            raise ConfigError(
                f"{where}: no column looks like the {what}. Accepted: {', '.join(known)}. The row has: "
                f"{', '.join(map(str, row))}. Next: rename the column, or start without --data and set data.{what}_column "
                "in task.yaml."
            )
    here = str(Path(path).absolute()) if Path(path).exists() else path
    found = {"path": here}
    found |= {} if prompt in ("messages", "prompt") else {"prompt_column": str(prompt)}
    found |= {} if answer == "ground_truth" else {"answer_column": str(answer)}
    if "####" in str(value_at(row, str(answer))):
        found["answer_pattern"] = r"####\s*(.+)"
    return found, any(row.get(name) is not None for name in COLUMNS)


def _yaml(answers: Answers, data: Mapping[str, Any], *, images: bool) -> str:
    from rl4llm.data.read import has_splits

    env: dict[str, Any] = {"name": "chat"}
    if answers.tools != "none":
        name = {"function": "calculate", "sqlite": "Sql", "picture": "Camera"}[answers.tools]
        env = {"name": "tool", "tools": [f"task:{name}"], "max_steps": answers.turns}
    elif answers.turns > 1:
        env = {"name": "task:Task", "max_steps": answers.turns}
    measured = data["path"] == "." or has_splits(data["path"])
    model = str(Path(answers.model).absolute()) if Path(answers.model).is_dir() else answers.model
    sections = {
        "model": {"path": model, **({"vision": "frozen"} if images else {})},
        "data": dict(data),
        "eval": {"every": 10, "limit": 64} if measured else {"every": 0},
        "env": env,
        "rewards": ["task:Right"],
        "rollout": {"prompts": 8, "group_size": 8, "max_tokens": 128},
        "training": {"lr": 1.0e-5, "warmup_steps": 2},
        "checkpoint": {"every": 25},
        "output": {"dir": "run"},
        "max_steps": 100,
    }
    head = "# Train from this directory: rl4llm train task.yaml\n"
    return head + yaml.safe_dump(sections, sort_keys=False)


def _tried() -> int:
    """Check the task in this directory and play a few episodes of it; return the exit code."""
    from rl4llm.cli import main

    code = main(["check", "task.yaml"])
    if code:
        return code
    size = ["rollout.prompts=2", f"rollout.group_size={EPISODES // 2}"]
    code = main(["collect", "task.yaml", "--prompts", "2", "--out", EPISODES_FILE, *size])
    if code:
        return code
    for line in Path(EPISODES_FILE).read_text(encoding="utf-8").splitlines():
        show(*_played(json.loads(line)))
    return 0


def _played(episode: Mapping[str, Any]) -> Iterator[str]:
    yield f"episode {episode['prompt_id']}, reward {episode['reward']:g}"
    for message in episode["messages"]:
        text = " ".join(message["content"].split())
        yield f"  {message['role']}: {text if len(text) <= TEXT_CHARS else f'{text[:TEXT_CHARS]} ...'}"

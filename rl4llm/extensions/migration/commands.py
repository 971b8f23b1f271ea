"""Command lines of other projects, and what to type instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rl4llm.extensions.migration.answers import of_key

BENCHMARKS = {"math": "gsm8k", "code": "humaneval"}
CONFIGS = {
    "math": "gsm8k_grpo",
    "code": "humaneval_grpo",
    "debate": "debate_grpo",
    "tool": "arithmetic_tool_dapo",
}


def of_command(line: str) -> str:
    """Return a sentence with the command to type, for a command line that another project has; else "".

    >>> of_command("train --config ppo.yaml --output runs/ppo")
    "--config is an option of MRLM. Here it is: rl4llm train ppo.yaml output.dir=runs/ppo"
    """
    words = shlex.split(line)
    if not words:
        return ""
    command, given = words[0], _options(words[1:])
    if dashed := next((name for name in given if re.fullmatch(r"--[a-z_]+(\.[a-z_]+)+", name)), ""):
        return of_key(dashed.removeprefix("--"))
    asked = [name for name in given if name in FLAGS.get(command, ())]
    if not asked:
        return ""
    return f"{asked[0]} is an option of MRLM. Here it is: rl4llm {_ours(command, given)}"


FLAGS = {
    "serve": ("--environments",),
    "train": ("--config", "--output", "--resume"),
    "eval": ("--environment", "--num-episodes", "--output", "--checkpoint"),
    "collect": ("--environment", "--model", "--num-episodes", "-n", "-o", "--output"),
}
"""Options of MRLM's commands that are not options of ours."""


def _options(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-") and len(word) > 1:
            name, _, value = word.partition("=")
            found[name] = value
        elif name and not found[name]:
            found[name] = word
    return found


def _ours(command: str, given: dict[str, str]) -> str:
    """Return the command to type."""
    kind = given.get("--environment", "math")
    count = given.get("--num-episodes") or given.get("-n")
    out = given.get("--output") or given.get("-o") or given.get("--out")
    model = given.get("--model") or given.get("--checkpoint")
    config = f"configs/{CONFIGS.get(kind, CONFIGS['math'])}.yaml"
    if command == "train":
        words = [given.get("--config") or "CONFIG", out and f"output.dir={out}"]
        resumes = ". The same command resumes the run" if "--resume" in given else ""
        return " ".join(["train", *filter(None, words)]) + resumes
    if command == "serve":
        port = f" --port {given['--port']}" if given.get("--port") else ""
        return f"serve-env --env {given['--environments'] or 'NAMES'}{port}"
    if command == "eval":
        words = [BENCHMARKS.get(kind, config), model and f"--model {model}", count and f"--limit {count}"]
        return " ".join(["eval", *filter(None, [*words, out and f"--out {out}"])])
    words = [
        config,
        model and f"model.path={model}",
        count and f"--prompts {count}",
        f"--out {out or 'FILE.jsonl'}",
    ]
    return " ".join(["collect", *filter(None, words)])

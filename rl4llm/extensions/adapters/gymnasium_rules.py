"""The rules of an environment of Gymnasium in words, from its docstring and its spaces."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

HEADING = re.compile(r"^ *#+ +(.+?) *$", re.MULTILINE)
SECTIONS = ("description", "rules", "action space", "observation space", "reward", "rewards", "episode end")
ARGUMENTS = re.compile(r"^(Args|Arguments|Parameters|Attributes)\b:?", re.MULTILINE)
LEGEND = re.compile(r"^ *- \"\S+\" .*$", re.MULTILINE)  # what the letters of a map mean
TAG = re.compile(r"<[^>]+>")


def rules_of(env: Any, *, named: bool, shown: bool) -> str:
    """Return ``metadata["rules"]`` of an environment, otherwise what its docstring says for a player.

    Leaves out the actions if they are `named`, and the observations if a text rendering of them is `shown`; the legend
    of the rendering is kept. Observations that the docstring does not explain are described by their space.
    """
    rules = str(env.metadata.get("rules") or _documented(type(env.unwrapped).__doc__ or "", named, shown))
    space = type(env.observation_space).__name__
    if not shown and space != "Text" and "observation" not in rules.lower():
        rules = f"{rules}\n\nAn observation is {in_words(env.observation_space)}."
    return rules.strip()


def in_words(space: Any) -> str:
    """Describe a space of Gymnasium; one of another kind is printed as Gymnasium prints it."""
    kind = type(space).__name__
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    if kind == "Tuple":
        return f"({', '.join(in_words(part) for part in space.spaces)})"
    if kind == "Dict":
        return ", ".join(f"{name!r}: {in_words(part)}" for name, part in space.spaces.items())
    return str(space)


def _documented(docstring: str, named: bool, shown: bool) -> str:
    text = TAG.sub("", inspect.cleandoc(docstring))
    first, *rest = HEADING.split(text)
    hidden = {"action space": named, "observation space": shown}
    kept: Sequence[str] = [
        f"{title}:\n{inspect.cleandoc(body)}"
        for title, body in zip(rest[::2], rest[1::2], strict=True)
        if title.lower() in SECTIONS and not hidden.get(title.lower(), False)
    ]
    first = ARGUMENTS.split(first)[0].strip()
    legend = "\n".join(line.strip() for line in LEGEND.findall(text)) if shown else ""
    return "\n\n".join(filter(None, (first, *kept, legend and f"The map:\n{legend}")))

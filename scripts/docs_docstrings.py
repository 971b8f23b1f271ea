"""An extension of mkdocstrings (mkdocs.yml): turns sections of options into lists, and doctests into code."""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"(?m)^    (\w[\w., ]*):(?= )")
DOCTEST = re.compile(r"(?m)^>>> .*(?:\n.+)*")


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring with its options as a list and its doctests as code."""
    text = re.sub(r"(?m)^(Options[^:\n]*):\n((?:    .*\n?|\n(?=    ))+)", _listed, text)
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


def _listed(section: re.Match[str]) -> str:
    names = OPTION.sub(lambda found: f"- **`{found[1]}`**:", section[2])
    return f"**{section[1]}:**\n\n{names}\n"

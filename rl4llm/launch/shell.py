"""What scripts of bash have in common; words in them are quoted by `shlex`."""

from __future__ import annotations

from collections.abc import Sequence

HEADER = "#!/usr/bin/env bash"


def secrets_are_set(names: Sequence[str]) -> list[str]:
    """Lines that end a script at once where an environment variable is missing; values are in no file."""
    return [f': "${{{name}:?is to be set, to any long random text}}"' for name in names]

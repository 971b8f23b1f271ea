"""Common parts of bash scripts; words in them are quoted by `shlex`."""

from __future__ import annotations

from collections.abc import Sequence

HEADER = "#!/usr/bin/env bash"


def secrets_are_set(names: Sequence[str]) -> list[str]:
    """Return lines that end a script at once if an environment variable is missing; values are in no file."""
    return [f': "${{{name}:?must be set to a long random string}}"' for name in names]

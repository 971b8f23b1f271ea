"""The environment of processes that run code whose output the policy may see: what programs need, and no secrets."""

from __future__ import annotations

import os

_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def short_environment() -> dict[str, str]:
    """Return the variables of this process that find programs, files and Python's modules."""
    return {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("PYTHON")}

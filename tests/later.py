"""Packages that take a second to import, imported where a test uses them: each process collects all tests.

from later import later

client = later.openai.AsyncOpenAI()

A module that pytest collects holds no such package itself, since pytest looks at all that a module holds.
"""

import importlib


class Later:
    """Import a package when it is asked for."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return importlib.import_module(name)


later = Later()

"""The command line of the server; reading it imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rl4llm.core.errors import ConfigError, unknown

KEYS = (
    "model.dtype", "model.autocast", "model.device", "model.pad_token", "model.vision", "inference.max_rows",
    "inference.context_length", "inference.path", "inference.share_from", "deterministic", "threads",
)  # fmt: skip
"""Keys of a configuration that decide how the engine computes; they mean the same as in a run."""


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line: the model, where to listen, and keys of a configuration. Raises ConfigError.

    >>> read_options(["runs/grpo", "--port", "30200", "inference.max_rows=64"]).overrides
    ['model.path=runs/grpo', 'inference.max_rows=64']
    """
    parser = argparse.ArgumentParser("rl4llm serve --engine embedded", allow_abbrev=False)
    parser.add_argument("model", help="a directory, a run or a name on the hub")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-key", default="")
    parser.add_argument("overrides", nargs="*", help=f"KEY=VALUE, for the keys {', '.join(KEYS)}")
    options = parser.parse_intermixed_args(words)
    for key in (word.partition("=")[0] for word in options.overrides):
        if key not in KEYS:
            raise ConfigError(unknown("rl4llm serve --engine embedded: the key", key, KEYS))
    options.overrides.insert(0, f"model.path={options.model}")
    return options

"""A temporary directory for a command that runs a model and keeps no files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rl4llm.compose import server_urls
from rl4llm.config import Config
from rl4llm.core.errors import RunDirError


@contextmanager
def scratch_of(config: Config) -> Iterator[Config]:
    """Yield the configuration with a temporary output directory, which servers can read if the run has any.

    Raise RunDirError if it cannot be made.
    """
    shared = existing(Path(config.sync.dir or config.output.dir)) if server_urls(config) else None
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".scratch-", dir=shared)
    except OSError as error:
        raise RunDirError(
            f"Cannot make a directory in {shared or tempfile.gettempdir()}: {error.strerror}."
        ) from error
    with scratch as directory:
        yield replace(
            config, output=replace(config.output, dir=directory), sync=replace(config.sync, dir=None)
        )


def existing(directory: Path) -> Path:
    """Return the directory or, if it does not exist, its nearest existing parent."""
    return next(path for path in (directory, *directory.absolute().parents) if path.is_dir())

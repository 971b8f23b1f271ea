"""Check a configuration that was converted, as `rl4llm train` does before it loads anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rl4llm.compose import Given, build_algorithm
from rl4llm.compose.choices import check_choices
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError


def check(text: str) -> None:
    """Raise ConfigError if a configuration is not accepted."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "converted.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            config = load_config(file)
            check_choices(config, Given(), build_algorithm(config).needs())
        except ConfigError as error:
            said = str(error).replace(f"{file}: ", "")
            raise ConfigError(f"The converted configuration needs a change: {said}") from error

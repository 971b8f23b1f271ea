"""The token that a host of environments wants to be shown: from an environment variable, or from a file that one names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl4llm.core.errors import ConfigError

VARIABLE, FILE_VARIABLE = "RL4LLM_ENV_TOKEN", "RL4LLM_ENV_TOKEN_FILE"


def read_token(environ: Mapping[str, str]) -> str:
    """The token, "" where none is set; raises ConfigError for one that cannot be sent. No message shows it."""
    if environ.get(VARIABLE) and environ.get(FILE_VARIABLE):
        raise ConfigError(f"{VARIABLE} and {FILE_VARIABLE} are both set; set one of them.")
    where, token = VARIABLE, environ.get(VARIABLE, "")
    if environ.get(FILE_VARIABLE):
        where = f"{FILE_VARIABLE}={environ[FILE_VARIABLE]}"
        try:
            token = Path(environ[FILE_VARIABLE]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}.") from None
    token = token.strip()
    if where != VARIABLE and not token:
        raise ConfigError(f"{where} is empty; it should hold the token.")
    if not token.isascii() or not token.replace(" ", "?").isprintable():
        raise ConfigError(f"{where} is not accepted as a token: printable ASCII, in one line.")
    return token

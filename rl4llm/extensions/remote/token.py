"""The token that a host of environments requires, from an environment variable or from a file that one names.

A host on loopback without a configured token creates one at its start. It stores the token in a file that only its user
can read, where trainers of the same user on the same machine find it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.runs.run_dir import PRIVATE, write_atomically

VARIABLE, FILE_VARIABLE = "RL4LLM_ENV_TOKEN", "RL4LLM_ENV_TOKEN_FILE"


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token, "" if none is set. Raises ConfigError for a token that cannot be sent; no message shows it."""
    file = environ.get(FILE_VARIABLE)
    token = (Path(file).read_text() if file else environ.get(VARIABLE, "")).strip()
    if not token.isascii() or not token.replace(" ", "?").isprintable():  # gRPC's own error would show it
        raise ConfigError(f"{VARIABLE} or {FILE_VARIABLE} must hold printable ASCII characters in one line.")
    return token


@contextlib.contextmanager
def stored(token: str, port: int) -> Iterator[Path]:
    """Store the token of a host that listens on a loopback port where `token_of_start` finds it."""
    file = _file(port)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(file, token + "\n", mode=PRIVATE)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            if file.read_text().strip() == token:  # not the token of a later start on this port
                file.unlink()


def new_token() -> str:
    return secrets.token_hex(16)


def token_of_start(address: str) -> str:
    """Return the token of the host that this user runs on loopback at that address, or "" without such a host."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in ("localhost", "::1") and not re.fullmatch(r"127(\.\d{1,3}){3}", host):
        return ""
    try:
        return _file(int(port)).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _file(port: int) -> Path:
    """Return the file of a port; its name contains the machine, since several may share a home directory."""
    return Path.home() / ".cache" / "rl4llm" / "env-tokens" / f"{socket.gethostname()}-{port}"

"""What no tracker and no model card is told: keys, tokens, passwords."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_NAME = re.compile(
    r"(^|[_.\-])((api|access|private|secret)_?key|secret|password|passwd|credentials?|(access|auth|bearer|hf|hub)_?token)$"
    r"|^(key|token|authorization)$",
    re.IGNORECASE,
)
SECRET_PART = re.compile(  # of a text: the password of a URL, what key=... gives, and what begins as keys do
    r"(?<=://)[^/@\s]+(?=@)"
    r"|(?i:(?<=[_\-?&]key=)|(?<=token=)|(?<=secret=)|(?<=password=)|(?<=bearer ))[^&\s'\"]+"
    r"|\b(sk-|hf_|gh[pousr]_|glpat-|xox[abp]-)[A-Za-z0-9_\-]{16,}"
)
HIDDEN = "(hidden)"


def redacted(config: Any) -> Any:
    """A copy of a configuration in which values whose names speak of keys are hidden, and so are passwords and keys
    in texts and what a command gets as its environment.

    >>> redacted({"max_tokens": 5, "judge": {"api_key": "sk-1"}, "url": "http://me:pw@host/v1"})
    {'max_tokens': 5, 'judge': {'api_key': '(hidden)'}, 'url': 'http://(hidden)@host/v1'}
    >>> redacted({"name": "mcp", "command": ["server"], "env": {"SEARCH_TOKEN": "1"}})
    {'name': 'mcp', 'command': ['server'], 'env': '(hidden)'}
    """
    if dataclasses.is_dataclass(config):
        config = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        hidden = ("env",) if "command" in config else ()
        return {
            key: HIDDEN if SECRET_NAME.search(str(key)) or (key in hidden and value) else redacted(value)
            for key, value in config.items()
        }
    if isinstance(config, str):
        return SECRET_PART.sub(HIDDEN, config)
    if isinstance(config, Sequence):
        return [redacted(item) for item in config]
    return config

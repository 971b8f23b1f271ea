"""Hide keys, tokens and passwords in whatever is written for others to read.

A reference such as ``${oc.env:NAME}`` names a secret without holding it, so it stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
# any other default could be the secret itself
REFERENCE = re.compile(r"\$\{[\w.:\[\]\-]+(,\s*(null|''|\"\")\s*)?\}")

KEY_OF = (
    "access|account|admin|api|auth|client|encryption|license|master|private|secret|server|service|signing|ssh"
)
SECRET_NAME = re.compile(
    rf"(^|[_.])({KEY_OF})_?key$|(^|\.)key$|(^|[_.])pwd$|(token|secret|passphrase|password|passwd|authorization|credentials?)$"
)
ORDINARY_TOKEN = re.compile(  # a tokenizer's, or a count
    r"(^|[_.])(additional|audio|begin|bos|cls|end|eos|every|extra|first|image|last|longest|mask|max|min|new|newest|next|pad|per"
    r"|sep|special|start|stop|think|unk|video|vision)_?token$"
)
LIKE_A_KEY = re.compile(r"(?=\S*\d)[\w\-+/=.]{16,}")  # unlike the name of a column in prompt_key, answer_key

VALUE = r"(?:\$\{[^}]{0,200}\}|[^&\s'\",;])+"
PLACEHOLDER = re.compile(r"[A-Z]{2,12}[.)]*|\$\(.*|\$\w+|\.\.\.")  # of a message that says what to do
NAMED = (  # what a text gives to a name: --NAME VALUE, NAME=VALUE, and "NAME": "VALUE" of JSON or of Python's repr
    re.compile(rf"(?P<before>(?<![\w\-])--?(?P<name>[A-Za-z][\w.\-]*)[= ])(?!-)(?P<value>{VALUE})"),
    re.compile(rf"(?P<before>(?:^|(?<=[^\w.\-]))(?P<name>[A-Za-z][\w.\-]*)=)(?P<value>{VALUE})"),
    re.compile(r"(?P<before>(['\"])(?P<name>[\w.\-]+)\2: *(['\"]))(?P<value>[^'\"]+)"),
)
FORMS = re.compile(  # repetitions before a character that may be missing are bounded, so that time grows with the length
    r"(?<=://)[^/\s]+(?=@)"  # the user and password of a URL
    rf"|(?i:(?<=bearer )|(?<=authorization: basic )|(?<=api-key: )){VALUE}"
    r"|\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|nvapi-|gsk_)[A-Za-z0-9_\-]{16,}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w\-]{35}|\beyJ[\w\-]{8,2000}\.[\w\-]{8,}(\.[\w\-]*)?"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END[A-Z ]*-----|\Z)"
)
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def redacted(config: Any) -> Any:
    """Return a copy of a configuration without its secrets: by the names of keys and flags, and by the form of values.

    >>> redacted({"max_tokens": 5, "judge": {"api_key": "sk-1"}, "url": "http://me:pw@host/v1"})
    {'max_tokens': 5, 'judge': {'api_key': '(hidden)'}, 'url': 'http://(hidden)@host/v1'}
    >>> redacted({"name": "mcp", "command": ["server", "--token", "1"], "env": {"SEARCH": "1", "HOME": "${oc.env:HOME}"}})
    {'name': 'mcp', 'command': ['server', '--token', '(hidden)'], 'env': {'SEARCH': '(hidden)', 'HOME': '${oc.env:HOME}'}}
    """
    if isinstance(config, Mapping):
        variables = "env" if "command" in config else None
        return {
            key: _hidden(value) if key == variables else _item(str(key), value)
            for key, value in config.items()
        }
    if isinstance(config, str):
        return redacted_text(config)
    if isinstance(config, Sequence):
        return list(_words(config))
    return config


def redacted_text(text: str) -> str:
    """Return a text, such as an error message or a line of a log, without what looks like a secret.

    >>> redacted_text("http://me:pw@host/v1 refused --api-key 123, and X-Api-Key: 123")
    'http://(hidden)@host/v1 refused --api-key (hidden), and X-Api-Key: (hidden)'
    """
    text = FORMS.sub(lambda found: _form(found[0]), text)
    for named in NAMED:
        text = named.sub(_named, text)
    return text


def is_secret_name(name: str) -> bool:
    """Return whether a key, a flag or a variable of this name holds a secret, in any case style.

    >>> [is_secret_name(name) for name in ("X-Api-Key", "githubToken", "PWD", "pad_token", "token_file", "api_key_env")]
    [True, True, True, False, False, False]
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return bool(SECRET_NAME.search(snake)) and not ORDINARY_TOKEN.search(snake)


def _item(name: str, value: Any) -> Any:
    like_a_key = isinstance(value, str) and name.lower().endswith("key") and LIKE_A_KEY.fullmatch(value)
    return _hidden(value) if is_secret_name(name) or like_a_key else redacted(value)


def _hidden(value: Any) -> Any:
    """Hide a value whatever its form, except references and what holds nothing."""
    if value is None or value == "" or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    return value if isinstance(value, str) and REFERENCE.fullmatch(value) else HIDDEN


def _words(words: Sequence[Any]) -> Iterator[Any]:
    """Redact the items of a list, which may be the words of a command line."""
    flag = False
    for word in words:
        is_flag = isinstance(word, str) and word.startswith("-")
        yield _hidden(word) if flag and not is_flag else redacted(word)
        flag = is_flag and is_secret_name(word)


def _form(found: str) -> str:
    """Return what replaces a secret. A reference stays, also one that is the password of a URL."""
    return found if REFERENCE.fullmatch(found.partition(":")[2]) or REFERENCE.fullmatch(found) else HIDDEN


def _named(found: re.Match[str]) -> str:
    """Return a name in a text with its value, which is hidden where the name asks for it."""
    plain = found["before"].lower() == "key=" and found.string[: found.start()][-1:] not in (
        "?",
        "&",
    )  # sort(key=len)
    if plain or not is_secret_name(found["name"]) or PLACEHOLDER.fullmatch(found["value"]):
        return found[0]
    return found["before"] + _hidden(found["value"])


def short_environment() -> dict[str, str]:
    """Return the variables of this process that find programs, files and Python's modules."""
    return {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("PYTHON")}

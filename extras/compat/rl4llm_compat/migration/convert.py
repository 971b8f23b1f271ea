"""Turn keys of verl into a configuration of rl4llm, with a comment on each line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import yaml

from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import redacted
from rl4llm_compat.migration.rules import DIVERGENCES, RULES, A, DataFacts, JointRule
from rl4llm_compat.migration.table import DEFAULTS, row_of

SECTIONS = (
    "model", "data", "eval", "env", "rewards", "parts", "rollout", "inference", "sync", "algorithm", "training", "backend",
    "checkpoint", "tracking", "output", "launch",
)  # fmt: skip

SHOWN = 100  # characters of a value in a comment
# a variable that only a shell or another machine knows
UNKNOWN = re.compile(r"\$(\{(?!oc\.env:)|[(A-Za-z_])")


@dataclass
class Converted:
    """A configuration that was converted.

    Args:
        keys: our keys, each with its value and what it was.
        open: lines about unknown keys, values without a counterpart, and numbers that the file does not contain.
        without: keys that have no counterpart, and why.
    """

    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    without: list[tuple[str, str]] = field(default_factory=list)

    def text(self, head: str) -> str:
        """Return the configuration as YAML; `head` is its first comment."""
        lines = [f"# {head}"]
        if self.open:
            lines += ["# To be decided:", *(f"#   {line}" for line in self.open)]
        lines += _yaml(_tree(self.keys))
        if self.without:
            lines += ["# Without a counterpart:", *(f"#   {given}: {why}" for given, why in self.without)]
        return "\n".join(lines) + "\n"


BASE = {
    "data.answer_column": "reward_model.ground_truth",
    "model.autocast": "bfloat16",
    "algorithm.old_logprobs": "recomputed",
}
"""Our keys that each converted file begins with."""


def convert(values: Mapping[str, Any], facts: DataFacts) -> Converted:
    """Convert every key, by its row or by the rules that read several of them; secrets are left out and to be decided."""
    given = dict(values)
    made = Converted({name: (value, "as verl has it") for name, value in BASE.items()})
    for name in [name for name, value in given.items() if isinstance(value, str) and UNKNOWN.search(value)]:
        made.open.append(f"{_pair(name, given.pop(name))}: set the variable, and convert again")
    merged = dict(DEFAULTS) | given
    for name, value in merged.items():
        _by_row(made, name, value, name in given)
    answered = {name for rule in RULES for name in _by_rule(made, rule, merged, given, facts)}
    for name in given:
        row = row_of(name)
        if row is not None and row.ours and not row.to and name not in answered:
            made.without.append((_pair(name, given[name]), f"nothing to set with these values, see {row}"))
    if made.keys.get("algorithm.name", ("", ""))[0] in DIVERGENCES:
        del made.keys["algorithm.old_logprobs"]
        made.without += [
            (_pair(f"{A}.clip_ratio_c", merged[f"{A}.clip_ratio_c"]), "the ratio of these losses has no cap"),
            (
                "log-probs before the updates",
                "the ratio of these losses is to those that the engine recorded",
            ),
        ]
    for key in [key for key, (value, _) in made.keys.items() if redacted({key: value}) != {key: value}]:
        del made.keys[key]
        made.open.append(
            f"{key}: the secret is not written here. Set a variable, and {key}: ${{oc.env:NAME}}"
        )
    return made


def _by_rule(
    made: Converted, rule: JointRule, merged: Mapping[str, Any], given: Mapping[str, Any], facts: DataFacts
) -> list[str]:
    """Add what a rule says; return the keys that it read, [] if it had nothing to say."""
    names = [name for name in merged if any(fnmatchcase(name, known) for known in rule.names)]
    shown = [name for name in names if name in given] or names
    if not names:
        return []
    try:
        found = rule.keys(merged, facts)
    except ConfigError as error:
        _add(made.open, str(error))
        return names
    except (TypeError, ValueError, KeyError):
        made.open += [f"{_pair(name, merged[name])}: the value is not understood" for name in shown]
        return names
    said = ", ".join(_pair(name, merged[name]) for name in shown)
    made.keys |= {name: (value, _of(said, shown[0] in given)) for name, value in found.items()}
    return names if found else []


def _by_row(made: Converted, name: str, value: Any, given: bool) -> None:
    row = row_of(name)
    if row is None:
        made.open.append(f"{_pair(name, value)}: not a key of verl that is known here")
    elif row.to:
        try:
            found = row.keys(value)
        except (TypeError, ValueError):
            _add(made.open, f"{_pair(name, value)}: {row}")
            return
        for key, item in found.items():
            changed = row.note if given and item != value else ""
            said = "; ".join(filter(None, (_pair(name, value), changed)))
            made.keys[key] = (item, _of(said, given))
    elif given and not row.ours:
        made.without.append((_pair(name, value), row.note))


def _add(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)


def _of(said: str, given: bool) -> str:
    return said if given else f"{said}, the default of verl"


def _pair(name: str, value: Any) -> str:
    value = redacted({name: value})[name]
    text = " ".join((value if isinstance(value, str) else _inline(value)).split())
    return f"{name}={text if len(text) <= SHOWN else f'{text[:SHOWN]}...'}"


def _tree(keys: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return nested keys; sections are in our order, and a name comes before its options."""
    place = {name: number for number, name in enumerate(SECTIONS)}
    tree: dict[str, Any] = {}
    for key in sorted(
        keys, key=lambda key: (place.get(key.split(".")[0], len(place)), not key.endswith(".name"))
    ):
        *sections, last = key.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = keys[key]
    return tree


def _yaml(tree: Mapping[str, Any], indent: str = "") -> Iterable[str]:
    for name, item in tree.items():
        if isinstance(item, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml(item, f"{indent}  ")
        else:
            value, comment = item
            yield f"{indent}{name}: {_inline(value)}  # {comment}"


def _inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("...\n").strip()

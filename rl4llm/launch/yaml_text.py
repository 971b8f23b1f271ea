"""YAML for engines, in which texts of several lines look like themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Leaves other users of PyYAML as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_of(documents: Sequence[Any]) -> str:
    """One file with these documents."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)

"""YAML for launchers, with multi-line strings as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """A dumper whose representers do not affect other users of PyYAML."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_of(documents: Sequence[Any]) -> str:
    """Return one YAML file with these documents."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)

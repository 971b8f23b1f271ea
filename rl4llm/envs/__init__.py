"""Environments: what the policy talks to. Each is imported on first use."""

from rl4llm.core.registry import lazy
from rl4llm.core.tables import ENVIRONMENTS, register_env

_HOMES = dict(path.split(":")[::-1] for path in map(ENVIRONMENTS.path_of, ENVIRONMENTS.builtin))
__getattr__ = lazy(__name__, _HOMES)
__all__ = ["ENVIRONMENTS", "register_env", *_HOMES]

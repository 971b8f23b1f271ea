"""Environments: what the policy talks to. Each is imported on first use."""

from rl4llm.core.registry import lazy
from rl4llm.envs.registry import ENVIRONMENTS, register_env

__path__.append(f"{__path__[0]}/../extensions/migration/former/envs")  # modules that michaelnny/rl4llm has
_HOMES = dict(path.split(":")[::-1] for path in map(ENVIRONMENTS.path_of, ENVIRONMENTS.builtin))
__getattr__ = lazy(__name__, _HOMES)
__all__ = ["ENVIRONMENTS", "register_env", *_HOMES]

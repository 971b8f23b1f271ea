"""Tables of the engines, backends and publishers that a configuration may name, and the objects that Python may give.

Reading the tables imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl4llm.core.registry import Registry

if TYPE_CHECKING:
    from rl4llm.core.base_backend import BaseBackend
    from rl4llm.core.base_client import BaseClient, BasePublisher, TakesWeights
    from rl4llm.core.base_env import BaseMDPEnv

BACKENDS: Registry[type[BaseBackend]] = Registry(
    "backend.name",
    "rl4llm.core.base_backend:BaseBackend",
    group="rl4llm.backends",
    table={"torch": "rl4llm.backends.torch_backend:TorchBackend"},
)
ENGINES: Registry[type[BaseClient]] = Registry(
    "inference.name",
    "rl4llm.core.base_client:BaseClient",
    group="rl4llm.engines",
    table={"local": "rl4llm.inference.local:LocalClient"},
)
PUBLISHERS: Registry[Callable[[TakesWeights, Callable[[], Any], Any], BasePublisher]] = Registry(
    "sync.name", group="rl4llm.publishers", table={"memory": "rl4llm.sync.inference:in_memory"}
)
"""Functions that make a publisher from a client, a function that makes the store of versions, and the tokenizer."""


@dataclass(frozen=True, slots=True)
class Given:
    """Objects that the Python API gives instead of names; for None the configuration decides."""

    model: Any = None
    tokenizer: Any = None
    dataset: Any = None
    eval_dataset: Any = None
    reward_functions: Sequence[Any] | None = None
    reward_transform_fn: Any = None
    env_class: type[BaseMDPEnv] | None = None
    hosted: Any = None  # the stand-in for an environment that hosts run

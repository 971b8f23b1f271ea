"""The composition root, the only place that knows every class: from a configuration to a trainer that is ready to run."""

from rl4llm.core.registry import lazy

_HOMES = {
    "Given": "rl4llm.compose.setup",
    "build_algorithm": "rl4llm.compose.setup",
    "build_model": "rl4llm.compose.models",
    "build_trainer": "rl4llm.compose.trainer",
    "check_config": "rl4llm.compose.choices",
    "server_urls": "rl4llm.compose.engines",
}
__getattr__ = lazy(__name__, _HOMES)
__all__ = list(_HOMES)

"""The composition root: the only place that knows every class. From a configuration to a trainer that is ready to run."""

from rl4llm.build.engines import server_urls
from rl4llm.build.models import build_model
from rl4llm.build.options import Given
from rl4llm.build.trainer import build_algorithm, build_trainer

__all__ = ["Given", "build_algorithm", "build_model", "build_trainer", "server_urls"]

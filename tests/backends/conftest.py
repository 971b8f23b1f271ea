"""The models and trajectories of all tests of backends."""

from tiny_models import build, trajectories  # noqa: F401 - fixtures
from vision_models import seen, some_vision_directory, vision_directories  # noqa: F401 - fixtures

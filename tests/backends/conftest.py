"""The models and trajectories of all tests of backends."""

from tiny_models import build, trajectories  # noqa: F401 - fixtures
from vision_models import seen, vision_directories, vision_directory  # noqa: F401 - fixtures

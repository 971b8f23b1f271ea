"""The models and trajectories of all tests of backends."""

from tiny_models import build, trajectories  # noqa: F401 - fixtures

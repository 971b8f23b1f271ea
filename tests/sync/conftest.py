"""The tiny vision-language models of all tests of syncing."""

from vision_models import some_vision_directory, vision_directories  # noqa: F401 - fixtures

"""The tiny vision-language models of all tests of syncing."""

from vision_models import vision_directories, vision_directory  # noqa: F401 - fixtures

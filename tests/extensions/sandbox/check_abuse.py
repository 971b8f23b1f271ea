"""Runs attacks and looks, from outside, for anything that got through or stayed."""

import os
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rl4llm.extensions.sandbox import Limits, Sandbox

LIMITS = Limits(wall_s=0.4, total_s=0.5, memory_bytes=256 * 2**20, processes=16)
SECRET = "the secret of the host"


@contextmanager
def host():
    """A file that is not to be read, a directory that is not to be written to, a port that is not to be reached."""
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(directory, 0o777)
        secret = Path(directory) / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o644)
        open_dir = Path(directory) / "open"
        open_dir.mkdir()
        open_dir.chmod(0o777)
        yield {"secret": secret, "open_dir": open_dir, "port": server.getsockname()[1], "pid": os.getpid()}


def below(pid):
    """All processes below a process, zombies too."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


def problems_of(attack, sandbox, host):
    """What an attack achieved; [] when it was contained."""
    outcome = sandbox.run(attack.program(**host), LIMITS)
    late = "timeout" if attack.kind == "script" else "the tests do not run: timeout"  # no script takes long
    if outcome.reason.startswith(late):  # a busy machine: the attack had not begun
        outcome = sandbox.run(attack.program(**host), replace(LIMITS, wall_s=7.0, total_s=14.0))
    problems = []
    if attack.kind == "script":
        if "ESCAPED" in outcome.stdout or SECRET in outcome.stdout:
            problems.append(f"it printed {outcome.stdout[:200]!r}")
    elif outcome.status not in ("wrong", "model_error") or any(test.passed for test in outcome.tests):
        problems.append(f"graded as {outcome}")
    if outcome.status == "infra_error":
        problems.append(f"the machine is blamed: {outcome.reason}")
    if left := [child for pid in sandbox.pids() for child in below(pid)]:
        problems.append(f"processes {left} are left")
    if host["secret"].read_text() != SECRET or list(host["open_dir"].iterdir()):
        problems.append("the host was written to")
    return problems


def run_all(attacks, level="bubblewrap", threads=2):
    """{name: problems} of all attacks, on as many sandboxes as threads."""
    sandboxes = threading.local()
    made = []

    def contained(attack):
        if not hasattr(sandboxes, "mine"):
            sandboxes.mine = Sandbox(level, slots=1)
            made.append(sandboxes.mine)
        return attack.name, problems_of(attack, sandboxes.mine, places)

    before = {path.name for path in Path(tempfile.gettempdir()).glob("rl4llm-sandbox-*")}
    with host() as places, ThreadPoolExecutor(threads) as pool:
        results = dict(pool.map(contained, attacks))
    for sandbox in made:
        sandbox.close()
    left = {path.name for path in Path(tempfile.gettempdir()).glob("rl4llm-sandbox-*")} - before
    results["files"] = [f"{left} are left"] if left else []
    return results

"""Runs parts of the suites as another user, from a copy of the package that any user may read.

As a program, ``python sandbox_user.py attacks|honest LEVEL NAME ...``, it prints the results as JSON.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NOBODY = 65534
HERE = Path(__file__).parent


def as_nobody(suite, names=(), level="auto"):
    """The results of a suite, run by the user nobody where this process may become it, else by its own user."""
    from rl4llm.extensions.sandbox.levels import find_python

    is_root = os.getuid() == 0
    python = find_python(NOBODY) if is_root else sys.executable
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if is_root else {}
    with tempfile.TemporaryDirectory(prefix="rl4llm-suite-") as directory:
        root = Path(directory)
        package = HERE.parents[2] / "rl4llm"
        (root / "rl4llm" / "extensions").mkdir(parents=True)
        for source in ("__init__.py", "extensions/__init__.py", "core", "runtime", "extensions/sandbox"):
            copy = shutil.copytree if (package / source).is_dir() else shutil.copy
            copy(package / source, root / "rl4llm" / source)
        for name in ("abuse.py", "check_abuse.py", "honest.py", "sandbox_user.py"):
            shutil.copy(HERE / name, root / name)
        subprocess.run(["chmod", "-R", "a+rX", directory], check=True)
        done = subprocess.run(
            [python, "-s", "-S", "-B", str(root / "sandbox_user.py"), suite, level],
            input=json.dumps(list(names)),
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONUTF8": "1"},
            **identity,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main():
    suite, level = sys.argv[1:]
    names = set(json.load(sys.stdin))
    sys.stdout.write(json.dumps({"attacks": attacks, "honest": honest}[suite](names, level)))


def attacks(names, level):
    from abuse import ATTACKS
    from check_abuse import run_all

    chosen = [attack for attack in ATTACKS if not names or attack.name in names]
    return run_all(chosen, "bubblewrap" if level == "auto" else level)


def honest(names, level):
    from honest import HONEST

    from rl4llm.extensions.sandbox import Limits, Sandbox

    chosen = [item for item in HONEST if not names or item.name in names]
    sandbox = Sandbox(level, limits=Limits(wall_s=20, total_s=40))
    with ThreadPoolExecutor(sandbox.slots) as threads:
        statuses = list(threads.map(lambda item: sandbox.run(item.program).status, chosen))
    sandbox.close()
    return {item.name: status for item, status in zip(chosen, statuses, strict=True)}


if __name__ == "__main__":
    main()

"""Rows of SWE-bench and SWE-Gym as task directories."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.data.read import read_rows

CONFIGS = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml",
)  # fmt: skip
"""Files that give pytest code and options."""

SHADOWS = ("pytest", "pytest.py", "_pytest", "_pytest.py")  # of ``python -m pytest``
OF_ROWS = (LookupError, TypeError, ValueError, AttributeError, OSError)
FORM = {
    "task.toml": 'version = "1.0"\nagent.timeout_sec = 1800.0\nverifier.timeout_sec = 1800.0\n',
    "environment/Dockerfile": "FROM {image}\nCOPY repo.tar /tmp/\n"
    "RUN mkdir -p /testbed && tar -xf /tmp/repo.tar -C /testbed && rm /tmp/repo.tar\nWORKDIR /testbed\n"
    "RUN {command} --version\n",
    "solution/solve.sh": "cd /testbed && git apply --whitespace=nowarn /solution/solution.patch\n",
    "tests/test.sh": """cd /testbed && chmod -R u+rwX .
find . '(' -name __pycache__ -o -name {configs} ')' -prune -exec rm -rf '{{}}' +
rm -rf {removed} {above}
for folder in {folders}; do [ ! -L "$folder" ] && [ -d "$folder" ] || rm -f "$folder"; done
log=/logs/verifier/junit.xml
tar -xf /tests/files.tar --recursive-unlink &&
{command} -p no:cacheprovider --rootdir . --junitxml $log {names} &&
[ "$(grep -o '<testcase ' $log | wc -l)" -ge {count} ] && ! grep -q '{skipped}' $log
echo $((! $?)) > /logs/verifier/reward.txt
""",
}
"""The files of a task. Its tests, with what configures pytest, are those of the solution; one that is skipped, or not in the
report, has not passed.
"""


@dataclass(frozen=True, slots=True)
class Importer:
    """Writes a task directory for each row; `repos` has a mirror of each repository, owner/name or owner/name.git.

    The Dockerfiles begin from `image`, in which `command` starts pytest.
    """

    repos: Path
    out: Path
    image: str
    command: str

    def write_all(self, rows: str) -> int:
        """Write the task of each row of a file; return their number. Raises DataError, with its place, for a bad row."""
        count = 0
        for where, row in read_rows(rows, "test"):
            try:
                self._write(row)
                count += 1
            except (*OF_ROWS, subprocess.SubprocessError, DataError) as error:
                reason = str(getattr(error, "stderr", None) or error).strip()
                raise DataError(f"{where}: no task can be made: {type(error).__name__}: {reason}") from error
        return count

    def _write(self, row: Mapping[str, Any]) -> None:
        """Write the task of one row, whole or not at all. It begins with the base_commit, and the patch is the solution."""
        names = [name for key in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _test_ids(row[key])]
        target = self.out / _plain(row["instance_id"])
        self.out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self.out, prefix=".import-") as scratch:
            task, repo = Path(scratch) / "task", Path(scratch) / "repo"
            for file in FORM:
                (task / file).parent.mkdir(parents=True)
            _clone(self._mirror(row["repo"]), _plain(row["base_commit"]), repo)
            _pack(repo, ["."], task / "environment/repo.tar")
            _apply(repo, row["patch"])
            files = _test_files(repo, row.get("test_patch") or "", names)
            _pack(repo, [file for file in files if (repo / file).is_file()], task / "tests/files.tar")
            lists = {
                "names": names,
                "above": [f"/{name}" for name in CONFIGS],
                "removed": [file for file in (*files, *SHADOWS) if not (repo / file).exists()],
                "folders": sorted({str(folder) for file in files for folder in PurePosixPath(file).parents}),
            }
            values = {name: shlex.join(words) for name, words in lists.items()}
            values |= {"image": self.image, "command": self.command, "configs": " -o -name ".join(CONFIGS)}
            values |= {"count": str(len(set(names)))}
            # A test that fails as expected has passed, but only tests may expect it.
            expects = re.search(rb"\bxfail\b", (task / "tests/files.tar").read_bytes())
            values["skipped"] = 'type="pytest.skip"' if expects else "<skipped"
            texts = {file: text.format(**values) for file, text in FORM.items()}
            texts |= {"instruction.md": row["problem_statement"], "solution/solution.patch": row["patch"]}
            for file, text in texts.items():
                (task / file).write_text(text, encoding="utf-8")
            task.rename(target)

    def _mirror(self, name: str) -> Path:
        mirror = self.repos.joinpath(*map(_plain, name.split("/")))
        bare = mirror.with_name(f"{mirror.name}.git")
        return (bare if bare.is_dir() else mirror).resolve()  # git names one that is missing


def _clone(mirror: Path, commit: str, repo: Path) -> None:
    """Make a repository with one commit, that of the mirror. Others, which may have the solution, are not in it."""
    repo.mkdir()
    _git(repo, "init", "-q")
    _git(repo, "fetch", "-q", "--depth", "1", str(mirror), commit)
    _git(repo, "checkout", "-q", "--detach", "FETCH_HEAD")
    shutil.rmtree(repo / ".git")
    _git(repo, "init", "-q")
    _git(repo, "add", "-A", "-f")
    _commit(repo)


def _apply(repo: Path, patch: str) -> None:
    """Apply a patch and commit it."""
    if patch.strip():
        _git(repo, "apply", "--index", "--whitespace=nowarn", "-", text=patch)
        _commit(repo)


def _commit(repo: Path) -> None:
    _git(repo, "-c", "user.name=-", "-c", "user.email=-", "commit", "-q", "--allow-empty", "-m", "-")


def _pack(repo: Path, names: Sequence[str], file: Path) -> None:
    """Write files of a repository, without this machine's users and times."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(file, "w") as tar:
        for name in names:
            tar.add(repo / name, name, filter=plain)


def _test_files(repo: Path, patch: str, names: Sequence[str]) -> list[str]:
    """Patch the tests; return their files, what lies beside them for tests to import, and what configures pytest."""
    solved = _git(repo, "rev-parse", "HEAD").strip()
    _apply(repo, patch)
    files = {name.partition("::")[0] for name in names}
    folders = {PurePosixPath(file).parent for file in files}
    beside = [f"{folder}/*.py" for folder in folders if {"test", "tests"}.intersection(folder.parts)]
    listed = _git(repo, "ls-files", "-z", *CONFIGS, *(f"*/{name}" for name in CONFIGS), *beside)
    listed += _git(repo, "diff", "--name-only", "--no-renames", "-z", solved)
    return sorted({*files, *filter(None, listed.split("\0"))})


def _test_ids(stored: Any) -> list[str]:
    """Return the ids of a column, which is a list or its JSON."""
    names = json.loads(stored) if isinstance(stored, str) else list(stored)
    for name in names:
        if not re.match(r"[^\[-][^\[]*\.py::", name):
            raise DataError(f"{name!r} is not the id of a test of pytest, such as tests/test_a.py::test_b.")
    return names


def _plain(name: str) -> str:
    """Return a name that becomes part of a path or a command; raise DataError for one that could lead elsewhere."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise DataError(f"the name {name!r} is not accepted: letters, digits, '_', '-' and '.'.")
    return name


def _git(repo: Path, *words: str, text: str = "") -> str:
    command = ["git", "-C", str(repo), *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

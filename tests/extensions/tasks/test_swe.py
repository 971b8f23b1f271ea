"""Rows of SWE-bench become task directories, which show neither the solution nor later commits."""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from task_files import grades, import_pytest_from

from rl4llm.cli import main
from rl4llm.core.errors import DataError
from rl4llm.data.load import load_rows
from rl4llm.extensions.tasks.check import try_tasks
from rl4llm.extensions.tasks.swe import Importer

CODE = "def double(x):\n    return x * x\n\n\ndef half(x):\n    return x / 2\n"
SOLVED = CODE.replace("x * x", "2 * x")
TESTS = "from calc import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
NEW_TESTS = (
    TESTS.replace("half\n", "double, half\n", 1)
    + "\n\ndef test_double(base):\n    assert double(base) == 6\n"
)
CONFTEST = "import pytest\n\n\n@pytest.fixture\ndef base():\n    return 3\n"


def git(repo: Path, *words: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", "-C", repo, *author, *words], check=True, capture_output=True, text=True
    ).stdout


def commit(repo: Path, **files: str) -> str:
    for name, text in files.items():
        path = repo / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "change")
    return git(repo, "rev-parse", "HEAD").strip()


@pytest.fixture(scope="module")
def repos(tmp_path_factory):
    """Return a directory with the mirror of a repository, and its row as SWE-bench would have it."""
    home = tmp_path_factory.mktemp("repos")
    work = home / "work"
    work.mkdir()
    git(work, "init", "-qb", "main")
    import_pytest_from(work / "pytest.zip")
    base = commit(
        work, calc=CODE, conftest=CONFTEST, tests__test_calc=TESTS, tests__test_old="def test_old(): pass\n"
    )
    (work / "tests/test_old.py").unlink()
    commit(work, tests__test_calc=NEW_TESTS)
    test_patch = git(work, "diff", base, "HEAD")
    commit(work, calc=SOLVED)
    patch = git(work, "diff", base, "HEAD", "--", "calc.py")
    git(home, "clone", "-q", "--mirror", str(work), str(home / "mirrors/owner/calc.git"))
    row = {
        "repo": "owner/calc",
        "problem_statement": "double() must double.",
        "FAIL_TO_PASS": ["tests/test_calc.py::test_double"],
    }
    bench = {
        **row,
        "instance_id": "owner__calc-1",
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(row["FAIL_TO_PASS"]),
        "PASS_TO_PASS": '["tests/test_calc.py::test_half"]',
    }
    return home / "mirrors", bench


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tasks(repos, tmp_path_factory):
    mirrors, row = repos
    tmp_path = tmp_path_factory.mktemp("tasks")
    words = ["tasks", "import", str(write(tmp_path / "rows.jsonl", row)), "--repos", str(mirrors)]
    command = "env PYTHONPATH=/testbed/pytest.zip python3 -m pytest"
    assert main([*words, "--out", str(tmp_path / "tasks"), "--command", command]) == 0
    return tmp_path / "tasks"


def test_rows_become_tasks(tasks):
    rows = load_rows(tasks)
    assert [row["prompt_id"] for row in rows] == ["owner__calc-1"]
    assert rows[0]["messages"] == [{"role": "user", "content": "double() must double."}]


def test_an_episode_sees_no_solution_and_no_later_commit(tasks, tmp_path):
    with tarfile.open(tasks / "owner__calc-1" / "environment/repo.tar") as tar:
        tar.extractall(tmp_path / "repo", filter="data")
    repo = tmp_path / "repo"
    assert (repo / "calc.py").read_text() == CODE
    assert git(repo, "status", "--porcelain") == ""
    assert (
        git(repo, "rev-list", "--all", "--reflog").splitlines() == git(repo, "rev-list", "HEAD").splitlines()
    )
    blobs = git(repo, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
    texts = [
        git(repo, "cat-file", "-p", line.split()[0])
        for line in blobs
        if " blob " in line and int(line.split()[2]) < 9999
    ]
    assert CODE in texts and SOLVED not in texts and NEW_TESTS not in texts
    assert "mirrors" not in "".join(
        path.read_text(errors="replace") for path in (repo / ".git").glob("*") if path.is_file()
    )


@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
def test_solutions_pass_and_empty_agents_do_not(tasks):
    assert try_tasks(load_rows(tasks), {"count": 2}, print) == []


FIX = "import calc; calc.double = lambda x: 2 * x"
END = "echo 'import os; os._exit(0)'"
CHEATS = {
    "conftest": f"echo '{FIX}' >> conftest.py",
    "new_conftest": f"echo '{FIX}' > tests/conftest.py",
    "edited_tests": 'for name in half double; do echo "def test_$name(): pass"; done > tests/test_calc.py',
    "linked_tests": f"mv tests /mine; ln -s /mine tests; echo '{FIX}' > /mine/conftest.py",
    "linked_test": "ln -sf /dev/null tests/test_calc.py",
    "locked_tests": "chmod 0 tests/test_calc.py tests",
    "skipped": "echo 'def double(x): __import__(\"pytest\").skip()' >> calc.py",
    "expected": "echo 'def double(x): __import__(\"pytest\").xfail()' >> calc.py",
    "empty_pytest": "touch pytest.py",
    "own_pytest": "mkdir pytest; echo 'raise SystemExit' | tee pytest/__init__.py > pytest/__main__.py",
    "user_site": "d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d; "
    f"{END} > $d/usercustomize.py",
    "options": "printf '[pytest]\\naddopts = -p evil' > pytest.ini; echo 'import os; os._exit(0)' > evil.py",
    "other_options": "printf '[pytest]\\naddopts = --collect-only' > tests/pytest.ini",
    "options_above": "printf '[pytest]\\naddopts = --collect-only' > /tox.ini; rm conftest.py",
    "end_at_import": f"{END} >> calc.py",
    "folder_is_a_file": "rm -rf tests; touch tests",
    "no_folder": "rm -rf /testbed/*",
    "restored_test": "git checkout -q HEAD tests; echo 'def test_old(): pass' > tests/test_old.py",
}


SPOILT = ("skip", "xfail", ">> calc.py", "/testbed/*")
"""What an episode has broken in the program too, so that no later change of `double` helps."""


@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_what_an_episode_does_to_the_tests_does_not_count(tasks, cheat):
    cheated, solved = grades(tasks / "owner__calc-1", cheat, "sed -i 's/x [*] x/2 * x/' calc.py")
    assert (cheated, solved) == (0, not any(name in cheat for name in SPOILT))


@pytest.mark.parametrize(
    "change",
    [
        {"instance_id": "../out"},
        {"repo": "../calc"},
        {"repo": "owner/other"},
        {"base_commit": "--upload-pack=touch"},
        {"base_commit": "0" * 40},
        {"base_commit": None},
        {"patch": "nonsense"},
        {"test_patch": "--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n"},
        {"FAIL_TO_PASS": ["test_double (calc.Tests)"]},
        {"FAIL_TO_PASS": "not JSON"},
        {"PASS_TO_PASS": ["--co tests/a.py::b"]},
    ],
    ids=str,
)
def test_a_bad_row_is_one_line_and_leaves_nothing(repos, tmp_path, change):
    mirrors, bench = repos
    importer = Importer(mirrors, tmp_path / "tasks", "host", "pytest")
    with pytest.raises(DataError) as caught:
        importer.write_all(str(write(tmp_path / "rows.jsonl", bench | change)))
    assert "rows.jsonl:1" in str(caught.value)
    assert not (tmp_path / "tasks").exists() or not list((tmp_path / "tasks").iterdir())


def test_a_row_that_is_there_twice_is_refused(repos, tmp_path):
    mirrors, bench = repos
    with pytest.raises(DataError):
        Importer(mirrors, tmp_path / "tasks", "host", "pytest").write_all(
            str(write(tmp_path / "r.jsonl", bench, bench))
        )

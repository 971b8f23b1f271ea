"""A package of somebody else adds names by entry points, and rl4llm uses them like its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import python
from small_run import SmallRun

ROOT = Path(__file__).parents[1]
USES = """
import json, sys
from rl4llm.cli import main
from rl4llm.config import load_config
from rl4llm.compose import build_trainer

small, output = sys.argv[1:]
names = {"env.name": "hello_echo", "env.greeting": "You wrote:", "rewards": ["hello_vowels"], "max_steps": 1,
         "algorithm.name": "hello_reinforce", "inference.name": "hello_local", "output.dir": output,
         "tracking.episodes_every": 1}
with build_trainer(load_config(small, names)) as trainer:
    trainer.train()
    kinds = [trainer.rollout.env, trainer.algorithm, trainer.inference.client]
    print(json.dumps([f"{type(kind).__module__}:{type(kind).__name__}" for kind in kinds]))
    print(json.dumps([trainer.step, trainer.inference.client.requests]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Run Python with the example's package installed into a directory on its path."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples" / "package", source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, timeout=120)
    assert next(target.glob("rl4llm_hello-*.dist-info/entry_points.txt")).read_text().count("hello") > 5

    (target / "uses.py").write_text(USES)

    def run(*words):
        done = python(*words, cwd=target)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_run_uses_the_installed_parts_by_their_names(installed, model_dir, tmp_path):
    SmallRun.at(tmp_path, model_dir)
    output = installed("-m", "uses", tmp_path / "small.yaml", tmp_path / "run").splitlines()
    parts = ["rl4llm_hello.parts:Echo", "rl4llm_hello.parts:Reinforce", "rl4llm_hello.parts:CountingClient"]
    assert json.loads(output[-2]) == parts
    step, requests = json.loads(output[-1])
    assert step == 1 and requests >= 8  # two turns of four episodes
    episode = json.loads((tmp_path / "run" / "episodes" / "step-000001.jsonl").read_text().splitlines()[0])
    assert list(episode["rewards"]) == ["vowels"]
    assert any(message["content"].startswith("You wrote: ") for message in episode["messages"])


def test_info_lists_the_installed_names(installed):
    found = json.loads(installed("-m", "rl4llm", "info", "--json"))
    rows = [row for table in ("environments", "rewards", "algorithms", "engines") for row in found[table]]
    listed = {row["name"]: row["what"] for row in rows}
    assert listed["hello_echo"] == "Repeats what the policy said, for two turns."
    assert listed["hello_vowels"] == "Return the share of vowels in the last reply."
    assert listed["hello_local"] == "The embedded engine, which counts its requests."
    assert "Williams" in listed["hello_reinforce"]


def test_an_installed_command_is_one_of_rl4llm(installed):
    assert "greet somebody" in installed("-m", "rl4llm", "--help")
    assert "rl4llm hello --name Ann" in installed("-m", "rl4llm", "hello", "--help")
    assert installed("-m", "rl4llm", "hello", "--name", "Ann") == "Hello, Ann.\n"

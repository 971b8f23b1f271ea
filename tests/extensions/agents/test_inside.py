"""Agents in a workspace: what they see of the machine, how they reach the policy, and what is left of them."""

import asyncio
import json
import os
import shutil
import tempfile
from types import SimpleNamespace

import httpx
import pytest
import yaml

from rl4llm.cli import main
from rl4llm.extensions.agents.endpoint import AgentEndpoint
from rl4llm.extensions.agents.env import AgentEnv
from rl4llm.tracking.summary import summarize
from rl4llm.tracking.tracker import read_jsonl

AGENT = """
import json, os, sys, time, urllib.request
def ask(url=os.environ["OPENAI_BASE_URL"], key=os.environ["OPENAI_API_KEY"]):
    head = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, head)).read()
ask()
"""


@pytest.fixture
def program():
    """The options of an agent in a workspace, which asks the policy once and then runs these lines."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/install_sandbox.sh does it")

    def options(lines="", **workspace):
        command = ["sh", "-c", 'exec python3 "$HOME/.agent.py" "$1"', "agent", "{prompt}"]
        return {"command": command, "files": {".agent.py": AGENT + lines}, "workspace": workspace}

    return options


@pytest.fixture
def task(tmp_path):
    """The directory of a task: write 85 into the file `number`."""
    pytest.importorskip("rl4llm.extensions.tasks")
    directory = tmp_path / "tasks" / "write"
    (directory / "tests").mkdir(parents=True)
    (directory / "task.toml").write_text('[environment]\nworkdir = "/work"\n')
    (directory / "instruction.md").write_text("Write 85 into the file number.")
    (directory / "tests" / "test.sh").write_text('test "$(cat /work/number)" = 85\n')
    return directory


def test_an_agent_sees_an_image_and_leaves_only_its_work(play, program, tmp_path):
    lines = f"""
assert not os.path.exists({str(tmp_path)!r}) and "RL4LLM_SECRET" not in os.environ
assert os.listdir(os.environ["HOME"]) == [".agent.py"]
open(os.path.expanduser("~/cache"), "w").write("x")
open("made", "w").write(sys.argv[1])
print(os.getcwd())
"""
    result, _ = play(size=2, **program(lines))
    assert [trajectory.messages[-1].content for trajectory in result.trajectories] == ["/root"] * 2
    for trajectory in result.trajectories:
        changes = trajectory.extras["changes"]
        assert "+How many?" in changes and changes.count("+++ ") == 1 and "cache" not in changes


def test_an_agent_in_a_workspace_reaches_the_policy_alone(play, program):
    lines = """
import socket
reached = []
for address in (("1.1.1.1", 53), ("127.0.0.1", 22), ("127.0.0.1", 8000)):
    try:
        socket.create_connection(address, 2)
        reached.append(address)
    except OSError:
        pass
print(reached)
"""
    result, _ = play(**program(lines))
    assert [trajectory.messages[-1].content for trajectory in result.trajectories] == ["[]"]


async def served(path, key):
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as http:
        return (await http.get(f"http://policy/{key}/v1/models")).status_code


async def statuses_of_sockets():
    sessions = [SimpleNamespace(key=name, context_length=9) for name in ("one", "other")]
    endpoint = AgentEndpoint()
    async with endpoint.used():
        for session in sessions:
            endpoint.open(session)
        async with endpoint.socket(sessions[0]) as one, endpoint.socket(sessions[1]) as other:
            return [await served(path, key) for path in (one, other) for key in ("one", "other", "no")]


def test_each_socket_answers_the_key_of_its_episode():
    assert asyncio.run(statuses_of_sockets()) == [200, 401, 401, 401, 200, 401]


@pytest.mark.parametrize(("number", "reward"), [(85, 1.0), (84, 0.0)])
def test_the_tests_of_a_task_grade_what_an_agent_left(play, program, task, number, reward):
    lines = f"assert not os.path.exists('/tests'); open('number', 'w').write('{number}')"
    result, _ = play(columns={"task": str(task)}, **program(lines))
    (trajectory,) = result.trajectories
    assert trajectory.extras["task"]["reward"] == reward and f"+{number}" in trajectory.extras["changes"]


@pytest.mark.parametrize(("seconds", "count"), [(0, 0), (60, 1)])
def test_tests_of_a_task_that_hang_are_counted(play, program, task, seconds, count):
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 2.0\n")
    (task / "tests" / "test.sh").write_text(f"sleep {seconds}\n")
    result, _ = play(columns={"task": str(task)}, **program())
    assert summarize(result.groups, result.failed)["env/tests_timed_out"] == count


def test_an_agent_finds_the_files_of_its_row(play, program, task):
    files = {"a.txt": "one", "b/c.txt": "two", "d.txt": None}
    lines = "print(os.getcwd(), sorted(os.listdir()), open('a.txt').read(), open('b/c.txt').read())"
    for place, name in ((str(task), "/work"), (None, "/root")):
        result, _ = play(columns={"task": place, "files": files}, **program(lines))
        said = result.trajectories[0].messages[-1].content
        assert (
            said.startswith(name)
            and "'a.txt', 'b'" in said
            and said.endswith("one two")
            and "d.txt" not in said
        )


def test_a_column_files_of_another_kind_fails_the_sample(play, program):
    result, client = play(columns={"files": ["a.txt"]}, **program())
    assert [failed.failure_class for failed in result.failed] == ["env/task"] and not client.calls


def test_a_failed_agent_is_not_graded(play, program, task):
    result, _ = play(columns={"task": str(task)}, **program("sys.exit(3)"))
    assert [failed.failure_class for failed in result.failed] == ["agent/crashed"]
    assert "task" not in result.failed[0].extras


def test_a_broken_task_fails_the_sample(play, program, task):
    (task / "tests" / "test.sh").write_text("echo 7 > /logs/verifier/reward.txt\n")
    result, _ = play(columns={"task": str(task)}, **program())
    assert [failed.failure_class for failed in result.failed] == ["env/task"]


class Unmounted(AgentEnv):
    """An environment whose mount is removed before an episode begins."""

    async def _run_episode(self, sample, llm, sampling_params):
        shutil.rmtree(sample.columns["mounted"], ignore_errors=True)
        await super()._run_episode(sample, llm, sampling_params)


def test_a_workspace_that_does_not_start_fails_the_sample(play, program):
    mounted = tempfile.mkdtemp()
    os.chmod(mounted, 0o755)  # workspaces have another user
    options = {"columns": {"mounted": mounted}, **program(mounts=[mounted])}
    assert not play(**options)[0].failed
    result, client = play(env_class=Unmounted, **options)
    assert [failed.failure_class for failed in result.failed] == ["env/workspace"] and not client.calls


def test_a_program_that_is_not_in_the_image_fails_the_sample(play, program):
    result, client = play(**program() | {"command": ["no-such-program", "{prompt}"]})
    assert [failed.failure_class for failed in result.failed] == ["agent/crashed"] and not client.calls


def test_an_agent_that_hangs_in_a_workspace_is_killed(play, program):
    result, _ = play(timeout_s=2, **program("time.sleep(1000)"))
    assert [failed.failure_class for failed in result.failed] == ["agent/timeout"]


def test_rows_with_a_task_have_its_reward_by_default(task):
    assert AgentEnv.rewards_for({"task": str(task)}) == ("task",)
    for kind in ("sum", None, "", 5, str(task.parent), "write a sum " * 99):
        assert AgentEnv.rewards_for({"task": kind}) == ("math",)


def test_tasks_train_an_agent_in_a_workspace_by_default(program, task, model_dir, tmp_path, capsys):
    run, config = tmp_path / "run", tmp_path / "train.yaml"
    lines = "open('number', 'w').write(['85', '86'][json.load(sys.stdin)['sample']])"
    command = ["sh", "-c", 'exec python3 "$HOME/.agent.py"']
    written = {
        "model": {"path": str(model_dir), "autocast": "none"},
        "data": {"path": str(task.parent)},
        "eval": {"every": 0},
        "env": {"name": "agent", "max_steps": 4, **program(lines), "command": command},
        "rollout": {"prompts": 1, "group_size": 2, "max_tokens": 6},
        "tracking": {"tensorboard": False},
        "output": {"dir": str(run)},
        "max_steps": 2,
    }
    config.write_text(yaml.safe_dump(written))
    assert main(["train", str(config)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "trajectories" in row]
    assert len(rows) == 2 and all(row["reward/mean"] == 0.5 and row["mismatch/max"] < 1e-4 for row in rows)
    for episode, number in zip(read_jsonl(run / "episodes" / "step-000002.jsonl"), (85, 86), strict=True):
        assert episode["extras"]["task"]["reward"] == (number == 85)
        assert f"+{number}" in episode["extras"]["changes"]

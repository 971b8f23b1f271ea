"""Episodes of agents: what they are given, what becomes of their end, and that nothing of them is left."""

import asyncio
import json
import re
import ssl
import sys
import textwrap
import time

import httpx
import psutil
import pytest
from forked_python import started

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import ConfigError, EngineError, EnvError, UnreachableError
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.agents.env import AgentEnv
from rl4llm.rewards import as_reward_function
from rl4llm.testing import ScriptedClient, check_env

TLS = ssl.create_default_context()  # made once, as that takes longer than most episodes here
HEAD = """
import json, os, sys, time, urllib.request
task = json.load(sys.stdin)
def ask(*messages, **options):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"messages": messages, **options}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))["choices"][0]["message"]
"""


@pytest.fixture
def command(tmp_path):
    """A command that runs an agent of these lines."""

    def write(lines):
        file = tmp_path / "agent.py"
        file.write_text(HEAD + textwrap.dedent(lines))
        return [sys.executable, str(file)]

    return write


@pytest.fixture
def marker():
    """A word in command lines; what still has it at the end is killed, and the test has failed."""
    word = f"{time.time_ns()}"
    yield word
    left = alive(word)
    for process in left:
        process.kill()
    assert not left


def alive(word):
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(word in item for item in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def gone_within(word, seconds):
    deadline = time.monotonic() + seconds
    while alive(word) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(word)


async def post(base_url, *messages, **options):
    async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
        asked = {"messages": [{"role": "user", "content": text} for text in messages], **options}
        return await http.post(f"{base_url}/chat/completions", json=asked, timeout=30)


def test_command_reads_its_task_and_prints_its_output(play, command):
    agent = command("""
        said = ask(*task["messages"])
        print("thinking aloud", file=sys.stderr)
        assert sorted(task) == ["messages", "prompt_id", "sample", "seed", "shelf"], task
        print(json.dumps([said["content"], task["shelf"], task["prompt_id"], task["sample"], sys.argv[1:]]))
    """)
    result, _ = play(command=[*agent, "--twice"], columns={"shelf": 7, "prompt_id": "p"})
    (trajectory,) = result.trajectories
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "assistant"]
    assert json.loads(trajectory.messages[-1].content) == ["Answer: 85", 7, "p", 0, ["--twice"]]
    assert trajectory.stop_reason == "done" and trajectory.num_turns == 1


def test_rewards_see_the_last_conversation_and_the_output(play):
    async def agent(task, base_url, api_key):
        await post(base_url, "a sub-agent's question")
        await post(base_url, "the question")
        return {"answer": 85} if task["sample"] else "Answer: 85\n"

    result, _ = play(agent, size=2)
    same, other = ([message.content for message in trajectory.messages] for trajectory in result.trajectories)
    assert same == ["the question", "Answer: 85"] and other == [*same, '{"answer": 85}']
    assert [trajectory.num_turns for trajectory in result.trajectories] == [2, 2]


async def raises(task, base_url, api_key):
    await post(base_url, "Hi")
    raise KeyError("tool_calls")


def exits(task, base_url, api_key):
    sys.exit("gave up")


async def hangs(task, base_url, api_key):
    await post(base_url, "Hi")
    await asyncio.sleep(1000)


def hangs_in_a_thread(task, base_url, api_key):
    time.sleep(8)


async def is_silent(task, base_url, api_key):
    return "Answer: 85"


async def asks_nonsense(task, base_url, api_key):
    assert (await post(base_url)).status_code == 400


@pytest.mark.parametrize(("agent", "failure_class", "reason"), [
    (raises, "agent/crashed", "raised KeyError: 'tool_calls'"),
    (exits, "agent/crashed", "raised SystemExit: gave up"),
    (hangs, "agent/timeout", "took more than 1 s"),
    (hangs_in_a_thread, "agent/timeout", "took more than 1 s"),
    (is_silent, "agent/silent", "without an answer from the policy"),
    (asks_nonsense, "agent/refused", "at least one message"),
    ("ask(*task['messages']); sys.exit(3)", "agent/crashed", "exit code 3 and no output on standard error"),
    ("raise ValueError('no idea')", "agent/crashed", "exit code 1: Traceback.*ValueError: no idea"),
    ("ask(*task['messages']); os.kill(os.getpid(), 9)", "agent/crashed", r"exit code 137 \(SIGKILL\)"),
    ("ask(*task['messages']); time.sleep(1000)", "agent/timeout", "took more than 1 s"),
    ("import signal; signal.signal(15, signal.SIG_IGN); time.sleep(1000)", "agent/timeout", "took more than 1 s"),
    ("print('Answer: 85')", "agent/silent", "without an answer from the policy"),
    ("ask(); ", "agent/refused", "at least one message"),
])  # fmt: skip
def test_agent_faults_fail_the_sample_after_a_retry(play, command, agent, failure_class, reason):
    agents = {"command": command(agent)} if isinstance(agent, str) else {"agent": agent}
    started = time.monotonic()
    result, _ = play(**agents, timeout_s=1 if failure_class == "agent/timeout" else 60)
    assert time.monotonic() - started < 30
    (failed,) = result.failed
    assert failed.failure_class == failed.extras["played_again_after"] == failure_class
    assert re.search(reason, failed.failure, re.DOTALL), failed.failure


def test_retry_has_the_same_seed_and_counts_earlier_tokens(play, remembering):
    seeds = []

    async def agent(task, base_url, api_key):
        seeds.append(task["seed"])
        await post(base_url, "Hi")
        if len(seeds) == 1:
            raise RuntimeError("once")

    params = SamplingParams(max_tokens=200, stop=("e", "a", "o"))  # a crash after a cut answer is no failure
    result, client = play(agent, client=remembering, params=params)
    (trajectory,) = result.trajectories
    (_, _, first), (_, _, second) = client.record
    assert seeds[0] == seeds[1] and first.token_ids == second.token_ids
    assert trajectory.extras["played_again_after"] == "agent/crashed"
    metrics = trajectory.extras["metrics"]
    assert metrics["generated_tokens"] == 2 * metrics["trained_tokens"] == 2 * len(second.token_ids)


def test_an_agent_that_a_limit_brought_down_has_come_to_its_end(play, tokenizer):
    async def agent(task, base_url, api_key):
        for number in range(5):
            (await post(base_url, "x" * (1 if number < 2 else task["size"]))).raise_for_status()

    for size, options, reason in ((1, {"max_steps": 2}, "max_steps"), (10_000, {}, "context")):
        client = ScriptedClient(tokenizer, {"": ["Answer: 85"]}, context_length=200)
        result, _ = play(agent, client=client, columns={"size": size}, **options)
        assert [trajectory.stop_reason for trajectory in result.trajectories] == [
            reason
        ] and not result.failed


def test_an_agent_that_makes_room_in_its_context_goes_on(play, tokenizer):
    async def agent(task, base_url, api_key):
        assert (await post(base_url, "x" * 10_000)).json()["error"]["code"] == "context_length_exceeded"
        assert (await post(base_url, "x")).status_code == 200

    result, _ = play(agent, client=ScriptedClient(tokenizer, {"": ["Answer: 85"]}, context_length=200))
    assert [trajectory.stop_reason for trajectory in result.trajectories] == ["done"]


def test_truncated_last_answer_has_stop_reason_length(play):
    async def agent(task, base_url, api_key):
        await post(base_url, "Hi", max_tokens=2)

    result, _ = play(agent)
    assert result.trajectories[0].stop_reason == "length"


LEAVES = """
import subprocess
ask(*task["messages"])
sleeps = "import time; time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", sleeps, "{marker}"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        os.execv(sys.executable, [sys.executable, "-c", sleeps, "{marker}"])
    os._exit(0)
"""


@pytest.mark.parametrize("end", ["", "time.sleep(1000)", "os.kill(os.getpid(), 9)"])
def test_nothing_that_an_agent_started_is_left(play, command, marker, end):
    result, _ = play(
        command=command(LEAVES.format(marker=marker) + f"print('Answer: 85')\n{end}"), timeout_s=3
    )
    assert len(result.failed) == (1 if end else 0)
    assert not alive(marker)


KILLED = """
import sys
from rl4llm.runtime.runner import Runner
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.extensions.agents.env import AgentEnv
from rl4llm.envs.rollout import Rollout
from rl4llm.rewards import as_reward_function
from rl4llm.testing import ScriptedClient
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
rows = [{"messages": [{"role": "user", "content": "Hi"}], "ground_truth": "85"}]
client = ScriptedClient(tokenizer, {"": ["Answer: 85"]})
with Runner() as runner:
    runner.run(client.load(WeightRef(0)))
    env = AgentEnv(rows, tokenizer, [as_reward_function({"name": "length", "max_length": 99})], 1, 1, command=sys.argv[2:])
    Rollout(env, client, Renderer(tokenizer), runner, seed=0).play([0], step=0, sampling_params=SamplingParams())
"""


def test_a_trainer_that_is_killed_takes_its_agents_with_it(command, marker, model_dir, tmp_path):
    words = [*command(LEAVES.format(marker=marker) + "time.sleep(1000)"), marker]
    (tmp_path / "trainer.py").write_text(KILLED)
    with started(tmp_path / "trainer.py", model_dir, *words) as trainer:
        deadline = time.monotonic() + 120
        while len(alive(marker)) < 4 and time.monotonic() < deadline:  # supervisor, agent, and its two
            time.sleep(0.1)
        assert len(alive(marker)) == 4
        trainer.process.kill()
        trainer.process.join(30)
        assert gone_within(marker, 10)


def test_an_agent_may_print_anything_and_read_nothing(play, command):
    agent = command("""
        ask(*task["messages"])
        sys.stdout.buffer.write(b"\\xff\\x00" * 2_000_000)
        sys.stderr.write("e" * 3_000_000)
    """)
    agent[1:1] = ["-X", "faulthandler"]
    result, _ = play(command=agent)
    assert len(result.trajectories[0].messages[-1].content) == 2**20
    result, _ = play(command=["true"], columns={"long": "x" * 3_000_000})
    assert result.failed[0].failure_class == "agent/silent"


@pytest.mark.parametrize("waits_s", [0, 1000])
def test_engine_abort_ends_the_episode_whatever_the_agent_does(play, tokenizer, waits_s):
    class Silent(ScriptedClient):
        async def generate(self, prompt_ids, sampling_params, *, session=""):
            raise UnreachableError("nobody there")

    async def agent(task, base_url, api_key):
        response = await post(base_url, "Hi")
        await asyncio.sleep(waits_s)
        response.raise_for_status()

    result, _ = play(agent, client=Silent(tokenizer, {"": ["x"]}))
    (failed,) = result.failed
    assert failed.failure_class == "engine/unreachable" and "nobody there" in failed.failure


def test_what_breaks_the_engine_stops_the_run(play, tokenizer):
    class Broken(ScriptedClient):
        async def generate(self, prompt_ids, sampling_params, *, session=""):
            raise EngineError("the engine is on fire")

    async def agent(task, base_url, api_key):
        await post(base_url, "Hi")

    with pytest.raises(EngineError, match="on fire"):
        play(agent, client=Broken(tokenizer, {"": ["x"]}))


def test_agents_at_once_are_limited_by_env_processes(play, command, model, tokenizer, tmp_path):
    from rl4llm.inference.local import LocalClient

    agent = command(f"""
        import pathlib
        here = pathlib.Path({str(tmp_path)!r})
        mine = here / f"{{os.getpid()}}.running"
        mine.touch()
        ask(*task["messages"])
        ask(*task["messages"])
        running = len(list(here.glob("*.running")))
        mine.unlink()
        print(running)
    """)
    client = LocalClient(model, tokenizer, deterministic=True, stall_timeout_s=20)
    result, _ = play(command=agent, client=client, size=5, processes=2, params=SamplingParams(max_tokens=4))
    assert not result.failed
    assert {trajectory.messages[-1].content for trajectory in result.trajectories} <= {"1", "2"}


def test_function_that_cannot_be_stopped_is_refused(play):
    attempts, enough = [], time.monotonic() + 60

    def agent(task, base_url, api_key):
        seen = []
        attempts.append(seen)
        with httpx.Client(trust_env=False, verify=TLS) as http:
            while "refused" not in seen and time.monotonic() < enough:
                try:
                    response = http.post(f"{base_url}/chat/completions", json={"messages": task["messages"]})
                    seen.append("answered" if response.status_code == 200 else "refused")
                except httpx.TransportError:  # the endpoint is gone already
                    seen.append("refused")
                time.sleep(0.05)

    result, client = play(agent, timeout_s=1, max_steps=1000)
    assert [failed.failure_class for failed in result.failed] == ["agent/timeout"]
    calls = len(client.calls)
    while not all("refused" in seen for seen in attempts) and time.monotonic() < enough:
        time.sleep(0.05)
    assert (
        len(attempts) == 2 and all(seen[-1] == "refused" for seen in attempts) and len(client.calls) == calls
    )


class OfTurns(BaseRewardFunction):
    per_turn = True

    def __call__(self, messages, ground_truth, **kwargs):
        return []


@pytest.mark.parametrize(("options", "message"), [
    ({}, "needs either env.command"),
    ({"command": "true", "agent": "a:b"}, "needs either env.command"),
    ({"command": "no_such_program --x"}, "was not found"),
    ({"command": ""}, "was not found"),
    ({"agent": "os"}, "cannot be imported"),
    ({"agent": "no_such_module:agent"}, "cannot be imported: No module named"),
    ({"agent": "os:no_such_agent"}, "cannot be imported"),
    ({"agent": "os:sep"}, "a function"),
    ({"agent": is_silent, "timeout_s": 0}, "env.timeout_s=0 is not accepted"),
    ({"command": "true", "processes": 0}, "env.processes=0 is not accepted"),
    ({"agent": is_silent, "max_steps": 0}, "max_steps=0 is not accepted"),
    ({"agent": is_silent, "rewards": [OfTurns("turns")]}, "'turns' scores each turn"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_before_anything_starts(tokenizer, options, message):
    options = dict(options)
    rewards = options.pop("rewards", None) or [as_reward_function({"name": "length", "max_length": 99})]
    rows = [{"messages": [{"role": "user", "content": "Hi"}], "ground_truth": "85"}]
    with pytest.raises(ConfigError, match=message):
        AgentEnv(rows, tokenizer, rewards, 1, 1, **options)


async def asks_three_times(task, base_url, api_key):
    """Keeps its whole history, and copes with any answer and refusal."""
    messages = list(task["messages"])
    async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
        for _ in range(3):
            response = await http.post(
                f"{base_url}/chat/completions", json={"messages": messages}, timeout=30
            )
            if response.status_code != 200:
                return
            messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "Sure?"}]


async def throws_dice(task, base_url, api_key):
    await post(base_url, *[message["content"] for message in task["messages"]], f"{time.time_ns()}")


def test_agent_env_keeps_the_contract_and_check_finds_breaks(tokenizer):
    rows = [
        {"prompt_id": name, "messages": [{"role": "user", "content": name}], "ground_truth": "85"}
        for name in ("one", "two")
    ]

    def env(agent):
        return AgentEnv(
            rows,
            tokenizer,
            [as_reward_function({"name": "length", "max_length": 99})],
            1,
            1,
            agent=agent,
            max_steps=3,
        )

    check_env(env(asks_three_times), ["Answer: 85"])
    with pytest.raises(EnvError, match="a group shares its prompt"):
        check_env(env(throws_dice))


def test_a_command_sees_no_keys_of_the_trainer(play, command, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "RL4LLM_SERVER_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "secret")
    agent = command("ask({'role': 'user', 'content': 'Hi'}); print(json.dumps(dict(os.environ)))")
    (trajectory,) = play(command=agent, env={"MODE": "test"})[0].trajectories
    seen = json.loads(trajectory.messages[-1].content)
    assert (
        "secret" not in seen.values() and seen["MODE"] == "test" and {"PATH", "OPENAI_API_KEY"} <= seen.keys()
    )


def test_variables_of_a_function_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="only for a command"):
        AgentEnv([], tokenizer, [], 1, 1, agent=print, env={"MODE": "test"})
    with pytest.raises(ConfigError, match="MODE"):
        AgentEnv([], tokenizer, [], 1, 1, command="true", env={"MODE": 1})

"""Environments on hosts: what a trainer gets from them is what it would get without, whatever becomes of the hosts."""

import asyncio
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import hosted_envs
import pytest
from forked_python import started
from hosting import HostThread, played_on

from rl4llm.core.errors import ConfigError, HostsDownError, RL4LLMError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs import DebateEnv, ToolMDPEnv
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.remote import hosts as trainer_side
from rl4llm.extensions.remote import wire
from rl4llm.extensions.remote.env import LOST, HostedEnvironment
from rl4llm.extensions.remote.host import EnvHost
from rl4llm.extensions.remote.rpc import HostChannel, LostError
from rl4llm.extensions.remote.token import new_token, stored, token_of_start
from rl4llm.inference.local import LocalClient
from rl4llm.rewards import as_reward_function, weighted_sum
from rl4llm.runtime.runner import Runner
from rl4llm.testing import check_env

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'
HINTS, STUMBLES = "hosted_envs:Hints", "hosted_envs:Stumbles"
DUEL = "hosted_envs:Duel"
OF_ROLES = ["hosted_envs:Seen", "hosted_envs:TurnLetters", "hosted_envs:MoreLetters"]
SPECS = [
    "hosted_envs:Tokens",
    "hosted_envs:TurnLetters",
    {"name": "length", "max_length": 40, "unit": "chars"},
]
WINNER = {"name": "winner", "by": SPECS[2]}  # not by `math`, whose processes take a second to start
PARAMS = SamplingParams(max_tokens=6, temperature=1.0)


def rows(*texts):
    return [
        {
            "prompt_id": f"p{i}",
            "messages": [{"role": "user", "content": text}],
            "ground_truth": "85",
            "level": i,
        }
        for i, text in enumerate(texts)
    ]


@pytest.fixture
def host():
    with HostThread([HINTS, STUMBLES, DUEL, "debate", "roles", "chat", "tool"]) as host:
        yield host


@pytest.fixture
def remote(tokenizer):
    """remote(hosts, name, rows, rewards, **options): an environment on hosts; those made are closed at the end."""
    made = []

    def make(hosts, name, dataset, rewards=("hosted_envs:Tokens",), seed=42, opponents=None, **options):
        hosted = HostedEnvironment({"name": name, "remote": [host.address for host in hosts], **options})
        made.append(hosted.hosts)
        functions = hosted.rewards(list(rewards), tokenizer, dataset[0], seed)
        return hosted(
            dataset,
            tokenizer,
            functions,
            1,
            2,
            seed=seed,
            reward_transform_fn=transform(functions),
            opponents=opponents,
        )

    yield make
    for hosts in made:
        hosts.close()


def transform(functions):
    terminal = [function.name for function in functions if not function.per_turn]
    return weighted_sum(dict.fromkeys(terminal, 1.0)) if len(terminal) > 1 else None


@pytest.fixture
def play(model, tokenizer):
    """Plays a rollout of an environment against the embedded engine."""
    runner = Runner()
    client = LocalClient(model, tokenizer, deterministic=True)
    runner.run(client.load(WeightRef(0)))

    def run(env, group_size=3, **options):
        renderer = Renderer(tokenizer, env.tool_schemas, roles=env.reply_roles)
        rollout = Rollout(env, client, renderer, runner, seed=1, **options)
        return rollout.play(range(len(env.dataset)), step=0, sampling_params=PARAMS, group_size=group_size)

    yield run
    runner.run(client.close())
    runner.close()


def outcome(result):
    """What two rollouts must agree in."""
    return [
        (
            item.role, item.spans, item.messages, dict(item.rewards), item.reward, item.turn_rewards, item.stop_reason,
            item.success, item.extras["sample"], item.extras.get("metrics"),
        )
        for item in result.trajectories
    ], [group.frozen for group in result.groups]  # fmt: skip


def test_the_compiled_protocol_is_that_of_the_published_file(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    folder = wire.COMPILED.parent
    into = tmp_path / "compiled"
    assert protoc.main(["", f"-I{folder}", f"--descriptor_set_out={into}", "environments.proto"]) == 0
    sets = [
        wire.descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()) for path in (into, wire.COMPILED)
    ]
    assert sets[0] == sets[1]
    proto = (folder / "environments.proto").read_text()
    assert f"--descriptor_set_out=rl4llm/extensions/remote/{wire.COMPILED.name}" in proto


@pytest.mark.parametrize(("name", "options"), [
    ("tool", {"tools": ["calculator"]}), ("chat", {}), (HINTS, {"max_steps": 3}), ("debate", {}),
    ("roles", {"roles": ["asker", "answerer", "listener"]}),
])  # fmt: skip
def test_an_environment_on_a_host_keeps_the_contract(host, remote, name, options):
    env = remote([host], name, rows("How many are 37 and 48?", "And 1?"), **options)
    check_env(env, ["85", CALL])
    assert env.roles == tuple(options.get("roles", ("pro", "con") if name == "debate" else ("",)))


@pytest.mark.parametrize(("name", "env_class", "specs", "options"), [
    (HINTS, hosted_envs.Hints, SPECS, {"max_steps": 3}),
    ("debate", DebateEnv, [SPECS[0], WINNER], {}),
    ("debate", DebateEnv, [SPECS[0], WINNER], {"frozen": ["con"], "instructions": {"con": "Be {role}."}}),
    (DUEL, hosted_envs.Duel, OF_ROLES, {"max_steps": 4}),
])  # fmt: skip
def test_episodes_on_a_host_equal_the_local_ones(
    host, remote, play, tokenizer, name, env_class, specs, options
):
    dataset = rows("How many are 37 and 48?", "And 1?")
    functions = [as_reward_function(spec) for spec in specs]
    local = env_class(
        dataset, tokenizer, functions, 1, 2, reward_transform_fn=transform(functions), **options
    )
    expected, actual = play(local), play(remote([host], name, dataset, specs, **options))
    assert outcome(actual) == outcome(expected)
    assert len(actual.trajectories) == 6 * max(1, len(local.roles))
    assert not any("object" in item.extras for item in actual.trajectories)


def test_hosted_episodes_are_compacted_as_local_ones(host, remote, play, tokenizer):
    dataset = rows("How many are 37 and 48?")
    functions = [as_reward_function(spec) for spec in SPECS]
    local = hosted_envs.Hints(
        dataset, tokenizer, functions, 1, 2, reward_transform_fn=transform(functions), max_steps=3
    )
    hosted = remote([host], HINTS, dataset, SPECS, max_steps=3)
    local.compact_at = hosted.compact_at = 1
    expected, actual = play(local), play(hosted)
    assert outcome(actual) == outcome(expected)
    assert [item.forks for item in actual.trajectories] == [item.forks for item in expected.trajectories]
    assert all(len(item.forks) == 2 for item in actual.trajectories)


def test_hosted_episodes_depend_on_the_seed_and_have_metrics(host, remote, play):
    dataset = rows("Guess.", "Guess again.")
    results = [play(remote([host], HINTS, dataset, SPECS, seed=seed, max_steps=3)) for seed in (42, 43)]
    assert outcome(results[0]) != outcome(results[1])
    assert all(item.turn_rewards for item in results[0].trajectories)
    assert results[0].trajectories[0].extras["metrics"] == {"hints": 3}
    duel = play(remote([host], DUEL, dataset, OF_ROLES, max_steps=4)).trajectories
    assert len({item.extras["metrics"]["lines"] for item in duel}) > 1
    assert {item.messages[0].content for item in duel} >= {"Defend level 1.", "Attack it."}


def test_what_ends_a_turn_and_the_tools_are_those_of_the_host(host, remote, play, tokenizer):
    dataset = rows("How many are 37 and 48?")
    options = {"tools": ["calculator"], "max_calls": 1}
    here = ToolMDPEnv(dataset, tokenizer, [as_reward_function(SPECS[0])], 1, 2, **options)
    there = remote([host], "tool", dataset, SPECS[:1], **options)
    assert there.turn_params(PARAMS) == here.turn_params(PARAMS) != PARAMS
    assert (there.tool_schemas, there.reply_roles, there.max_steps) == (here.tool_schemas, ("tool",), 4)
    assert outcome(play(there)) == outcome(play(here))


def test_episodes_spread_over_hosts_and_need_only_one_of_them(remote, play):
    dataset = rows("Guess.", "Guess again.")
    with HostThread([HINTS]) as one, HostThread([HINTS]) as two:
        env = remote([one, two], HINTS, dataset, max_steps=2)
        whole = play(env)
        assert [played_on(host) for host in (one, two)] == [3, 3]
        one.stop()
        assert outcome(play(env)) == outcome(whole)
        assert played_on(two) == 3 + 6


def test_a_host_writes_prompts_as_the_trainer_does(host, remote, tokenizer, tmp_path):
    options = {"template_args": {"enable_thinking": False}, "thoughts": "drop"}
    tokenizer.save_pretrained(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sent = HostedEnvironment({"name": "chat", "remote": host.address, **options})
    sent.hosts.close()
    assert sent.options == options
    wanted = {"environment": "chat", "options": sent._options(), "rewards": ['"math"'], "tokenizer": files}
    row = json.dumps(rows("Hi")[0])
    made = EnvHost(["chat"], lambda: None)._make(wire.OpenRequest(**wanted, row=row, seed=1))
    assert (made.template_args, made.thoughts) == ({"enable_thinking": False}, "drop")


def test_opponent_of_a_hosted_role_plays_in_the_trainer(host, remote, play):
    heard = []

    def rival(messages):
        heard.append(messages[-1].content)
        return f"No, for the {len(messages)}. time."

    dataset = rows("Fight.")
    result = play(remote([host], DUEL, dataset, OF_ROLES, opponents={"con": rival}, max_steps=2))
    assert {item.role for item in result.trajectories} == {"pro"}
    assert all("No, for the" in str(item.messages) for item in result.trajectories)
    assert heard


def test_error_of_a_game_on_a_host_fails_all_its_roles(host, remote, play):
    env = remote([host], DUEL, rows("raise", "Fight."), OF_ROLES, max_steps=2)
    result = play(env, max_failed_share=1.0)
    assert [(sample.prompt_id, sample.index, sample.role) for sample in result.failed] == [
        ("p0", index, role) for index in (1, 2) for role in ("pro", "con")
    ]
    assert {sample.failure_class for sample in result.failed} == {"env/raised"}


def test_judge_that_fails_on_a_host_leaves_all_roles_out(host, remote, play):
    specs = [{"name": "hosted_envs:MoreLetters", "dislikes": "0"}]
    result = play(remote([host], DUEL, rows("Fight.", "Fight."), specs, max_steps=2), max_failed_share=1.0)
    assert {sample.prompt_id for sample in result.failed} == {"p0"}
    assert {(item.prompt_id, item.role) for item in result.trajectories} == {("p1", "pro"), ("p1", "con")}
    assert {sample.failure_class for sample in result.failed} == {"more_letters/raised"}


def test_hosts_that_have_different_environments_are_refused(remote, monkeypatch):
    with HostThread([HINTS]) as one, HostThread([HINTS]) as two:
        make = two.env_host._make

        def other(wanted):
            env = make(wanted)
            env.max_steps += 1
            return env

        two.env_host._make = other
        with pytest.raises(ConfigError):
            remote([one, two], HINTS, rows("Guess."), max_steps=2)


@pytest.fixture
def on_turn():
    """on_turn(number, do): `do` is called in the middle of a turn on a host, of the `number`th one."""
    turns, due = [], {}

    def watch(sample):
        turns.append(sample)
        due.pop(len(turns), lambda: None)()

    def watch_for(number, do):
        if not due:
            turns.clear()
            hosted_envs.ON_TURN[:] = [watch]
        due[number] = do

    yield watch_for
    hosted_envs.ON_TURN.clear()


@pytest.fixture
def restarted():
    """A host that `restart` ends, whatever it is doing, and starts again at the same address."""
    host = Restarted()
    yield host
    with host.lock:
        host.now.stop()


class Restarted:
    def __init__(self):
        self.now, self.lock = HostThread([HINTS, DUEL]), threading.Lock()
        self.address, self.times = self.now.address, 0

    def restart(self):
        with self.lock:  # the trainer may be done before the new one stands
            self.times += 1
            self.now.stop()
            self.now = HostThread([HINTS, DUEL], self.now.server.port)


def samples(result):
    """The tokens and rewards of a rollout; log-probs of another batch may differ in their last bit."""
    return [([span.token_ids for span in item.spans], item.reward) for item in result.trajectories]


@pytest.mark.parametrize(("name", "specs"), [(HINTS, SPECS), (DUEL, OF_ROLES)])
def test_episode_whose_host_is_lost_is_played_again(remote, play, on_turn, restarted, name, specs):
    env = remote([restarted], name, rows("Guess.", "Guess again."), specs, max_steps=3)
    whole = play(env)
    on_turn(8, restarted.restart)
    again = play(env)
    assert restarted.times == 1 and samples(again) == samples(whole)
    assert {item.extras.get("played_again_after") for item in again.trajectories} >= {LOST}


def test_host_that_drops_one_episode_is_reopened(remote, host):
    hosts = remote([host], HINTS, rows("Guess."))._hosts
    link = hosts._wait(hosts.free())
    opened = link.opened

    async def lose():
        hosts.lost(link, LostError("no answer to an episode"))

    hosts._wait(lose())
    assert hosts._wait(asyncio.wait_for(hosts.free(), 20)) is link
    assert link.opened is not opened


def test_episode_that_loses_every_host_is_left_out(remote, play, on_turn, restarted):
    env = remote([restarted], HINTS, rows("Guess."), max_steps=3)
    for number in range(2, 20):
        on_turn(number, restarted.restart)
    (failed,) = play(env, group_size=1, max_failed_share=1.0).failed
    assert restarted.times > trainer_side.ATTEMPTS
    assert failed.failure_class == LOST


def test_episodes_wait_without_a_host_until_the_run_stops(remote, play, caplog):
    with HostThread([HINTS]) as host:
        env = remote([host], HINTS, rows("Guess."), max_steps=1)
        port = host.server.port
    env._hosts.pool.warn_every_s = 0.2
    late = threading.Timer(1.0, lambda: hosts.append(HostThread([HINTS], port)))
    hosts = []
    late.start()
    with caplog.at_level(logging.WARNING, "rl4llm.envs"):
        assert len(play(env).trajectories) == 3
    assert (
        0 < sum("can serve" in record.message for record in caplog.records) < 12
    )  # not one for each episode
    hosts[0].stop()
    env._hosts.pool.limit_s = 0.6
    with pytest.raises(HostsDownError):
        play(env)


def test_a_host_that_hangs_is_lost_when_its_time_is_over(remote, play, monkeypatch, on_turn):
    monkeypatch.setattr(trainer_side, "GRACE_S", 0.5)
    monkeypatch.setattr(hosted_envs.Hints, "respond_timeout_s", 0.5)
    hung = threading.Event()
    with HostThread([HINTS]) as host, HostThread([HINTS]) as other:
        env = remote([host, other], HINTS, rows("Guess."), max_steps=2)
        whole = play(env)

        def hang():
            host.loop.call_soon_threadsafe(hung.wait, 10)  # the whole process

        on_turn(2, hang)
        again = play(env)
        hung.set()
        assert samples(again) == samples(whole)


@pytest.mark.parametrize(("text", "failure_class"), [
    ("raise", "env/raised"), ("stick", "env/raised"), ("hang", "env/timeout"), ("surrogate", "env/raised"),
    ("huge", "env/raised"),
])  # fmt: skip
def test_error_on_a_host_fails_only_its_episode(host, remote, play, text, failure_class):
    result = play(remote([host], STUMBLES, rows(text, "Guess."), max_steps=2), max_failed_share=1.0)
    assert {(sample.prompt_id, sample.index) for sample in result.failed} == {("p0", 1), ("p0", 2)}
    # gRPC may end a call without an answer where a message is too long
    classes = {failure_class, "env/timeout"} if text == "huge" else {failure_class}
    assert {sample.failure_class for sample in result.failed} <= classes
    assert len(result.trajectories) == 4


def test_a_reward_that_fails_on_a_host_leaves_the_episode_out(host, remote, play):
    specs = [{"name": "hosted_envs:Tokens", "dislikes": "bad"}]
    result = play(remote([host], HINTS, rows("bad", "good"), specs, max_steps=1), max_failed_share=1.0)
    assert {(sample.prompt_id, sample.failure_class) for sample in result.failed} == {("p0", "tokens/raised")}
    assert [item.prompt_id for item in result.trajectories] == ["p1"] * 3


def test_reward_that_breaks_its_contract_on_a_host_stops_the_run(host, remote, play):
    env = remote([host], HINTS, rows("Guess."), ["hosted_envs:Breaks"], max_steps=1)
    with pytest.raises(ConfigError):
        play(env)


@pytest.mark.parametrize(("name", "options", "specs"), [
    ("tol", {}, []),
    ("tool", {"tools": ["calculater"]}, ["math"]),
    ("chat", {}, ["mth"]),
    ("chat", {}, ["hosted_envs:Refuses"]),
])  # fmt: skip
def test_what_a_host_cannot_do_is_refused_before_anything_starts(host, remote, name, options, specs):
    with pytest.raises(ConfigError):
        remote([host], name, rows("Guess."), specs, **options)
    assert host.env_host._hosted == {}


def test_a_host_tells_what_rewards_need_and_what_success_is(host, remote):
    far = {"name": "scale", "reward": "tool_use", "factor": 2.0, "success_at": 1.5}
    env = remote([host], "chat", rows("Guess."), ["math", "format", far])
    assert [function.needs_ground_truth for function in env.reward_functions] == [True, False, False]
    assert [function.success_at for function in env.reward_functions] == [1.0, None, 1.5]
    hints = remote([host], HINTS, rows("Guess."), max_steps=3)
    assert (env.success_at, hints.success_at) == (None, hosted_envs.Hints.success_at)


def test_a_program_is_repaired_on_a_host(remote, play):
    row = {
        "messages": [{"role": "user", "content": "Write double(x)."}],
        "ground_truth": "assert double(4) == 8",
        "public_tests": ["assert double(2) == 4"],
    }
    names = ["code", "math", "tool", "chat", "reasoning_gym", "gymnasium", "openenv"]
    with HostThread(names) as host:
        first, second = (remote([host], "code", [row], ["code"]) for _ in range(2))
        first.close()  # the other's sandbox goes on
        check_env(second, ["```python\ndef double(x):\n    return x * 2\n```"], rows=[0])


@pytest.mark.parametrize("name", ["OwnLoop", "OwnOpening", "OwnOpponent"])
def test_environment_that_does_the_trainers_work_is_not_hosted(name):
    with pytest.raises(ConfigError):
        HostThread([f"hosted_envs:{name}"])


def test_another_protocol_is_refused_by_either_side(host, monkeypatch):
    hello = wire.HelloRequest
    monkeypatch.setattr(trainer_side.wire, "HelloRequest", lambda **fields: hello(protocol=7, version="9"))
    with pytest.raises(ConfigError):
        HostedEnvironment({"name": "chat", "remote": host.address})


def test_a_host_is_used_only_with_its_token(remote, monkeypatch, tmp_path):
    with HostThread(["chat"], token="open sesame") as host:
        monkeypatch.delenv("RL4LLM_ENV_TOKEN", raising=False)
        with pytest.raises(ConfigError):
            remote([host], "chat", rows("Guess."))
        monkeypatch.setenv("RL4LLM_ENV_TOKEN", "open barley")
        with pytest.raises(ConfigError) as caught:
            remote([host], "chat", rows("Guess."))
        assert not {"sesame", "barley"} & set(re.findall(r"\w+", f"{caught.value}"))
        monkeypatch.delenv("RL4LLM_ENV_TOKEN")
        (tmp_path / "token").write_text("open sesame\n")
        monkeypatch.setenv("RL4LLM_ENV_TOKEN_FILE", str(tmp_path / "token"))
        remote([host], "chat", rows("Guess."))
        assert host.said == ["chat: opened by a trainer; 1 open"]


@pytest.mark.parametrize("method", ["Hello", "Prompts", "Open", "Play"])
def test_no_call_works_without_the_token(method):
    with HostThread(["chat"], token="secret") as host:

        async def ask():
            channel = HostChannel(host.address, "other")
            request = wire.MESSAGES[wire.SERVICE.methods_by_name[method].input_type.name]()
            try:
                if method == "Hello":
                    return await channel.ask(method, request, 5, "tested")
                if method == "Prompts":
                    return [row async for row in channel.stream(method, request, 5, "tested")]
                if method == "Open":
                    return await channel.hold(method, request).hear(5, "tested")
                talk = channel.talk(method)
                await talk.say(request, 5, "tested")
                return await talk.hear(5, "tested")
            finally:
                await channel.close()

        with pytest.raises(RL4LLMError):
            asyncio.run(ask())
        assert host.said == []


SENDS = """import grpc, sys
channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.max_send_message_length", -1)])
call = channel.unary_unary("/rl4llm.environments.v1.Environments/Hello")
for _ in range(2):
    try:
        call(b"x" * (60 << 20), timeout=30)
    except grpc.RpcError as error:
        print(error.code().name)
"""


def test_peer_without_the_token_cannot_send_a_large_message():
    with HostThread(["chat"], token="open sesame") as host:
        before = peak_mb(reset=True)
        done = subprocess.run(
            [sys.executable, "-c", SENDS, host.address], capture_output=True, text=True, timeout=120
        )
        assert set(done.stdout.split()) <= {"UNAUTHENTICATED", "UNAVAILABLE"} and done.stdout, done.stderr
        assert peak_mb() - before < 30


def peak_mb(reset=False):
    """The most memory that this process had, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) // 1024


def test_trainers_of_the_same_user_find_the_token_of_a_start(remote, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RL4LLM_ENV_TOKEN", raising=False)
    with HostThread(["chat"], token=(token := new_token())) as host:
        with stored(token, host.server.port) as file:
            assert file.stat().st_mode & 0o077 == file.parent.stat().st_mode & 0o077 == 0
            remote([host], "chat", rows("Guess."))
        assert not file.exists()
        with pytest.raises(ConfigError):
            remote([host], "chat", rows("Guess."))
        assert len(token) == 32 and token != new_token()
    with stored("of a start", 1) as file, stored("of the next start", 1):
        assert token_of_start("127.0.0.1:1") == token_of_start("localhost:1") == "of the next start"
        others = ("host.example:1", "10.0.0.1:1", "127.host.example:1")
        assert {token_of_start(address) for address in others} == {""}


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl, which makes certificates, is not installed")
def test_certificate_encrypts_the_connection(remote, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = (
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=host -addext subjectAltName=IP:127.0.0.1 -days 1"
    )
    subprocess.run([*made.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with HostThread(["chat"], certificate=(certificate, key)) as host:
        remote([host], "chat", rows("Guess."), remote_ca=str(certificate))

        async def hello(authority):
            channel = HostChannel(host.address, authority=authority)
            try:
                return await channel.ask("Hello", wire.HelloRequest(protocol=wire.PROTOCOL), 5, "tested")
            finally:
                await channel.close()

        assert asyncio.run(hello(certificate)).protocol == wire.PROTOCOL
        with pytest.raises(LostError):
            asyncio.run(hello(None))


def test_garbage_is_answered_and_the_host_goes_on(host, remote, play):
    async def send(request):
        channel = HostChannel(host.address)
        try:
            if isinstance(request, wire.OpenRequest):
                return await channel.hold("Open", request).hear(5, "tested")
            call = channel.talk("Play")
            await call.say(request, 5, "tested")
            return await call.hear(5, "tested")
        finally:
            await channel.close()

    outside = Path(tempfile.gettempdir(), "escaped")
    wanted = {"environment": "chat", "options": "{}", "row": "{}", "tokenizer": {"../escaped": b"x"}}
    requests = [
        wire.OpenRequest(**wanted),
        wire.OpenRequest(**wanted | {"options": "["}),
        wire.OpenRequest(),
        wire.Said(),
    ]
    for request in requests:
        with pytest.raises(RL4LLMError):
            asyncio.run(send(request))
    assert not outside.exists()
    assert len(play(remote([host], "chat", rows("Guess."))).trajectories) == 3


def test_an_environment_on_a_host_brings_its_prompts(host):
    hosted = HostedEnvironment({"name": HINTS, "remote": [host.address], "above": 5, "max_steps": 2})
    assert hosted.default_rewards == ["hosted_envs:Tokens"]
    assert [row["messages"][0]["content"] for row in hosted.prompts("test", 2)] == ["Guess 5.", "Guess 6."]
    hosted.hosts.close()


CLIENT = """
import sys, time
sys.path[:0] = {path}
from rl4llm.extensions.remote.env import HostedEnvironment
from rl4llm.backends.models import load_tokenizer
from rl4llm.extensions.remote.hosts import HostedEpisode
from rl4llm.core.base_env import SampleState, ChatMessage
hosted = HostedEnvironment({{"name": "hosted_envs:Hints", "remote": ["{address}"], "max_steps": 3}})
row = {{"messages": [{{"role": "user", "content": "Guess."}}], "ground_truth": 1}}
hosted.rewards(["hosted_envs:Tokens"], load_tokenizer("{model}"), row, 1)
sample = SampleState("p", 7, [ChatMessage("user", "Guess."), ChatMessage("assistant", "1")], 1)
hosted.hosts._wait(HostedEpisode(hosted.hosts, "hints").ask(sample, "tested"))
print("talking", flush=True)
time.sleep(100)
"""


def test_a_trainer_that_is_killed_leaves_nothing_on_a_host(host, model_dir, tmp_path):
    hosted_envs.CLOSED.clear()
    hosted_envs.ENDED.clear()
    code = CLIENT.format(path=[path for path in sys.path if path], address=host.address, model=model_dir)
    (tmp_path / "client.py").write_text(code)
    with started(tmp_path / "client.py") as client:
        while client.out.read_text() != "talking\n":
            assert client.process.is_alive(), client.err.read_text()
            time.sleep(0.02)
        assert len(host.env_host._hosted) == 1
        assert not hosted_envs.ENDED
        client.process.kill()
        client.process.join()
    deadline = time.monotonic() + 10
    while not (hosted_envs.CLOSED and hosted_envs.ENDED) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert host.env_host._hosted == {}
    assert len(hosted_envs.CLOSED) == 1
    assert hosted_envs.ENDED == [("p", 7)]

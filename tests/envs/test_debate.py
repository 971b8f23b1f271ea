"""Debates and other episodes of several roles: who speaks when, what each receives, who plays whom, how faults end."""

import asyncio
import threading

import pytest

from rl4llm.core.base_env import ChatMessage
from rl4llm.core.base_opponent import BaseOpponent
from rl4llm.core.errors import ConfigError, EnvError, UnreachableError
from rl4llm.core.message import CUT
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs import DebateEnv, RolesEnv
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.judges.judges import BaseJudge, Winner
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient, check_env
from tests.envs.test_rollout import Length

QUIET = Winner()


class Talk(RolesEnv):
    roles = ("pro", "con")


def dataset(size=2):
    return [
        {
            "prompt_id": f"p{i}",
            "messages": [{"role": "user", "content": f"Number {i}?"}],
            "ground_truth": str(i),
            "mood": "sad",
        }
        for i in range(size)
    ]


def lines(session, prompt_ids):
    """What each session says; the role tells it from others."""
    return f"{session.split('/')[2]} speaks"


@pytest.fixture
def play(tokenizer):
    """Plays a rollout of an environment of roles, by default without a model."""
    runner, envs = Runner(), []

    def run(
        env_class=Talk, client=None, rewards=None, group_size=1, params=None, max_failed_share=1.0, **options
    ):
        client = client or ScriptedClient(tokenizer, lines)
        runner.run(client.load(WeightRef(0)))
        env = env_class(dataset(), tokenizer, rewards or [Length()], 2, group_size, **options)
        envs.append(env)
        rollout = Rollout(env, client, Renderer(tokenizer), runner, seed=1, max_failed_share=max_failed_share)
        return rollout.play((0, 1), step=0, sampling_params=params or SamplingParams())

    yield run
    for env in envs:
        env.close()
    runner.close()


def conversation(result, role, prompt_id="p0"):
    found = [item for item in result.trajectories if (item.prompt_id, item.role) == (prompt_id, role)]
    return [(message.role, message.content) for message in found[0].messages]


def test_roles_take_turns_and_receive_the_lines_since_their_last(play):
    result = play(max_steps=2)
    assert conversation(result, "pro") == [
        ("user", "Number 0?"),
        ("assistant", "pro speaks"),
        ("user", "con speaks"),
        ("assistant", "pro speaks"),
    ]
    assert conversation(result, "con") == [
        ("user", "Number 0?\n\npro speaks"),
        ("assistant", "con speaks"),
        ("user", "pro speaks"),
        ("assistant", "con speaks"),
    ]
    assert {item.stop_reason for item in result.trajectories} == {"done"}


def test_three_roles_receive_the_lines_of_both_others_by_name(play):
    result = play(roles=["pro", "con", "host"], max_steps=2)
    assert conversation(result, "pro")[2] == ("user", "con: con speaks\n\nhost: host speaks")


def test_debate_instructs_each_role_and_lines_name_their_speaker(play):
    result = play(DebateEnv, rewards=[QUIET], max_steps=1, instructions={"con": "Be {mood}, {role}."})
    opening = conversation(result, "pro")[0]
    assert opening[0] == "system"
    assert "You are pro in a debate" in opening[1]
    assert conversation(result, "con") == [
        ("system", "Be sad, con."),
        ("user", "Number 0?\n\npro: pro speaks"),
        ("assistant", "con speaks"),
    ]


def test_instruction_precedes_the_system_message_of_the_task(tokenizer):
    env = Talk(dataset(), tokenizer, [Length()], 1, 1, instructions={"pro": "You are {role}."})
    task = [ChatMessage("system", "Be brief."), ChatMessage("user", "Why?")]
    assert env.opening("pro", task, {}) == [ChatMessage("system", "You are pro.\n\nBe brief."), task[1]]
    assert env.opening("con", task, {}) == task


def test_thoughts_of_a_role_are_hidden_from_the_others(play, tokenizer):
    client = ScriptedClient(tokenizer, {"": ["<think>I bluff.</think> I have an ace."]})
    result = play(client=client, max_steps=1)
    assert conversation(result, "con")[0] == ("user", "Number 0?\n\nI have an ace.")
    assert "bluff" in conversation(result, "pro")[1][1]


def test_role_that_never_spoke_has_no_trajectory(play):
    class FirstMoveWins(Talk):
        def next_role(self, episode):
            return None if episode.said else "con"

    result = play(FirstMoveWins)
    assert not result.failed
    assert {group.role for group in result.groups} == {"con"}


def test_a_role_has_at_most_max_steps_turns(play):
    class Greedy(Talk):
        def next_role(self, episode):
            return self.roles[len(episode.said) % 2]

    result = play(Greedy, max_steps=3)
    assert {item.num_turns for item in result.trajectories} == {3}
    assert {item.stop_reason for item in result.trajectories} == {"max_steps", "done"}


@pytest.mark.parametrize("continues", [True, False])
def test_truncated_line_ends_the_episode_unless_env_continues(play, tokenizer, continues):
    kind = type("Cut", (Talk,), {"continue_truncated": continues})
    result = play(kind, params=SamplingParams(max_tokens=2), max_steps=1)
    reasons = {item.role: item.stop_reason for item in result.trajectories}
    assert reasons == ({"pro": "done", "con": "done"} if continues else {"pro": "length"})


def test_a_full_context_ends_the_episode_for_all(play, tokenizer):
    room = len(Renderer(tokenizer).first([ChatMessage("user", "Number 0?")])) + 12
    result = play(client=ScriptedClient(tokenizer, lines, context_length=room), max_steps=4)
    assert not result.failed
    assert {item.stop_reason for item in result.trajectories} == {"context", "done"}


BROKEN = {
    "raises": ("next_role", lambda self, *args: 1 / 0),
    "is unknown": ("next_role", lambda self, episode: "judge"),
    "speaks again": ("next_role", lambda self, episode: "pro"),
    "no string": (RolesEnv.hears.__name__, lambda self, role, episode: None),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_turn_fails_its_episode_alone(play, case):
    name, broken = BROKEN[case]

    def method(self, *args):
        breaks = args[-1].said and args[-1].seats["pro"].prompt_id == "p0"
        return (broken if breaks else getattr(Talk, name))(self, *args)

    result = play(type("Broken", (Talk,), {name: method}))
    assert {(sample.prompt_id, sample.role) for sample in result.failed} == {("p0", "pro"), ("p0", "con")}
    assert {sample.failure_class for sample in result.failed} == {"env/raised"}
    assert {group.prompt_id for group in result.groups} == {"p1"}


# Opponents


def test_opponent_has_its_own_view_and_adds_no_policy_tokens(play):
    seen = []

    def rival(messages):
        seen.append([(message.role, message.content) for message in messages])
        return "I object."

    result = play(opponents={"con": rival}, max_steps=2)
    assert {group.role for group in result.groups} == {"pro"}
    assert conversation(result, "pro")[2] == ("user", "I object.")
    assert [("user", "Number 0?\n\npro speaks")] in seen
    assert [len(messages) for messages in sorted(seen, key=len)] == [1, 1, 3, 3]
    policy = [len(span.token_ids) for item in result.trajectories for span in item.policy_spans]
    assert len(policy) == 4


def test_async_opponent_may_speak_first_with_a_seed_per_line(play):
    seeds, left = [], []

    class Rival(BaseOpponent):
        async def reply(self, messages, sampling_params):
            seeds.append(sampling_params.seed)
            await asyncio.sleep(0)
            return "You first."

        async def disconnect(self):
            left.append(self)

    result = play(opponents={"pro": Rival()}, max_steps=2, group_size=2)
    assert conversation(result, "con")[0] == ("user", "Number 0?\n\nYou first.")
    assert len(set(seeds)) == len(seeds) == 8
    play(opponents={"pro": Rival()}, max_steps=2, group_size=2)
    assert sorted(seeds[:8]) == sorted(seeds[8:])
    assert len(left) == 2


def raises(messages):
    raise UnreachableError("nobody there")


@pytest.mark.parametrize("reply", [raises, lambda messages: None, lambda messages: 7])
def test_opponent_fault_is_retried_once_and_drops_the_episode(play, reply):
    calls = []

    def rival(messages):
        first = "Number 0?" in messages[0].content
        calls.append(first)
        return reply(messages) if first else "Fine."

    result = play(opponents={"con": rival}, max_steps=1)
    assert sum(calls) == 2
    failed = [(sample.prompt_id, sample.failure_class) for sample in result.failed]
    assert failed == [("p0", "opponent/raised")]
    assert [(group.prompt_id, group.role) for group in result.groups] == [("p1", "pro")]


def test_an_opponent_that_is_silent_for_once_is_asked_again(play):
    calls = []

    def rival(messages):
        calls.append(1)
        return raises(messages) if len(calls) == 1 else "Fine."

    result = play(opponents={"con": rival}, max_steps=1)
    assert not result.failed
    assert len(result.groups) == 2


def test_an_opponent_that_hangs_fails_at_its_deadline(play):
    class Asleep(BaseOpponent):
        reply_timeout_s = 0.05

        async def reply(self, messages, sampling_params):
            await asyncio.sleep(60)

    result = play(opponents={"con": Asleep()}, max_steps=1)
    assert {sample.failure_class for sample in result.failed} == {"opponent/timeout"}


def test_long_lines_are_cut_and_lone_surrogates_replaced(play):
    result = play(opponents={"con": lambda messages: "\ud800" + "x" * 10_000_000}, max_steps=2)
    heard = conversation(result, "pro")[2][1]
    assert heard == "?" + "x" * (len(heard) - 1 - len(CUT)) + CUT
    assert len(heard) == 20_000


# Judges


def verdict_of(value):
    asked = []

    class Judge(BaseJudge):
        def judge(self, transcript, ground_truth, **columns):
            asked.append((ground_truth, [tuple(line) for line in transcript], columns))
            return value() if callable(value) else value

    return Judge("judge"), asked


def test_judge_scores_all_roles_at_once_from_the_transcript(play):
    judge, asked = verdict_of({"pro": 1.0, "con": 0.25})
    result = play(rewards=[judge], max_steps=1)
    assert {item.role: item.reward for item in result.trajectories} == {"pro": 1.0, "con": 0.25}
    said = [("pro", "pro speaks"), ("con", "con speaks")]
    assert sorted(asked, key=lambda call: call[0]) == [(truth, said, {"mood": "sad"}) for truth in ("0", "1")]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "judge/invalid"),
        ({"pro": float("nan"), "con": 1.0}, "judge/invalid"),
        ({"pro": 1.0}, "judge/invalid"),
        ({"pro": "yes", "con": 0.0}, "judge/invalid"),
        (lambda: 1 / 0, "judge/raised"),
    ],
)
def test_judge_without_a_verdict_drops_the_episode_of_all_roles(play, value, kind):
    result = play(rewards=[verdict_of(value)[0]], max_steps=1)
    assert not result.groups
    assert {sample.failure_class for sample in result.failed} == {kind}
    assert len(result.failed) == 4


# Configuration


@pytest.mark.parametrize(
    "options",
    [
        {"frozen": "con"},
        {"frozen": ["cno"]},
        {"frozen": ["pro", "con"]},
        {"opponents": ["con"]},
        {"opponents": {"judge": print}},
        {"opponents": {"con": 7}},
        {"opponents": {"con": print, "pro": print}},
        {"instructions": {"judge": "Hi."}},
    ],
)
def test_invalid_role_options_are_refused(play, options):
    with pytest.raises(ConfigError):
        play(**options)


def test_an_instruction_with_an_unknown_column_stops_the_rollout(play):
    with pytest.raises(ConfigError):
        play(instructions={"pro": "You want {goal}."})


def test_a_judge_of_roles_is_refused_where_only_one_speaks(tokenizer):
    from rl4llm.envs import ChatEnv

    with pytest.raises(ConfigError):
        ChatEnv(dataset(), tokenizer, [Winner()], 1, 1)


# With a model


def test_logprobs_of_each_role_equal_the_models_on_its_tokens(play, model, tokenizer):
    import torch

    client = LocalClient(model, tokenizer, deterministic=True, stall_timeout_s=20)
    params = SamplingParams(max_tokens=5)
    result = play(DebateEnv, client=client, rewards=[Length()], group_size=2, params=params, max_steps=2)
    assert len(result.trajectories) == 8
    for item in result.trajectories:
        with torch.no_grad():
            logprobs = model(torch.tensor([item.token_ids])).logits[0].log_softmax(-1)
        at = 0
        for span in item.spans:
            for i, token in enumerate(span.token_ids):
                if span.author == "policy":
                    assert logprobs[at - 1, token].item() == pytest.approx(span.logprobs[i], abs=1e-5)
                at += 1


def test_deterministic_engine_waits_for_one_role_per_episode(play, model, tokenizer):
    def slow(messages):
        threading.Event().wait(0.01 * (len(messages[0].content) % 3))
        return "Hm."

    params = SamplingParams(max_tokens=4)
    options = {"roles": ["pro", "con", "host"], "opponents": {"con": slow}, "group_size": 2, "params": params}
    plays = []
    for _ in range(2):
        client = LocalClient(model, tokenizer, deterministic=True, stall_timeout_s=20)
        plays.append([item.spans for item in play(client=client, max_steps=2, **options).trajectories])
    assert plays[0] == plays[1]
    assert len(plays[0]) == 8


# check_env


@pytest.mark.parametrize("env_class", [Talk, DebateEnv])
def test_environments_of_roles_keep_the_contract(tokenizer, env_class):
    check_env(env_class(dataset(), tokenizer, [Length()], 1, 1), replies=["Answer: 0"])


def test_check_env_finds_a_role_whose_opening_depends_on_chance(tokenizer):
    moods = []

    class Moody(Talk):
        def opening(self, role, task, columns):
            moods.append(role)
            return [ChatMessage("system", f"Mood {len(moods)}."), *task]

    with pytest.raises(EnvError):
        check_env(Moody(dataset(), tokenizer, [Length()], 1, 1))


def test_check_env_finds_turns_that_depend_on_earlier_episodes(tokenizer):
    played = []

    class Forgets(Talk):
        def hears(self, role, episode):
            played.append(role)
            return f"{super().hears(role, episode)} {len(played)}"

    with pytest.raises(EnvError):
        check_env(Forgets(dataset(), tokenizer, [Length()], 1, 1))


def test_check_env_finds_a_loop_that_hides_a_failed_role(tokenizer):
    class Careless(Talk):
        async def _policys_line(self, seat, llm, sampling_params):
            line = await super()._policys_line(seat, llm, sampling_params)
            if line is None and seat.failure:
                seat.episode.seats["pro"].failure = None
            return line

    with pytest.raises(EnvError):
        check_env(Careless(dataset(), tokenizer, [Length()], 1, 1))

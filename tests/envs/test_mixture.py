"""Several environments in one rollout: each its rewards, tools and sampling, all of them at once, and faults by name."""

import threading

import pytest

from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.core.errors import EnvError, TooManyFailuresError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs import ToolMDPEnv
from rl4llm.envs.mixture import MixedRollout
from rl4llm.envs.rollout import Rollout
from rl4llm.rewards.combine import weighted_sum
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient
from rl4llm.tracking.episodes import EpisodeLog
from rl4llm.tracking.summary import summarize
from rl4llm.tracking.tracker import read_jsonl

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'


class Says(BaseRewardFunction):
    """1 for the ground truth."""

    success_at = 1.0

    def __init__(self, name="says"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return float(messages[-1].content == ground_truth)


class Turns(BaseRewardFunction):
    """How often the policy spoke."""

    def __init__(self, name="turns"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return float(sum(message.role == "assistant" for message in messages))


class Asking(BaseMDPEnv):
    def respond(self, sample):
        return [ChatMessage("user", "Go on.")]


class Breaking(BaseMDPEnv):
    def respond(self, sample):
        raise RuntimeError("the house is on fire")


class OwnLoop(BaseMDPEnv):
    """Plays all episodes in one go, with a stop reason that shows it."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample, reply in zip(
            env_state.sample_states, llm.chat(env_state.sample_states, sampling_params), strict=True
        ):
            sample.messages.append(reply)
            sample.finish("own")
        return env_state


def rows(size, name="p"):
    prompts = [{"role": "user", "content": f"Say {name}."}]
    return [{"prompt_id": str(number), "messages": prompts, "ground_truth": "85"} for number in range(size)]


@pytest.fixture
def mix(tokenizer):
    """mix(parts, script): a rollout of environments by name, each a tuple of class, rows and options, and its engine."""
    runner = Runner()

    def make(parts, script, *, max_failed_share=1.0, sampling=None, rewards=None):
        client = ScriptedClient(tokenizer, script)
        runner.run(client.load(WeightRef(0)))
        rollouts = []
        for name, (env_class, size, options) in parts.items():
            own = (rewards or {}).get(name, [Says()])
            transform = weighted_sum({reward.name: 2.0 for reward in own}) if len(own) > 1 else None
            env = env_class(rows(size, name), tokenizer, own, 2, 2, reward_transform_fn=transform, **options)
            renderer = Renderer(tokenizer, env.tool_schemas, roles=env.reply_roles)
            given = {
                "part": name,
                "sampling": (sampling or {}).get(name),
                "max_failed_share": max_failed_share,
            }
            rollouts.append(Rollout(env, client, renderer, runner, seed=0, **given))
        return MixedRollout(rollouts), client

    yield make
    runner.close()


PARTS = {
    "plain": (BaseMDPEnv, 2, {}),
    "tools": (ToolMDPEnv, 3, {"describe_tools": False}),
    "asking": (Asking, 1, {"max_steps": 2}),
}
PARAMS = SamplingParams(max_tokens=2000)


def test_row_numbers_run_across_parts_to_the_right_environment(mix):
    script = {"": ["85"], "0/tools/1/0": [CALL, "85"], "0/tools/1/1": [CALL, "85"]}
    mixed, _ = mix(PARTS, script, rewards={"asking": [Says(), Turns()]})
    assert (mixed.num_rows, mixed.group_size, mixed.count_groups([0, 3, 5])) == (6, 2, 3)
    result = mixed.play([5, 0, 3], step=0, sampling_params=PARAMS)
    assert [group.prompt_id for group in result.groups] == ["plain/0", "tools/1", "asking/0"]
    assert [[item.part for item in group.trajectories] for group in result.groups] == [
        [name] * 2 for name in PARTS
    ]
    assert [group.trajectories[0].num_turns for group in result.groups] == [1, 2, 2]
    rewards = [{"says": 1.0}, {"says": 1.0}, {"says": 1.0, "turns": 2.0}]
    assert [group.trajectories[0].rewards for group in result.groups] == rewards
    assert [group.rewards_G.tolist() for group in result.groups] == [[1.0, 1.0], [1.0, 1.0], [6.0, 6.0]]


def test_parts_are_played_at_once_and_announced_first(mix):
    met = threading.Barrier(2, timeout=20)

    class Meeting(BaseMDPEnv):
        def respond(self, sample):
            met.wait()
            return []

    parts = {"one": (Meeting, 1, {}), "two": (Meeting, 1, {})}
    mixed, client = mix(parts, {"": ["85"]})
    result = mixed.play([0, 1], step=0, sampling_params=PARAMS, group_size=1)
    assert len(result.trajectories) == 2 and not result.failed  # each waited for the other
    asked = {call.session for call in client.calls}
    assert asked == set(client.expected[:2]) == {"0/one/0/0", "0/two/0/0"}


def test_environment_with_a_custom_loop_can_be_a_part(mix):
    mixed, _ = mix({"own": (OwnLoop, 1, {}), **PARTS}, {"": ["85"]})
    result = mixed.play(range(7), step=0, sampling_params=PARAMS)
    assert len(result.groups) == 7
    assert [item.stop_reason for item in result.groups[0].trajectories] == ["own", "own"]


def test_part_sampling_is_combined_with_that_of_its_environment(mix):
    sampling = {"tools": {"max_tokens": 7, "stop": ("Z",)}, "plain": {"top_k": 3}}
    tools = (ToolMDPEnv, 3, {"describe_tools": False, "max_calls": 1})
    mixed, client = mix({**PARTS, "tools": tools}, {"": ["8"]}, sampling=sampling)
    mixed.play([0, 2, 5], step=0, sampling_params=PARAMS, group_size=1)
    asked = {call.session.split("/")[1]: call.params for call in client.calls}
    assert (asked["plain"].max_tokens, asked["plain"].top_k, asked["plain"].stop) == (2000, 3, ())
    assert (asked["tools"].max_tokens, asked["tools"].stop, asked["tools"].top_k) == (7, ("Z",), 0)
    assert set(asked["tools"].stop_token_ids) > set(asked["plain"].stop_token_ids)  # the end of a call
    assert asked["asking"] == PARAMS.replace(
        seed=asked["asking"].seed, stop_token_ids=asked["asking"].stop_token_ids
    )


def test_samples_of_a_part_do_not_depend_on_other_parts(mix):
    def seeds(parts, played):
        mixed, client = mix(parts, {"": ["8"]})
        mixed.play(played, step=3, sampling_params=PARAMS)
        return {call.session: call.params.seed for call in client.calls}

    alone = seeds({"tools": PARTS["tools"]}, [1])
    together = seeds(PARTS, [5, 3, 0])
    assert alone.items() <= together.items()
    assert together["3/plain/0/0"] != together["3/asking/0/0"]  # the same row number in two parts


def test_a_row_that_other_ranks_play_too_gets_other_samples(mix):
    mixed, _ = mix(PARTS, {"": ["8"]})
    result = mixed.play([2, 5], step=0, sampling_params=PARAMS, earlier={2: 1, 0: 3})
    assert [[item.extras["sample"] for item in group.trajectories] for group in result.groups] == [
        [2, 3],
        [0, 1],
    ]


def test_failures_of_a_part_count_for_it_and_spare_the_others(mix, tmp_path):
    parts = {"good": (BaseMDPEnv, 2, {}), "bad": (Breaking, 1, {})}
    mixed, client = mix(parts, {"": ["85"]})
    result = mixed.play([0, 1, 2], step=0, sampling_params=PARAMS)
    metrics = summarize(result.groups, result.failed)
    assert (metrics["failures"], metrics["failures/env/raised"]) == (2.0, 2.0)
    assert (metrics["part/bad/failures"], metrics["part/bad/failures/env/raised"]) == (2.0, 2.0)
    assert metrics["part/good/failures"] == 0.0
    assert (metrics["part/bad/trajectories"], metrics["part/good/trajectories"]) == (0.0, 4.0)
    assert (metrics["part/good/accuracy"], metrics["part/good/reward/mean"], metrics["part/good/share"]) == (
        1.0,
        1.0,
        1.0,
    )
    assert [call.session for call in client.calls].count("0/bad/0/0") == 2  # once more, from its seed
    log = EpisodeLog(tmp_path)
    log.log(1, result.groups, result.failed)
    stored = read_jsonl(tmp_path / "step-000001.jsonl")
    assert [row["part"] for row in stored] == ["bad", "bad", "good", "good", "good", "good"]
    assert "the house is on fire" in stored[0]["failure"]


def test_too_many_failures_stop_the_run_and_name_the_part(mix):
    mixed, _ = mix(
        {"good": (BaseMDPEnv, 2, {}), "bad": (Breaking, 1, {})}, {"": ["85"]}, max_failed_share=0.1
    )
    with pytest.raises(TooManyFailuresError) as caught:
        mixed.play([0, 1, 2], step=0, sampling_params=PARAMS)
    assert {sample.special.part for sample in caught.value.failed} == {"bad"}


def test_raising_loop_ends_all_parts_and_names_its_environment(mix):
    class Broken(BaseMDPEnv):
        async def _run_episode(self, sample, llm, sampling_params):
            raise KeyError("oops")

    mixed, _ = mix({**PARTS, "broken": (Broken, 1, {})}, {"": ["85"]})
    with pytest.raises(EnvError):
        mixed.play([0, 6], step=0, sampling_params=PARAMS)


def test_success_of_a_part_is_defined_by_its_own_reward(mix):
    class Open(Says):
        success_at = None

    class Strict(Says):
        success_at = 2.0

    parts = {"easy": (BaseMDPEnv, 1, {}), "hard": (BaseMDPEnv, 1, {}), "open": (BaseMDPEnv, 1, {})}
    mixed, _ = mix(parts, {"": ["85"]})
    for part, reward in zip(mixed.parts, (Says(), Strict(), Open()), strict=True):
        part.env.reward_functions = [reward]
    metrics = summarize(mixed.play([0, 1, 2], step=0, sampling_params=PARAMS).groups)
    assert (metrics["accuracy"], metrics["part/easy/accuracy"], metrics["part/hard/accuracy"]) == (
        0.5,
        1.0,
        0.0,
    )
    assert "part/open/accuracy" not in metrics and metrics["part/open/reward/mean"] == 1.0


def test_no_rows_are_an_empty_rollout(mix):
    mixed, client = mix(PARTS, {"": ["85"]})
    result = mixed.play([], step=0, sampling_params=PARAMS)
    assert (result.groups, result.failed, client.calls) == ((), (), [])

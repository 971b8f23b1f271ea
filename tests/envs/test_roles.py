"""Several roles in one episode: each has its own tokens, reward and group; what breaks for one breaks for all."""

import pytest

from rl4llm.core.base_env import BaseMDPEnv, ChatMessage
from rl4llm.core.errors import ConfigError, EngineError, TooManyFailuresError
from rl4llm.core.types import Group, SamplingParams, TokenSpan, Trajectory
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.rewards import RewardFailure
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient
from rl4llm.tracking.summary import summarize
from tests.envs.test_rollout import Length


class Talk(BaseMDPEnv):
    """The asker says something, the answerer receives it and answers: a custom loop over roles."""

    roles = ("asker", "answerer")

    def opening(self, role, task, columns):
        return [ChatMessage("system", f"You are the {role}."), *task]

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample in env_state.sample_states:
            if sample.role == "asker":
                llm.run(self.talk(sample, sample.episode.seats["answerer"], llm, sampling_params))
        return env_state

    async def talk(self, asker, answerer, llm, params):
        await llm.reply(asker, params)
        if not asker.done:
            answerer.messages[-1] = ChatMessage(
                "user", f"{answerer.messages[-1].content} {asker.last_message.content}"
            )
            await llm.reply(answerer, params)


def dataset(size=2):
    return [
        {"prompt_id": f"p{i}", "messages": [{"role": "user", "content": f"Number {i}?"}], "ground_truth": i}
        for i in range(size)
    ]


def replies(session, prompt_ids):
    """Another line for each role and attempt."""
    _, prompt_id, role, index = session.split("/")
    return f"{role} {'ab'[int(index)] * (int(index) + 1)} of {prompt_id}"


@pytest.fixture
def play(tokenizer):
    runner = Runner()

    def run(env_class=Talk, script=replies, rewards=None, client=None, max_failed_share=1.0, **attributes):
        client = client or ScriptedClient(tokenizer, script)
        runner.run(client.load(WeightRef(0)))
        kind = type(env_class.__name__, (env_class,), attributes)
        env = kind(dataset(), tokenizer, rewards or [Length()], 2, 2, max_steps=2)
        rollout = Rollout(env, client, Renderer(tokenizer), runner, seed=1, max_failed_share=max_failed_share)
        return rollout.play((0, 1), step=0, sampling_params=SamplingParams())

    yield run
    runner.close()


def test_each_role_is_a_group_with_its_own_tokens_and_rewards(play, tokenizer):
    groups = play().groups
    assert [(group.prompt_id, group.role) for group in groups] == [
        (prompt, role) for prompt in ("p0", "p1") for role in ("asker", "answerer")
    ]
    for group in groups:
        for index, trajectory in enumerate(group.trajectories):
            said = tokenizer.decode(trajectory.policy_spans[0].token_ids, skip_special_tokens=True)
            assert said == replies(f"0/{group.prompt_id}/{group.role}/{index}", ())
            assert trajectory.reward == len(said)
            assert trajectory.num_turns == 1


def test_roles_share_a_prefix_up_to_the_first_line(play, tokenizer):
    for group in play().groups:
        starts = [tokenizer.decode(trajectory.spans[0].token_ids) for trajectory in group.trajectories]
        assert len(set(starts)) == 1
        assert f"You are the {group.role}." in starts[0]
        for index, trajectory in enumerate(group.trajectories):
            heard = replies(f"0/{group.prompt_id}/asker/{index}", ())
            whole = tokenizer.decode([token for span in trajectory.spans[:-1] for token in span.token_ids])
            rendered = Renderer(tokenizer).first(trajectory.messages[:-1])
            assert trajectory.token_ids[: len(rendered)] == rendered
            assert (heard in whole) == (group.role == "answerer")
            assert heard[-8:] not in starts[0]


def test_roles_of_one_sample_have_different_seeds(play, tokenizer):
    client = ScriptedClient(tokenizer, replies)
    play(client=client)
    assert len({call.params.seed for call in client.calls}) == len(client.calls) == 8


def test_a_role_that_fails_takes_its_episode_along_and_no_other(play):
    class Stumbling(Talk):
        async def talk(self, asker, answerer, llm, params):
            await super().talk(asker, answerer, llm, params)
            if (asker.prompt_id, asker.index) == ("p0", 1):
                answerer.fail("the opponent went away", "opponent/unreachable")

    result = play(Stumbling)
    assert {(sample.prompt_id, sample.index, sample.role) for sample in result.failed} == {
        ("p0", 1, "asker"),
        ("p0", 1, "answerer"),
    }
    assert {sample.failure for sample in result.failed} == {
        "the opponent went away",
        "role 'answerer': the opponent went away",
    }
    assert [len(group.trajectories) for group in result.groups] == [1, 1, 2, 2]
    with pytest.raises(TooManyFailuresError):
        play(Stumbling, max_failed_share=0.2)


def test_a_failed_episode_is_played_again_with_all_its_roles(play):
    stumbled = []

    class StumblesOnce(Talk):
        async def talk(self, asker, answerer, llm, params):
            await super().talk(asker, answerer, llm, params)
            if (asker.prompt_id, asker.index) == ("p1", 0) and not stumbled:
                stumbled.append(asker.fail("once", "env/once"))

    result = play(StumblesOnce)
    assert not result.failed
    assert all(len(group.trajectories) == 2 for group in result.groups)
    again = {
        (t.prompt_id, t.role, t.extras["sample"])
        for t in result.trajectories
        if "played_again_after" in t.extras
    }
    assert again == {("p1", "asker", 0), ("p1", "answerer", 0)}


def test_episode_is_dropped_if_one_role_cannot_be_scored(play):
    class OnlyAskers(Length):
        def score_batch(self, samples):
            broken = [sample.role == "answerer" and sample.index == 0 for sample in samples]
            return [RewardFailure("no verdict") if is_broken else 1.0 for is_broken in broken]

    result = play(rewards=[OnlyAskers()])
    assert [len(group.trajectories) for group in result.groups] == [1, 1, 1, 1]
    assert {sample.index for sample in result.failed} == {0}
    assert len(result.failed) == 4


def test_a_role_that_had_nothing_to_say_is_no_failure(play):
    class Monologue(Talk):
        async def talk(self, asker, answerer, llm, params):
            await llm.reply(asker, params)

    result = play(Monologue)
    assert not result.failed
    assert {group.role for group in result.groups} == {"asker"}


def test_rewards_receive_the_role_and_the_transcript(play):
    seen = []

    class Told(Length):
        def __call__(self, messages, ground_truth, *, role, transcript, **columns):
            seen.append((role, list(transcript)))
            return 1.0

    play(rewards=[Told()])
    assert {role for role, _ in seen} == {"asker", "answerer"}


def test_metrics_cover_the_learning_roles_and_each_role(play):
    result = play(frozen=("answerer",))
    assert [group.frozen for group in result.groups] == [False, True, False, True]
    metrics = summarize(result.groups)
    assert (
        metrics["trajectories"]
        == metrics["role/asker/trajectories"]
        == metrics["role/answerer/trajectories"]
        == 4
    )
    assert metrics["reward/mean"] == metrics["role/asker/reward/mean"] != metrics["role/answerer/reward/mean"]
    assert not any(name.startswith("role/") for name in summarize([Group("p", (trajectory(),))]))


def test_a_group_holds_one_role():
    with pytest.raises(EngineError):
        Group("p", (trajectory("pro"), trajectory("con")))


def trajectory(role=""):
    spans = (TokenSpan.context([1]), TokenSpan((2,), "policy", (-0.5,), 0))
    return Trajectory("p", spans, (), {"x": 1.0}, 1.0, "done", role=role)


@pytest.mark.parametrize(
    "attributes",
    [
        {"frozen": ("asked",)},
        {"opponents": {"nobody": object()}},
        {"frozen": ("asker", "answerer")},
        {"frozen": ("asker",), "opponents": {"answerer": object()}},
        {"roles": ("asker", "asker")},
        {"roles": ("asker", "an/swerer")},
    ],
)
def test_roles_that_cannot_be_are_refused(play, attributes):
    with pytest.raises(ConfigError):
        play(**attributes)


def test_dataset_columns_named_like_the_role_are_refused(tokenizer):
    rows = [{**row, "role": "x"} for row in dataset()]
    with pytest.raises(ConfigError):
        Talk(rows, tokenizer, [Length()], 1, 1)

"""Environments of Gymnasium, played in words."""

from typing import ClassVar

import pytest
from played import played

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.adapters.gymnasium import GymnasiumEnv
from rl4llm.extensions.adapters.step_rewards import StepRewards
from rl4llm.testing import ScriptedClient, check_env

gymnasium = pytest.importorskip("gymnasium")
FIXED = {
    "task": "FrozenLake-v1",
    "task_options": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
PATH = [
    "down",
    "I go down.",
    "right",
    "Down, not left: down",
    "r\u0131ght",  # without regard to case, which is not what `lower` makes of it
    "right",
]  # to the goal of the usual lake


class Shout(gymnasium.Env):
    """Texts in and out: repeats the last text in capitals, and rewards an echo of it.

    Args:
        render_mode: not for players.
    """

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(min_length=1, max_length=20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.last = f"start{self.np_random.integers(1000)}"
        return self.last, {}

    def step(self, action):
        reward, self.last = float(action == self.last), action.upper()
        return self.last, reward, False, action == "stop", {}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    gymnasium.register("Shout-v0", entry_point=Shout)
    gymnasium.register("Broken-v0", entry_point=Broken)
    gymnasium.register("Pair-v0", entry_point=Pair)
    gymnasium.register("Ruled-v0", entry_point=Ruled)


class Pair(Shout):  # without a docstring
    observation_space = gymnasium.spaces.Tuple(
        (gymnasium.spaces.Discrete(3, start=1), gymnasium.spaces.Dict(side=gymnasium.spaces.Discrete(2)))
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (1, {"side": 0}), {}


class Ruled(Pair):
    """For programmers."""

    metadata: ClassVar = {"rules": "Observation: what you see. Say 1."}


class Broken(Shout):
    """Begins otherwise each time, whatever the seed."""

    begins = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Broken.begins += 1
        return f"beginning {Broken.begins}", {}


def made(tokenizer, limit=2, split="train", max_steps=8, **options):
    rows = GymnasiumEnv.prompts(split, limit, **options)
    return GymnasiumEnv(rows, tokenizer, [StepRewards()], batch_size=1, group_size=2, max_steps=max_steps)


def play(env, tokenizer, script, group_size=2):
    return played(env, ScriptedClient(tokenizer, script), group_size=group_size)


@pytest.mark.parametrize(
    "options", [FIXED, {"task": "Taxi-v4"}, {"task": "Blackjack-v1"}, {"task": "Shout-v0"}]
)
def test_environments_of_gymnasium_keep_the_contract(tokenizer, options):
    check_env(made(tokenizer, **options), ["1", "right", "stop"])


def test_gymnasium_episode_follows_the_library_and_its_rewards(tokenizer):
    env = made(tokenizer, **FIXED)
    prompt = env.dataset[0]["prompt_id"]
    won, lost = play(env, tokenizer, {f"0/{prompt}/0": PATH, "": ["right", "what?", "down"]}).trajectories
    assert (won.reward, won.turn_rewards, won.stop_reason) == (1.0, (0.0,) * 5 + (1.0,), "done")
    assert won.messages[0].content.endswith("one action. Actions: left, down, right, up.")
    assert won.messages[1].content == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert won.messages[3].content.endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert won.extras["metrics"] == {"return": 1.0, "invalid_actions": 0}
    assert (lost.reward, lost.stop_reason, lost.num_turns) == (0.0, "done", 3)  # through the ice
    assert lost.messages[5].content == "That names no action. Actions: left, down, right, up."
    assert lost.extras["metrics"]["invalid_actions"] == 1


def told(**options):
    return GymnasiumEnv.prompts("train", 1, **options)[0]["messages"][0]["content"]


def test_a_game_begins_with_the_rules_of_its_docstring():
    lake, blackjack = told(**FIXED), told(task="Blackjack-v1")
    assert lake.startswith("Frozen lake involves crossing a frozen lake from start to goal")
    assert "Rewards:\nDefault reward schedule:\n- Reach goal: +1" in lake
    assert 'The map:\n- "S" for Start tile\n- "G" for Goal tile' in lake  # the letters that the policy sees
    assert "0: Move left" in told(task="FrozenLake-v1")
    assert "0: Move left" not in lake and "current_row" not in lake  # the names and the map stand for both
    assert "- 1: Hit" in blackjack and "the dealer's one showing card (1-10 where 1 is ace)" in blackjack
    for text in (lake, blackjack, told(task="Taxi-v4"), told(task="CliffWalking-v1")):
        assert not any(word in text for word in ("gym.make", "Version History", "Information", "<a ", "##"))


def test_games_without_documented_rules_describe_their_spaces():
    described = "An observation is (a whole number from 1 to 3, 'side': a whole number from 0 to 1)."
    assert told(task="Pair-v0") == f"{described}\n\nEach of your turns is one action. Actions: 0, 1."
    assert told(task="Ruled-v0").startswith("Observation: what you see. Say 1.\n\nEach of")
    assert told(task="Shout-v0") == (
        "Texts in and out: repeats the last text in capitals, and rewards an echo of it.\n\n"
        "Each of your turns is one action. An action is a text of 1 to 20 characters."
    )
    assert told(task="Shout-v0", instructions="Shout.") == "Shout."


def test_texts_are_actions_and_observations_as_they_are(tokenizer):
    env = made(tokenizer, task="Shout-v0")
    begin = env.dataset[0]["messages"][-1]["content"]
    (episode,) = play(env, tokenizer, {"": [begin, "x" * 30, "stop"]}, group_size=1).trajectories
    assert episode.turn_rewards == (1.0, 0.0, 0.0)
    assert episode.messages[3].content == begin.upper()
    assert episode.messages[5].content == "That is not an action. An action is a text of 1 to 20 characters."
    assert episode.stop_reason == "done"


def test_gymnasium_splits_and_episodes_have_different_seeds():
    def seeds(split, **options):
        return [row["gymnasium"]["seed"] for row in GymnasiumEnv.prompts(split, 50, **FIXED, **options)]

    assert len({*seeds("train"), *seeds("test")}) == 100
    assert seeds("train") == seeds("train") != seeds("train", task_seed=1)


def test_gymnasium_ignoring_its_seed_fails_the_episode(tokenizer):
    result = play(made(tokenizer, task="Broken-v0"), tokenizer, {"": ["hello"]})
    assert not result.trajectories and {sample.failure_class for sample in result.failed} == {"env/raised"}


@pytest.mark.parametrize("options", [
    {"task": "FrozenLake-v1", "actions": ["left"]},
    {"task": "CartPole-v1", "actions": ["left", "left"]},
    {"task": "Pendulum-v1"},
    {"task": "Taxi-v4", "split": "dev"},
])  # fmt: skip
def test_unplayable_tasks_and_unknown_splits_are_refused(options):
    with pytest.raises(ConfigError):
        GymnasiumEnv.prompts(**{"split": "train", "limit": 1, **options})

"""Wrappers change scores and nothing else: failures stay failures, turns stay turns, and examples hold through them."""

import math

import pytest
import torch

from rl4llm.core.base_env import BaseRewardFunction, ChatMessage, RewardExample, SampleState
from rl4llm.core.errors import ConfigError, RewardError
from rl4llm.rewards import Clip, Gate, RewardFailure, Scale, Threshold, as_reward_function, check_examples
from rl4llm.rewards.scoring import score


class Number(BaseRewardFunction):
    """The number that the last message is."""

    def __init__(self, name="number", turns=False):
        super().__init__(name)
        self.per_turn = turns
        self.asked = []
        self.closed = False

    def __call__(self, messages, ground_truth, **kwargs):
        self.asked.append(messages[-1].content)
        numbers = [float(message.content) for message in messages if message.role == "assistant"]
        return numbers if self.per_turn else numbers[-1]

    def examples(self):
        score = [3.0] if self.per_turn else 3.0
        return [RewardExample([ChatMessage("user", "?"), ChatMessage("assistant", "3")], "", score)]

    def close(self):
        self.closed = True


def samples(*replies):
    messages = [[ChatMessage("user", "?"), ChatMessage("assistant", reply)] for reply in replies]
    return [SampleState("p", index, both, "", init_msg_size=1) for index, both in enumerate(messages)]


def even(completions):
    return torch.tensor([float(text) % 2 == 0 for text in completions])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda reward: Clip(reward, -1.0, 1.0), [-1.0, 0.5, 1.0]),
        (lambda reward: Clip(reward, high=2), [-4.0, 0.5, 2.0]),
        (lambda reward: Threshold(reward, 0.5), [0.0, 1.0, 1.0]),
        (lambda reward: Threshold(reward, 1, above=5, below=-5), [-5.0, -5.0, 5.0]),
        (lambda reward: Scale(reward, 0.5, 1.0), [-1.0, 1.25, 2.5]),
        (lambda reward: Gate(reward, even), [-4.0, 0.0, 0.0]),
        (lambda reward: Gate(reward, even, otherwise=-2), [-4.0, -2.0, -2.0]),
        (lambda reward: Scale(Clip(reward, 0), -1.0), [0.0, -0.5, -3.0]),
    ],
)
def test_scores_are_changed_as_the_wrapper_says(make, expected):
    number = Number()
    wrapped = make(number)
    assert score(samples("-4", "0.5", "3"), [wrapped]).rewards["number"].tolist() == expected
    assert wrapped([ChatMessage("assistant", "-4")], "") == expected[0]
    check_examples([wrapped])
    wrapped.close()
    assert number.closed


def test_a_configuration_may_nest_them():
    spec = {
        "name": "gate",
        "reward": {"name": "scale", "reward": "format", "factor": 0.5},
        "by": "math",
        "label": "layout",
    }
    wrapped = as_reward_function(spec)
    reply = "<think>9*2</think><answer>{}</answer>"
    batch = samples(reply.format("18"), reply.format("17"), "18")
    for sample in batch:
        sample.ground_truth = "18"
    assert score(batch, [wrapped]).rewards["layout"].tolist() == [0.5, 0.0, 0.0]
    check_examples([wrapped])
    wrapped.close()


@pytest.mark.parametrize("value", [RewardFailure("no worker"), math.nan, None, "1", ValueError("broken")])
@pytest.mark.parametrize(
    "make",
    [
        lambda inner: Clip(inner, 0, 1),
        lambda inner: Threshold(inner, 0.5),
        lambda inner: Gate(Number(), inner),
    ],
)
def test_what_fails_inside_fails_the_sample_and_is_never_a_score(make, value):
    class Fails(Number):
        def score_batch(self, samples):
            return [value if sample.messages[-1].content == "1" else 1.0 for sample in samples]

    batch = samples("1", "2")
    scores = score(batch, [make(Fails("fails"))])
    assert batch[0].failure is not None and scores.reward.isnan().tolist() == [True, False]


def test_wrappers_apply_to_each_turn_and_a_gate_zeroes_all():
    batch = samples("1", "2")
    for sample in batch:
        sample.messages += [ChatMessage("tool", "?"), ChatMessage("assistant", sample.messages[-1].content)]
    wrapped = Gate(Scale(Number(turns=True), 10.0), even)
    score(batch, [wrapped])
    assert [sample.turn_rewards for sample in batch] == [{0: 0.0, 1: 0.0}, {0: 20.0, 1: 20.0}]
    check_examples([wrapped])


def test_a_gate_does_not_ask_about_what_it_shuts_out():
    number = Number()
    score(samples("1", "2", "3"), [Gate(number, even)])
    assert number.asked == ["2"]


def test_examples_of_what_is_wrapped_are_checked_too():
    class Wrong(Number):
        def __call__(self, messages, ground_truth, **kwargs):
            return 0.0

    for wrapped in (Clip(Wrong(), 0, 5), Gate(Number(), Wrong("wrong")), Gate(Wrong(), even)):
        with pytest.raises(RewardError):
            check_examples([wrapped])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Clip(Number(), 1, 0),
        lambda: as_reward_function({"name": "scale", "reward": "format", "factor": math.nan}),
        lambda: as_reward_function({"name": "clip", "reward": "format", "hi": 1}),
        lambda: as_reward_function({"name": "clip", "high": 1}),
        lambda: as_reward_function({"name": "gate", "reward": "format", "by": "mth"}),
        lambda: Gate(Number(turns=True), Number(turns=True)),
    ],
)
def test_what_cannot_work_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("turns", [False, True])
def test_a_gate_by_scores_of_turns_fails_its_samples(turns):
    batch, gate = samples("1"), Gate(Number(turns=turns), lambda completions: [[0.5]])
    assert score(batch, [gate]).reward.isnan().all() and batch[0].failure

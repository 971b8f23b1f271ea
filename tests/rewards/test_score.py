"""Scoring: a fault of a reward stays with the sample it concerns, and never becomes a score."""

import asyncio
import copy
import gc
import logging
import math
import threading

import pytest
import torch

from rl4llm.core.base_env import BaseRewardFunction, ChatMessage, RewardExample, SampleState
from rl4llm.core.errors import RewardError
from rl4llm.rewards import RewardFailure
from rl4llm.rewards.ask import Broken, ask
from rl4llm.rewards.combine import weighted_sum
from rl4llm.rewards.scoring import _turns, check_examples, score


class Told(BaseRewardFunction):
    """Scores each sample with what its reply is in `table`; exceptions there are raised."""

    def __init__(self, table, name="told", examples=()):
        super().__init__(name)
        self.table = table
        self.seen = []
        self._examples = examples

    def __call__(self, messages, ground_truth, **kwargs):
        self.seen.append(messages[-1].content)
        value = self.table[messages[-1].content]
        if isinstance(value, BaseException):
            raise value
        return value

    def examples(self):
        return self._examples


def samples(*replies):
    messages = [[ChatMessage("user", "?"), ChatMessage("assistant", reply)] for reply in replies]
    return [SampleState("p", index, both, "", init_msg_size=1) for index, both in enumerate(messages)]


def same(left, right):
    return torch.allclose(left, torch.tensor(right, dtype=left.dtype), equal_nan=True)


def test_scores_have_names_and_one_reward_needs_no_transform():
    scores = score(samples("a", "b"), [Told({"a": 0.1, "b": True})])
    assert scores.rewards["told"].tolist() == [0.1, 1.0] and scores.reward.tolist() == [0.1, 1.0]
    assert scores.reward.shape == (2,)


def test_a_reward_that_edits_messages_does_not_affect_the_rest():
    class Edits(BaseRewardFunction):
        def __call__(self, messages, ground_truth, **kwargs):
            messages[-1].tool_calls[0]["function"]["arguments"] = {"x": 1}
            del messages[:]
            return 0.0

    class Looks(BaseRewardFunction):
        def __call__(self, messages, ground_truth, **kwargs):
            return float(messages == expected)

    def conversation():
        call = {"function": {"name": "add", "arguments": '{"x": 1}'}}
        return [ChatMessage("user", "?"), ChatMessage("assistant", "", (call,))]

    (sample,), expected = [SampleState("p", 0, conversation(), "", init_msg_size=1)], conversation()
    scores = score([sample], [Edits("edits"), Looks("looks")], weighted_sum({"edits": 1.0, "looks": 1.0}))
    assert scores.reward.tolist() == [1.0]
    assert sample.messages == expected


def test_a_transform_combines_several_rewards():
    rewards = [Told({"a": 1.0, "b": 0.0}, "x"), Told({"a": 0.5, "b": 2.0}, "y")]
    scores = score(samples("a", "b"), rewards, weighted_sum({"x": 1.0, "y": 2.0}))
    assert scores.reward.tolist() == [2.0, 4.0]
    assert scores.rewards["y"].tolist() == [0.5, 2.0]


def test_no_samples_give_no_scores():
    assert score([], [Told({})]).reward.shape == (0,)


def test_a_reward_that_raises_fails_only_that_sample():
    batch = samples("a", "b", "c")
    scores = score(batch, [Told({"a": 1.0, "b": ValueError("no digits"), "c": 0.0})])
    assert same(scores.reward, [1.0, math.nan, 0.0])
    assert batch[1].failure.startswith(
        "reward 'told' raised ValueError: no digits (tests/rewards/test_score.py:"
    )
    assert batch[1].done and batch[1].stop_reason == "failed"
    assert batch[0].failure is None and batch[2].failure is None


def test_a_reward_that_raises_is_retried_once():
    class Stumbles(Told):
        def __call__(self, messages, ground_truth, **kwargs):
            first = messages[-1].content not in self.seen
            score = super().__call__(messages, ground_truth)
            if first and messages[-1].content != "steady":
                raise ConnectionError("reset")
            return score

    batch = samples("steady", "stumbles", "broken")
    scores = score(batch, [Stumbles({"steady": 1.0, "stumbles": 0.5, "broken": KeyError("x")})])
    assert same(scores.reward, [1.0, 0.5, math.nan])
    assert [sample.failure_class for sample in batch] == ["", "", "told/raised"]


def test_a_reward_failure_is_not_retried():
    batch, told = samples("a"), Told({"a": RewardFailure("no worker")})
    told.score_batch = lambda samples: [told.seen.append("a") or RewardFailure("no worker")]
    assert score(batch, [told]).reward.isnan().all()
    assert batch[0].failure_class == "told/unavailable" and told.seen == ["a"]


def test_an_async_reward_scores_all_samples_at_once():
    class Later(Told):
        async def __call__(self, messages, ground_truth, **kwargs):
            waiting.append(messages)
            while len(waiting) < 3:
                await asyncio.sleep(0.001)
            return super().__call__(messages, ground_truth)

    waiting, batch = [], samples("a", "b", "c")
    scores = score(batch, [Later({"a": 1.0, "b": ValueError("no digits"), "c": 0.0})])
    assert same(scores.reward, [1.0, math.nan, 0.0])
    assert batch[1].failure.startswith(
        "reward 'told' raised ValueError: no digits (tests/rewards/test_score.py:"
    )


def conversation(*turns):
    said = [ChatMessage("user", "?")]
    for turn in turns:
        said += [ChatMessage("assistant", turn), ChatMessage("tool", "noted")]
    return SampleState("p", 0, said, "", init_msg_size=1)


class Turns(Told):
    per_turn = True

    def __call__(self, messages, ground_truth, **kwargs):
        return [self.table[message.content] for message in messages if message.role == "assistant"]


def test_turn_rewards_bypass_the_transform():
    batch = [conversation("a", "b"), conversation("b")]
    batch[0].reward_turn(0.25)
    turns, whole = Turns({"a": 0.5, "b": -1.0}, "turns"), Told({"noted": 2.0}, "whole")
    scores = score(batch, [turns, whole])
    assert scores.reward.tolist() == [2.0, 2.0] and scores.rewards["turns"].tolist() == [-0.5, -1.0]
    assert [sample.turn_rewards for sample in batch] == [{0: 0.5, 1: -0.75}, {0: -1.0}]
    assert score([conversation("a")], [turns]).reward.tolist() == [0.0]


@pytest.mark.parametrize("value", [math.nan, None, "1"])
def test_turns_of_a_sample_that_any_reward_failed_earn_nothing(value):
    batch = [conversation("a", "b"), conversation("b")]
    scores = score(batch, [Turns({"a": value, "b": 1.0}, "turns"), Told({"noted": 1.0})])
    assert batch[0].failure_class == "turns/invalid" and batch[0].turn_rewards == {}
    assert same(scores.reward, [math.nan, 1.0]) and batch[1].turn_rewards == {0: 1.0}
    late = [conversation("b")]
    score(late, [Turns({"b": 1.0}, "turns"), Told({"noted": value})])
    assert late[0].failure_class == "told/invalid" and late[0].turn_rewards == {}


@pytest.mark.parametrize("returned", [[1.0], [1.0] * 3, 1.0, None])
def test_turn_rewards_have_one_number_per_policy_turn(returned):
    class Other(Turns):
        def __call__(self, messages, ground_truth, **kwargs):
            return returned

    batch = [conversation("a", "b")]
    score(batch, [Other({}, "turns")])
    assert batch[0].failure_class == "turns/invalid"


def test_a_reward_that_exits_fails_only_the_sample():
    batch = samples("a", "b")
    assert same(score(batch, [Told({"a": SystemExit(0), "b": 1.0})]).reward, [math.nan, 1.0])
    assert "sys.exit" in batch[0].failure


def test_ctrl_c_in_a_reward_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        score(samples("a"), [Told({"a": KeyboardInterrupt()})])


def test_failed_samples_are_not_scored_and_stay_as_they_failed():
    batch = samples("a", "b")
    batch[0].fail("the environment broke")
    reward = Told({"b": 1.0})
    scores = score(batch, [reward])
    assert same(scores.reward, [math.nan, 1.0]) and reward.seen == ["b"]
    assert batch[0].failure == "the environment broke"


def test_a_sample_that_one_reward_failed_counts_for_no_reward():
    batch = samples("a", "b")
    first, second = Told({"a": 1.0, "b": 1.0}, "first"), Told({"a": ValueError(), "b": 1.0}, "second")
    third = Told({"b": 1.0}, "third")
    scores = score(batch, [first, second, third], lambda rewards: sum(rewards.values()))
    assert same(scores.reward, [math.nan, 3.0]) and same(scores.rewards["first"], [math.nan, 1.0])
    assert third.seen == ["b"]


def test_a_transform_sees_only_the_samples_that_are_left():
    batch = samples("a", "b", "c")
    told = Told({"a": 1.0, "b": ValueError(), "c": 3.0})
    scores = score(batch, [told], lambda rewards: rewards["told"] - rewards["told"].mean())
    assert same(scores.reward, [-1.0, math.nan, 1.0])


def test_when_every_sample_failed_the_transform_is_not_asked():
    batch = samples("a")
    assert score(batch, [Told({"a": ValueError()})], lambda rewards: 1 / 0).reward.isnan().all()


@pytest.mark.parametrize(
    "transform",
    [
        lambda rewards: rewards["told"].sum(),
        lambda rewards: rewards["told"][None],
        lambda rewards: [1.0, 2.0],
        lambda rewards: rewards["told"] / 0,
        lambda rewards: rewards["x"],
    ],
)
def test_a_transform_that_breaks_its_contract_stops_the_run(transform):
    with pytest.raises(RewardError):
        score(samples("a", "b"), [Told({"a": 0.0, "b": 1.0})], transform)


@pytest.mark.parametrize(
    "rewards", [[Told({"a": 1.0}, "x"), Told({"a": 1.0}, "y")], [Told({"a": RewardError("no column")})]]
)
def test_rewards_that_break_their_contract_stop_the_run(rewards):
    with pytest.raises(RewardError):
        score(samples("a"), rewards)


@pytest.mark.parametrize(
    "value", [math.nan, None, "1.0", torch.ones(2), 10**5000, "x" * 10_000], ids=range(6)
)
def test_what_is_no_finite_number_fails_the_sample(value):
    batch = samples("bad", "good")
    assert same(score(batch, [Told({"bad": value, "good": 1.0})]).reward, [math.nan, 1.0])
    assert batch[0].failure_class == "told/invalid" and len(batch[0].failure) < 200


def test_a_reward_over_its_time_limit_fails_its_samples():
    release = threading.Event()

    class Hangs(Told):
        def score_batch(self, samples):
            release.wait(60)
            return [1.0] * len(samples)

    batch = samples("a", "b")
    scores = score(batch, [Hangs({})], timeout_s=0.2)
    release.set()
    assert scores.reward.isnan().all()
    assert batch[0].failure == "reward 'told' took more than 0.2 s on 2 samples"
    assert score(samples("a"), [Told({"a": 1.0})], timeout_s=30).reward.tolist() == [1.0]


class Left:
    """A deadline by what is left of it at each look, on a machine of any speed; then nothing is."""

    slow_after_s, timeout_s = 60.0, 0.3

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    @property
    def left_s(self):
        return self.seconds.pop(0) if self.seconds else 0.0


def test_a_deadline_covers_all_samples_scored_one_by_one():
    class Hangs(BaseRewardFunction):
        def score_batch(self, samples):
            if len(samples) > 1:
                raise ValueError("not this batch")
            return super().score_batch(samples)

        def __call__(self, messages, ground_truth, **kwargs):
            return released.wait(60) if messages[-1].content == "hangs" else 1.0

    released, batch, before_and_in_one = threading.Event(), 60, (60, 60)
    left = Left(batch, *before_and_in_one, *before_and_in_one[:1], 0.05)
    first, *others = ask(Hangs("hangs"), samples("a", "hangs", "b", "c"), left)
    waiting = [thread for thread in threading.enumerate() if thread.name == "rl4llm-reward-hangs"]
    released.set()
    assert first == [1.0] and len(waiting) == 1
    assert others == [Broken("timeout", "reward 'hangs' took more than 0.3 s on 1 samples")] * 3


def test_a_reward_that_takes_long_is_named_in_the_log(caplog):
    said = threading.Event()

    class Slow(Told):
        def score_batch(self, samples):
            assert said.wait(30)
            return [1.0] * len(samples)

    class Listener(logging.Handler):
        def emit(self, record):
            said.set()

    listener = Listener()
    logger = logging.getLogger("rl4llm.rewards")
    logger.addHandler(listener)
    try:
        assert score(samples("a"), [Slow({})], slow_after_s=0.05).reward.tolist() == [1.0]
    finally:
        logger.removeHandler(listener)
    assert "Reward 'told' has been running for" in caplog.text


def example(reply, promised):
    return RewardExample([ChatMessage("user", "?"), ChatMessage("assistant", reply)], "g", promised)


def test_examples_that_hold_pass_in_silence():
    check_examples([Told({"a": 0.3, "b": 0.0}, examples=[example("a", 0.3), example("b", 0.0)]), Told({})])


def test_failed_examples_are_listed_with_expected_and_actual():
    table = {"a": 0.0, "b": 0.0, "c": ValueError("cannot"), "d": math.nan}
    examples = [example("a", 1.0), example("b", 0.0), example("c", 1.0), example("d", 1.0)]
    with pytest.raises(RewardError) as caught:
        check_examples([Told(table, examples=examples)])
    text = str(caught.value)
    assert "'a' for ground truth 'g': expected 1, but reward 'told' gave 0" in text
    assert "'c' for ground truth 'g': expected 1, but reward 'told' raised ValueError: cannot" in text
    assert "'d' for ground truth 'g': expected 1, but reward 'told' returned nan" in text
    assert "'b' for" not in text


def test_a_reward_can_be_copied_after_use_and_leaves_nothing():
    reward = Told({"a": 1.0})
    key = id(reward)
    score(samples("a"), [reward])
    assert key in _turns and copy.deepcopy(reward).table == {"a": 1.0}
    del reward
    gc.collect()
    assert key not in _turns


def test_a_reward_is_named_like_its_class():
    class Right(BaseRewardFunction):
        def __call__(self, messages, ground_truth, **columns):
            return 1.0

    assert (Right().name, Right("other").name) == ("Right", "other")
    with pytest.raises(RewardError):
        Right("")

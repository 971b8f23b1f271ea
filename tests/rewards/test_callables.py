"""Whatever may stand for a reward becomes one, or is refused with what is accepted."""

import asyncio
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch

from rl4llm.core.base_env import BaseRewardFunction, ChatMessage, RewardExample, SampleState
from rl4llm.core.errors import ConfigError, RewardError
from rl4llm.rewards import REWARDS, LengthReward, as_reward_function, register_reward
from rl4llm.rewards.callables import BatchCallable
from rl4llm.rewards.scoring import check_examples, score


class Exact(BaseRewardFunction):
    def __init__(self, name="exact", lower=False):
        super().__init__(name)
        self.lower = lower

    def __call__(self, messages, ground_truth, **kwargs):
        return float(messages[-1].content == ground_truth)


def lengths(completions, **columns):
    return [float(len(text)) for text in completions]


def samples(*replies):
    return [
        SampleState(
            f"p{index}",
            index,
            [ChatMessage("system", "s"), ChatMessage("user", f"q{index}"), ChatMessage("assistant", reply)],
            f"g{index}",
            {"level": index, "source": "here"},
            init_msg_size=2,
        )
        for index, reply in enumerate(replies)
    ]


class Words(Exact):
    def __init__(self, *words, name="words"):
        super().__init__(name)


class Unnamed(Exact):
    def __init__(self):
        pass


def test_a_name_a_mapping_a_class_or_an_object_is_the_reward():
    reward = Exact()
    assert as_reward_function(reward) is reward and as_reward_function(Exact).name == "exact"
    assert as_reward_function(Words).name == "words"
    length = as_reward_function({"name": "length", "max_length": 7, "unit": "chars"})
    assert isinstance(length, LengthReward) and length.max_length == 7 and length.name == "length"
    assert as_reward_function({"name": "format", "label": "layout"}).name == "layout"
    assert as_reward_function("format", "layout").name == "layout"
    assert as_reward_function(lengths, "characters").name == "characters"
    with pytest.raises(ConfigError):
        as_reward_function(Unnamed)


def test_a_path_imports_what_is_not_registered(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_a_user.py").write_text(
        "from rl4llm.rewards import FormatReward\n"
        "class Mine(FormatReward): pass\n"
        "ready = Mine('ready')\n"
        "def ones(completions): return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert as_reward_function({"name": "rewards_of_a_user:Mine", "score": 0.5}).score == 0.5
    assert as_reward_function("rewards_of_a_user:ready").name == "ready"
    assert as_reward_function("rewards_of_a_user:ones").score_batch(samples("a", "b")) == [1.0, 1.0]
    with pytest.raises(ConfigError):
        as_reward_function("rewards_of_a_user:missing")


def test_functions_can_be_registered_too():
    @register_reward("test_callables_shout")
    def shout(completions):
        return [float(text.isupper()) for text in completions]

    assert "test_callables_shout" in REWARDS
    assert as_reward_function("test_callables_shout").score_batch(samples("A", "b")) == [1.0, 0.0]
    assert shout(["A"]) == [1.0]


def test_a_function_gets_the_replies_and_the_columns_it_names():
    def fussy(completions, ground_truth, *, level, prompts, messages, absent=None):
        assert (
            completions == ["a", "b"] and ground_truth == ["g0", "g1"] and level == [0, 1] and absent is None
        )
        assert prompts[1] == [{"role": "system", "content": "s"}, {"role": "user", "content": "q1"}]
        assert messages[1][-1] == ChatMessage("assistant", "b")
        return [1.0, 2.0]

    assert as_reward_function(fussy).score_batch(samples("a", "b")) == [1.0, 2.0]


def test_a_function_with_keyword_columns_gets_all_of_them():
    def greedy(completions, **columns):
        assert sorted(columns) == ["ground_truth", "level", "messages", "prompts", "source"]
        return [0.0] * len(completions)

    def greedier(**columns):
        return lengths(columns.pop("completions"), **columns)

    assert as_reward_function(greedy).score_batch(samples("a")) == [0.0]
    assert as_reward_function(greedier).score_batch(samples("abc")) == [3.0]


def test_the_first_parameter_may_have_any_name():
    def trl_order(prompts, completions):
        return [float(len(prompt) + len(text)) for prompt, text in zip(prompts, completions, strict=True)]

    assert as_reward_function(lambda texts: [float(len(text)) for text in texts], "n").score_batch(
        samples("ab")
    ) == [2.0]
    assert as_reward_function(trl_order).score_batch(samples("ab")) == [4.0]


def test_a_column_missing_from_one_row_is_none_there():
    rows = samples("a", "b")
    rows[1].columns = {}
    absent = as_reward_function(lambda completions, level: [float(x is None) for x in level], "absent")
    assert absent.score_batch(rows) == [0.0, 1.0]


def test_a_callable_object_is_a_function_too():
    class Scale:
        def __call__(self, completions):
            return [0.5] * len(completions)

    reward = as_reward_function(Scale())
    assert reward.name == "Scale" and reward.score_batch(samples("a")) == [0.5]


def test_a_function_scores_one_conversation_as_well():
    reward = BatchCallable(lengths, "n")
    assert reward([ChatMessage("assistant", "four")], None, level=1) == 4.0


@pytest.mark.parametrize("wrong", [1.0, None, "ab", {"a": 1.0, "b": 2.0}, [1.0], [1.0] * 3, []])
def test_anything_but_a_score_for_each_sample_stops_the_run(wrong):
    with pytest.raises(RewardError):
        score(samples("a", "b"), [as_reward_function(lambda completions: wrong, "n")])


@pytest.mark.parametrize(
    "right", [(1, 2), torch.tensor([1.0, 2.0]), torch.arange(1, 3).numpy(), [True, torch.tensor(2.0)]]
)
def test_tuples_tensors_and_arrays_of_numbers_are_lists_enough(right):
    assert score(samples("a", "b"), [as_reward_function(lambda completions: right, "n")]).reward.tolist() == [
        1.0,
        2.0,
    ]


def test_an_async_function_works_inside_a_running_event_loop():
    async def later(completions):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    async def inside():
        return as_reward_function(later).score_batch(samples("a", "bcd"))

    assert asyncio.run(inside()) == [1.0, 3.0]


def test_a_function_can_score_turns_and_have_examples():
    def length_of_turns(completions, messages):
        return [[float(len(item.content)) for item in said if item.role == "assistant"] for said in messages]

    example = RewardExample([ChatMessage("user", "?"), ChatMessage("assistant", "ab")], "", [2.0])
    reward = BatchCallable(length_of_turns, "turns", per_turn=True, examples=[example])
    check_examples([reward])
    batch = samples("abc")
    assert score(batch, [reward]).rewards["turns"].tolist() == [3.0] and batch[0].turn_rewards == {0: 3.0}
    wrong = BatchCallable(length_of_turns, "turns", per_turn=True, examples=[replace(example, score=[1.0])])
    with pytest.raises(RewardError):
        check_examples([wrong])


@pytest.mark.parametrize(
    "spec",
    [
        "maths",
        {"name": "math", "time_out_s": 2},
        "length",
        {"max_length": 3},
        {"name": "format", "success_at": "high"},
        3,
    ],
)
def test_unknown_names_and_options_are_refused(spec):
    with pytest.raises(RewardError if spec == 3 else ConfigError):
        as_reward_function(spec)


def test_a_failure_in_place_of_a_score_is_raised():
    failing = as_reward_function(lambda completions: [RewardError("no verdict")], "failing")
    with pytest.raises(RewardError):
        failing([ChatMessage("assistant", "a")], None)


def test_a_reward_is_awaited_however_it_became_a_coroutine():
    class Wrapped(BaseRewardFunction):
        def __call__(self, messages, ground_truth, **kwargs):
            async def later():
                return float(len(messages[-1].content))

            return later()

    assert list(Wrapped("wrapped").score_batch(samples("a", "bcd"))) == [1.0, 3.0]


def test_one_conversation_is_shown_with_its_prompt():
    reward = as_reward_function(lambda completions, prompts: [len(prompt) for prompt in prompts])
    asked = [ChatMessage("system", "Be brief."), ChatMessage("user", "2 + 2?")]
    assert reward([*asked, ChatMessage("assistant", "4")], "") == 2
    assert reward([ChatMessage("assistant", "4")], "") == 0


@pytest.mark.parametrize(
    ("stored", "text"),
    [(42, "42"), (2.0, "2"), (-0.5, "-0.5"), (1e-7, "0.0000001"), (100.0, "100"), (10**400, "1" + "0" * 400), ("x", "x"),
     (np.float32(0.1), "0.1"), (np.int64(7), "7"), (Decimal("3.50"), "3.5"), (True, True), (None, None), ([1], [1])],
)  # fmt: skip
def test_a_plain_function_gets_numbers_as_a_csv_file_has_them(stored, text):
    def exact_match(completions, ground_truth, **columns):
        return [
            float((said, truth) == ("42", text))
            for said, truth in zip(completions, ground_truth, strict=True)
        ]

    (sample,) = samples("42")
    sample.ground_truth = stored
    assert as_reward_function(exact_match).score_batch([sample]) == [1.0]

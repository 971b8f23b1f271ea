"""What algorithms need and refuse, and what groups teach them."""

from dataclasses import replace

import pytest
import torch

from rl4llm.algorithms import ALGORITHMS, DAPO, DPO, GDPO, GRPO, PKPO, PPO, SFT, GiGPO, MaxRL, OnlineDPO
from rl4llm.algorithms.distill import Distill
from rl4llm.algorithms.functional import clipped_share
from rl4llm.algorithms.reinforce_pp import ReinforcePP
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group, TokenSpan, Trajectory


def group(*rewards: float) -> Group:
    spans = (TokenSpan.context([1]), TokenSpan((2,), "policy", (-0.5,), 0))
    return Group("p", tuple(Trajectory("p", spans, (), {}, reward, "done") for reward in rewards))


def test_equal_rewards_teach_nothing_and_dapo_drops_the_group():
    equal = group(0.1, 0.1, 0.1)
    assert GRPO().credits(equal).abs().max() < 1e-9
    assert not DAPO().keep(equal)
    assert DAPO().keep(group(0.0, 1.0))
    assert GRPO().keep(equal)


@pytest.mark.parametrize("equal", [(0.1 + 0.2, 0.3), (3.1415927, 3.1415925), (1e-17, 0.0), (-2.0, -2.0)])
def test_rounding_is_no_difference_between_rewards(equal):
    assert not DAPO().keep(group(*equal))
    assert not OnlineDPO().keep(group(*equal))
    assert DAPO().keep(group(1.0, 1.0001))
    assert OnlineDPO().keep(group(1e-6, 0.0))


def by_turns(*earned: tuple[float, ...]) -> Group:
    turn = (TokenSpan.context([1]), TokenSpan((2,), "policy", (-0.5,), 0))
    return Group(
        "p",
        tuple(
            Trajectory("p", turn * len(turns), (), {}, sum(turns), "done", turn_rewards=turns)
            for turns in earned
        ),
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        DAPO(turn_discount=1.0),
        GiGPO(filter_groups=True),
        PPO(filter_groups=True),
        ReinforcePP(filter_groups=True),
    ],
)
def test_groups_that_differ_in_turns_are_kept_where_turns_count(algorithm):
    assert algorithm.keep(by_turns((1.0, 0.0), (0.0, 1.0)))
    assert not algorithm.keep(by_turns((0.5, 0.5), (0.5, 0.5)))
    assert not DAPO().keep(by_turns((1.0, 0.0), (0.0, 1.0)))


def test_only_the_options_in_use_are_needed():
    assert not GRPO().needs().reference
    assert GRPO(kl_coef=0.1).needs().reference
    assert GRPO(kl_coef=0.1, kl_in="reward").needs().reward_kl == (0.1, "k3")
    assert not GRPO(kl_coef=0.1, kl_in="reward").needs().every_token
    assert not GRPO().needs().entropy
    assert GRPO(entropy_coef=0.01).needs().entropy


@pytest.mark.parametrize("reason", ["length", "context", "max_steps", "done"])
def test_episodes_that_met_a_token_limit_can_be_left_out(reason):
    one = replace(group(1.0).trajectories[0], stop_reason=reason)
    assert GRPO(mask_truncated=True).learns_from(one) == (reason in ("max_steps", "done"))
    assert GRPO().learns_from(one)


@pytest.mark.parametrize(
    ("algorithm", "group_size"),
    [
        (GRPO(), 1),
        (DAPO(), 1),
        (OnlineDPO(), 1),
        (PKPO(k=8), 8),
        (GDPO(), 8),
        (GRPO(clip_low=-0.1), 8),
        (ReinforcePP(gamma=1.5), 8),
        (GRPO(kl_estimator="k4"), 8),
        (GRPO(kl_target=0.1), 8),
        (GRPO(kl_weighted=True, kl_coef=0.1, kl_in="reward"), 8),
        (GRPO(correction="tis"), 8),
        (Distill(), 8),
        (DPO(label_smoothing=0.5), 8),
        (DPO(label_smoothing=0.1, loss="ipo"), 8),
        (SFT(learn="asistant"), 1),
    ],
)
def test_impossible_options_are_refused(algorithm, group_size):
    with pytest.raises(ConfigError):
        algorithm.check(group_size)


def test_maxrl_has_no_credit_without_a_success():
    assert not MaxRL().credits(group(0.0, 0.0, 0.0)).any()
    assert MaxRL().credits(group(0.0, 0.0, 1.0)).tolist() == pytest.approx([-1, -1, 2])
    assert not MaxRL().credits(group(-0.5, 0.0, -1.0)).any()


def test_maxrl_divides_by_successes_not_by_what_penalties_leave():
    assert MaxRL().credits(group(1.0, -0.5, -0.5)).tolist() == pytest.approx([3, -1.5, -1.5])
    assert MaxRL().credits(group(1.0, 0.0, -0.5)).tolist() == pytest.approx([2.5, -0.5, -2])


def test_no_set_of_k_is_left_in_a_small_group():
    assert not PKPO(k=3).credits(group(0.0, 1.0, 1.0)).any()
    assert PKPO(k=2).credits(group(0.0, 0.0, 1.0)).tolist() == pytest.approx([-1, -1, 2])


def test_a_class_on_the_python_path_needs_no_registration():
    assert ALGORITHMS["rl4llm.algorithms.dapo:DAPO"] is DAPO
    with pytest.raises(ConfigError):
        ALGORITHMS["rl4llm.algorithms.dapo:Nothing"]


def test_the_clip_counts_only_where_it_cuts_the_gradient():
    ratio_BT = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 0.9, 1.0]])
    advantages_BT = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]])
    assert clipped_share(ratio_BT, advantages_BT, 0.2, 0.2).tolist() == [[1, 0, 0, 1, 0, 0, 0]]

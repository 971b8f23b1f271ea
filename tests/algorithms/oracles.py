"""What the papers say, once more, as loops over single numbers: for what no other framework's numbers were stored.

Each oracle returns the largest difference to what the library makes of the same groups.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from golden_numbers import own
from invariance import TableBackend, groups, look_up, sampled_table, table
from packed import pack
from torch import Tensor

from rl4llm.algorithms import (
    DAPO,
    DPPO,
    DPPOKL,
    GDPO,
    GRPO,
    KTO,
    PKPO,
    PPO,
    RAE,
    SDFT,
    SDPO,
    VAPO,
    Distill,
    ExploreGRPO,
    GiGPO,
    MaxRL,
    OnlineDPO,
    ReinforcePP,
    ReMax,
)
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.types import Group, TrainBatch, Trajectory
from rl4llm.data.pack import Batching, totals_of
from rl4llm.trainers.prepare import Preparation

GROUPS = groups(seed=3)
MEMBERS = [one for group in GROUPS for one in group.trajectories]
SAMPLED = sampled_table(GROUPS)
OLD, REF, VALUES = SAMPLED + table(1, spread=0.2), SAMPLED + table(5, spread=0.3), table(3)
NEW = SAMPLED + table(2, spread=0.4)


def ids(one: Trajectory) -> list[int]:
    """Return the ids of the policy's tokens, which are distinct."""
    return [token for span in one.policy_spans for token in span.token_ids]


def batch_of(credits: Sequence[Tensor]) -> TrainBatch:
    """Put all trajectories in one row, every number in float64."""
    flat = [
        credit[: one.num_turns]
        for group, credits_G in zip(GROUPS, credits, strict=True)
        for one, credit in zip(group.trajectories, credits_G.reshape(len(credits_G), -1), strict=True)
    ]
    numbers = itertools.count()
    numbered = [[next(numbers) for _ in turns] if credits[0].dim() == 2 else next(numbers) for turns in flat]
    totals = totals_of(MEMBERS)
    (batch,) = pack(
        MEMBERS,
        numbered,
        max_tokens_per_batch=10**5,
        layout="packed",
        aggregation="token",
        totals=totals,
        pad_token_id=0,
    )
    batch.credits_BT = torch.cat(flat).double()[batch.credits_BT.long()] * batch.mask_BT
    batch.sampled_logprobs_BT = look_up(SAMPLED, batch)
    batch.old_logprobs_BT, batch.ref_logprobs_BT = look_up(OLD, batch), look_up(REF, batch)
    batch.values_BT = look_up(VALUES, batch)
    return batch


def assigned(algorithm: BaseAlgorithm) -> TrainBatch:
    """Return a batch with the advantages of an algorithm."""
    batch = batch_of(algorithm.batch_credits(GROUPS, own))
    algorithm.assign([batch], own)
    return batch


def distance(x_BT: Tensor, batch: TrainBatch, wanted: dict[int, float]) -> float:
    """Return the largest difference on the policy's tokens."""
    ids_N = batch.token_ids_BT[batch.mask_BT].tolist()
    assert sorted(ids_N) == sorted(wanted)
    expected = torch.tensor([wanted[token] for token in ids_N], dtype=torch.float64)
    return (x_BT[batch.mask_BT].double() - expected).abs().max().item()


def losses(algorithm: BaseAlgorithm, batch: TrainBatch) -> Tensor:
    """Return the losses of the new log-probs."""
    return algorithm.token_losses(batch, look_up(NEW, batch), None)[0]


def turns(one: Trajectory) -> list[list[int]]:
    """Return the token ids of each turn."""
    return [list(span.token_ids) for span in one.policy_spans]


def earned(one: Trajectory) -> list[float]:
    """Return what each turn earned; the rest of the reward of the episode goes to the last turn."""
    rewards = list(one.turn_rewards)
    rewards[-1] += one.reward - sum(rewards)
    return rewards


def token_reward(one: Trajectory, kl_coef: float = 0.0) -> dict[int, float]:
    """Return rewards by token id, in order."""
    found = {}
    for turn, reward in zip(turns(one), earned(one), strict=True):
        for token in turn:
            found[token] = -kl_coef * (OLD[token] - REF[token]).item() + (
                reward if token == turn[-1] else 0.0
            )
    return found


def scalar_gae(one: Trajectory, gamma: float, lam: float, kl_coef: float = 0.0) -> dict[int, float]:
    """Compute GAE backwards over the policy's tokens."""
    rewards, found, advantage, value_next = token_reward(one, kl_coef), {}, 0.0, 0.0
    for token in reversed(ids(one)):
        value = VALUES[token].item()
        advantage = rewards[token] + gamma * value_next - value + gamma * lam * advantage
        found[token], value_next = advantage, value
    return found


def scalar_whitened(numbers: dict[int, float]) -> dict[int, float]:
    """Return numbers with mean 0 and sample deviation 1."""
    mean, deviation = (
        statistics.fmean(numbers.values()),
        math.sqrt(statistics.variance(numbers.values()) + 1e-8),
    )
    return {token: (number - mean) / deviation for token, number in numbers.items()}


def clipped(token: int, advantage: float, low: float, high: float) -> float:
    """Return PPO's loss of one token."""
    ratio = math.exp((NEW[token] - OLD[token]).item())
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def compared(rewards: list[float], scale: bool = True) -> list[float]:
    """Return GRPO's advantages; a group of one gets 0."""
    mean = statistics.fmean(rewards)
    deviation = statistics.stdev(rewards) + 1e-6 if scale and len(rewards) > 1 else 1.0
    return [(reward - mean) / deviation for reward in rewards]


def vapo_advantages() -> float:
    """Length-adaptive lambda for the policy, 1 for the critic, and both from the rewards of turns."""
    batch = assigned(VAPO(alpha=0.3, whiten=False))
    wanted, returns = {}, {}
    for one in MEMBERS:
        lam = max(0.0, 1 - 1 / (0.3 * len(ids(one))))
        wanted |= scalar_gae(one, 1.0, lam)
        returns |= {
            token: number + VALUES[token].item() for token, number in scalar_gae(one, 1.0, 1.0).items()
        }
        # with lambda 1 a return is what the episode earned
        assert abs(returns[ids(one)[0]] - one.reward) < 1e-9
    return max(distance(batch.advantages_BT, batch, wanted), distance(batch.returns_BT, batch, returns))


def vapo_loss() -> float:
    """Clip-higher, and the likelihood of episodes that were rewarded."""
    algorithm = VAPO(alpha=0.3, nll_coef=0.2)
    batch = assigned(algorithm)
    advantages = {}
    for one in MEMBERS:
        advantages |= scalar_gae(one, 1.0, max(0.0, 1 - 1 / (0.3 * len(ids(one)))))
    advantages = scalar_whitened(advantages)
    wanted = {}
    for one in MEMBERS:
        for token in ids(one):
            nll = -NEW[token].item() if one.reward > 0 else 0.0
            wanted[token] = clipped(token, advantages[token], 0.2, 0.28) + 0.2 * nll
    assert {one.reward > 0 for one in MEMBERS} == {True, False}
    return distance(losses(algorithm, batch), batch, wanted)


def ppo_turns() -> float:
    """Compare GAE from rewards of turns, with a KL penalty at every token."""
    batch = assigned(PPO(gamma=0.97, lam=0.9, kl_coef=0.05))
    advantages = {}
    for one in MEMBERS:
        advantages |= scalar_gae(one, 0.97, 0.9, 0.05)
    returns = {token: number + VALUES[token].item() for token, number in advantages.items()}
    wanted = scalar_whitened(advantages)
    return max(distance(batch.advantages_BT, batch, wanted), distance(batch.returns_BT, batch, returns))


def reinforce_pp_turns() -> float:
    """Discounted returns from rewards of turns, with a KL penalty at every token."""
    batch = assigned(ReinforcePP(gamma=0.9, kl_coef=0.05))
    wanted = {}
    for one in MEMBERS:
        rewards, still = token_reward(one, 0.05), 0.0
        for token in reversed(ids(one)):
            still = rewards[token] + 0.9 * still
            wanted[token] = still
    return distance(batch.advantages_BT, batch, scalar_whitened(wanted))


def remax() -> float:
    """Compare with the reward of the greedy episode as the baseline."""
    algorithm = ReMax()
    batch, wanted = assigned(algorithm), {}
    for group in GROUPS:
        for one in group.trajectories:
            wanted |= {
                token: clipped(token, one.reward - group.baseline.reward, 0.2, 0.2) for token in ids(one)
            }
    return distance(losses(algorithm, batch), batch, wanted)


def _by_token(x_BT: Tensor, batch: TrainBatch) -> dict[int, float]:
    return dict(zip(batch.token_ids_BT[batch.mask_BT].tolist(), x_BT[batch.mask_BT].tolist(), strict=True))


def _returns(one: Trajectory, discount: float) -> list[float]:
    found, still = [], 0.0
    for reward in reversed(earned(one)):
        still = reward + discount * still
        found.append(still)
    return found[::-1]


def _states(one: Trajectory) -> Iterator[tuple[int, ...]]:
    """The context before each turn."""
    for before, span in itertools.pairwise(one.spans):
        if span.author == "policy":
            yield before.token_ids


def gigpo() -> float:
    """Compare with the episode's credit plus the comparison of turns taken from the same state."""
    algorithm = GiGPO(step_coef=0.6, turn_discount=0.9)
    batch, wanted, recurring = assigned(algorithm), {}, 0
    for group in GROUPS:
        episode = compared([one.reward for one in group.trajectories])
        places = defaultdict(list)
        for number, one in enumerate(group.trajectories):
            for turn, (state, still) in enumerate(zip(_states(one), _returns(one, 0.9), strict=True)):
                places[state].append((number, turn, still))
        for members in places.values():
            recurring += len(members) > 1
            for (number, turn, _), step in zip(
                members, compared([still for *_, still in members]), strict=True
            ):
                credit = episode[number] + 0.6 * step
                wanted |= dict.fromkeys(turns(group.trajectories[number])[turn], credit)
    assert recurring > len(GROUPS)
    return distance(batch.advantages_BT, batch, wanted)


def turn_credits() -> float:
    """Compare each turn with the same turn of the others, by its remaining return."""
    batch, wanted = assigned(GRPO(turn_discount=0.8)), {}
    for group in GROUPS:
        returns = [_returns(one, 0.8) for one in group.trajectories]
        for turn in range(3):
            there = [number for number, found in enumerate(returns) if len(found) > turn]
            for number, credit in zip(
                there, compared([returns[i][turn] for i in there]) if there else [], strict=True
            ):
                wanted |= dict.fromkeys(turns(group.trajectories[number])[turn], credit)
    return distance(batch.advantages_BT, batch, wanted)


def explore_correction() -> float:
    """Truncated importance weights between what was sampled and what the trainer says."""
    algorithm = ExploreGRPO(correction_high=1.2)
    batch, wanted = assigned(algorithm), {}
    for group in GROUPS:
        credits = compared([one.reward for one in group.trajectories])
        for one, credit in zip(group.trajectories, credits, strict=True):
            for token in ids(one):
                weight = min(math.exp((OLD[token] - SAMPLED[token]).item()), 1.2)
                wanted[token] = weight * clipped(token, credit, 0.2, 0.2)
    return distance(losses(algorithm, batch), batch, wanted)


def distillation() -> float:
    """Compare with the log-ratio of teacher and present student at each token, plus GRPO's credit."""
    algorithm = Distill(teacher_path="t", reward_coef=0.5)
    batch, wanted = assigned(algorithm), {}
    for group in GROUPS:
        credits = compared([one.reward for one in group.trajectories])
        for one, credit in zip(group.trajectories, credits, strict=True):
            wanted |= {
                token: clipped(token, (REF[token] - NEW[token]).item() + 0.5 * credit, 0.2, 0.2)
                for token in ids(one)
            }
    return distance(losses(algorithm, batch), batch, wanted)


def _taught(token: int) -> float:
    z, r, ratio = NEW[token].item(), REF[token].item(), math.exp((NEW[token] - OLD[token]).item())
    return (z - r) * z * min(ratio, 1.1)


def self_distillation() -> float:
    """Compare with the log-ratio of student and teacher, weighted by the truncated ratio, in place of any reward."""
    algorithm = SDFT(ratio_max=1.1)
    batch = assigned(algorithm)
    return distance(
        losses(algorithm, batch), batch, {token: _taught(token) for one in MEMBERS for token in ids(one)}
    )


def self_distillation_with_rewards() -> float:
    """Compare with a share of that, and the rest of GRPO's loss."""
    algorithm = SDPO(ratio_max=1.1, distill_coef=0.3, clip_low=0.1, clip_high=0.3)
    batch, wanted = assigned(algorithm), {}
    for group in GROUPS:
        credits = compared([one.reward for one in group.trajectories])
        for one, credit in zip(group.trajectories, credits, strict=True):
            wanted |= {t: 0.3 * _taught(t) + 0.7 * clipped(t, credit, 0.1, 0.3) for t in ids(one)}
    return distance(losses(algorithm, batch), batch, wanted)


def dppo_total_variation() -> float:
    """Qi et al. 2026, equation 13, and the squared log-ratio of Kimi K2.5."""
    return _dppo(DPPO(clip_low=0.03, clip_high=0.04, log_ratio_coef=0.1), lambda p, q: abs(p - q))


def dppo_kl() -> float:
    """Qi et al. 2026, equation 14: the KL of two outcomes, the token and all others."""

    def kl(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    return _dppo(DPPOKL(clip_low=0.003, clip_high=0.005, log_ratio_coef=0.0), kl)


def _dppo(algorithm: DPPO, divergence: Callable[[float, float], float]) -> float:
    """Compare losses and their derivatives by each log-prob."""
    batch, wanted, slopes, kinds = assigned(algorithm), {}, {}, set()
    sampler, policy = OLD.clamp(max=-0.02), NEW.clamp(max=-0.01)  # logarithms of probabilities
    batch.old_logprobs_BT = look_up(sampler, batch)
    for group in GROUPS:
        credits = compared([one.reward for one in group.trajectories])
        for one, credit in zip(group.trajectories, credits, strict=True):
            for token in ids(one):
                p, q = math.exp(sampler[token].item()), math.exp(policy[token].item())
                bound = algorithm.clip_high if credit > 0 else algorithm.clip_low
                masked = divergence(p, q) > bound and (q > p) == (credit > 0)
                kinds.add((credit > 0, q > p, divergence(p, q) > bound))
                log = math.log(q / p)
                wanted[token] = -credit * q / p * (not masked) + algorithm.log_ratio_coef * log**2
                slopes[token] = -credit * q / p * (not masked) + 2 * algorithm.log_ratio_coef * log
    assert len(kinds) == 8  # both signs, both ways, both sides of the bound
    policy.requires_grad_()
    losses_BT = algorithm.token_losses(batch, look_up(policy, batch), None)[0]
    (gradient,) = torch.autograd.grad(losses_BT[batch.mask_BT].sum(), policy)
    apart = max(abs(gradient[token].item() - slope) for token, slope in slopes.items())
    return max(apart, distance(losses_BT.detach(), batch, wanted))


def decoupled_rewards() -> float:
    """Liu et al. 2026: each reward is normalized in its group, and their weighted sum over the step."""
    weights, summed, wanted = {"right": 1.0, "short": -0.3}, {}, {}
    for group in GROUPS:
        columns = {name: compared([one.rewards[name] for one in group.trajectories]) for name in weights}
        for number, one in enumerate(group.trajectories):
            summed[ids(one)[0]] = sum(weights[name] * columns[name][number] for name in weights)
    scale = statistics.stdev(summed.values()) + 1e-6
    for one in MEMBERS:
        wanted |= dict.fromkeys(ids(one), (summed[ids(one)[0]] - statistics.fmean(summed.values())) / scale)
    batch = assigned(GDPO(reward_weights=weights))
    return distance(batch.advantages_BT, batch, wanted)


def best_of_several() -> float:
    """Walder and Karkhanis 2025: in expectation the step is the gradient of the best reward of k samples."""
    return max(
        _expected_apart(PKPO(k=k), size, (0.0, 1.0, 0.3), lambda drawn, k=k: max(drawn[:k]))
        for size, k in ((4, 1), (4, 2), (4, 3), (5, 3))
    )


def likelihood_of_success() -> float:
    """Tajwar et al. 2026: the gradient of the first n - 1 terms of the logarithm of the success rate, for n samples."""
    return max(
        _expected_apart(
            MaxRL(),
            size,
            (0.0, scale, 0.0),
            lambda drawn: sum(any(drawn[:j]) / j for j in range(1, len(drawn))),
        )
        for size, scale in ((2, 1.0), (4, 1.0), (5, 2.0))
    )


def _expected_apart(
    algorithm: GRPO, size: int, rewards: Sequence[float], objective: Callable[[Sequence[float]], float]
) -> float:
    """Enumerate all draws of a group from a policy of one token, and compare the expected step with the gradient."""
    logits = torch.tensor([0.2, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    step, value = torch.zeros(3, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for actions in itertools.product(range(3), repeat=size):
        drawn = [rewards[action] for action in actions]
        chance = logprobs[list(actions)].sum().exp()
        value = value + chance * objective(drawn)
        credits = algorithm.compare(torch.tensor(drawn, dtype=torch.float64))
        mean = (credits * logprobs[list(actions)]).mean()
        step += chance.detach() * torch.autograd.grad(mean, logits, retain_graph=True)[0]
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.abs().max() > 1e-2
    return (step - gradient).abs().max().item()


def means_of_roles() -> float:
    """Liu et al. 2025 (SPIRAL): a running mean for each role of each environment, here with equal rewards in a step."""
    algorithm, means, worst = RAE(decay=0.9), defaultdict(float), 0.0
    for step in range(3):
        played = [_of_seat(group, number, step) for number, group in enumerate(GROUPS)]
        for group, credits in zip(played, algorithm.batch_credits(played, own), strict=True):
            for one, credit in zip(group.trajectories, credits.tolist(), strict=True):
                worst = max(worst, abs(credit - (one.reward - means[one.part, one.role])))
        for one in (one for group in played for one in group.trajectories):  # one by one, as in the paper
            means[one.part, one.role] = 0.9 * means[one.part, one.role] + 0.1 * one.reward
        algorithm.observe(played, lambda value: [value])
    assert len(set(means.values())) == 4
    return worst


def _of_seat(group: Group, number: int, step: int) -> Group:
    seat = {"role": "ab"[number % 2], "part": "xy"[number // 2 % 2]}
    reward = number % 4 + step**2
    return Group(
        group.prompt_id, tuple(replace(one, reward=float(reward), **seat) for one in group.trajectories)
    )


def batch_scale() -> float:
    """Centred in the group, divided by the deviation of all rewards of the step."""
    batch, wanted = assigned(GRPO(scale_rewards="batch")), {}
    deviation = statistics.stdev([one.reward for one in MEMBERS]) + 1e-6
    for group in GROUPS:
        for one, credit in zip(
            group.trajectories, compared([one.reward for one in group.trajectories], False), strict=True
        ):
            wanted |= dict.fromkeys(ids(one), credit / deviation)
    return distance(batch.advantages_BT, batch, wanted)


def adaptive_kl() -> float:
    """Ziegler et al. 2019: the coefficient follows the measured KL."""
    algorithm, coefficient, worst = GRPO(kl_coef=0.2, kl_target=0.1, kl_horizon=10), 0.2, 0.0
    for measured in (0.5, 0.02, 0.1, 0.11, 0.0, 3.0):
        algorithm.after_step({"kl": measured})
        error = max(-0.2, min(0.2, measured / 0.1 - 1))
        coefficient *= 1 + error / 10
        batch = assigned(algorithm)
        penalised, plain = losses(algorithm, batch), losses(GRPO(), batch)
        wanted = {}
        for token in batch.token_ids_BT[batch.mask_BT].tolist():
            difference = (REF[token] - NEW[token]).item()
            wanted[token] = coefficient * (math.exp(difference) - difference - 1)
        worst = max(worst, distance(penalised - plain, batch, wanted))
    resumed = GRPO(kl_coef=0.2, kl_target=0.1, kl_horizon=10)
    resumed.restore(algorithm.state())
    return max(worst, (losses(resumed, batch) - penalised).abs().max().item())


def truncated_and_equal() -> float:
    """Compare truncated members as baselines only: they neither train nor count, and neither do equal groups."""
    algorithm = DAPO(mask_truncated=True)
    equal = Group("p9", tuple(_equal(GROUPS[0])))
    kept = [group for group in [*GROUPS, equal] if algorithm.keep(group)]
    assert kept == GROUPS
    batching = Batching("packed", "token", 0, 10**5, 10**5)
    model = TableBackend(OLD)
    prepared = Preparation(algorithm=algorithm, policy=model, batching=batching).prepare(kept, 0)
    (batch,) = prepared.updates[0].batches
    trained = [one for one in MEMBERS if one.stop_reason != "length"]
    assert 0 < len(trained) < len(MEMBERS)
    weight = 1 / sum(len(ids(one)) for one in trained)
    weights = {token: weight for one in trained for token in ids(one)}
    wanted = {}
    for group in GROUPS:
        for one, credit in zip(
            group.trajectories, compared([one.reward for one in group.trajectories]), strict=True
        ):
            wanted |= dict.fromkeys(ids(one) if one in trained else [], credit)
    rounding = 1e-6  # `pack` gives float32
    apart = max(distance(batch.weights_BT, batch, weights), distance(batch.advantages_BT, batch, wanted))
    return max(0.0, apart - rounding)


def _equal(group: Group) -> list[Trajectory]:
    return [replace(one, prompt_id="p9", reward=0.1) for one in group.trajectories]


def kto() -> float:
    """Ethayarajh et al. 2024, equation 8, with a divergence that is given, and its derivative by each log-prob."""
    algorithm = KTO(beta=0.2, desirable_weight=1.33, undesirable_weight=0.7)
    batch = batch_of([torch.where(group.rewards_G > 0, 1.0, -1.0) for group in GROUPS])
    batch.divergence = torch.tensor(0.4, dtype=torch.float64)
    wanted, slopes, new = {}, {}, NEW.clone().requires_grad_()
    for one in MEMBERS:
        drift = sum((NEW[token] - REF[token]).item() for token in ids(one))
        weight, sign = (1.33, 1) if one.reward > 0 else (0.7, -1)
        value = 1 / (1 + math.exp(-sign * 0.2 * (drift - 0.4)))
        wanted |= dict.fromkeys(ids(one), weight * (1 - value))
        slopes |= dict.fromkeys(ids(one), -len(ids(one)) * weight * value * (1 - value) * sign * 0.2)
    losses_BT = algorithm.token_losses(batch, look_up(new, batch), None)[0]
    (gradient,) = torch.autograd.grad(losses_BT[batch.mask_BT].sum(), new)
    apart = max(abs(gradient[token].item() - slope) for token, slope in slopes.items())
    return max(apart, distance(losses_BT.detach(), batch, wanted))


def online_pairs() -> float:
    """Compare the best with the worst of each group."""
    found, wanted = assigned_or_absent(OnlineDPO()), {}
    for group in GROUPS:
        ordered = sorted(group.trajectories, key=lambda one: one.reward)
        wanted |= dict.fromkeys(ids(ordered[-1]), 1.0) | dict.fromkeys(ids(ordered[0]), -1.0)
    return (
        max(abs(found[token] - wanted[token]) for token in wanted)
        if found.keys() == wanted.keys()
        else math.inf
    )


def assigned_or_absent(algorithm: BaseAlgorithm) -> dict[int, float]:
    """Return the credit of each token that trains."""
    batching = Batching(
        "packed", algorithm.aggregation, 0, 10**5, 10**5, whole_groups=algorithm.needs().whole_groups
    )
    model = TableBackend(OLD)
    preparation = Preparation(algorithm=algorithm, policy=model, reference=model, batching=batching)
    (batch,) = preparation.prepare(GROUPS, 0).updates[0].batches
    return _by_token(batch.credits_BT, batch)


ORACLES: dict[str, tuple[Callable[[], float], ...]] = {
    "dapo": (truncated_and_equal,),
    "distill": (distillation,),
    "dppo": (dppo_total_variation,),
    "dppo_kl": (dppo_kl,),
    "explore_grpo": (explore_correction,),
    "gdpo": (decoupled_rewards,),
    "gigpo": (gigpo,),
    "grpo": (turn_credits, batch_scale, adaptive_kl),
    "kto": (kto,),
    "online_dpo": (online_pairs,),
    "maxrl": (likelihood_of_success,),
    "pkpo": (best_of_several,),
    "ppo": (ppo_turns,),
    "rae": (means_of_roles,),
    "reinforce_pp": (reinforce_pp_turns,),
    "remax": (remax,),
    "sdft": (self_distillation,),
    "sdpo": (self_distillation_with_rewards,),
    "vapo": (vapo_advantages, vapo_loss),
}
"""By the method that they say something of."""

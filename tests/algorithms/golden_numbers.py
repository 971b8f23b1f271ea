"""The reference numbers, their trajectories as real batches in several layouts, and what the library makes of them.

`golden/open.json` holds quantities that other frameworks' own functions computed in float64. `CHECKS` says for each of them
which method gives it with which options; `NOT_OFFERED` says why for those that no option here gives. Every check goes
the way that training goes: groups, credits, `pack`, `assign`, `token_losses` and the weights of the aggregation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packed import pack
from torch import Tensor

from rl4llm.algorithms import ALGORITHMS
from rl4llm.algorithms.correction import correction_weights
from rl4llm.algorithms.functional import kl
from rl4llm.algorithms.returns import whiten
from rl4llm.backends.heads import OutputLayer, logprobs_of_logits, selected_logprobs
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.types import Group, TokenSpan, TrainBatch, Trajectory
from rl4llm.data.pack import AGGREGATIONS, StepTotals, totals_of
from rl4llm.rewards.overlong import OverlongPenalty

GOLDEN = json.loads((Path(__file__).parent / "golden" / "open.json").read_text())
QUANTITIES = {entry["name"]: entry for entry in GOLDEN["quantities"]}
EXTRA = GOLDEN["extra"]
LAYOUTS = ("one row", "shuffled", "a row each, padded", "shared prompts", "micro-batches")
GARBAGE = 3.3  # stands on prompts and padding, where nothing may look


def own(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the sum over one rank."""
    return tensor


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Those of a case, each with a shared prompt token before it; a token's id is its place in the case's flat arrays."""

    case: str

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        return GOLDEN["cases"][self.case]["trajectories"]

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(len(row["mask"]) for row in self.rows)]

    def groups(self) -> list[Group]:
        """Return the groups as the environment would give them."""
        names = list(dict.fromkeys(row["group"] for row in self.rows))
        return [
            Group(name, tuple(self._trajectory(i) for i, row in enumerate(self.rows) if row["group"] == name))
            for name in names
        ]

    def _trajectory(self, number: int) -> Trajectory:
        row, start = self.rows[number], self.starts[number]
        prompt = TokenSpan.context([self.starts[-1] + ord(row["group"])])
        spans, column = [prompt], 0
        for sampled, run in itertools.groupby(row["mask"]):
            ids = tuple(range(start + column, start + column + len(list(run))))
            column += len(ids)
            spans.append(
                TokenSpan(ids, "policy", (0.0,) * len(ids), 0) if sampled else TokenSpan.context(ids)
            )
        return Trajectory(row["group"], tuple(spans), (), {}, row["reward"], "done")

    def flat(self, key: str) -> Tensor:
        """Return one array of the case (N,), float64."""
        return torch.tensor([value for row in self.rows for value in row[key]], dtype=torch.float64)

    def per_trajectory(self, key: str) -> Tensor:
        """Repeat one number per trajectory on each of its tokens (N,)."""
        return torch.tensor([row[key] for row in self.rows for _ in row["mask"]], dtype=torch.float64)

    @property
    def mask_N(self) -> Tensor:
        return self.flat("mask").bool()


@dataclass(frozen=True, slots=True)
class Pairs:
    """Hold the stored pairs, chosen answers first. The sums of an answer are spread evenly over its tokens."""

    lengths: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def groups(self) -> list[Group]:
        """Return one group for each pair."""
        count = len(self.lengths) // 2
        return [
            Group(f"{i}", (self._answer(i, i, 1.0), self._answer(i + count, i, -1.0))) for i in range(count)
        ]

    def _answer(self, number: int, pair: int, reward: float) -> Trajectory:
        ids = tuple(range(self.starts[number], self.starts[number + 1]))
        spans = (TokenSpan.context([self.starts[-1] + pair]), TokenSpan(ids, "policy", (0.0,) * len(ids), 0))
        return Trajectory(
            f"{pair}", spans, (), {}, reward, "done", {"margin": EXTRA["preference_pairs"]["margin"][pair]}
        )

    def flat(self, key: str) -> Tensor:
        """Spread an answer's number over its tokens (N,); numbers that pairs do not have are 0."""
        pairs = EXTRA["preference_pairs"]
        if f"{key}_chosen" not in pairs:
            return torch.zeros(self.starts[-1], dtype=torch.float64)
        sums = pairs[f"{key}_chosen"] + pairs[f"{key}_rejected"]
        numbers = [
            number / size for number, size in zip(sums, self.lengths, strict=True) for _ in range(size)
        ]
        return torch.tensor(numbers, dtype=torch.float64)


def spread(flat_N: Tensor, batch: TrainBatch) -> Tensor:
    """Return (B, T) from (N,): each token's number, and garbage outside the tokens of the case."""
    padded = torch.cat([flat_N, flat_N.new_full((1,), GARBAGE)])
    return padded[batch.token_ids_BT.clamp(max=len(flat_N))]


def gathered(batches: Sequence[TrainBatch], values: Sequence[Tensor], like_N: Tensor) -> Tensor:
    """Return (N,) from the (B, T) of all batches, with NaN for tokens that no batch has."""
    out = torch.full_like(like_N, torch.nan)
    for batch, values_BT in zip(batches, values, strict=True):
        there_BT = batch.token_ids_BT < len(like_N)
        out[batch.token_ids_BT[there_BT]] = values_BT[there_BT]
    return out


def packed(
    trajectories: Trajectories | Pairs,
    credits: Sequence[Tensor],
    layout: str,
    aggregation: str = "token",
    constant_length: int = 0,
    whole_groups: bool = False,
) -> list[TrainBatch]:
    """Return batches as `pack` makes them, with float64 numbers, after a check that they round to those of `pack`."""
    members = [
        (trajectory, credit.reshape(-1)[: trajectory.num_turns], credit.dim())
        for group, credits_G in zip(trajectories.groups(), credits, strict=True)
        for trajectory, credit in zip(group.trajectories, credits_G, strict=True)
    ]
    if layout == "shuffled":
        members = members[::2] + members[1::2][::-1]
    owned = [one for one, _, _ in members]
    totals = totals_of(owned)
    options = {
        "totals": totals,
        "aggregation": aggregation,
        "pad_token_id": 10**6,
        "whole_groups": whole_groups,
        "constant_length": constant_length,
    }
    options |= _layout(owned, layout, whole_groups)
    numbers = itertools.count()
    numbered = [[next(numbers) for _ in turns_K] if dim else next(numbers) for _, turns_K, dim in members]
    real = pack(
        owned, [turns_K.tolist() if dim else turns_K.item() for _, turns_K, dim in members], **options
    )
    made = pack(owned, numbered, **options)
    exact = torch.cat([turns_K for _, turns_K, _ in members])
    weights_N = _weights(owned, trajectories, aggregation, totals, constant_length)
    for batch, rounded in zip(made, real, strict=True):
        batch.credits_BT = exact[batch.credits_BT.long()] * batch.mask_BT
        batch.weights_BT = spread(weights_N, batch) * batch.mask_BT
        assert torch.equal(batch.credits_BT.float(), rounded.credits_BT)
        assert torch.equal(batch.weights_BT.float(), rounded.weights_BT)
        batch.sampled_logprobs_BT = spread(trajectories.flat("sampled_logprobs"), batch)
        batch.old_logprobs_BT = spread(trajectories.flat("old_logprobs"), batch)
        batch.ref_logprobs_BT = spread(trajectories.flat("ref_logprobs"), batch)
        batch.values_BT = spread(trajectories.flat("values"), batch)
    return made


def _layout(owned: Sequence[Trajectory], layout: str, whole_groups: bool) -> dict[str, Any]:
    sizes: dict[object, int] = {}
    for one in owned:
        piece = one.prompt_id if whole_groups else id(one)
        sizes[piece] = sizes.get(piece, 0) + one.num_tokens
    longest, all_tokens = max(sizes.values()), sum(sizes.values())
    kinds = {
        "one row": ("packed", all_tokens),
        "shuffled": ("packed", all_tokens),
        "a row each, padded": ("sorted", longest * len(owned)),
        "shared prompts": ("shared", all_tokens),
        "micro-batches": ("packed", longest),
    }
    name, budget = kinds[layout]
    return {"layout": name, "max_tokens_per_batch": budget}


def _weights(
    owned: Sequence[Trajectory],
    trajectories: Trajectories | Pairs,
    aggregation: str,
    totals: StepTotals,
    constant_length: int,
) -> Tensor:
    """The aggregation's weight of each token of the case (N,), float64."""
    names = sorted({one.prompt_id for one in owned})
    tokens = np.array([one.num_policy_tokens for one in owned])
    weights = AGGREGATIONS[aggregation](
        tokens, np.array([names.index(one.prompt_id) for one in owned]), totals, constant_length
    )
    weights_N = torch.zeros(trajectories.starts[-1], dtype=torch.float64)
    for one, weight in zip(owned, weights, strict=True):
        weights_N[[token for span in one.policy_spans for token in span.token_ids]] = float(weight)
    return weights_N


def expected(name: str, part: str) -> Tensor:
    """Return a stored part (N,), or a number ()."""
    stored = QUANTITIES[name]["result"][part]
    ragged = isinstance(stored, list) and stored and isinstance(stored[0], list)
    return torch.tensor(
        list(itertools.chain.from_iterable(stored)) if ragged else stored, dtype=torch.float64
    )


def make(method: str, **options: Any) -> BaseAlgorithm:
    """Make a registered method."""
    return ALGORITHMS[method](**options)


Found = dict[str, Tensor]
"""The parts of a quantity by the names they are stored under."""


def assigned(
    name: str, method: str, options: Mapping[str, Any], layout: str
) -> tuple[Trajectories, list[TrainBatch]]:
    """Return batches with the advantages of a method, computed from the rewards of the case."""
    trajectories = Trajectories(QUANTITIES[name]["case"])
    algorithm = make(method, **options)
    batches = packed(trajectories, algorithm.batch_credits(trajectories.groups(), own), layout)
    algorithm.assign(batches, own)
    return trajectories, batches


def advantages(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    trajectories, batches = assigned(name, method, options, layout)
    found = gathered(batches, [batch.advantages_BT for batch in batches], trajectories.flat("mask"))
    return {"per_token": found}


def returns(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    trajectories, batches = assigned(name, method, options, layout)
    return {
        "per_token": gathered(batches, [batch.returns_BT for batch in batches], trajectories.flat("mask"))
    }


def given(name: str, aggregation: str, key: str | None, layout: str, constant_length: int = 0) -> Any:
    """Return batches whose credits are the advantages of the case; None gives 0."""
    trajectories = Trajectories(QUANTITIES[name]["case"])
    credits = [torch.zeros(len(group.trajectories)) for group in trajectories.groups()]
    batches = packed(trajectories, credits, layout, aggregation, constant_length)
    flat_N = {
        None: torch.zeros_like,
        "seq_advantage": lambda _: trajectories.per_trajectory("seq_advantage"),
    }.get(key, lambda _: trajectories.flat(key))(trajectories.flat("mask"))
    for batch in batches:
        batch.credits_BT = spread(flat_N, batch) * batch.mask_BT
        batch.advantages_BT = batch.credits_BT
    return trajectories, batches


def loss(
    name: str,
    method: str,
    options: Mapping[str, Any],
    layout: str,
    key: str | None = "token_advantages",
    constant_length: int = 0,
) -> Found:
    algorithm = make(method, **options)
    trajectories, batches = given(name, algorithm.aggregation, key, layout, constant_length)
    for batch in batches if options.get("kl_weighted") else ():
        batch.sampled_logprobs_BT = batch.old_logprobs_BT  # the reference has no other sampler
    if method not in LOSSES_ALONE:
        algorithm.assign(batches, own)
    logprobs_N = trajectories.flat("new_logprobs").requires_grad_()
    entropies_N = trajectories.flat("entropy") if algorithm.needs().entropy else None
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for batch in batches:
        entropy_BT = None if entropies_N is None else spread(entropies_N, batch)
        losses_BT, measured = algorithm.token_losses(batch, spread(logprobs_N, batch), entropy_BT)
        total = total + (losses_BT * batch.weights_BT).sum()
        metrics.append(measured)
    (gradient_N,) = torch.autograd.grad(total, logprobs_N, allow_unused=True)
    found = {"scalar": total.detach(), "grad_new_logprobs": gradient_N, "flat": total.detach().reshape(1)}
    if "kl" in metrics[0]:
        estimates = [measured["kl"].detach() for measured in metrics]
        found["per_token_kl"] = gathered(batches, estimates, trajectories.flat("mask"))
    if getattr(algorithm, "correction", None) is not None:
        bounds = (algorithm.correction, algorithm.correction_low, algorithm.correction_high)
        weights = [correction_weights(batch, *bounds) for batch in batches]
        found["per_token_weight"] = gathered(batches, weights, trajectories.flat("mask"))
    return found


def estimate(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    """Return a KL estimate with its own gradient."""
    trajectories, batches = given(name, "token", None, layout)
    logprobs_N = trajectories.flat("new_logprobs").requires_grad_()
    values = [kl(spread(logprobs_N, batch), batch.ref_logprobs_BT, options["estimator"]) for batch in batches]
    total = sum((value * batch.weights_BT).sum() for value, batch in zip(values, batches, strict=True))
    (gradient_N,) = torch.autograd.grad(total, logprobs_N)
    per_token = gathered(batches, [value.detach() for value in values], trajectories.flat("mask"))
    return {"scalar": total.detach(), "grad_new_logprobs": gradient_N, "per_token_kl": per_token}


def weighted_estimate(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    """Return the estimate times the ratio, as the reference stores it."""
    found = loss(name, method, options, layout, key=None)
    trajectories = Trajectories(QUANTITIES[name]["case"])
    ratio_N = (trajectories.flat("new_logprobs") - trajectories.flat("old_logprobs")).exp()
    return {**found, "per_token_kl": found["per_token_kl"] * ratio_N}


def whitened(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    trajectories, batches = given(name, "token", "token_advantages", layout)
    whiten(batches, own)
    return {
        "per_token": gathered(batches, [batch.advantages_BT for batch in batches], trajectories.flat("mask"))
    }


def preference(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    """Return the loss of pairs and its gradient with respect to each answer's sum."""
    algorithm, stored = make(method, **options), EXTRA["preference_pairs"]
    valued = algorithm.needs().value_head
    lengths = (
        [1] * 2 * len(stored["margin"]) if valued else stored["length_chosen"] + stored["length_rejected"]
    )
    pairs = Pairs(tuple(lengths))
    credits = algorithm.batch_credits(pairs.groups(), own)
    if name == "rm.pairwise":
        credits = [credits_G.sign() for credits_G in credits]  # without the margins
    batches = packed(pairs, credits, layout, algorithm.aggregation, whole_groups=True)
    numbers_N = pairs.flat("reward" if valued else "policy").requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        batch.ref_logprobs_BT = spread(pairs.flat("ref"), batch)
        losses_BT, _ = algorithm.token_losses(batch, spread(numbers_N, batch), None)
        total = total + (losses_BT * batch.weights_BT).sum()
    (gradient_N,) = torch.autograd.grad(total, numbers_N)
    answers = gradient_N.split(lengths)
    same = [one[0] if (one - one[0]).abs().max() < 1e-12 else one.new_tensor(torch.inf) for one in answers]
    chosen, rejected = torch.stack(same).chunk(2)
    kind = "reward" if valued else "policy"
    return {"scalar": total.detach(), f"grad_{kind}_chosen": chosen, f"grad_{kind}_rejected": rejected}


def value_loss(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    algorithm = make(method, **options)
    trajectories, batches = given(name, algorithm.aggregation, None, layout)
    values_N = trajectories.flat("new_values").requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        batch.returns_BT = spread(trajectories.flat("value_targets"), batch)
        losses_BT, _ = algorithm.value_losses(batch, spread(values_N, batch))
        total = total + (losses_BT * batch.weights_BT).sum()
    (gradient_N,) = torch.autograd.grad(total, values_N)
    return {"scalar": total.detach(), "grad_new_values": gradient_N}


def from_logits(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    """Return log-probs and entropies of heads. The fused one computes in float32, so it only has to come close."""
    logits_NV = torch.tensor(EXTRA["logits"], dtype=torch.float64)
    labels_N = torch.tensor(EXTRA["labels"])
    exact = logprobs_of_logits(logits_NV, labels_N, entropy=True)
    identity = OutputLayer(torch.eye(logits_NV.shape[1]))
    fused = selected_logprobs(logits_NV.float(), identity, labels_N, entropy=True)
    for one, other in zip(exact, fused, strict=True):
        torch.testing.assert_close(other.double(), one, atol=2e-6, rtol=0)
    return {"flat": exact[name == "entropy.from_logits"]}


def overlong(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    task = EXTRA["overlong"][QUANTITIES[name]["params"]["overlong"]]
    penalty = OverlongPenalty(max_length=task["max_length"], buffer=task["buffer"], factor=task["factor"])
    return {"flat": torch.tensor([penalty.at(length) for length in task["lengths"]], dtype=torch.float64)}


def entropy_bonus(name: str, method: str, options: Mapping[str, Any], layout: str) -> Found:
    found = loss(name, method, {"entropy_coef": 1.0, **options}, layout, key=None)
    return {"flat": -found["flat"]}


Compute = Callable[[str, str, Mapping[str, Any], str], Found]


@dataclass(frozen=True, slots=True)
class Check:
    """How the library computes a quantity: with each of these methods and options."""

    compute: Compute
    methods: Mapping[str, Mapping[str, Any]]
    extra: Mapping[str, Any] = ()

    def found(self, name: str, method: str, layout: str) -> Found:
        """Return what a method gives for it."""
        return self.compute(name, method, self.methods[method], layout, **dict(self.extra))


TOKEN = {"aggregation": "token"}
NO_WHITENING = {"whiten": False}
PENALTY = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "whiten": False}
HIGHER = {**TOKEN, "clip_low": 0.2, "clip_high": 0.28, "old_logprobs": "recomputed"}
NARROW = {"clip_low": 0.05, "clip_high": 0.08}
CLIPS_LIKE_PPO = (
    "bnpo", "dapo", "dr_grpo", "explore_grpo", "gigpo", "grpo", "pkpo", "ppo", "rae", "reinforce_pp",
    "reinforce_pp_baseline", "remax", "rloo", "vapo",
)  # fmt: skip
PLAIN = {
    "explore_grpo": {"correction": None},
    "ppo": NO_WHITENING,
    "reinforce_pp": NO_WHITENING,
    "reinforce_pp_baseline": NO_WHITENING,
    "vapo": {**NO_WHITENING, "nll_coef": 0.0},
}
"""Options that leave nothing but the clipped surrogate of given advantages."""
LOSSES_ALONE = ("ppo", "vapo", "reinforce_pp")
"""Their advantages are more than given credits, so a loss of given advantages goes without their `assign`."""


def _clips(**options: Any) -> dict[str, dict[str, Any]]:
    return {name: {**TOKEN, **options, **PLAIN.get(name, {})} for name in CLIPS_LIKE_PPO}


def _corrected(correction: str, low: float = 0.0, high: float = 2.0) -> Check:
    options = {**HIGHER, "correction": correction, "correction_low": low, "correction_high": high}
    return Check(loss, {"dapo": options, "grpo": options})


GROUP_MEANS = {
    "adv.grpo": {
        name: {}
        for name in ("grpo", "bnpo", "dapo", "dppo", "dppo_kl", "gspo", "gspo_token", "gmpo", "sapo", "cispo")
    },
    "adv.dr_grpo": {"dr_grpo": {}, "grpo": {"scale_rewards": "none"}},
    "adv.rloo": {"rloo": {}, "pkpo": {"k": 1}},
}
CHECKS: dict[str, Check] = {
    **{name: Check(advantages, methods) for name, methods in GROUP_MEANS.items()},
    **{f"{name}.equal_group": Check(advantages, methods) for name, methods in GROUP_MEANS.items()},
    **{f"{name}.singleton_zero": Check(advantages, methods) for name, methods in GROUP_MEANS.items()},
    **{
        f"adv.reinforce_pp{kind}.{case}": Check(
            advantages, {"reinforce_pp": {"gamma": gamma, "whiten": kind == ""}}
        )
        for kind in ("", "_returns")
        for case, gamma in (
            ("gamma1", 1.0),
            ("gamma0.99", 0.99),
            ("gamma1.equal_group", 1.0),
            ("gamma1.singleton_group", 1.0),
        )
    },
    "adv.reinforce_pp_baseline": Check(advantages, {"reinforce_pp_baseline": {}}),
    "adv.reinforce_pp_baseline.equal_group": Check(advantages, {"reinforce_pp_baseline": {}}),
    **{
        f"adv.gae{kind}.gamma{gamma:g}_lambda{lam:g}": Check(
            returns if kind == "_returns" else advantages,
            {"ppo": {"gamma": gamma, "lam": lam, "whiten": kind == "_whitened"}}
            | (
                {}
                if kind == "_returns"
                else {"vapo": {"gamma": gamma, "lam": lam, "alpha": None, "whiten": bool(kind)}}
            ),
        )
        for kind in ("", "_returns", "_whitened")
        for gamma, lam in ((1.0, 0.95), (0.99, 0.9))
    },
    "adv.gae_kl_in_reward.gamma1_lambda0.95": Check(advantages, {"ppo": PENALTY}),
    "adv.reinforce_pp_kl_in_reward_returns": Check(advantages, {"reinforce_pp": PENALTY}),
    # with gamma 0 a return is a reward
    "kl.in_reward_k1": Check(advantages, {"reinforce_pp": {**PENALTY, "gamma": 0.0}}),
    "whiten.ddof1": Check(whitened, {"ppo": {}, "reinforce_pp": {}, "reinforce_pp_baseline": {}, "vapo": {}}),
    **{f"kl.{name}": Check(estimate, {"grpo": {"estimator": name}}) for name in ("k1", "k2", "k3")},
    "kl.k3_straight_through": Check(
        loss, {"grpo": {**TOKEN, "kl_coef": 1.0, "kl_estimator": "k3+"}}, {"key": None}
    ),
    "kl.k3_importance_weighted": Check(
        weighted_estimate, {"grpo": {**TOKEN, "kl_coef": 1.0, "kl_weighted": True}}
    ),
    "loss.ppo_clip_plus_k3": Check(
        loss, _clips(kl_coef=0.04, kl_in="loss", kl_estimator="k3", clip_low=0.2, clip_high=0.2)
    ),
    "loss.ppo_clip": Check(loss, _clips(clip_low=0.2, clip_high=0.2)),
    "loss.ppo_clip_higher": Check(loss, _clips(clip_low=0.2, clip_high=0.28)),
    "loss.ppo_dual_clip_c3": Check(loss, _clips(clip_low=0.2, clip_high=0.28, dual_clip=3.0)),
    "loss.ppo_dual_clip_c10": Check(loss, _clips(clip_low=0.2, clip_high=0.28, dual_clip=10.0)),
    "loss.cispo": Check(loss, {"cispo": {"clip_low": 0.2, "clip_high": 0.28}}),
    "loss.cispo_upper_only": Check(loss, {"cispo": {}}),
    "loss.dppo_tv": Check(loss, {"dppo": {"clip_low": 0.05, "clip_high": 0.08, "log_ratio_coef": 0.0}}),
    "loss.dppo_kl": Check(loss, {"dppo_kl": {"clip_low": 0.01, "clip_high": 0.02, "log_ratio_coef": 0.0}}),
    "loss.sapo": Check(loss, {"sapo": {}}),
    "loss.sapo_token_mean": Check(loss, {"sapo": TOKEN}),
    "loss.gspo": Check(loss, {"gspo": NARROW, "gspo_token": NARROW}, {"key": "seq_advantage"}),
    "loss.gspo_token_mean": Check(loss, {"gspo": {**NARROW, **TOKEN}}, {"key": "seq_advantage"}),
    "loss.gspo_token_advantages": Check(loss, {"gspo_token": NARROW}),
    "loss.gspo_token_advantages_mean_gradient": Check(loss, {"gspo": NARROW}),
    "loss.gmpo": Check(loss, {"gmpo": {}}, {"key": "seq_advantage"}),
    "agg.token_mean": Check(loss, {"dapo": {}, "bnpo": {"clip_high": 0.28}}),
    "agg.token_mean_micro_batched": Check(loss, {"dapo": {}}),
    "agg.seq_mean_token_mean": Check(loss, {"dapo": {"aggregation": "sequence"}}),
    "agg.seq_mean_token_sum_norm": Check(
        loss, {"dapo": {"aggregation": "constant"}, "dr_grpo": {"clip_high": 0.28}}, {"constant_length": 32}
    ),
    "agg.seq_mean_token_sum": Check(loss, {"dapo": {"aggregation": "constant"}}, {"constant_length": 1}),
    "agg.prompt_mean": Check(loss, {"dapo": {"aggregation": "prompt"}}),
    "corr.is_untruncated": _corrected("is"),
    "corr.tis": Check(loss, {**_corrected("tis").methods, "explore_grpo": {**TOKEN, "clip_high": 0.28}}),
    "corr.icepop": _corrected("icepop", 0.5),
    "corr.token_mask_only": _corrected("token_mask", 0.5),
    "corr.mis_sequence": _corrected("sequence_icepop", 0.5),
    "corr.mis_sequence_upper_only": _corrected("sequence_icepop"),
    "corr.tis_sequence": _corrected("sequence_tis"),
    "corr.sequence_mask_only": _corrected("sequence_mask", 0.5),
    "corr.geometric_mask_only": _corrected("geometric_mask", 0.95, 1.05),
    "corr.geometric_mask_token_is": _corrected("geometric_mask_is", 0.95, 1.05),
    "corr.geometric_mask_geometric_weight": _corrected("geometric_icepop", 0.95, 1.05),
    "corr.geometric_weight_clamped": _corrected("geometric_clip", 0.95, 1.05),
    "value.mse": Check(value_loss, {"ppo": {"value_clip": None}, "vapo": {"value_clip": None}}),
    "value.clipped": Check(value_loss, {"ppo": {}, "vapo": {}}),
    "value.clipped_seq_mean": Check(value_loss, {"ppo": {"aggregation": "sequence"}}),
    "entropy.token_mean": Check(entropy_bonus, {"grpo": TOKEN, "dapo": {}}),
    "entropy.from_logits": Check(from_logits, {"grpo": {}}),
    "logprob.from_logits": Check(from_logits, {"grpo": {}}),
    "overlong.dapo.large": Check(overlong, {"dapo": {}}),
    "overlong.dapo.small": Check(overlong, {"dapo": {}}),
    **{
        f"dpo.{name}": Check(preference, {"dpo": options, "online_dpo": options})
        for name, options in {
            "sigmoid": {},
            "label_smoothing": {"label_smoothing": 0.1},
            "ipo_sum": {"loss": "ipo"},
            "ipo_token_mean": {"loss": "ipo", "length_normalized": True},
            "sigmoid_token_mean": {"length_normalized": True},
        }.items()
    },
    "rm.pairwise": Check(preference, {"reward_model": {}}),
    "rm.pairwise_margin": Check(preference, {"reward_model": {}}),
    "sft.token_mean": Check(loss, {"sft": {}}),
    "sft.seq_mean_token_mean": Check(loss, {"sft": {"aggregation": "sequence"}}),
}

DDOF = "deviations are those of a sample (ddof 1) everywhere"
RAW = "a group of one has nothing to be compared with, so it gets 0"
EPS = "the epsilon beside a deviation is fixed: 1e-6, as in verl, SkyRL and NeMo-RL"
DENOMINATOR = (
    "a token that is masked counts as one whose loss is 0, so a mask does not make the others louder"
)
NOT_OFFERED = {
    "adv.grpo_eps1e-9": EPS,
    "adv.grpo_eps1e-9.equal_group": EPS,
    "adv.grpo_ddof0_eps1e-5": DDOF,
    "adv.grpo_leave_one_out_std": "no paper has it",
    "adv.reinforce_pp_returns_context_discounted.gamma0.99": "only the policy's own tokens are steps, so only they discount",
    "adv.reinforce_pp_ddof0.gamma1": DDOF,
    "adv.reinforce_pp_baseline_ddof0": DDOF,
    "adv.reinforce_pp_baseline_ddof0.equal_group": DDOF,
    "adv.reinforce_pp_baseline_ddof0.singleton_zero": DDOF,
    "adv.grpo.singleton_raw_reward": RAW,
    "adv.dr_grpo.singleton_raw_reward": RAW,
    "adv.rloo.singleton_raw_reward": RAW,
    "adv.reinforce_pp_baseline.singleton_raw_reward": RAW,
    "whiten.ddof1_keep_mean": "an advantage is a difference, so whitening takes its mean off too",
    "whiten.ddof0_eps1e-5": DDOF,
    "kl.k3_nemo_score_function": "kl_weighted does the same on the policy, and is right off it too",
    "corr.geometric_mask_only_kept_denominator": DENOMINATOR,
    "corr.token_mask_only_kept_denominator": DENOMINATOR,
    "overlong.dapo_unbounded.large": "equation 13 of the paper ends at the hard limit",
    "overlong.dapo_unbounded.small": "equation 13 of the paper ends at the hard limit",
}


def errors(name: str, found: Found) -> dict[str, float]:
    """Return the largest difference to each stored part: on the policy's tokens, or on all for gradients."""
    differences = {}
    for part in QUANTITIES[name]["result"]:
        stored, ours = expected(name, part), found[part]
        if part.startswith("per_token"):
            mask_N = Trajectories(QUANTITIES[name]["case"]).mask_N
            stored, ours = stored[mask_N], ours[mask_N]
        differences[part] = (stored - ours).abs().max().nan_to_num(nan=torch.inf).item()
    return differences


def error(name: str, method: str, layout: str) -> float:
    """Return the largest difference of a method to a stored quantity, over all its parts."""
    return max(errors(name, CHECKS[name].found(name, method, layout)).values())

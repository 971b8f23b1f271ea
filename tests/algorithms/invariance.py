"""The same trajectories arranged otherwise: the loss of a step and its gradient must not change.

Every log-prob and value is looked up by its token, in float64, so a method sees the same numbers wherever a token stands,
and the gradient with respect to those tables can be compared. Groups go through the trainer's own `Preparation`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl4llm.algorithms import ALGORITHMS
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.base_backend import BaseBackend, of_batch, of_update
from rl4llm.core.types import Group, TokenSpan, TrainBatch, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.runtime.ranks import Ranks
from rl4llm.trainers.prepare import Preparation

POLICY_IDS = range(100, 4000)  # each token of the policy has its own
TABLE = 4000
GARBAGE = 3.3
AFTER_WARMUP = 10**6
RANK_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the same groups become batches; `ranks` says how many groups each rank has."""

    layout: str = "sorted"
    budget: int | None = None  # None is all in one batch, 1 what cannot be cut
    shuffled: bool = False
    ranks: tuple[int, ...] = ()
    more_context: int = 0  # tokens of the environment put before each turn but the first


BASE = Arrangement()
ARRANGEMENTS = {
    "packed": Arrangement("packed"),
    "shared prompts": Arrangement("shared"),
    "small micro-batches": Arrangement("sorted", 1),
    "small packed micro-batches": Arrangement("packed", 40),
    "small shared micro-batches": Arrangement("shared", 60),
    "other order": Arrangement("packed", 70, shuffled=True),
    "two ranks": Arrangement("packed", 60, ranks=(3, 2)),
    "two ranks, one without groups": Arrangement("shared", ranks=(5, 0)),
    "three ranks in another order": Arrangement("sorted", 1, shuffled=True, ranks=(1, 3, 1)),
    "longer observations": Arrangement("packed", more_context=7),
}


def groups(learns_from: str = "episodes", seed: int = 0, nonnegative: bool = False) -> list[Group]:
    """Ragged trajectories of one to three turns with context between, and rewards for turns and episodes.

    The prompt of the first group comes once more at the end, with other trajectories. What an episode earns beside its turns
    may be negative, unless `nonnegative`.
    """
    draw, fresh = random.Random(seed), iter(POLICY_IDS)
    size = {"episodes": 4, "pairs": 2, "comparisons": 2}.get(learns_from, 1)
    found: list[Group] = []
    for number in range(4):
        prompt = TokenSpan.context([draw.randrange(1, 50) for _ in range(draw.randrange(2, 6))])
        found.append(_group(f"p{number}", prompt, size, draw, fresh, learns_from))
    prompt = found[0].trajectories[0].spans[0]
    found.append(_group("p0", prompt, size, draw, fresh, learns_from))
    if nonnegative:
        found = [replace(group, trajectories=tuple(map(_raised, group.trajectories))) for group in found]
    return found


def with_privileged(group: Group, seed: int = 0) -> Group:
    """Return a group as a reference reads it that knows more: other prompts, of other lengths, and one record not at all."""
    draw = random.Random(seed)

    def read(one: Trajectory) -> Trajectory:
        prompt = TokenSpan.context([draw.randrange(1, 50) for _ in range(draw.randrange(1, 9))])
        return replace(one, privileged=((prompt, *one.spans[1:]),))

    first, *rest = map(read, group.trajectories)
    return replace(group, trajectories=(replace(first, privileged=()), *rest))


def _raised(one: Trajectory) -> Trajectory:
    earned = sum(one.turn_rewards)
    return replace(one, reward=earned + abs(one.reward - earned))


def _group(
    name: str, prompt: TokenSpan, size: int, draw: random.Random, fresh: Any, learns_from: str
) -> Group:
    members = [_trajectory(name, prompt, draw, fresh) for _ in range(size + (learns_from == "episodes"))]
    if learns_from != "episodes":
        signs = [1.0, -1.0] if size == 2 else [1.0 if name in ("p0", "p3") else -1.0]
        members = [
            replace(one, reward=sign, turn_rewards=()) for one, sign in zip(members, signs, strict=True)
        ]
        return Group(name, tuple(members))
    return Group(name, tuple(members[:-1]), baseline=members[-1])


def _trajectory(name: str, prompt: TokenSpan, draw: random.Random, fresh: Any) -> Trajectory:
    spans, turns = [prompt], draw.randrange(1, 4)
    for turn in range(turns):
        if turn:
            spans.append(TokenSpan.context([60 + draw.randrange(2)] * 2))  # two states, so that they recur
        ids = tuple(next(fresh) for _ in range(draw.randrange(2, 7)))
        spans.append(TokenSpan(ids, "policy", tuple(-draw.expovariate(1.0) for _ in ids), 0))
    turn_rewards = tuple(draw.choice([0.0, 0.25, 0.5]) for _ in range(turns))
    reward = sum(turn_rewards) + draw.gauss(0, 1)
    stop = "length" if draw.random() < 0.2 else "done"
    named = {"right": float(reward > 0.3), "short": -sum(len(span.token_ids) for span in spans) / 10}
    return Trajectory(name, tuple(spans), (), named, reward, stop, turn_rewards=turn_rewards)


def table(seed: int, center: float = 0.0, spread: float = 1.0) -> Tensor:
    """Return a number for each token id, float64."""
    generator = torch.Generator().manual_seed(seed)
    return center + spread * torch.randn(TABLE, generator=generator, dtype=torch.float64)


def sampled_table(found: Sequence[Group]) -> Tensor:
    """Return the engine's log-probs by token id."""
    numbers = torch.full((TABLE,), GARBAGE, dtype=torch.float64)
    for span in (span for group in found for one in group.trajectories for span in one.policy_spans):
        numbers[list(span.token_ids)] = torch.tensor(span.logprobs, dtype=torch.float64)
    return numbers


class TableBackend(BaseBackend):
    """A model that knows a number for each token."""

    def __init__(self, numbers: Tensor):
        self.numbers = numbers

    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        return look_up(self.numbers, batch)

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    forward_backward = optim_step = weights = take_weights = weight_specs = _unused
    write_config = save = load = export = info = _unused


def look_up(numbers: Tensor, batch: TrainBatch) -> Tensor:
    """Return (B, T), with 0 on tokens that the policy did not write."""
    return torch.where(batch.mask_BT, numbers[batch.token_ids_BT], 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss, metrics and gradients of all optimizer steps of a rollout."""

    losses: Tensor
    metrics: Tensor
    gradient: Tensor
    value_gradient: Tensor

    def distance(self, other: Outcome) -> float:
        """Return the largest difference, relative to the largest number."""
        names = "losses", "gradient", "value_gradient"
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        pairs += zip(self.metrics, other.metrics, strict=True)  # each relative to itself
        return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def outcome(
    make: Callable[[], BaseAlgorithm], arrangement: Arrangement, updates: int = 1, nonnegative: bool = False
) -> Outcome:
    """Return what a step computes from the groups of this arrangement."""
    made = groups(make().needs().learns_from, nonnegative=nonnegative)
    if make().needs().privileged:
        made = list(map(with_privileged, made))
    found = arranged([group for group in made if make().keep(group)], arrangement)
    ranks = arrangement.ranks or (len(found),)
    share = Exchange(len(ranks))

    def run(rank: int) -> Outcome:
        begin = sum(ranks[:rank])
        with share:
            own, speaks = found[begin : begin + ranks[rank]], ThreadRanks(rank, len(ranks), share)
            return _of_rank(make(), own, found, arrangement, speaks, updates)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(ranks))]
    broken = [future.exception() for future in futures if future.exception() is not None]
    for error in sorted(broken, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    results = [future.result() for future in futures]
    assert all(torch.equal(one.metrics, results[0].metrics) for one in results)  # every rank logs the same
    added = (sum(getattr(one, name) for one in results) for name in ("losses", "gradient", "value_gradient"))
    losses, *gradients = added
    return Outcome(losses, results[0].metrics, *gradients)


class Exchange:
    """Where ranks that are threads leave tensors for each other."""

    def __init__(self, ranks: int):
        self.barrier = threading.Barrier(ranks, timeout=RANK_TIMEOUT_S)
        self.slots: list[Any] = [None] * ranks

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:  # the others must not wait for a rank that failed
            self.barrier.abort()

    def everyone(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks gave."""
        self.slots[rank] = value
        self.barrier.wait()
        gathered = list(self.slots)
        self.barrier.wait()
        return gathered


class ThreadRanks(Ranks):
    """One of several ranks that are threads."""

    def __init__(self, rank: int, size: int, exchange: Exchange):
        self.rank, self.size = rank, size
        self._exchange = exchange

    def total(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.everyone(tensor)).sum(0)

    def largest(self, number: int) -> int:
        return max(self.everyone(int(number)))

    def everyone(self, value: Any) -> list[Any]:
        return self._exchange.everyone(self.rank, value)


def arranged(found: list[Group], arrangement: Arrangement) -> list[Group]:
    """Return the groups of an arrangement."""
    if arrangement.more_context:
        found = [
            replace(
                group,
                trajectories=tuple(_stretched(one, arrangement.more_context) for one in group.trajectories),
            )
            for group in found
        ]
    if not arrangement.shuffled:
        return found
    draw = random.Random(1)
    mixed = [
        replace(group, trajectories=tuple(draw.sample(group.trajectories, len(group.trajectories))))
        for group in found
    ]
    return draw.sample(mixed, len(mixed))


def _stretched(one: Trajectory, count: int) -> Trajectory:
    """With more tokens of the environment before each turn but the first."""

    def longer(spans: tuple[TokenSpan, ...]) -> tuple[TokenSpan, ...]:
        first, *rest = spans
        return first, *(
            TokenSpan.context(span.token_ids + (70,) * count) if span.author == "context" else span
            for span in rest
        )

    return replace(one, spans=longer(one.spans), privileged=tuple(map(longer, one.privileged)))


def _of_rank(
    algorithm: BaseAlgorithm,
    own: list[Group],
    everything: list[Group],
    arrangement: Arrangement,
    ranks: Ranks,
    updates: int,
) -> Outcome:
    sampled = sampled_table(everything)
    old, new = sampled + table(1, spread=0.1), sampled + table(2, spread=0.3)
    values = table(3)
    logprobs, new_values = new.requires_grad_(), (values + table(4, spread=0.3)).requires_grad_()
    preparation = Preparation(
        algorithm=algorithm,
        policy=TableBackend(old),
        reference=TableBackend(sampled + table(5, center=-0.2, spread=0.3)),
        critic=TableBackend(values),
        batching=Batching(
            layout=arrangement.layout,
            aggregation=algorithm.aggregation,
            pad_token_id=TABLE - 1,
            max_tokens_per_batch=arrangement.budget or 10**5,
            usual_tokens_per_batch=10**5,
            updates_per_rollout=updates,
            constant_length=18,
            whole_groups=algorithm.needs().whole_groups,
        ),
        ranks=ranks,
    )
    losses, metrics = [], []
    mismatched = algorithm.needs().mismatched
    for update in preparation.prepare(own, AFTER_WARMUP).updates:
        # 0 would be 0 on all ranks
        assert not mismatched or all(batch.divergence > 0 for batch in update.batches)
        assert len(update.batches) == ranks.largest(len(update.batches))  # sharded models compute together
        if update.model == "critic":
            parts = [_value_loss(algorithm, batch, new_values) for batch in update.batches]
        else:
            parts = [_loss(algorithm, batch, logprobs) for batch in update.batches]
        losses.append(sum((loss for loss, _ in parts), torch.zeros((), dtype=torch.float64)))
        metrics += of_update([metrics for _, metrics in parts], ranks).values()
    made = torch.stack(losses)
    gradients = torch.autograd.grad(
        made.sum() + 0 * (logprobs.sum() + new_values.sum()), [logprobs, new_values]
    )
    return Outcome(made.detach(), torch.tensor(metrics, dtype=torch.float64), *gradients)


def _loss(algorithm: BaseAlgorithm, batch: TrainBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
    needs = algorithm.needs()
    entropy_BT = (
        look_up(table(6, center=2.0), batch) * look_up(logprobs, batch).exp() if needs.entropy else None
    )
    return _summed(batch, *algorithm.token_losses(batch, look_up(logprobs, batch), entropy_BT))


def _value_loss(
    algorithm: BaseAlgorithm, batch: TrainBatch, new_values: Tensor
) -> tuple[Tensor, dict[str, float]]:
    return _summed(batch, *algorithm.value_losses(batch, look_up(new_values, batch)))


def _summed(
    batch: TrainBatch, losses_BT: Tensor, metrics: dict[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    loss = (losses_BT * batch.weights_BT).sum()
    return loss, of_batch(loss.detach(), metrics, batch)


def invariance_error(method: str, options: Mapping[str, Any], nonnegative: bool = False) -> float:
    """Return the largest relative difference over all arrangements."""

    def make() -> BaseAlgorithm:
        return ALGORITHMS[method](**options)

    expected = outcome(make, BASE, nonnegative=nonnegative)
    found = (outcome(make, one, nonnegative=nonnegative) for one in ARRANGEMENTS.values())
    return max(map(expected.distance, found))

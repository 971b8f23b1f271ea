"""Checks of the laws themselves, on a few episodes: tokens, log-probs, weights, loss."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rl4llm.build.trainer import AnyTrainer
from rl4llm.check.bench import Bench, NotNeeded, Played, Recorded
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import EngineError, EnvError, MismatchError, RL4LLMError, StaleWeightsError
from rl4llm.core.types import Completion, Group, TrainBatch, Trajectory
from rl4llm.envs.rollout import Rollout
from rl4llm.sync.verify import TOLERANCES, Canary
from rl4llm.trainers.prepare import Preparation
from rl4llm.trainers.rl import RLTrainer

ROWS, SAMPLES, MOST_TOKENS = 2, 4, 64
"""So many prompts are played, with so many samples each and so many tokens a turn, at most."""
ALIKE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Accepted difference of two gradients, relative to their norm, by the dtype that they are computed in."""
ATTEMPTS = 6


def model(bench: Bench) -> str:
    """Everything that `rl4llm train` builds can be built."""
    trainer = bench.build()
    info = trainer.backend.info()
    name = bench.config.backend["name"]
    instead = "" if name == "torch" else f"; checked with backend.name=torch in one process, not {name}"
    sizes = f"{info['parameters']:,} parameters, of which {info['trainable']:,} train"
    return f"{info['architecture']}, {sizes}, on {info['device']}{instead}"


def episodes(bench: Bench) -> str:
    """A few episodes are played with the weights of the trainer, which the engine proves to hold."""
    bench.demand_episodes()
    trainer = _rl(bench)
    trainer.publish()
    recorded = Recorded(trainer.inference.client)
    needs = bench.algorithm.needs()
    groups: list[Group] = []
    failed: list[SampleState] = []
    for part in bench.parts:
        assert part.env is not None and part.renderer is not None  # of checks that this one needs
        rollout = Rollout(
            part.env,
            recorded,
            part.renderer,
            trainer.inference.runner,
            seed=bench.config.seed,
            max_failed_share=1.0,
            part=part.name,
        )
        params = trainer.sampling_params.replace(max_tokens=min(part.config.rollout.max_tokens, MOST_TOKENS))
        result = rollout.play(
            range(min(ROWS, len(part.dataset))),
            step=0,
            sampling_params=params,
            group_size=min(bench.config.rollout.group_size, SAMPLES),
            sampling=needs.sampling,
            greedy_baseline=needs.greedy_baseline,
        )
        groups += result.groups
        failed += result.failed
    bench.played = Played(groups, recorded.completions)
    count = sum(len(group.trajectories) for group in groups)
    if failed:
        raise EnvError(f"{len(failed)} of {count + len(failed)} episodes failed; the first: {failed[0].failure}")
    return f"{count} episodes of {len(groups)} groups, {len(recorded.completions)} turns of the policy"


def mask(bench: Bench) -> str:
    """What the mask marks in the batches that train are the tokens that were sampled, and no others."""
    trajectories = [trajectory for group in _groups(bench) for trajectory in group.trajectories]
    if bench.played is not None:
        check_sampled(bench.played.completions, trajectories)
    batches = _pack(_trainer(bench).preparation, trajectories)
    check_mask(trajectories, batches)
    tokens = sum(int(batch.mask_BT.sum()) for batch in batches)
    total = sum(trajectory.num_tokens for trajectory in trajectories)
    return f"{tokens:,} of {total:,} tokens train, exactly those that {'were sampled' if bench.samples else 'are learned'}"


def check_sampled(completions: Sequence[Completion], trajectories: Sequence[Trajectory]) -> None:
    """Raise EnvError unless each turn of the policy is a completion of the engine, token for token."""
    given = Counter((item.token_ids, item.logprobs) for item in completions)
    recorded = Counter((span.token_ids, span.logprobs) for trajectory in trajectories for span in _policy_spans(trajectory))
    made_up = recorded - given
    if made_up and max(len(item.versions) for item in completions) < 2:
        (tokens, _), _ = next(iter(made_up.items()))
        raise EnvError(
            f"{len(made_up)} turns are marked as the policy's that the engine did not sample like that, such as the tokens "
            f"{list(tokens)[:8]}. Next: let the environment append messages only, or what `llm` gave it, unchanged."
        )


def check_mask(trajectories: Sequence[Trajectory], batches: Sequence[TrainBatch]) -> None:
    """Raise EnvError unless the mask marks the policy's tokens in the batches, each with its own log-prob."""
    expected = Counter(
        pair
        for trajectory in trajectories
        for span in _policy_spans(trajectory)
        for pair in zip(span.token_ids, torch.tensor(span.logprobs).tolist(), strict=True)  # as fp32, like the batch
    )
    found: Counter[tuple[int, float]] = Counter()
    for batch in batches:
        marked = (item_BT[batch.mask_BT].tolist() for item_BT in (batch.token_ids_BT, batch.sampled_logprobs_BT))
        found.update(zip(*marked, strict=True))
    missing, extra = (expected - found).total(), (found - expected).total()
    if missing or extra:
        raise EnvError(
            f"The mask of the batches leaves out {missing} of the policy's tokens and marks {extra} that are none of its. "
            "Next: look at what builds trajectories and batches in this setup; it is not what rl4llm ships."
        )


def _policy_spans(trajectory: Trajectory) -> Iterator[Any]:
    return (span for record in trajectory.records for span in record if span.author == "policy")


def logprobs(bench: Bench) -> str:
    """Engine and trainer give the sampled tokens the same log-probs."""
    bench.demand_episodes()
    if bench.algorithm.needs().sampling:
        raise NotNeeded("samples are drawn at several temperatures, of which the trainer knows one")
    trainer, config = _rl(bench), bench.config
    trajectories = [trajectory for group in _played(bench).groups for trajectory in group.trajectories]
    differences = []
    for batch in _pack(trainer.preparation, trajectories):
        own_BT = trainer.backend.forward(batch, temperature=config.rollout.temperature or 1.0).cpu()
        differences.append((own_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs())
    apart = torch.cat(differences)
    largest, mean, accepted = apart.max().item(), apart.mean().item(), _tolerance(bench)
    text = f"{largest:.2g} nats apart at most, {mean:.2g} on average, over {len(apart):,} tokens"
    if not largest <= accepted:
        raise MismatchError(
            f"{text}; accepted: {accepted:g}. Next: give engine and trainer the same weights, dtype and chat template, and "
            "leave sampling penalties of the server out."
        )
    return text


def publish(bench: Bench) -> str:
    """When the trainer's weights change, so does what the engine computes; afterwards it has the old ones again."""
    bench.demand_episodes()
    trainer = _rl(bench)
    inference = trainer.inference
    accepted = _tolerance(bench)
    canary = Canary(inference.client.vocab_size, dtype=_dtype(bench), tolerance=accepted)
    before_BT = canary.expected(trainer.backend)
    parameter, kept = _moved(trainer, canary, before_BT, 4 * accepted)
    moved = (canary.expected(trainer.backend) - before_BT).abs().max().item()
    try:
        trainer.inference = replace(inference, canary=canary)
        trainer.step += 1
        trainer.publish()
    except StaleWeightsError as error:
        raise StaleWeightsError(
            f"The trainer's log-probs moved by {moved:.2g} nats, and the engine did not follow. {error}"
        ) from error
    finally:
        _put(parameter, kept)
        trainer.inference = inference
    trainer.step += 1
    trainer.publish()
    return f"weights that move log-probs by {moved:.2g} nats reached the engine, to {accepted:g}, and the old ones again"


def _moved(trainer: RLTrainer, canary: Canary, before_BT: Tensor, enough: float) -> tuple[nn.Parameter, Tensor]:
    """Change one tensor that trains until the trainer's log-probs move enough; returns it and what it was."""
    parameter = [item for item in trainer.backend.model.parameters() if item.requires_grad][-1]
    kept = parameter.detach().clone()
    for attempt in range(ATTEMPTS):
        _put(parameter, kept + 0.05 * 3**attempt * torch.randn(kept.shape).to(kept))
        if (canary.expected(trainer.backend) - before_BT).abs().max().item() > enough:
            return parameter, kept
    _put(parameter, kept)
    raise EngineError("Noise on a tensor that trains does not change the log-probs, so nothing could be learned in it.")


@torch.no_grad()
def _put(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.copy_(value)


def loss(bench: Bench) -> str:
    """The gradient of an optimizer step does not depend on how it is cut into micro-batches."""
    trainer = _trainer(bench)
    groups = [_rewarded(group, number) for number, group in enumerate(_groups(bench))]
    if isinstance(trainer, RLTrainer) and all(_alike(group) for group in groups):
        raise NotNeeded("all attempts at each prompt are alike, so what they teach cancels out")
    lengths = [trajectory.num_tokens for group in groups for trajectory in group.trajectories]
    pieces = [sum(t.num_tokens for t in group.trajectories) for group in groups]
    smallest = max(pieces if trainer.algorithm.needs().whole_groups else lengths)
    whole, cut = (_batches(trainer, groups, budget) for budget in (sum(lengths), smallest))
    if len(cut) < 2:
        raise NotNeeded("what is played here cannot be cut into two micro-batches")
    one, other = _gradient(trainer, whole), _gradient(trainer, cut)
    apart = ((one - other).norm() / one.norm().clamp(min=1e-30)).item()
    if one.norm() == 0:
        raise NotNeeded("no gradient: nothing here can be learned from")
    text = f"gradients from {len(whole)} and from {len(cut)} micro-batches differ by {apart:.2g} of their norm"
    if not apart <= ALIKE[_dtype(bench)]:
        raise RL4LLMError(
            f"{text}, more than {ALIKE[_dtype(bench)]:g}. Next: have token_losses return one loss per token, without any "
            "mean or sum over the batch."
        )
    return text


def _alike(group: Group) -> bool:
    """Whether every attempt says the same, so that of the gradient of a comparison only rounding is left."""
    return len({tuple(span.token_ids for span in item.spans) for item in group.trajectories}) == 1


def _rewarded(group: Group, number: int) -> Group:
    """The group with made-up rewards that differ, since equal ones teach many methods nothing."""
    made_up = (replace(item, reward=float((number + i) % 2)) for i, item in enumerate(group.trajectories))
    return replace(group, trajectories=tuple(made_up))


def _batches(trainer: AnyTrainer, groups: Sequence[Group], budget: int) -> list[TrainBatch]:
    """The micro-batches of one optimizer step on all groups, of so many tokens each."""
    preparation = copy.copy(trainer.preparation)
    preparation.batching = replace(
        preparation.batching, max_tokens_per_batch=budget, usual_tokens_per_batch=budget, updates_per_rollout=1, epochs=1
    )
    critic = trainer.algorithm.needs().critic
    updates = preparation.prepare(groups, critic.warmup_steps if critic else 0).updates
    return list(updates[0].batches)


def _gradient(trainer: AnyTrainer, batches: Sequence[TrainBatch]) -> Tensor:
    """All gradients of an optimizer step on these micro-batches, as one vector; the model is left without any."""
    parameters = [item for item in trainer.backend.model.parameters() if item.requires_grad]
    for number, batch in enumerate(batches, 1):
        trainer.forward_backward(batch, number == len(batches))
    gradients = [torch.zeros(1) if item.grad is None else item.grad.detach().flatten().float().cpu() for item in parameters]
    for item in parameters:
        item.grad = None
    return torch.cat(gradients)


def _groups(bench: Bench) -> list[Group]:
    """Those that were played, or the first rows of a dataset."""
    trainer = _trainer(bench)
    if isinstance(trainer, RLTrainer):
        return [group for group in _played(bench).groups if not group.frozen]
    count = min(2 * ROWS, len(trainer.dataset))
    return [trainer.read(trainer.dataset[row], str(row)) for row in range(count)]


def _pack(preparation: Preparation, trajectories: Sequence[Trajectory]) -> list[TrainBatch]:
    batching = preparation.batching
    return batching.pack(trajectories, [1.0] * len(trajectories), batching.totals(trajectories))


def _trainer(bench: Bench) -> AnyTrainer:
    assert bench.trainer is not None  # of a check that these need
    return bench.trainer


def _played(bench: Bench) -> Played:
    assert bench.played is not None
    return bench.played


def _rl(bench: Bench) -> RLTrainer:
    assert isinstance(bench.trainer, RLTrainer)
    return bench.trainer


def _dtype(bench: Bench) -> str:
    chosen = bench.config.model
    return chosen.dtype if chosen.autocast == "none" else chosen.autocast


def _tolerance(bench: Bench) -> float:
    return bench.config.sync.tolerance or TOLERANCES[_dtype(bench)]

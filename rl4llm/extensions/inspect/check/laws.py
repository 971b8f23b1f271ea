"""Checks of the invariants on a few episodes: tokens, log-probs, weights, loss."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl4llm.backends.lora import LoraAdapter
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose.engines import build_canary
from rl4llm.compose.trainer import AnyTrainer
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import EngineError, EnvError, MismatchError, RL4LLMError
from rl4llm.core.types import Completion, Group, TrainBatch, Trajectory, Update
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.inspect.check.bench import Bench, NotNeeded, Recorded
from rl4llm.sync.verify import BOUNDS, Canary
from rl4llm.trainers.rl import RLTrainer

ROWS, SAMPLES, MOST_TOKENS = 2, 4, 64
"""The number of prompts, the samples per prompt, and the maximum tokens per turn."""
ALIKE = {"float32": 1e-4, "bfloat16": 0.25}
"""Accepted difference of two gradients, relative to the norms of their parts, by the dtype of the computation.

In bfloat16 the gradients of good and bad samples cancel out and their rounding errors do not: a pretrained model of 135M
parameters had 0.03 to 0.11, and 0.45 to 0.56 with a loss that is a mean over its micro-batch.
"""
ATTEMPTS = 6


def model(bench: Bench) -> str:
    """Check that everything can be built that `rl4llm train` builds."""
    trainer = bench.build()
    info = trainer.backend.info()
    name = bench.config.backend["name"]
    instead = "" if name == "torch" else f"; checked with backend.name=torch in one process, not {name}"
    sizes = f"{info['parameters']:,} parameters, {info['trainable']:,} of them train"
    return f"{info['architecture']}, {sizes}, on {info['device']}{instead}"


def episodes(bench: Bench) -> str:
    """Play a few episodes with the trainer's weights, which the engine proves to have."""
    trainer = _rl(bench)
    trainer.publish()
    recorded = Recorded(trainer.inference.client)
    needs = bench.algorithm.needs()
    bench.groups = []
    failed: list[SampleState] = []
    for part in bench.parts:
        rollout = Rollout(
            part.env,
            cast("BaseClient", recorded),
            part.renderer,
            trainer.inference.runner,
            seed=bench.config.seed,
            max_failed_share=1.0,
            part=part.name,
        )
        params = trainer.sampling_params.replace(
            max_tokens=min(part.setup.config.rollout.max_tokens, MOST_TOKENS)
        )
        result = rollout.play(
            range(min(ROWS, len(part.dataset))),
            step=0,
            sampling_params=params,
            group_size=min(bench.config.rollout.group_size, SAMPLES),
            sampling=needs.sampling,
            greedy_baseline=needs.greedy_baseline,
        )
        bench.groups += result.groups
        failed += result.failed
    bench.completions = recorded.completions
    trajectories = _trajectories(bench.groups)
    if failed:
        count = len(trajectories) + len(failed)
        raise EnvError(f"{len(failed)} of {count} episodes failed; the first: {failed[0].failure}")
    text = f"{len(trajectories)} episodes, {len(bench.completions)} turns of the policy"
    if not any(part.env.tool_schemas for part in bench.parts):
        return text
    calls = sum(message.role == "tool" for item in trajectories for message in item.messages)
    hint = "" if calls else ": see what the model writes with `rl4llm check --task`"
    return f"{text}, {calls} tool calls{hint}"


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def mask(bench: Bench) -> str:
    """Check that the mask of the training batches marks exactly the sampled tokens."""
    trajectories = _trajectories(_groups(bench))
    if bench.samples:
        check_sampled(bench.completions, trajectories)
    batches = _pack(bench.trainer, trajectories)
    check_mask(trajectories, batches)
    tokens = sum(int(batch.mask_BT.sum()) for batch in batches)
    total = sum(trajectory.num_tokens for trajectory in trajectories)
    return f"{tokens:,} of {total:,} tokens train, exactly those that {'were sampled' if bench.samples else 'are learned'}"


def check_sampled(completions: Sequence[Completion], trajectories: Sequence[Trajectory]) -> None:
    """Raise EnvError unless each turn of the policy is a completion of the engine, token for token."""
    sampled = Counter((item.token_ids, item.logprobs) for item in completions)
    recorded = Counter((span.token_ids, span.logprobs) for span in _policy_spans(trajectories))
    made_up = recorded - sampled
    if made_up and all(len(item.versions) < 2 for item in completions):
        token_ids, _ = next(iter(made_up))
        raise EnvError(
            f"The engine did not sample {len(made_up)} turns of the policy, such as the tokens {list(token_ids)[:8]}. Next: "
            "let the environment append only messages, or unchanged results of `llm`."
        )


def check_mask(trajectories: Sequence[Trajectory], batches: Sequence[TrainBatch]) -> None:
    """Raise EnvError unless the mask marks the policy's tokens in the batches, each with its log-prob."""
    expected = Counter(
        pair
        for span in _policy_spans(trajectories)
        # as fp32, like the batch
        for pair in zip(span.token_ids, torch.tensor(span.logprobs).tolist(), strict=True)
    )
    marked_tokens: Counter[tuple[int, float]] = Counter()
    for batch in batches:
        marked = (
            item_BT[batch.mask_BT].tolist() for item_BT in (batch.token_ids_BT, batch.sampled_logprobs_BT)
        )
        marked_tokens.update(zip(*marked, strict=True))
    missing, extra = (expected - marked_tokens).total(), (marked_tokens - expected).total()
    if missing or extra:
        raise EnvError(
            f"The loss mask misses {missing} policy tokens and includes {extra} non-policy tokens. Next: look at your code "
            "that builds trajectories and batches."
        )


def _policy_spans(trajectories: Sequence[Trajectory]) -> Iterator[Any]:
    records = (record for trajectory in trajectories for record in trajectory.records)
    return (span for record in records for span in record if span.author == "policy")


def logprobs(bench: Bench) -> str:
    """Check that engine and trainer compute the same log-probs for the sampled tokens."""
    if bench.algorithm.needs().sampling:
        raise NotNeeded("samples are drawn at several temperatures")
    trainer, config = _rl(bench), bench.scratch
    differences = []
    for batch in _pack(trainer, _trajectories(bench.groups)):
        own_BT = trainer.backend.forward(batch, temperature=config.rollout.temperature or 1.0).cpu()
        differences.append((own_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs())
    apart = torch.cat(differences)
    largest, mean = apart.max().item(), apart.mean().item()
    accepted = build_canary(replace(bench.setup, config=config), trainer.inference.client).bound
    text = f"differences of at most {largest:.2g} nats, {mean:.2g} on average, over {len(apart):,} tokens"
    if not mean <= accepted:
        raise MismatchError(
            f"{text}; accepted: {accepted:g} on average. Next: give engine and trainer the same weights and dtype, and set "
            "no sampling penalties on the server."
        )
    return text


def publish(bench: Bench) -> str:
    """Check that a change of the trainer's weights reaches the engine, then restore the old weights in both."""
    trainer = _rl(bench)
    inference = trainer.inference
    # not calibrated: it accepts differences up to its bound
    canary = build_canary(replace(bench.setup, config=bench.scratch), inference.client)
    checked = replace(inference, canary=canary)
    checked.choose_tokens()
    before_BT = canary.expected(trainer.backend)
    parameter, weights = _moved(trainer, canary, before_BT, 4 * canary.bound)
    moved = _apart(canary.expected(trainer.backend), before_BT)
    try:
        trainer.inference = checked
        trainer.step += 1
        trainer.publish()
    finally:
        _put(parameter, weights)
        trainer.inference = inference
    trainer.step += 1
    trainer.publish()
    return f"weights that change log-probs by {moved:.2g} nats on average reached the engine, and so did the old ones"


def _moved(
    trainer: RLTrainer, canary: Canary, before_BT: Tensor, enough: float
) -> tuple[nn.Parameter, Tensor]:
    """Change one trained tensor until the trainer's log-probs move by more than `enough` nats on average; return it and its
    old value."""
    parameter = [item for item in trainer.backend.model.parameters() if item.requires_grad][-1]
    weights = parameter.detach().clone()
    for attempt in range(ATTEMPTS):
        _put(parameter, weights + 0.05 * 3**attempt * torch.randn(weights.shape).to(weights))
        if _apart(canary.expected(trainer.backend), before_BT) > enough:
            return parameter, weights
    _put(parameter, weights)
    raise EngineError("Noise on a trained tensor does not change the log-probs: training it has no effect.")


@torch.no_grad()
def merge(bench: Bench) -> str:
    """Check that a model with a trained adapter and the merged model, which is published and saved, compute the same."""
    trainer = bench.trainer
    backend, adapter = trainer.backend, trainer.backend.adapter
    if not isinstance(backend, TorchBackend) or not isinstance(adapter, LoraAdapter):
        raise NotNeeded("the whole model trains, so nothing is merged")
    batches = _pack(trainer, _trajectories(_groups(bench)))

    def numbers() -> Tensor:
        return torch.cat([backend.forward(batch).cpu()[batch.mask_BT.cpu()] for batch in batches])

    accepted, before_N = BOUNDS[bench.setup.machine.computed], numbers()
    heads = () if backend.value_head is None else backend.value_head.parameters()
    trained = [item for item in (*backend.model.parameters(), *heads) if item.requires_grad]
    saved = [(item, item.detach().clone()) for item in trained]
    try:
        for attempt in range(ATTEMPTS):
            _add_noise(saved, 0.05 * 3**attempt)
            adapted_N = numbers()
            if (moved := _apart(adapted_N, before_N)) > 4 * accepted:
                break
        saved += _merge(adapter)
        with adapter.off():
            apart = _apart(numbers(), adapted_N)
    finally:
        _add_noise(saved, 0.0)
    text = f"an adapter that moves the model's numbers by {moved:.2g} on average; merged they differ by {apart:.2g}"
    if not apart <= accepted:
        raise MismatchError(
            f"{text}; accepted: {accepted:g}. Next: name other layers in model.lora.targets, or train the whole model "
            "(model.lora.rank=0)."
        )
    return text


def _add_noise(saved: Sequence[tuple[Tensor, Tensor]], scale: float) -> None:
    """Set each tensor to its old value, with noise of this scale."""
    for item, old in saved:
        _put(item, old + scale * torch.randn(old.shape).to(old))


def _merge(adapter: LoraAdapter) -> list[tuple[Tensor, Tensor]]:
    """Write what is published into the frozen model; return each tensor that has changed, and its old value."""
    base, replaced = dict(adapter.base_parameters()), []
    for name, tensor in adapter.merged_parameters():
        if adapter.beside(name):
            replaced.append((base[name], base[name].cpu().clone()))
            _put(base[name], tensor)
    return replaced


def _apart(one_BT: Tensor, other_BT: Tensor) -> float:
    """Return the mean difference of log-probs, in nats."""
    return (one_BT - other_BT).abs().mean().item()


@torch.no_grad()
def _put(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


def loss(bench: Bench) -> str:
    """Check that the gradient of an optimizer step does not depend on the micro-batches."""
    trainer = bench.trainer
    groups = [rewarded(group, number) for number, group in enumerate(_groups(bench))]
    samples = [
        {tuple(span.token_ids for span in item.spans) for item in group.trajectories} for group in groups
    ]
    if isinstance(trainer, RLTrainer) and all(len(distinct) == 1 for distinct in samples):
        # The gradient of a comparison of equal samples is only rounding error.
        raise NotNeeded("all samples of each prompt are equal, so their gradients cancel out")
    lengths = [trajectory.num_tokens for trajectory in _trajectories(groups)]
    whole = _batches(trainer, groups, sum(lengths))
    gradient, norms = _gradient(trainer, whole)
    if norms == 0 and any((batch.advantages_BT * batch.weights_BT).any() for batch in whole):
        raise RL4LLMError(
            "The gradient is zero, but tokens have advantages. Next: have token_losses of "
            f"algorithm.name={bench.config.algorithm['name']} return losses that depend on its log-probs."
        )
    pieces = [sum(t.num_tokens for t in group.trajectories) for group in groups]
    smallest = max(pieces if trainer.algorithm.needs().whole_groups else lengths)
    cut = _batches(trainer, groups, smallest)
    if len(cut) < 2:
        raise NotNeeded("these episodes cannot be split into two micro-batches")
    split_gradient, parts = _gradient(trainer, cut)
    if parts == 0:
        raise NotNeeded("the gradient is zero, so there is nothing to compare")
    apart = (gradient - split_gradient).norm().item() / parts
    text = (
        f"gradients from {len(whole)} and from {len(cut)} micro-batches differ by {apart:.2g} of their norm"
    )
    accepted = ALIKE[bench.setup.machine.computed]
    if not apart <= accepted:
        raise RL4LLMError(
            f"{text}, more than {accepted:g}. Next: have token_losses of algorithm.name={bench.config.algorithm['name']} "
            "return one loss per token, without any mean or sum over the batch."
        )
    return text


def rewarded(group: Group, number: int) -> Group:
    """Return the group with made-up rewards that differ, since equal ones give many methods no gradient."""
    made_up = (replace(item, reward=float((number + i) % 2)) for i, item in enumerate(group.trajectories))
    return replace(group, trajectories=tuple(made_up))


def _batches(trainer: AnyTrainer, groups: Sequence[Group], budget: int) -> list[TrainBatch]:
    """Return the micro-batches of one optimizer step on all groups, each of at most `budget` tokens."""
    preparation = copy.copy(trainer.preparation)
    preparation.batching = replace(
        preparation.batching,
        max_tokens_per_batch=budget,
        usual_tokens_per_batch=budget,
        updates_per_rollout=1,
        passes_per_rollout=1,
    )
    critic, before = trainer.algorithm.needs().critic, copy.deepcopy(trainer.algorithm.state())
    updates = preparation.prepare(groups, critic.warmup_steps if critic else 0).updates
    trainer.algorithm.restore(before)  # it may remember the rewards that it saw
    return list(updates[0].batches)


def _gradient(trainer: AnyTrainer, batches: Sequence[TrainBatch]) -> tuple[Tensor, float]:
    """Return the gradient of an optimizer step on these micro-batches as one vector; clear it in the model.

    The second value is the sum of the norms of what each micro-batch added. The gradients of good and bad samples may cancel
    out, but the rounding errors of a computation in bf16 do not, so this is what they compare with.
    """
    assert isinstance(trainer.backend, TorchBackend)  # see `Bench`
    parameters = list(trainer.backend.stepped.values())
    objective = trainer.objective(Update(batches))
    gradient, norms = torch.zeros(1), 0.0
    for number, batch in enumerate(batches, 1):
        trainer.backend.forward_backward(batch, **objective, last=number == len(batches))
        parts = [
            torch.zeros(item.numel()) if item.grad is None else item.grad.detach().flatten().float().cpu()
            for item in parameters
        ]
        before, gradient = gradient, torch.cat(parts)
        norms += (gradient - before).norm().item()
    for item in parameters:
        item.grad = None
    return gradient, norms


def _groups(bench: Bench) -> list[Group]:
    """Return the groups that were played, or the first rows of a dataset."""
    trainer = bench.trainer
    if isinstance(trainer, RLTrainer):
        return [group for group in bench.groups if not group.frozen]
    count = min(2 * ROWS, len(trainer.dataset))
    return [trainer.read(trainer.dataset[row], str(row)) for row in range(count)]


def _pack(trainer: AnyTrainer, trajectories: Sequence[Trajectory]) -> list[TrainBatch]:
    return trainer.preparation.batching.pack(trajectories, [1.0] * len(trajectories))


def _rl(bench: Bench) -> RLTrainer:
    assert isinstance(bench.trainer, RLTrainer)
    return bench.trainer

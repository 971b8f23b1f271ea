"""What the policy can do before training: sample it on a few prompts, and say what its groups would teach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import ROUND_UP, Context

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.config import Config
from rl4llm.core.errors import ConfigError
from rl4llm.core.message import shortened
from rl4llm.core.registry import PARTS, load, provided
from rl4llm.core.types import TRUNCATED, Group, Trajectory
from rl4llm.envs.mixture import MixedRollout
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.inspect.check.bench import Bench
from rl4llm.extensions.inspect.check.parts import data
from rl4llm.tracking.summary import QUOTED_CHARS, last_words, summarize, unread
from rl4llm.trainers.rl import RLTrainer

MANY, FEW, MOST = 0.2, 0.05, 0.95
"""Shares of episodes or groups at which the report gives advice."""
STILL = 0.02  # nats per token: a run that changes no more is not seen in the noise of rewards
NOISE = 1e-6  # nats per token: an update that changes less is mostly the rounding of log-probs
QUOTED = 3


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What was measured: `metrics` as in a run's log, answers in a wrong format, times, and what to change.

    `quoted` are ground truths and the answers to them, those first that no reward could read; `refused` are calls that got
    errors.
    `teaches` is whether any group has rewards that differ. Methods that compare them need such groups. `update` is how much
    an update on them changes the log-probs of their tokens, in nats, and `run` at most all updates; None without a gradient.
    """

    prompts: int
    group_size: int
    metrics: Mapping[str, float]
    no_answer: float
    quoted: Sequence[tuple[str, str]]
    refused: Sequence[str]
    teaches: bool
    update: float | None
    run: float | None
    advice: Sequence[str]

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        metrics: Mapping[str, float] = defaultdict(float, self.metrics)
        yield f"sampled {metrics['trajectories']:.0f} episodes: {self.prompts} prompts, group size {self.group_size}"
        success = f"{metrics['accuracy']:.1%}" if "accuracy" in metrics else "not defined (success_at)"
        yield f"success       {success}, mean reward {metrics['reward/mean']:.3f}"
        yield f"groups        {1 - metrics['groups/zero_spread']:.1%} have rewards that differ, and so a gradient"
        yield f"format        {self.no_answer:.1%} have no answer, as the rewards report"
        yield from (f"  ground truth {truth}, answer {text!r}" for truth, text in self.quoted)
        yield f"truncated     {metrics['truncated']:.1%}, {metrics['completion_length/mean']:.0f} tokens on average"
        if "env/tool_calls" in metrics:
            calls, errors = metrics["env/tool_calls"], metrics["env/tool_errors"]
            yield f"tools         {calls:.2f} calls an episode, {errors:.2f} errors"
            yield from (f"  for example {text}" for text in self.refused)
        if metrics["failures"]:
            yield f"failed        {metrics['failures']:.0f} episodes, which would be left out"
        if self.update is not None:
            yield f"update        changes log-probs by {self.update:.1e} nats a token; the run, by at most {self.run:.1e}"
        yield from (f"change        {text}" for text in self.advice or ["nothing"])


def faulty_tasks(config: Config, tell: Callable[[str], None]) -> list[str]:
    """Return a line for each row with hidden tests that its own solution fails, or that pass where nothing was done.

    `tell` gets each line at once, and one for each part whose tasks run elsewhere.
    """
    if (path := provided(PARTS).get("try_tasks")) is None:
        return []
    lines: list[str] = []
    with closing(Bench(config)) as bench:
        data(bench)
        for part in bench.parts:
            env = part.setup.config.env
            if env.get("remote"):
                tell(f"{part.where}tasks that {env['remote']} plays are not checked here.")
            else:
                rows = [*part.dataset, *(part.held_out or ())]
                lines += load(path)(rows, env.get("workspace") or {}, tell)
    return lines


def examine(config: Config, prompts: int) -> TaskReport:
    """Play groups of the run's size on the first `prompts` prompts that it would train on.

    Nothing of the run is read or written: the policy is `model.path`. Raises ConfigError if nothing is sampled.
    """
    with closing(Bench(config)) as bench:
        trainer = bench.build()
        if not isinstance(trainer, RLTrainer):
            raise ConfigError(
                f"algorithm.name={config.algorithm['name']!r} samples nothing: leave --task out."
            )
        trainer.publish()
        return _examined(trainer, config, prompts)


def _examined(trainer: RLTrainer, config: Config, prompts: int) -> TaskReport:
    prompts = min(prompts, trainer.rollout.num_rows)
    needs = trainer.algorithm.needs()
    result = trainer.rollout.play(
        trainer.prompts.next_batch(prompts),
        step=0,
        sampling_params=trainer.sampling_params,
        sampling=needs.sampling,
        greedy_baseline=needs.greedy_baseline,
    )
    groups = [group for group in result.groups if not group.frozen]
    if not groups:
        raise ConfigError(f"No episode ended: {[sample.failure for sample in result.failed][:1]}")
    metrics = summarize(result.groups, result.failed)
    members = [trajectory for group in groups for trajectory in group.trajectories]
    unanswered = [trajectory for trajectory in members if unread(trajectory)]
    no_answer = len(unanswered) / len(members)
    examples = unanswered or [group.trajectories[0] for group in groups]
    update, times = _update(trainer, config, groups)
    run = None if update is None else update * times
    return TaskReport(
        prompts=prompts,
        group_size=trainer.rollout.group_size,
        metrics=metrics,
        no_answer=no_answer,
        quoted=[
            (shortened(repr(example.extras["ground_truth"]), QUOTED_CHARS), last_words(example))
            for example in examples[:QUOTED]
        ],
        refused=_refused_calls(members),
        teaches=metrics.get("groups/zero_spread", 0.0) < 1,
        update=update,
        run=run,
        advice=[
            *_of_rate(config, update, run),
            *_of_tools(metrics),
            *_of_length(trainer, config, members),
            *_advice(trainer, config, metrics, no_answer),
        ],
    )


def _update(trainer: RLTrainer, config: Config, groups: Sequence[Group]) -> tuple[float | None, float]:
    """Take an optimizer step on the groups; return the mean change of the log-probs of their tokens, in nats, and how many
    such steps all those of the run would be if each went the same way."""
    backend, critic = trainer.backend, trainer.algorithm.needs().critic
    assert isinstance(backend, TorchBackend)  # see `Bench`
    trainer.inference.lend_device(backend)
    kept = [group for group in groups if trainer.algorithm.keep(group)]
    prepared = trainer.preparation.prepare(kept, critic.warmup_steps if critic else 0)
    updates = [update for update in prepared.updates if update.model == "model" and update.batches]
    if not updates:
        return None, 0.0
    batches, temperature = updates[0].batches, trainer.preparation.temperature
    before = [backend.forward(batch, temperature=temperature) for batch in batches]
    for batch in batches:
        backend.forward_backward(batch, **trainer.objective(updates[0]), last=batch is batches[-1])
    if not backend.optim_step()["grad_norm"]:
        return None, 0.0
    tokens = changed = 0.0
    for batch, before_BT in zip(batches, before, strict=True):
        mask_BT = batch.mask_BT.to(before_BT.device)
        after_BT = backend.forward(batch, temperature=temperature)
        changed += float(((after_BT - before_BT).abs() * mask_BT).sum())
        tokens += float(mask_BT.sum())
    rate, steps = backend.optimizer.options.lr_at, config.max_steps * len(updates)
    return changed / max(tokens, 1.0), sum(map(rate, range(steps))) / rate(0) if rate(0) else 0.0


def _of_rate(config: Config, update: float | None, run: float | None) -> Iterator[str]:
    if not config.training.lr:
        yield "training.lr=0 trains nothing. Set training.lr above 0."
    elif update is not None and run is not None and run < STILL:
        enough = Context(1, ROUND_UP).create_decimal(config.training.lr * STILL / max(run, NOISE))
        yield (
            f"All {config.max_steps} steps change log-probs by at most {run:.1e} nats a token, which no reward shows. Raise "
            f"training.lr={config.training.lr:g}{f' to {float(enough):g} or more' if update >= NOISE else ''}."
        )


def _refused_calls(members: Sequence[Trajectory]) -> list[str]:
    """Return the most frequent errors that tools answered, each with a turn that got it."""
    turns: dict[str, list[str]] = defaultdict(list)  # by error
    for trajectory in members:
        turn = ""
        for message in trajectory.messages:
            if message.role == "assistant":
                turn = message.content
            elif message.role == "tool" and message.failed:
                turns[message.content].append(turn)
    errors = sorted(turns, key=lambda error: -len(turns[error]))[:QUOTED]
    return [f"{turns[error][0][-QUOTED_CHARS:]!r} got {error[:QUOTED_CHARS]!r}" for error in errors]


def _advice(
    trainer: RLTrainer, config: Config, metrics: Mapping[str, float], no_answer: float
) -> Iterator[str]:
    """Yield what to change in the prompts and the groups, the most important first."""
    success, equal = metrics.get("accuracy"), metrics.get("groups/zero_spread", 0.0)
    if no_answer >= MANY:
        key = "the environment's prompts" if config.data.path is None else "data.system_prompt"
        yield (
            f"{no_answer:.0%} of the answers lack the format of the reward{_format(trainer)}. Ask for it in {key}, choose "
            "another `extract` of the reward, or teach the format with SFT first (`configs/sft.yaml`)."
        )
    elif equal >= MOST and (success is None or success <= FEW):
        yield (
            "Nearly every group scores the same. Use easier prompts, a stronger model, a reward with partial credit, or SFT "
            "first (`configs/sft.yaml`)."
        )
    if equal >= MOST and (success or 0.0) >= MOST:
        yield "Nearly everything is right already. Use harder prompts."
    elif MOST > equal >= 1 - MANY:
        yield (
            f"Only {1 - equal:.0%} of the groups teach something. Raise rollout.group_size={config.rollout.group_size}, or "
            "use prompts that the model solves sometimes (curriculum, or algorithm.name=dapo, which draws others)."
        )


def _of_length(trainer: RLTrainer, config: Config, members: Sequence[Trajectory]) -> Iterator[str]:
    cut = [trajectory for trajectory in members if trajectory.stop_reason in TRUNCATED]
    if len(cut) < MANY * len(members):
        return
    context = trainer.inference.client.context_length
    full = sum(sum(len(span.token_ids) for span in item.records[-1]) >= context for item in cut)
    key = f"Raise rollout.max_tokens={config.rollout.max_tokens}"
    if 2 * full > len(cut):
        key = f"They fill the model's context of {context} tokens. Shorten the prompts or the descriptions of tools"
    yield f"{len(cut) / len(members):.0%} of the episodes are cut off. {key}, or ask for shorter answers."


def _of_tools(metrics: Mapping[str, float]) -> Iterator[str]:
    calls, errors = metrics.get("env/tool_calls"), metrics.get("env/tool_errors", 0.0)
    if calls is not None and calls < MANY:
        yield (
            f"The model calls tools {calls:.2f} times an episode. Show a call in the system prompt, or teach calls with SFT "
            "first (`configs/sft.yaml`)."
        )
    elif calls and errors / calls >= 1 - MANY:
        yield (
            f"{errors / calls:.0%} of the calls are errors, such as those above. Change the tool's description, or teach "
            "calls with SFT, with the same env.tools; set env.describe_tools=false here if it showed none."
        )


def _format(trainer: RLTrainer) -> str:
    """Return an answer that a reward promises to score best, as text behind "the format of the reward"."""
    rollout = trainer.rollout
    parts: Sequence[Rollout] = rollout.parts if isinstance(rollout, MixedRollout) else [rollout]
    for reward in (reward for part in parts for reward in part.env.reward_functions):
        scores = {
            item.messages[-1].content: item.score
            for item in reward.examples()
            if isinstance(item.score, int | float)
        }
        if scores:
            return f", which reads for example {max(scores, key=scores.__getitem__)!r}"
    return ""

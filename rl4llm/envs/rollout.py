"""From prompts to groups of scored trajectories: one call plays all episodes of a rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv, EnvState, SampleState
from rl4llm.core.errors import EnvError, RL4LLMError, TooManyFailuresError
from rl4llm.core.types import ChatMessage, Group, SamplingParams, TokenSpan, Trajectory, count_turns
from rl4llm.data.render import Renderer
from rl4llm.envs.policy import PolicyLLM
from rl4llm.rewards.score import score

GREEDY = {"temperature": 0.0}


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What was played: groups of scored trajectories, and the samples that failed through no fault of the model."""

    groups: tuple[Group, ...]
    failed: tuple[SampleState, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@dataclass(frozen=True, slots=True)
class _Attempt:
    row: int
    index: int
    sampling: Mapping[str, float]
    is_baseline: bool = False


class Rollout:
    """Plays the episodes of an environment against an engine.

    A failed sample is played once more from its seed; what fails again, or is not scored, is left out and counted, and when
    more than `max_failed_share` of a rollout fails, TooManyFailuresError names the three most frequent causes.
    """

    def __init__(
        self,
        env: BaseMDPEnv,
        client: BaseClient,
        renderer: Renderer,
        runner: asyncio.Runner,
        *,
        seed: int,
        max_failed_share: float = 0.1,
    ):
        self.env = env
        self._client = client
        self._renderer = renderer
        self._runner = runner
        self._seed = seed
        self._max_failed_share = max_failed_share

    def play(
        self,
        rows: Sequence[int],
        *,
        step: int,
        sampling_params: SamplingParams,
        group_size: int | None = None,
        first_index: int = 0,
        sampling: Sequence[Mapping[str, float]] = (),
        greedy_baseline: bool = False,
        earlier: Mapping[int, int] | None = None,
    ) -> RolloutResult:
        """Play `group_size` episodes for each of the dataset's `rows`, and score them.

        `first_index` is that of the first sample of each row; another one gives other draws of the same prompt. `sampling`
        holds fields of SamplingParams by sample, from the start again after the last. With a `greedy_baseline` each row is
        played once more at temperature 0, as the baseline of its group. `earlier` says how often other ranks play a row too.
        """
        if not rows:  # a rank whose share is empty
            return RolloutResult((), ())
        size = group_size or self.env.group_size
        seen = Counter({row: count * (size + greedy_baseline) for row, count in (earlier or {}).items()})
        attempts = list(self._attempts(rows, size, first_index, seen, sampling, greedy_baseline))
        samples = [self._sample(attempt) for attempt in attempts]
        self._play(samples, step, sampling_params)
        self._play_failed_again(attempts, samples, step, sampling_params)
        scores = score(samples, self.env.reward_functions, self.env.reward_transform_fn)
        for sample in samples:
            self._check_turns(sample)
        self._check_failures(samples)
        trajectories = {
            id(sample): self._trajectory(sample, {name: values[i] for name, values in scores.rewards.items()}, reward)
            for i, (sample, reward) in enumerate(zip(samples, scores.reward.tolist(), strict=True))
            if sample.failure is None
        }
        return RolloutResult(
            groups=tuple(self._groups(samples, trajectories, size + greedy_baseline)),
            failed=tuple(sample for sample in samples if sample.failure is not None),
        )

    @staticmethod
    def _attempts(
        rows: Sequence[int],
        size: int,
        first: int,
        seen: Counter[int],
        sampling: Sequence[Mapping[str, float]],
        greedy_baseline: bool,
    ) -> Iterator[_Attempt]:
        """Every attempt. `seen` counts those that other ranks make of a row, and grows, so that no two are alike."""
        for row in rows:
            begin = first + seen[row]
            for index in range(size):
                yield _Attempt(row, begin + index, sampling[index % len(sampling)] if sampling else {})
            if greedy_baseline:
                yield _Attempt(row, begin + size, GREEDY, is_baseline=True)
            seen[row] += size + greedy_baseline

    def _sample(self, attempt: _Attempt) -> SampleState:
        columns = dict(self.env.dataset[attempt.row])
        messages = [
            item if isinstance(item, ChatMessage) else ChatMessage.from_dict(item) for item in columns.pop("messages")
        ]
        return SampleState(
            str(columns.pop("prompt_id", attempt.row)),
            attempt.index,
            messages,
            columns.pop("ground_truth"),
            columns,
            sampling=attempt.sampling,
            is_baseline=attempt.is_baseline,
        )

    def _play(self, samples: list[SampleState], step: int, sampling_params: SamplingParams) -> None:
        llm = PolicyLLM(self._client, self._renderer, self._runner, seed=self._seed, step=step)
        llm.begin(samples)
        try:
            self.env._run_interaction_loop(EnvState(samples, step), llm, sampling_params)
        except RL4LLMError:
            raise
        except Exception as error:
            where = f"{type(self.env).__name__}._run_interaction_loop"
            raise EnvError(f"{where} raised {type(error).__name__}: {error}") from error
        finally:
            llm.end()
        for sample in samples:
            self._check_played(sample)

    def _play_failed_again(
        self,
        attempts: list[_Attempt],
        samples: list[SampleState],
        step: int,
        sampling_params: SamplingParams,
    ) -> None:
        again = [i for i, sample in enumerate(samples) if sample.failure is not None]
        for i in again:
            first_failure = samples[i].failure_class
            samples[i] = self._sample(attempts[i])
            samples[i].extras["played_again_after"] = first_failure
        if again:
            self._play([samples[i] for i in again], step, sampling_params)

    def _check_played(self, sample: SampleState) -> None:
        if sample.failure is None and not any(span.author == "policy" for span in sample.spans):
            said = any(message.role == "assistant" for message in sample.messages[sample.init_msg_size :])
            nothing = "ended the episode before the policy said anything"
            other = "ended the episode with no assistant message that is the text that was sampled; append it unchanged"
            sample.fail(f"{type(self.env).__name__} {other if said else nothing}", "env/contract")
        self._check_turns(sample)
        if not sample.done:  # a level-3 loop that did not say why it stopped
            sample.finish("done")

    def _check_turns(self, sample: SampleState) -> None:
        if sample.failure is None and max(sample.turn_rewards, default=-1) >= count_turns(sample.spans):
            rewarded = "a turn that the policy did not take was rewarded"
            sample.fail(f"{type(self.env).__name__}: {rewarded}", "env/contract")

    def _check_failures(self, samples: list[SampleState]) -> None:
        failed = [sample for sample in samples if sample.failure is not None]
        causes = Counter(sample.failure_class for sample in failed)
        examples = {sample.failure_class: sample.failure for sample in reversed(failed)}
        if causes.total() > self._max_failed_share * len(samples):
            most = "; ".join(f"{count} x {cause}: {examples[cause]}" for cause, count in causes.most_common(3))
            raise TooManyFailuresError(
                f"{causes.total()} of {len(samples)} episodes failed, more than rollout.max_failed_share="
                f"{self._max_failed_share:g} allows. Most frequent: {most}.",
                failed,
            )

    def _trajectory(self, sample: SampleState, rewards: dict[str, torch.Tensor], reward: float) -> Trajectory:
        turns = range(count_turns(sample.spans)) if sample.turn_rewards else ()
        turn_rewards = tuple(sample.turn_rewards.get(turn, 0.0) for turn in turns)
        return Trajectory(
            prompt_id=sample.prompt_id,
            spans=_to_last_word(sample.spans),
            messages=tuple(sample.messages),
            rewards={name: float(value) for name, value in rewards.items()},
            reward=reward + sum(turn_rewards),
            stop_reason=sample.stop_reason or "done",
            extras={"sample": sample.index, "ground_truth": sample.ground_truth, **sample.extras},
            turn_rewards=turn_rewards,
            forks=tuple(_to_last_word(record) for record in sample.forks),
        )

    @staticmethod
    def _groups(samples: list[SampleState], trajectories: dict[int, Trajectory], size: int) -> Iterator[Group]:
        """Each draw of a prompt is a group of its own, whatever else a rank plays."""
        for first in range(0, len(samples), size):
            played = [sample for sample in samples[first : first + size] if id(sample) in trajectories]
            members = tuple(trajectories[id(sample)] for sample in played if not sample.is_baseline)
            baseline = next((trajectories[id(sample)] for sample in played if sample.is_baseline), None)
            if members:
                yield Group(members[0].prompt_id, members, baseline)


def _to_last_word(spans: Sequence[TokenSpan]) -> tuple[TokenSpan, ...]:
    """What came after the policy's last word trains nothing."""
    last = max(i for i, span in enumerate(spans) if span.author == "policy")
    return tuple(spans[: last + 1])

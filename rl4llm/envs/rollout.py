"""Play prompts to groups of scored trajectories: one call plays all episodes of a rollout."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import EnvError, RL4LLMError, TooManyFailuresError
from rl4llm.core.sample import EnvState, EpisodeState, SampleState, Special, messages_of, pool_of
from rl4llm.core.types import Group, SamplingParams, TokenSpan, Trajectory, count_turns
from rl4llm.data.render import Renderer
from rl4llm.data.thoughts import kept_thoughts
from rl4llm.envs.policy import PolicyLLM
from rl4llm.rewards.scoring import score, successes
from rl4llm.runtime.raised import raised
from rl4llm.runtime.runner import Runner
from rl4llm.runtime.seeds import derive_seed

T = TypeVar("T")
logger = logging.getLogger("rl4llm.envs")
Episode = list[SampleState]
"""A sample for each role that the policy plays: one unless the environment has several roles."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Groups of scored trajectories, and the samples that failed for reasons other than the policy."""

    groups: tuple[Group, ...]
    failed: tuple[SampleState, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class Rollout:
    """Play the episodes of an environment with an engine.

        rollout = Rollout(env, client)
        groups = rollout.play([0, 1, 2], step=0, sampling_params=SamplingParams(max_tokens=8)).groups

    A failed episode is played once more from its seed. If it fails again, or cannot be scored, it is left out and counted.
    If more than `max_failed_share` of a rollout fails, TooManyFailuresError lists the three most frequent causes.

    Args:
        env: the environment, with its prompts, tokenizer and rewards.
        client: the engine.
        renderer: turns messages into tokens; by default with the chat template of the environment's tokenizer.
        runner: runs the engine's event loop, for callers that share one; by default a new one that `close` closes.
        seed: seed of all randomness in episodes; by default the environment's.
        max_failed_share: share of the episodes that may fail, from 0 to 1.
        part: the environment's name in a mixture, which prefixes the ids of its prompts.
        sampling: fields of SamplingParams for this environment.
    """

    def __init__(
        self,
        env: BaseMDPEnv,
        client: BaseClient,
        renderer: Renderer | None = None,
        runner: Runner | None = None,
        *,
        seed: int | None = None,
        max_failed_share: float = 0.1,
        part: str = "",
        sampling: Mapping[str, Any] | None = None,
    ):
        self.env = env
        self.part = part
        self.runner = runner or Runner()
        self.max_failed_share = max_failed_share
        self.playing: Sequence[SampleState] = ()  # what is being played now, for whoever shows progress
        self._owns_runner = runner is None
        self._client = client
        self._renderer = renderer or Renderer.of(env, env.tokenizer)
        self._seed = env.seed if seed is None else seed
        self._sampling = dict(sampling or {})
        self._warned = False

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the dataset."""
        return len(self.env.dataset)

    @property
    def group_size(self) -> int:
        """Return the number of samples per prompt."""
        return self.env.group_size

    @property
    def tokenizer(self) -> Any:
        """Return the policy's tokenizer."""
        return self.env.tokenizer

    def count_groups(self, rows: Sequence[int]) -> int:
        """Return the number of groups that the policy learns from in the episodes of `rows`."""
        return len(rows) * len(self.env.trained_roles)

    def play(self, rows: Sequence[int], **how: Any) -> RolloutResult:
        """Play and score episodes of some of the dataset's rows; `begin` explains the arguments."""
        episodes = self.begin(rows, **how)
        for state in episodes.tries():
            with self.policy(state) as llm, naming(self.env):
                self.env._run_interaction_loop(state, llm, episodes.sampling_params)
        result = self.scored(episodes)
        check_failures(episodes.all, self.max_failed_share)
        return result

    def begin(
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
    ) -> Episodes:
        """Return `group_size` new episodes for each of the dataset's `rows`.

        `first_index` is the index of each row's first sample; another index gives other draws of the same prompt.
        `sampling` has fields of SamplingParams by sample and repeats after the last. With `greedy_baseline` each row is
        played once more at temperature 0, as the baseline of its group. `earlier` counts how often a row was already played
        in this step, here or on other ranks, so that its samples get further indices.
        """
        size = group_size or self.env.group_size
        ladder = sampling or ({},)
        kinds = [Special(part=self.part, sampling=ladder[index % len(ladder)]) for index in range(size)]
        if greedy_baseline:
            kinds.append(Special(part=self.part, sampling={"temperature": 0.0}, is_baseline=True))
        begin = []
        seen = Counter({row: count * len(kinds) for row, count in (earlier or {}).items()})
        for row in rows:  # a row may come twice; its samples must differ
            for index, special in enumerate(kinds, first_index + seen[row]):
                begin.append(
                    partial(begin_episode, self.env, row, index, special, seed=self._seed, step=step)
                )
            seen[row] += len(kinds)
        return Episodes(self.env, begin, len(kinds), step, sampling_params.replace(**self._sampling))

    @contextmanager
    def policy(self, state: EnvState) -> Iterator[PolicyLLM]:
        """Yield the policy for some episodes, and end them after the block."""
        llm = PolicyLLM(self._client, self._renderer, self.runner, seed=self._seed, step=state.step)
        llm.begin(state.sample_states)
        self.playing = state.sample_states
        try:
            yield llm
        finally:
            self.playing = ()
            llm.end()

    def scored(self, episodes: Episodes) -> RolloutResult:
        """Return the groups of played episodes, scored with the rewards of this environment."""
        samples = [item for item in episodes.samples if item.failure is not None or item.policy_spans]
        scores = score(samples, self.env.reward_functions, self.env.reward_transform_fn)
        self._warn_of_no_reward(samples)
        for sample in samples:
            check_turns(self.env, sample)
            if counts := self._counts(sample):
                sample.extras["metrics"] = {**sample.extras.get("metrics", {}), **counts}
        earned = {name: values.tolist() for name, values in scores.rewards.items()}
        trajectories = {
            id(sample): trajectory_of(sample, {name: values[i] for name, values in earned.items()}, reward)
            for i, (sample, reward) in enumerate(zip(samples, scores.reward.tolist(), strict=True))
            if sample.failure is None
        }
        for name, trajectory in trajectories.items():
            won = successes(
                self.env.reward_functions,
                trajectory.rewards,
                reward=trajectory.reward,
                success_at=self.env.success_at,
            )
            trajectories[name] = replace(trajectory, successes=won)
        groups = []
        # Each draw of a prompt is a group for each role.
        for first in range(0, len(episodes.all), episodes.size):
            for of_role in zip(*episodes.all[first : first + episodes.size], strict=True):
                groups.append(group_of(of_role, trajectories, frozen=of_role[0].role in self.env.frozen))
        return RolloutResult(
            groups=tuple(filter(None, groups)),
            failed=tuple(sample for sample in samples if sample.failure is not None),
        )

    def _warn_of_no_reward(self, samples: Sequence[SampleState]) -> None:
        """Log once if no reward is set and the environment rewarded no turn of any sample."""
        if self._warned or self.env.reward_functions or not samples:
            return
        self._warned = not any(sample.turn_rewards for sample in samples)
        if self._warned:
            logger.warning(
                "%s rewarded no turn in %d episodes, and there is no other reward: nothing can be learned from them. "
                "Next: set rewards, or call sample.reward_turn.",
                type(self.env).__name__,
                len(samples),
            )

    def _counts(self, sample: SampleState) -> dict[str, int]:
        """Count the special tokens in the text of others, and tokens of thoughts that the template would have dropped."""
        context = [message for message in sample.messages if message.role != "assistant"]
        renderer = self._renderer.of_row(sample.columns)
        counts = {"special_tokens": renderer.special_tokens(context)}
        if sample.failure is None and not sample.special.own_prompt:
            counts["kept_thoughts"] = kept_thoughts(renderer, sample.spans, sample.messages)
        return {name: count for name, count in counts.items() if count}

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's event loop, such as a request to the engine."""
        return self.runner.run(coroutine)

    def close(self) -> None:
        """Release the environment."""
        self.env.close()
        if self._owns_runner:
            self.runner.close()


@contextmanager
def naming(env: BaseMDPEnv) -> Iterator[None]:
    """Name the environment in an error of its interaction loop."""
    try:
        yield
    except RL4LLMError:
        raise
    except Exception as error:
        where = f"{type(env).__name__}._run_interaction_loop"
        raise EnvError(raised(where, error)) from error


@dataclass(slots=True, eq=False)
class Episodes:
    """Episodes of one environment, and the functions that begin them; the `size` episodes of a prompt are consecutive."""

    env: BaseMDPEnv
    begin: Sequence[Callable[[], Episode]]
    size: int
    step: int
    sampling_params: SamplingParams
    all: list[Episode] = field(init=False)

    def __post_init__(self) -> None:
        self.all = [begin() for begin in self.begin]

    @property
    def samples(self) -> list[SampleState]:
        return [sample for episode in self.all for sample in episode]

    def tries(self) -> Iterator[EnvState]:
        """Yield all episodes to play, and then once more those that failed, from their seed."""
        yield from self._played(range(len(self.all)))
        failed = [number for number, episode in enumerate(self.all) if _failed(episode)]
        for number in failed:
            first_failure = self.all[number][0].failure_class
            self.all[number] = self.begin[number]()
            for sample in self.all[number]:
                sample.extras["played_again_after"] = first_failure
        yield from self._played(failed)

    def _played(self, numbers: Sequence[int]) -> Iterator[EnvState]:
        episodes = [self.all[number] for number in numbers]
        if episodes:
            yield EnvState([sample for episode in episodes for sample in episode], self.step)
        for episode in episodes:
            if not _failed(episode) and not any(sample.policy_spans for sample in episode):
                new = (message for sample in episode for message in sample.messages[sample.init_msg_size :])
                problem = "before the policy took a turn"
                if any(message.role == "assistant" for message in new):
                    problem = "without the sampled text as an assistant message; append it unchanged"
                episode[0].fail(f"{type(self.env).__name__} ended the episode {problem}", "env/contract")
            for sample in episode:
                check_turns(self.env, sample)
                sample.finish("done")  # unless it has another reason; a level-3 loop may give none


def begin_episode(
    env: BaseMDPEnv, row: int, index: int, special: Special, *, seed: int, step: int
) -> Episode:
    """Return the samples of a new episode of one of the dataset's rows, one for each of the policy's roles."""
    columns = dict(env.dataset[row])
    pool = pool_of(columns, env.pool_column)
    columns["messages"] = task = messages_of(columns["messages"])
    openings = env.openings(columns)
    del columns["messages"]
    prompt_id, ground_truth = str(columns.pop("prompt_id", row)), columns.pop("ground_truth", None)
    prompt_id = f"{special.part}/{prompt_id}" if special.part else prompt_id
    special = replace(special, part=pool) if pool else special
    alone = SampleState(prompt_id, index, openings.get("", []), ground_truth, columns, special=special)
    if not any(openings):
        return [alone]
    episode = EpisodeState(task, derive_seed(seed, step, prompt_id, index))
    for role, messages in openings.items():
        episode.seat(role, messages, like=alone)
    return [episode.seats[role] for role in env.policy_roles]


def check_turns(env: BaseMDPEnv, sample: SampleState) -> None:
    """Fail a sample if a turn was rewarded that the policy did not take."""
    rewarded = sample.turn_rewards and max(sample.turn_rewards) >= _turns(sample)
    if sample.failure is None and rewarded:
        what = f"{type(env).__name__} rewarded a turn that the policy did not take"
        sample.fail(what, "env/contract")


def _turns(sample: SampleState) -> int:
    return sum(map(count_turns, (sample.spans, *sample.special.forks)))


def check_failures(episodes: Sequence[Episode], max_failed_share: float) -> None:
    """Raise TooManyFailuresError, with the three most frequent causes, if more than the allowed share failed."""
    failed = [episode for episode in episodes if _failed(episode)]
    causes = Counter(_cause(episode[0]) for episode in failed)
    examples = {_cause(episode[0]): episode[0].failure for episode in reversed(failed)}
    if causes.total() > max_failed_share * len(episodes):
        most = "; ".join(f"{count} x {cause}: {examples[cause]}" for cause, count in causes.most_common(3))
        raise TooManyFailuresError(
            f"{causes.total()} of {len(episodes)} episodes failed, more than rollout.max_failed_share="
            f"{max_failed_share:g} allows. Most frequent: {most}.",
            [sample for episode in failed for sample in episode],
        )


def _cause(sample: SampleState) -> str:
    part = sample.special.part
    return f"{part}: {sample.failure_class}" if part else sample.failure_class


def _failed(episode: Episode) -> bool:
    return any(sample.failure is not None for sample in episode)


def trajectory_of(sample: SampleState, rewards: Mapping[str, float], reward: float) -> Trajectory:
    """Return the trajectory of a sample; what follows the policy's last turn does not train and is cut off."""
    turns = range(_turns(sample)) if sample.turn_rewards else ()
    turn_rewards = tuple(sample.turn_rewards.get(turn, 0.0) for turn in turns)
    spans, *forks = (
        tuple(record[: 1 + max(i for i, span in enumerate(record) if span.author == "policy")])
        for record in (sample.spans, *sample.special.forks)
    )
    return Trajectory(
        prompt_id=sample.prompt_id,
        spans=spans,
        messages=tuple(sample.messages),
        rewards=rewards,
        reward=reward + sum(turn_rewards),
        stop_reason=sample.stop_reason or "done",
        extras={"sample": sample.index, "ground_truth": sample.ground_truth, **sample.extras},
        turn_rewards=turn_rewards,
        forks=tuple(forks),
        role=sample.role,
        part=sample.special.part,
    )


def group_of(
    samples: Sequence[SampleState], trajectories: Mapping[int, Trajectory], frozen: bool
) -> Group | None:
    """Return the group of the samples of one prompt and role; None if none of them was scored.

    `trajectories` has the scored ones by `id(sample)`.
    """
    scored = [(sample.special, trajectories[id(sample)]) for sample in samples if id(sample) in trajectories]
    members = [trajectory for special, trajectory in scored if not special.is_baseline]
    baseline = next((trajectory for special, trajectory in scored if special.is_baseline), None)
    if not members:
        return None
    if any(special.role or special.own_prompt for special, _ in scored):
        members = list(_from_common_start(members))
    return Group(members[0].prompt_id, tuple(members), baseline, frozen)


def _from_common_start(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Cut the first spans to the tokens that all trajectories share.

    They may differ: a later role begins with what others said, and an agent with what it writes.
    """
    firsts = [trajectory.spans[0].token_ids for trajectory in trajectories]
    if len(set(firsts)) == 1:
        yield from trajectories
        return
    shared = next(i for i, tokens in enumerate(zip_longest(*firsts)) if len(set(tokens)) > 1)
    for trajectory, first in zip(trajectories, firsts, strict=True):
        rest = filter(None, [first[shared:]])
        spans = (TokenSpan.context(first[:shared]), *map(TokenSpan.context, rest), *trajectory.spans[1:])
        yield replace(trajectory, spans=spans)

"""The public contract of environments and rewards: what users subclass.

Three levels, each a small step from the one before:

1. No subclass: a dataset with the columns `messages` and `ground_truth`, and reward functions.
2. ``respond(sample)``: the environment's next messages after each turn of the policy; an empty list ends the episode.
3. ``_run_interaction_loop(...)``: full control; whatever messages it appends, the tokens stay those that were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from rl4llm.core.base_reward import BaseRewardFunction, RewardExample, RewardTransform, Score
from rl4llm.core.errors import ConfigError, EnvError, unknown
from rl4llm.core.player import LLM, Player, are_messages
from rl4llm.core.sample import EnvState, EpisodeState, Line, SampleState, Special, messages_of, pool_of
from rl4llm.core.schema import Count, fits, refusal
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.runtime.seeds import derive_seed

__all__ = [
    "LLM",
    "BaseMDPEnv",
    "BaseRewardFunction",
    "ChatMessage",
    "EnvState",
    "EpisodeState",
    "Line",
    "RewardExample",
    "RewardTransform",
    "SampleState",
    "Score",
    "Special",
    "messages_of",
]


class BaseMDPEnv(Player):
    """A multi-turn environment over a dataset of prompts; without a subclass, one turn per prompt.

    Args:
        dataset: rows with `messages` (dicts with role and content) and `ground_truth`; other columns reach the rewards.
        tokenizer: the policy's tokenizer, with a chat template.
        reward_functions: terminal rewards; more than one needs `reward_transform_fn`. Without any, an episode earns what
            the environment gives its turns with `sample.reward_turn`.
        batch_size: accepted for compatibility, as is `shuffle_dataset`; the trainer's sections of a configuration decide.
        group_size: samples per prompt.
        max_steps: turns of the policy per episode.
        tool_schemas: JSON schemas of tools for the chat template.
        reward_transform_fn: combines rewards by name, tensors of shape (num_samples,), into one tensor of that shape.

    Raises ConfigError for what would play or learn something other than what was asked for.
    """

    respond_timeout_s: float = 120.0
    reply_roles: tuple[str, ...] = ("user",)
    """Roles of the messages that `respond` returns; the chat template must know them."""
    special_tokens: str = "escape"
    """What special tokens in messages become: "escape", "refuse" or "allow"; the configuration's `data.special_tokens`."""
    pool_column: str | None = None
    """The column whose values name the pools of the dataset; the configuration's `curriculum`."""
    template_args: Mapping[str, Any] = {}
    """Variables of the chat template, such as ``{"enable_thinking": False}``; the configuration's `env.template_args`."""
    call_example: str = ""
    """A call of the tool f with the argument x, for prompts that describe tools in place of the chat template."""
    thoughts: str = "keep"
    """What becomes of thoughts that the chat template drops from earlier turns: "keep", "drop" or "refuse"."""
    compact_at: int | None = None
    """How many tokens of context let the policy summarise its history and continue from the summary; None for never."""
    vision: Any = None
    """What the model makes of images, a `rl4llm.data.vision.Vision`; without it, messages with images are refused."""
    # whether an episode continues after a turn that ran into its token limit
    continue_truncated: bool = False
    roles: tuple[str, ...] = ("",)  # who speaks in an episode; the policy plays all except the opponents
    opponents: Mapping[str, Any] = {}  # the opponent of each role that the policy does not play
    frozen: Sequence[str] = ()  # roles that the policy plays without learning from it
    default_rewards: Sequence[Any] = ()
    """Names, or mappings with options, where a configuration has no `rewards`; without any, only turns are rewarded."""
    success_at: float | None = None
    """The lowest total reward of a successful episode, if none of the rewards defines success with a `success_at`."""
    prompts: Callable[..., Sequence[Mapping[str, Any]]] | None = None
    """A static method ``prompts(split, limit, **options)`` of an environment that brings its dataset.

    Its options are options of the environment. What it returns for the splits "train" and "test" must not overlap.
    """

    def __init__(  # noqa: PLR0913 - the public contract
        self,
        dataset: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        reward_functions: Sequence[BaseRewardFunction],
        batch_size: int = 1,
        group_size: Count = 1,
        max_steps: Count = 1,
        tool_schemas: Sequence[Mapping[str, Any]] | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        shuffle_dataset: bool = True,
        reward_transform_fn: RewardTransform | None = None,
    ):
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.reward_functions = list(reward_functions)
        self.batch_size = batch_size
        self.group_size = group_size
        self.max_steps = max_steps
        self.tool_schemas = list(tool_schemas) if tool_schemas else None
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle_dataset = shuffle_dataset
        self.reward_transform_fn = reward_transform_fn
        for fault in chain(self._faults(), self._faults_of_roles(), self._faults_of_rewards()):
            raise ConfigError(f"{type(self).__name__}: {fault}")

    @property
    def policy_roles(self) -> tuple[str, ...]:
        """The roles that the policy plays."""
        return tuple(role for role in self.roles if role not in self.opponents)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles that the policy learns from."""
        return tuple(role for role in self.policy_roles if role not in self.frozen)

    @classmethod
    def rewards_for(cls, row: Mapping[str, Any]) -> Sequence[Any]:
        """Return the rewards of a run over rows such as this one, if its configuration has none."""
        return cls.default_rewards

    def opening(
        self, role: str, task: Sequence[ChatMessage], columns: Mapping[str, Any]
    ) -> Sequence[ChatMessage]:
        """Return how the conversation of a role begins, given the messages and other columns of a row."""
        return task

    def openings(self, row: Mapping[str, Any]) -> dict[str, list[ChatMessage]]:
        """Return how the conversation of each role begins; raise EnvError if `opening` does not return messages."""
        columns = dict(row)
        task = messages_of(columns.pop("messages"))
        openings = {role: self.opening(role, task, columns) for role in self.roles}
        for role, messages in openings.items():
            if not are_messages(messages):
                where = f"{type(self).__name__}.opening({role!r})"
                raise EnvError(f"{where} must return a list of ChatMessage, not {messages!r:.200}")
        return {role: list(messages) for role, messages in openings.items()}

    def begin_episode(
        self, row: int, index: int, special: Special, seed: int, step: int
    ) -> list[SampleState]:
        """Return the samples of a new episode of one of the dataset's rows, one for each of the policy's roles."""
        columns = dict(self.dataset[row])
        pool = pool_of(columns, self.pool_column)
        columns["messages"] = task = messages_of(columns["messages"])
        openings = self.openings(columns)
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
        return [episode.seats[role] for role in self.policy_roles]

    def respond(
        self, sample: SampleState
    ) -> Sequence[ChatMessage] | Coroutine[Any, Any, Sequence[ChatMessage]]:
        """Return the environment's next messages after a turn of the policy; [] ends the episode. May be async."""
        return []

    @torch.inference_mode()
    def _run_interaction_loop(
        self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams, **kwargs: Any
    ) -> EnvState:
        """Play all episodes to their end. By default each is a coroutine: a slow one delays no other."""
        llm.run(self._run_episodes(env_state, llm, self.turn_params(sampling_params)))
        return env_state

    def _convert_to_batch_prompts(self, env_state: EnvState) -> list[list[ChatMessage]]:
        """Return the conversations as `llm.generate` takes them; loops of michaelnny/rl4llm call this."""
        return [sample.messages for sample in env_state.sample_states]

    def turn_params(self, sampling_params: SamplingParams) -> SamplingParams:
        """Return how the policy's turns are sampled, for example with another stop string."""
        return sampling_params

    def end_episode(self, sample: SampleState) -> Iterable[Future[None]] | None:
        """Release what the sample's episode held; a custom loop calls this when the sample is done.

        What still runs elsewhere it may return as futures. They are awaited, and an error fails the sample.
        """

    def report_to(self, warn: Callable[[str], None]) -> None:
        """Set the function for lines that the user should see."""

    def close(self) -> None:
        for reward_function in self.reward_functions:
            reward_function.close()

    def _faults(self) -> Iterator[str]:
        """Yield what would make a run play or learn something other than what was asked for."""
        row = next(iter(self.dataset), None)
        if row is None:
            yield "the dataset is empty."
        elif missing := [column for column in ("messages", "ground_truth") if column not in row]:
            yield f"the dataset has no column {missing}; it has {sorted(row)}."
        elif any(self.roles) and (overwritten := sorted({"role", "transcript"} & set(row))):
            yield f"rewards receive the role and the transcript, so rename the columns {overwritten}."
        for name in ("group_size", "max_steps"):
            if not fits(getattr(self, name), Count):
                yield refusal(name, getattr(self, name), Count)
        if self.max_steps > 1 and not self._has_code_outside("rl4llm.core."):
            where = type(self).__name__
            yield f"max_steps={self.max_steps} has no effect, since {where} has no method `respond`. Remove max_steps."

    def _faults_of_roles(self) -> Iterator[str]:
        named = not any(self.roles) or all(re.fullmatch(r"[a-zA-Z0-9_\-]+", role) for role in self.roles)
        if not named or not self.roles or len(set(self.roles)) < len(self.roles):
            yield f"roles={list(self.roles)} is not accepted. Accepted: different names of letters, digits, '_' and '-'."
        for key in ("frozen", "opponents"):
            yield from (
                unknown(f"env.{key}", role, self.roles)
                for role in getattr(self, key)
                if role not in self.roles
            )
        if not self.trained_roles:
            yield "no role would learn. Remove one from env.frozen or env.opponents."

    def _faults_of_rewards(self) -> Iterator[str]:
        rewards = self.reward_functions
        yield from (
            f"{item!r:.99} is not a reward. Next: rl4llm.rewards.as_reward_function(it)."
            for item in rewards
            if not isinstance(item, BaseRewardFunction)
        )
        if not rewards and not self._has_code_outside("rl4llm.core.", "rl4llm.envs."):
            yield "no reward is set, and this environment rewards no turns. Set rewards, for example rewards=[math]."
        names = [reward.name for reward in rewards]
        if len(set(names)) < len(names):
            yield f"the names of rewards must differ, but they are {names}."
        if not any(self.roles) and any(map(_needs_roles, rewards)):
            yield f"a reward among {names} judges several roles, but this environment has one."
        terminal = [reward.name for reward in rewards if not reward.per_turn]
        if len(terminal) > 1 and self.reward_transform_fn is None:
            yield f"{len(terminal)} rewards ({', '.join(terminal)}) require a reward_transform_fn."

    def _has_code_outside(self, *packages: str) -> bool:
        """Return whether the class has code of an episode that is not of these packages."""
        modules = (getattr(self, name).__module__ for name in _EPISODE_CODE)
        return not all(module.startswith(packages) for module in modules)


_EPISODE_CODE = ("respond", "_run_interaction_loop", "_run_episode", "end_episode")


def _needs_roles(reward: BaseRewardFunction) -> bool:
    return reward.needs_roles or any(map(_needs_roles, reward.parts))

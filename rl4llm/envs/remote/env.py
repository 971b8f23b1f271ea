"""An environment whose episodes are played on hosts, as the trainer sees it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from rl4llm.core.base_env import LLM, BaseMDPEnv, BaseRewardFunction, SampleState
from rl4llm.core.errors import EnvError, HostsDownError
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.remote.hosts import Episode, Hosts
from rl4llm.envs.remote.rpc import LostError
from rl4llm.rewards.ask import Broken
from rl4llm.rewards.pool import RewardFailure

SCORES = "remote_scores"
LOST = "env/host_lost"


class RemoteEnv(BaseMDPEnv):
    """The environment `name` on hosts that have it open: what it answers and what its rewards give comes from them.

    The tokens stay here. An episode whose host is lost goes on on another, see `Episode`; one that loses several fails with
    the class ``env/host_lost``, is played again like all that fail, and is left out when that fails too. While there is no
    host at all, episodes wait.

    Args:
        hosts: where the environment is open; they are hung up on with it.
        opened: what they say of it.
        name: what it is called there.
    """

    def __init__(self, *args: Any, hosts: Hosts, opened: Any, name: str, **kwargs: Any):
        self.reply_roles = tuple(opened.reply_roles)
        self.continue_truncated = opened.continue_truncated
        self.respond_timeout_s = math.inf  # the hosts' own deadlines hold, and waiting for one has another
        self._hosts, self._opened, self._name = hosts, opened, name
        self._episodes: dict[int, Episode] = {}  # by id of the sample
        self._down: HostsDownError | None = None
        schemas = [json.loads(schema) for schema in opened.tool_schemas]
        super().__init__(*args, **kwargs | {"max_steps": opened.max_steps, "tool_schemas": schemas})

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        episode = self._episodes.setdefault(id(sample), Episode(self._hosts, self._name))
        try:
            return await self._hosts.run(episode.respond(sample))
        except LostError as error:
            sample.fail(str(error), LOST)
        except HostsDownError as error:
            self._down = error
            raise
        return []

    def turn_params(self, sampling_params: SamplingParams) -> SamplingParams:
        return sampling_params.replace(
            stop=(*sampling_params.stop, *self._opened.stop),
            stop_token_ids=(*sampling_params.stop_token_ids, *self._opened.stop_token_ids),
        )

    def report_to(self, warn: Callable[[str], None]) -> None:
        self._hosts.report_to(warn)

    def close(self) -> None:
        """Hang up on the hosts, and release the rewards."""
        self._hosts.close()
        super().close()

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        try:
            await super()._run_episode(sample, llm, sampling_params)
            if self._down is not None:
                raise self._down
            if sample.failure is None and any(span.author == "policy" for span in sample.spans):
                await self._score(sample)
        finally:
            episode = self._episodes.pop(id(sample), None)
            if episode is not None:
                await self._hosts.run(episode.end())

    async def _score(self, sample: SampleState) -> None:
        """Keep what the rewards give for `RemoteReward` to tell."""
        episode = self._episodes.setdefault(id(sample), Episode(self._hosts, self._name))
        try:
            scores = await self._hosts.run(episode.score(sample))
        except LostError as error:
            sample.fail(str(error), LOST)
        except HostsDownError:
            raise
        except EnvError as error:  # a fault of the host that it survived
            sample.fail(str(error), "env/raised")
        else:
            sample.extras[SCORES] = {
                name: dataclasses.asdict(value) if isinstance(value, Broken) else value for name, value in scores.items()
            }


class RemoteReward(BaseRewardFunction):
    """A reward that a host computes when an episode ends; here it is only told."""

    def __init__(self, name: str, per_turn: bool = False):
        super().__init__(name)
        self.per_turn = per_turn

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        raise RewardFailure(f"the reward {self.name!r} is computed on the host of the environment, for whole episodes only")

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        return [self._told(sample) for sample in samples]

    def _told(self, sample: SampleState) -> Any:
        told = sample.extras.get(SCORES, {}).get(self.name)
        if told is None:
            return RewardFailure("the host told none")
        if isinstance(told, dict):
            return Broken(told["kind"], told["reason"])
        return told if self.per_turn else told[0]

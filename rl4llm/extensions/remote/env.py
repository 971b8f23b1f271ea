"""An environment whose episodes are played on hosts, as the trainer sees it, and what replaces its class."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.compose.environments import OF_TRAINER
from rl4llm.core.base_env import LLM, BaseMDPEnv, BaseRewardFunction, SampleState
from rl4llm.core.base_reward import BaseBatchReward
from rl4llm.core.errors import ConfigError, EnvError, HostsDownError
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs import RolesEnv
from rl4llm.extensions.remote import wire
from rl4llm.extensions.remote.hosts import HostedEpisode, Hosts
from rl4llm.extensions.remote.rpc import LostError
from rl4llm.extensions.remote.token import read_token
from rl4llm.rewards.ask import Broken
from rl4llm.rewards.pool import RewardFailure

SCORES = "remote_scores"
LOST = "env/host_lost"


class RemoteEnv(BaseMDPEnv):
    """The environment `name`, opened on hosts: they compute its replies and its rewards.

    The tokens stay in the trainer. An episode whose host is lost fails with the class ``env/host_lost``. Like all failed
    episodes it is played once more from its seed, on any host, and left out if it fails again. While no host is
    available, episodes wait. `opened` are the properties that the `hosts` reported, whose connections are closed
    together with it.
    """

    def __init__(self, *args: Any, hosts: Hosts, opened: Any, name: str, **kwargs: Any):
        self.reply_roles = tuple(opened.reply_roles)
        self.continue_truncated = opened.continue_truncated
        self.success_at = opened.success_at if opened.HasField("success_at") else None
        self.respond_timeout_s = math.inf  # the hosts have deadlines, and waiting for a host has another
        self._hosts, self._opened, self._name = hosts, opened, name
        self._episodes: dict[int, HostedEpisode] = {}  # by id of the sample
        self._down: HostsDownError | None = None
        schemas = [json.loads(schema) for schema in opened.tool_schemas]
        super().__init__(*args, **kwargs | {"max_steps": opened.max_steps, "tool_schemas": schemas})

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        answer = await self._ask(sample, "answering a turn")
        return wire.apply_answer(answer, sample) if answer else []

    def turn_params(self, sampling_params: SamplingParams) -> SamplingParams:
        return sampling_params.replace(
            stop=(*sampling_params.stop, *self._opened.stop),
            stop_token_ids=(*sampling_params.stop_token_ids, *self._opened.stop_token_ids),
        )

    def report_to(self, warn: Callable[[str], None]) -> None:
        self._hosts.pool.warn = warn

    def close(self) -> None:
        """Disconnect from the hosts, and release the rewards."""
        self._hosts.close()
        super().close()

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        try:
            await super()._run_episode(sample, llm, sampling_params)
            if self._down is not None:
                raise self._down
            if sample.failure is None and any(seat.policy_spans for seat in sample.seats):
                await self._score(sample)
        finally:
            episode = self._episodes.pop(id(sample), None)
            if episode is not None:
                await self._hosts.run(episode.end())

    async def _ask(self, sample: SampleState, doing: str, *, finished: bool = False) -> Any:
        """Return what a host answers; None if the sample failed because it lost its host."""
        episode = self._episodes.setdefault(id(sample), HostedEpisode(self._hosts, self._name))
        try:
            return await self._hosts.run(episode.ask(sample, doing, finished=finished))
        except LostError as error:
            sample.fail(str(error), LOST)
        except HostsDownError as error:
            self._down = error
            raise
        return None

    async def _score(self, sample: SampleState) -> None:
        """Store the scores of the rewards, which `RemoteReward` returns."""
        try:
            answer = await self._ask(sample, "scoring an episode", finished=True)
        except HostsDownError:
            raise
        except EnvError as error:  # an error on the host, which is still running
            sample.fail(str(error), "env/raised")
            return
        if answer is None:
            return
        wire.apply_answer(answer, sample)
        for seat in sample.seats:
            seat.extras[SCORES] = {
                name: dataclasses.asdict(value) if isinstance(value, Broken) else value
                for name, value in wire.scores_of(answer, seat).items()
            }


class RemoteRolesEnv(RemoteEnv, RolesEnv):
    """An environment of several roles on hosts: they decide whose turn it is and what the role reads before it.

    All turns are taken here, also those of opponents.
    """

    def __init__(self, *args: Any, opened: Any, **kwargs: Any):
        roles = {"roles": tuple(opened.roles), "frozen": tuple(opened.frozen)}
        super().__init__(*args, opened=opened, **kwargs | roles, instructions=dict(opened.instructions))

    async def _turn(self, sample: SampleState) -> tuple[str, str] | None:
        answer = await self._ask(sample, "choosing whose turn it is")
        messages = wire.apply_answer(answer, sample) if answer else []
        return (answer.role, "".join(item.content for item in messages)) if answer and answer.role else None


class RemoteReward(BaseBatchReward):
    """A reward that a host computes at the end of an episode; here its score is only looked up."""

    def __init__(self, of_host: Any):
        super().__init__(of_host.name)
        self.per_turn, self.needs_ground_truth = of_host.per_turn, of_host.needs_ground_truth
        self.success_at = of_host.success_at if of_host.HasField("success_at") else None

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        return [self._score_of(sample) for sample in samples]

    def _score_of(self, sample: SampleState) -> Any:
        score = sample.extras.get(SCORES, {}).get(self.name)
        if score is None:
            return RewardFailure("the host returned no score")
        if isinstance(score, dict):
            return Broken(score["kind"], score["reason"])
        return score if self.per_turn else score[0]


class HostedEnvironment:
    """Stands for the class of an environment that hosts run, see `rl4llm.extensions.remote`; it connects at once.

    Args:
        options: ``env`` of a configuration: `name`, `remote` (host:port, or several), `remote_ca` (the certificate file
            that TLS connections are verified with) and the options of the environment.
    """

    def __init__(self, options: Mapping[str, Any]):
        self.options = {name: value for name, value in options.items() if name not in OF_TRAINER}
        self.__name__ = self.__qualname__ = self.name = options["name"]
        authority = Path(str(options["remote_ca"])) if options.get("remote_ca") else None
        self.hosts = Hosts(_addresses(options["remote"]), read_token(os.environ), authority=authority)
        offer = self.hosts.offer(self.name)
        self.default_rewards = json.loads(offer.default_rewards)
        self.prompts = self._prompts if offer.brings_prompts else None
        if offer.has_roles:  # opponents take their turns in the trainer's process, as the policy does
            self.options.pop("opponents", None)
        self._opened: Any = None

    def rewards_for(self, row: Mapping[str, Any]) -> Sequence[Any]:
        """Return the host's default rewards."""
        return self.default_rewards

    def rewards(
        self, specs: Sequence[Any], tokenizer: Any, row: Mapping[str, Any], seed: int
    ) -> list[BaseRewardFunction]:
        """Open the environment with these rewards. Raises ConfigError if a host refuses a reward or an option."""
        with tempfile.TemporaryDirectory(prefix="rl4llm-tokenizer-") as directory:
            tokenizer.save_pretrained(directory)
            files = {file.name: file.read_bytes() for file in Path(directory).iterdir() if file.is_file()}
        self._opened = self.hosts.open(
            wire.OpenRequest(
                environment=self.name,
                options=self._options(),
                rewards=[wire.to_json(spec, "rewards: one of them") for spec in specs],
                seed=seed,
                row=wire.row_json(row, "data: its first row"),
                tokenizer=files,
            )
        )
        return [RemoteReward(reward) for reward in self._opened.rewards]

    def __call__(self, *args: Any, opponents: Any = None, **kwargs: Any) -> BaseMDPEnv:
        kwargs |= {"hosts": self.hosts, "opened": self._opened, "name": self.name}
        if self._opened.roles:
            return RemoteRolesEnv(*args, opponents=opponents, **kwargs)
        return RemoteEnv(*args, **kwargs)

    def _prompts(self, split: str, limit: int | None = None) -> Sequence[Mapping[str, Any]]:
        return self.hosts.prompts(
            wire.PromptsRequest(environment=self.name, options=self._options(), split=split, limit=limit)
        )

    def _options(self) -> str:
        return wire.to_json(self.options, "env: its options")


def _addresses(remote: Any) -> list[str]:
    addresses = list(remote) if isinstance(remote, list | tuple) else [remote]
    if not addresses or not all(re.fullmatch(r".+:\d{1,5}", str(address)) for address in addresses):
        # a run would wait for such hosts
        raise ConfigError(f"env.remote={remote!r} is not accepted. Accepted: host:port, or a list of them.")
    return list(dict.fromkeys(addresses))

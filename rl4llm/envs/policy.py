"""The policy as an environment sees it: messages go in, messages come out, the exact tokens are kept on the side."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import EnvError, UnreachableError
from rl4llm.core.seeds import derive_seed
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, TokenSpan, count_turns
from rl4llm.data.render import Renderer

T = TypeVar("T")
NO_VERSION = -1


@dataclass(slots=True, eq=False)
class _Record:
    """How far a sample's token record goes, and what was sampled at its end."""

    messages: int = 0
    sampled: list[Completion] = field(default_factory=list)
    kept_by_env: bool = False


class PolicyLLM:
    """One rollout's view of the engine; records what each sample's tokens are and who wrote them.

    The record of a sample grows only at its end: the first prompt, then what the engine sampled, then the tokens of new
    messages. An assistant message whose text the engine did not sample at that very point is the environment's own and
    becomes context.
    """

    def __init__(self, client: BaseClient, renderer: Renderer, runner: asyncio.Runner, *, seed: int, step: int):
        self._client = client
        self._renderer = renderer
        self._runner = runner
        self._identity = (seed, step)
        self._samples: list[SampleState] = []
        self._by_prompt: defaultdict[str, list[SampleState]] = defaultdict(list)
        self._records: dict[str, _Record] = {}  # by session

    def begin(self, samples: Sequence[SampleState]) -> None:
        """Announce the samples of a rollout, so that conversations passed to `generate` can be recognised."""
        self._samples = list(samples)
        self._by_prompt = defaultdict(list)
        for sample in samples:
            self._by_prompt[sample.prompt_id].append(sample)
            role = f"/{sample.role}" if sample.role else ""
            sample.session = f"{self._identity[1]}/{sample.prompt_id}{role}/{sample.index}"
            self._records[sample.session] = _Record()

    def end(self) -> None:
        """Complete the token records and let the engine drop its caches."""
        for sample in self._samples:
            if sample.failure is None and not self._records[sample.session].kept_by_env:
                self._record_sampled(sample)
        self.run(self._close_all())

    async def open(self, sample: SampleState) -> None:
        """The sample's episode begins; an engine in deterministic mode waits for it from now on."""
        await self._client.expect(sample.session)

    async def park(self, sample: SampleState) -> None:
        """Another role of the episode goes on; an engine in deterministic mode waits for that one."""
        await self._client.park(sample.session)

    async def close(self, sample: SampleState) -> None:
        """The sample's episode is over; the engine may drop its cache."""
        await self._client.release(sample.session)

    async def reply(self, sample: SampleState, sampling_params: SamplingParams) -> Completion:
        """Sample the next assistant message and append it.

        A sample with no room left is finished instead, and one whose reply the engine gave up is failed.
        """
        completion = await self._generate(sample, sampling_params)
        if completion.finish_reason != "abort":
            sample.messages.append(ChatMessage("assistant", self._renderer.content(completion.text)))
            self._record_sampled(sample)
        return completion

    async def complete(
        self, sample: SampleState, token_ids: Sequence[int], sampling_params: SamplingParams, *draw: int | str
    ) -> Completion:
        """What the policy says behind `token_ids`, for an environment that keeps the sample's token records itself.

        `draw` tells this completion from all others of the sample: with the sample it decides the random numbers, whatever
        else was asked for before. Nothing is appended anywhere; a sample whose completion the engine gave up is failed.
        """
        self._records[sample.session].kept_by_env = True
        return await self._ask(sample, token_ids, sampling_params.replace(**sample.sampling), draw)

    @property
    def context_length(self) -> int:
        """Prompt plus completion, in tokens."""
        return self._client.context_length

    def generate(self, prompts: Sequence[Any], sampling_params: SamplingParams) -> list[Completion]:
        """The synchronous batch form: one completion per prompt, in order, and nothing is appended anywhere.

        A prompt is a SampleState, a conversation (list of ChatMessage or dicts) or a list of token ids.
        """
        claimed: set[str] = set()
        requests = [self._request(prompt, sampling_params, claimed) for prompt in prompts]
        return self.run(self._gather(requests))

    def chat(self, prompts: Sequence[Any], sampling_params: SamplingParams) -> list[ChatMessage]:
        """`generate`, as assistant messages ready to be appended."""
        completions = self.generate(prompts, sampling_params)
        return [ChatMessage("assistant", self._renderer.content(completion.text)) for completion in completions]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's event loop."""
        return self._runner.run(coroutine)

    def _request(self, prompt: Any, params: SamplingParams, claimed: set[str]) -> Coroutine[Any, Any, Completion]:
        if isinstance(prompt, SampleState):
            return self._generate(prompt, params)
        if prompt and isinstance(prompt[0], int):
            return self._client.generate(prompt, self._with_stops(params))
        messages = [item if isinstance(item, ChatMessage) else ChatMessage.from_dict(item) for item in prompt]
        for sample in self._samples:
            if sample.session not in claimed and (sample.messages is prompt or sample.messages == messages):
                claimed.add(sample.session)
                return self._generate(sample, params)
        return self._client.generate(self._renderer.first(messages), self._with_stops(params))

    async def _generate(self, sample: SampleState, params: SamplingParams) -> Completion:
        self._record_sampled(sample)
        self._record_context(sample)
        if sample.sampling:
            params = params.replace(**sample.sampling)
        prompt_ids = sample.token_ids
        if len(prompt_ids) >= self._client.context_length:
            sample.finish("context")
            return Completion("", (), (), "abort", await self._client.version())
        sampled = self._records[sample.session].sampled  # several draws at one point are different draws
        completion = await self._ask(sample, prompt_ids, params, (count_turns(sample.spans), len(sampled)))
        if completion.finish_reason != "abort":
            sampled.append(completion)
        return completion

    async def _ask(
        self, sample: SampleState, prompt_ids: Sequence[int], params: SamplingParams, draw: Sequence[int | str]
    ) -> Completion:
        whose = (sample.prompt_id, sample.role) if sample.role else (sample.prompt_id,)
        seed = derive_seed(*self._identity, params.seed, *whose, sample.index, *draw)
        try:
            seeded = params.replace(seed=seed, stop_token_ids=self._stops(params))
            completion = await self._client.generate(prompt_ids, seeded, session=sample.session)
        except UnreachableError as error:  # after all attempts; this sample's affair, while other requests get through
            sample.fail(f"no server answered: {error}", "engine/unreachable")
            return Completion("", (), (), "abort", NO_VERSION)
        if completion.finish_reason == "abort":  # what there is of it may end anywhere, and is no turn of the policy
            given_up = f"after {len(completion.token_ids)} of at most {params.max_tokens} tokens"
            sample.fail(f"the engine aborted a reply of the policy {given_up}", "engine/aborted")
        return completion

    def _with_stops(self, params: SamplingParams) -> SamplingParams:
        return params.replace(stop_token_ids=self._stops(params))

    def _stops(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens that end a turn: those asked for, and those of the chat template."""
        return tuple(dict.fromkeys((*params.stop_token_ids, *self._renderer.stop_token_ids)))

    def _record_context(self, sample: SampleState) -> None:
        """Append the tokens of the messages since the last recorded one, up to the next generation prompt."""
        record = self._records[sample.session]
        if record.messages < len(sample.messages):
            self._append_context(sample, record, len(sample.messages))
        elif sample.messages[-1].role == "assistant":
            raise EnvError(f"Prompt {sample.prompt_id!r}: two turns of the policy in a row, with no message between them.")

    def _append_context(self, sample: SampleState, record: _Record, end: int) -> None:
        """The tokens of the unrecorded messages before `end`, and of the generation prompt behind them."""
        earlier, new = sample.messages[: record.messages], sample.messages[record.messages : end]
        if sample.spans:
            token_ids = self._renderer.following(new, ended=self._ended(sample), messages=earlier)
        else:
            token_ids = self._renderer.first(new)
        sample.spans.append(TokenSpan.context(token_ids))
        record.messages, record.sampled = end, []

    def _record_sampled(self, sample: SampleState) -> None:
        """Append the tokens of each assistant message that is not recorded yet."""
        record = self._records[sample.session]
        while (turn := _next_assistant(sample, record)) is not None:
            if turn > record.messages:
                self._append_context(sample, record, turn)
            content = sample.messages[turn].content
            completion = self._find(sample, content)
            if completion is None:
                sample.spans.append(TokenSpan.context(self._renderer.encode(content)))
            else:
                sample.spans.extend(TokenSpan.policy(completion))
            record.messages, record.sampled = turn + 1, []

    def _find(self, sample: SampleState, content: str) -> Completion | None:
        """The completion with this text that was sampled at this sample's present end, its own before a sibling's."""
        siblings = (other for other in self._by_prompt[sample.prompt_id] if other is not sample)
        own = self._records[sample.session].sampled
        theirs = (self._records[other.session].sampled for other in siblings if other.spans == sample.spans)
        for completion in chain(own, chain.from_iterable(theirs)):  # others' records are compared only if it is not its own
            if content.strip() in (completion.text.strip(), self._renderer.content(completion.text).strip()):
                return completion
        return None

    def _ended(self, sample: SampleState) -> bool:
        return self._renderer.ends_turn(sample.spans[-1].token_ids)

    @staticmethod
    async def _gather(requests: list[Coroutine[Any, Any, Completion]]) -> list[Completion]:
        return list(await asyncio.gather(*requests))

    async def _close_all(self) -> None:
        for sample in self._samples:
            await self.close(sample)


def _next_assistant(sample: SampleState, record: _Record) -> int | None:
    for turn in range(max(record.messages, sample.init_msg_size), len(sample.messages)):
        if sample.messages[turn].role == "assistant":
            return turn
    return None

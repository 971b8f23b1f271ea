"""The policy as environments see it: messages in, messages out, while the exact tokens are recorded."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import DataError, EnvError, SpecialTokenError, UnreachableError, UnreadableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.sample import SampleState, messages_of
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, TokenSpan, images_of
from rl4llm.data.render import Renderer
from rl4llm.data.thoughts import forked
from rl4llm.envs.records import end_record, order_records
from rl4llm.runtime.runner import Runner
from rl4llm.runtime.seeds import derive_seed

NO_VERSION = -1
ABORTED = Completion("", (), (), "abort", NO_VERSION)


@dataclass(slots=True, eq=False)
class _Record:
    """How many messages of a sample are recorded, and its completions by the number of spans before them.

    The current token record begins with the messages `opening`, before those of the sample from `start` on.
    """

    messages: int = 0
    opening: list[ChatMessage] = field(default_factory=list)
    start: int = 0
    sampled: defaultdict[int, list[Completion]] = field(default_factory=lambda: defaultdict(list))
    kept_by_env: bool = False

    def place(self, sample: SampleState) -> int:
        """Return the number of spans recorded so far."""
        return sum(map(len, sample.special.forks)) + len(sample.spans)

    def conversation(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return what the current record has of a sample's first messages."""
        return [*self.opening, *messages[self.start :]]


class PolicyLLM:
    """Sample from the engine for some episodes, and record each sample's tokens with their authors.

    The record of a sample grows only at its end: the first prompt, then what the engine sampled, then the tokens of new
    messages. An assistant message that the engine did not sample at that point was written by the environment and becomes
    context. With `env.thoughts=drop`, a new record begins where the template drops earlier thoughts: its context is the
    template's rendering of the conversation. Another one begins where the history is compacted, see
    `rl4llm.envs.compaction`. At the end the first record is in the sample's `spans`, and later ones are its `forks`.
    """

    def __init__(self, client: BaseClient, renderer: Renderer, runner: Runner, *, seed: int, step: int):
        self._client = client
        self._renderer = renderer
        self.run = runner.run  # runs a coroutine on the engine's event loop
        self._identity = (seed, step)
        self._samples: list[SampleState] = []
        self._by_prompt: defaultdict[str, list[SampleState]] = defaultdict(list)
        self._records: dict[str, _Record] = {}  # by session

    def begin(self, samples: Sequence[SampleState]) -> None:
        """Announce the samples of these episodes, so that conversations passed to `generate` can be recognized."""
        self._samples = list(samples)
        self._by_prompt = defaultdict(list)
        for sample in samples:
            self._by_prompt[sample.prompt_id].append(sample)
            role = f"/{sample.role}" if sample.role else ""
            sample.session = f"{self._identity[1]}/{sample.prompt_id}{role}/{sample.index}"
            self._records[sample.session] = _Record()

    async def end(self) -> None:
        """Complete the token records and let the engine drop its caches."""
        for sample in self._samples:
            if sample.failure is None and not self._records[sample.session].kept_by_env:
                try:
                    self._record_sampled(sample)
                except SpecialTokenError as error:
                    sample.fail(str(error), "env/special_tokens")
        for sample in self._samples:
            if sample.special.forks and not self._records[sample.session].kept_by_env:
                order_records(sample)
            await self.close(sample)

    async def open(self, sample: SampleState) -> None:
        """Start the sample's episode; an engine in deterministic mode waits for it from now on."""
        await self._client.expect(sample.session)

    async def park(self, sample: SampleState) -> None:
        """Pause the sample while another role of its episode speaks, so that a deterministic engine does not wait for it."""
        await self._client.park(sample.session)

    async def close(self, sample: SampleState) -> None:
        """End the sample's episode, so that the engine may drop its cache."""
        await self._client.release(sample.session)

    async def reply(
        self, sample: SampleState, sampling_params: SamplingParams, *, append: bool = True
    ) -> Completion:
        """Sample the next assistant message and append it, unless the environment's loop appends it later.

        A sample whose context is full is finished instead. If the engine aborts the reply, the sample fails, as it does if
        its messages contain special tokens that are refused.
        """
        record = self._records[sample.session]
        try:
            self._record_sampled(sample)
            if new := record.messages < len(sample.messages) or not sample.spans:
                self._append_context(sample, record, len(sample.messages))
        except DataError as error:
            kind = "special_tokens" if isinstance(error, SpecialTokenError) else "image"
            sample.fail(str(error), f"env/{kind}")
            return ABORTED
        if not new and sample.messages[-1].role == "assistant":
            raise EnvError(
                f"Prompt {sample.prompt_id!r}: append a message of the environment before the policy's next turn."
            )
        prompt_ids = sample.token_ids
        if len(prompt_ids) >= self._client.context_length:
            sample.finish("context")
            return Completion("", (), (), "abort", await self._client.version())
        sampled = record.sampled[record.place(sample)]
        draw = sample.num_turns, len(sampled)  # several draws at one point must differ
        completion = await self._ask(sample, prompt_ids, sampling_params, draw, images_of(sample.spans))
        if completion.finish_reason != "abort":
            sampled.append(completion)
            if append:
                sample.messages.append(self._for(sample).reply(completion))
                self._record_sampled(sample)
        return completion

    def _for(self, sample: SampleState) -> Renderer:
        """Return the renderer of a sample, whose row may have its own tools."""
        return self._renderer.of_row(sample.columns)

    async def complete(
        self,
        sample: SampleState,
        token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *draw: int | str,
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        """Sample after `token_ids`, for an environment that keeps the sample's token records itself.

        `draw` distinguishes this completion from all others of the sample. Sample and draw alone determine the random
        numbers. Nothing is appended. An aborted completion fails the sample. `images` are places among the tokens.
        """
        self._records[sample.session].kept_by_env = True
        return await self._ask(sample, token_ids, sampling_params, draw, images)

    @property
    def constrains(self) -> bool:
        """Return whether completions match the grammar of their sampling parameters."""
        return self._client.constrains

    @property
    def context_length(self) -> int:
        """Return the most tokens of prompt and completion together."""
        return self._client.context_length

    def generate(self, prompts: Sequence[Any], sampling_params: SamplingParams) -> list[Completion]:
        """Return one completion per prompt, in order; synchronous, and nothing is appended.

        A prompt is a SampleState, a conversation (list of ChatMessage or dicts), a list of token ids, or a string: the chat
        template's text of a sample's messages, or any other text.
        """
        claimed: set[str] = set()
        requests = [self._request(prompt, sampling_params, claimed) for prompt in prompts]

        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*requests)

        return self.run(all_of_them())

    def chat(self, prompts: Sequence[Any], sampling_params: SamplingParams) -> list[ChatMessage]:
        """Return the completions of `generate` as assistant messages, ready to be appended."""
        completions = self.generate(prompts, sampling_params)
        return [self._renderer.reply(completion) for completion in completions]

    def _request(
        self, prompt: Any, params: SamplingParams, claimed: set[str]
    ) -> Coroutine[Any, Any, Completion]:
        if isinstance(prompt, str):
            prompt = self._of_text(self._renderer.encode(prompt), claimed)
        if isinstance(prompt, SampleState):
            claimed.add(prompt.session)
            return self.reply(prompt, params, append=False)
        if prompt and isinstance(prompt[0], int):
            return self._client.generate(prompt, self._with_stops(params))
        messages = messages_of(prompt)
        for sample in self._samples:
            if sample.session not in claimed and (sample.messages is prompt or sample.messages == messages):
                claimed.add(sample.session)
                return self.reply(sample, params, append=False)
        span = self._renderer.context(self._renderer.first(messages), messages)
        return self._client.generate(span.token_ids, self._with_stops(params), **_seen(span.images))

    def _of_text(self, token_ids: list[int], claimed: set[str]) -> SampleState | list[int]:
        """Return the sample whose messages the template renders as these tokens, so that its record stays exact."""
        waiting = (sample for sample in self._samples if not sample.done and sample.session not in claimed)
        same = (sample for sample in waiting if self._for(sample).prompt(sample.messages) == token_ids)
        return next(same, token_ids)

    async def _ask(
        self,
        sample: SampleState,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        draw: Sequence[int | str],
        images: Sequence[ImagePlace],
    ) -> Completion:
        params = params.replace(**sample.special.sampling)
        whose = (sample.prompt_id, sample.role) if sample.role else (sample.prompt_id,)
        seed = derive_seed(*self._identity, params.seed, *whose, sample.index, *draw)
        try:
            seeded = self._with_stops(params).replace(seed=seed)
            completion = await self._client.generate(
                prompt_ids, seeded, session=sample.session, **_seen(images)
            )
        except UnreachableError as error:  # after all retries; other requests may get through
            sample.fail(f"no server answered: {error}", "engine/unreachable")
        except UnreadableError:  # what the policy sampled before, as if that had been too long
            sample.finish("length")
        else:
            if completion.finish_reason == "abort":  # it may end anywhere, and is not a turn of the policy
                given_up = f"after {len(completion.token_ids)} of at most {params.max_tokens} tokens"
                sample.fail(f"the engine aborted a reply of the policy {given_up}", "engine/aborted")
            return completion
        return ABORTED

    def _with_stops(self, params: SamplingParams) -> SamplingParams:
        """Add the tokens by which the chat template ends a turn."""
        stops = dict.fromkeys((*params.stop_token_ids, *self._renderer.stop_token_ids))
        return params.replace(stop_token_ids=tuple(stops))

    def _append_context(self, sample: SampleState, record: _Record, end: int) -> None:
        """Record the tokens of new messages before `end`, and of the generation prompt after them."""
        span, fork = self._context(sample, record, end)
        if fork is not None:
            end_record(sample, "rewrites")
        sample.spans.append(fork or span)
        record.messages = end

    def _context(self, sample: SampleState, record: _Record, end: int) -> tuple[TokenSpan, TokenSpan | None]:
        """Return the tokens of these messages, and the whole prompt if a new record begins there without thoughts."""
        conversation = record.conversation(sample.messages[:end])
        renderer = self._for(sample)
        if sample.spans:
            span = self._following(sample, sample.messages[record.messages : end])
        else:
            span = renderer.context(renderer.first(conversation), conversation)
        return span, forked(renderer, [*sample.token_ids, *span.token_ids], conversation)

    def _following(self, sample: SampleState, new: Sequence[ChatMessage]) -> TokenSpan:
        """Return the tokens of new messages after the last turn, and of the generation prompt after them."""
        record, renderer, turn = self._records[sample.session], self._for(sample), sample.spans[-1].token_ids
        ended = renderer.ends_turn(turn)
        by = turn[-1] if ended else None
        earlier = record.conversation(sample.messages[: record.messages])
        return renderer.context(renderer.following(new, ended=ended, by=by, messages=earlier), new)

    def _record_sampled(self, sample: SampleState) -> None:
        """Record the tokens of each new assistant message."""
        record = self._records[sample.session]
        for turn in range(max(record.messages, sample.init_msg_size), len(sample.messages)):
            if sample.messages[turn].role != "assistant":
                continue
            if turn > record.messages:
                self._append_context(sample, record, turn)
            content = sample.messages[turn].content
            completion = self._find(sample, content)
            if completion is None:
                sample.spans.append(TokenSpan.context(self._for(sample).written(content)))
            else:
                sample.spans.extend(TokenSpan.policy(completion))
            record.messages = turn + 1

    def _find(self, sample: SampleState, content: str) -> Completion | None:
        """Return a completion with this text that was sampled at the sample's current end, its own before a sibling's.

        A sibling may have grown since then; what counts is where it was sampled.
        """
        end, record = len(sample.spans), self._records[sample.session]
        siblings = (
            sibling
            for sibling in self._by_prompt[sample.prompt_id]
            if sibling is not sample and sibling.special.forks == sample.special.forks
        )
        alike = (sibling for sibling in siblings if sibling.spans[:end] == sample.spans)
        for each in chain([sample], alike):  # siblings are compared only if the sample has none
            for completion in self._records[each.session].sampled[record.place(sample)]:
                texts = completion.text, self._for(sample).reply(completion).content
                if content.strip() in (text.strip() for text in texts):
                    return completion
        return None


def _seen(images: Sequence[ImagePlace]) -> dict[str, Any]:
    return {"images": images} if images else {}  # engines of users need not know the argument

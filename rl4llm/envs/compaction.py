"""Compaction: a policy with a long history summarises it, and continues from its prompt and the summary.

The request for the summary is a message of the user; the summary is a turn of the policy, whose tokens train like others.
The next prompt is that of the dataset with the summary in its last message: its images stay, those of later messages go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rl4llm.core.errors import DataError, EnvError, TemplateError
from rl4llm.core.message import after_thinking
from rl4llm.core.sample import SampleState
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, count_turns
from rl4llm.envs.policy import PolicyLLM
from rl4llm.envs.records import end_record

REQUEST = (
    "Your context is nearly full. Reply with a summary only: what you know, what you did, and what remains to be done, such "
    "as an open question. You will continue with the task and this summary, and see nothing else of this conversation."
)
OWN_LOOP = "This environment plays its own loop, which ignores env.compact_at. Remove the key."
SUMMARY = "Your summary of what happened so far:"


class CompactingLLM(PolicyLLM):
    """The policy of an environment with `compact_at`.

    Before a turn in a record where the policy spoke and that would have `at` tokens, it summarises its history. A summary
    that is cut at its token limit ends the sample, unless `may_cut`, and so does an empty one.
    """

    def __init__(self, *args: Any, at: int, may_cut: bool, **how: Any):
        super().__init__(*args, **how)
        self._at, self._may_cut = at, may_cut

    async def reply(
        self, sample: SampleState, sampling_params: SamplingParams, *, append: bool = True
    ) -> Completion:
        """Sample the next assistant message, after a summary if one is due."""
        if not append:
            raise EnvError(OWN_LOOP)
        if self._is_due(sample):
            summary = await self._summarize(sample, sampling_params)
            if sample.done:
                return summary
        return await super().reply(sample, sampling_params)

    async def complete(self, *args: Any, **how: Any) -> Completion:
        """Refuse an environment that keeps its token records itself."""
        raise EnvError(OWN_LOOP)

    def _is_due(self, sample: SampleState) -> bool:
        record, end = self._records[sample.session], len(sample.messages)
        try:
            self._record_sampled(sample)
            if record.messages == end or not count_turns(sample.spans):
                return False
            span, fork = self._context(sample, record, end)
            spans = (fork,) if fork else (*sample.spans, span)
            return sum(len(span.token_ids) for span in spans) >= self._at
        except DataError:  # the turn fails the sample for it
            return False

    async def _summarize(self, sample: SampleState, sampling_params: SamplingParams) -> Completion:
        """Sample a summary, and begin a record with the prompt and the summary."""
        record = self._records[sample.session]
        new = sample.messages[record.messages :]
        sample.messages[record.messages :] = _with_request(new, lambda asked: self._following(sample, asked))
        completion = await super().reply(sample, sampling_params)
        summary = after_thinking(sample.last_message.content).strip()
        if not summary or (completion.finish_reason == "length" and not self._may_cut):
            sample.finish("length")
        if not sample.done:
            answers = range(sample.init_msg_size, len(sample.messages))
            *prompt, last = sample.messages[
                : next(i for i in answers if sample.messages[i].role == "assistant")
            ]
            sample.messages.append(ChatMessage("user", f"{SUMMARY}\n\n{summary}"))
            record.opening = [*prompt, _extended(last, sample.last_message.content)]
            record.start = len(sample.messages)
            end_record(sample, "continues")
        return completion


def _with_request(
    messages: Sequence[ChatMessage], renders: Callable[[Sequence[ChatMessage]], object]
) -> list[ChatMessage]:
    """Return new messages and the request: inside the last message if that is the user's or no template shape fits."""
    *before, last = messages
    if last.role != "user":
        asked = [*messages, ChatMessage("user", REQUEST)]
        try:
            renders(asked)
            return asked
        except (TemplateError, EnvError):
            pass
    return [*before, _extended(last, REQUEST)]


def _extended(message: ChatMessage, text: str) -> ChatMessage:
    parts = (*message.parts, f"\n\n{text}") if message.parts else ()
    return replace(message, content=f"{message.content}\n\n{text}", parts=parts)

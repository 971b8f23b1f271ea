"""A language model behind an OpenAI-compatible server, for judges and opponents, which need only its text."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from rl4llm.core.errors import RefusedError, UnreachableError
from rl4llm.core.schema import Count, Positive, checked
from rl4llm.runtime.transport import Retry, Transport

T = TypeVar("T")
FILTERED = 400  # the HTTP status of content filters


class ChatServer:
    """Chat completions with a deadline for each request, retries and a budget.

    Args:
        where: the configuration key that messages name.
        url: URL of the server, up to /v1.
        model: the model's name on the server.
        api_key_env: the environment variable that holds the server's key.
        attempts: maximum number of requests for one text.
        deadline_s: deadline of one request, in seconds.
        concurrency: maximum number of simultaneous requests.
        max_calls: maximum number of requests of this process, None for no limit; each rank has a separate budget.
        max_total_tokens: maximum number of tokens, read and written, that the server counts for this process.

    `counts` has the calls and tokens so far.
    """

    @checked("{where}")
    def __init__(
        self,
        where: str,
        *,
        url: str,
        model: str,
        api_key_env: str | None = None,
        attempts: Count = 4,
        deadline_s: Positive = 60.0,
        concurrency: Count = 16,
        max_calls: int | None = None,
        max_total_tokens: int | None = None,
    ):
        self.model = model
        self.retry = Retry(attempts)
        self.counts: Counter[str] = Counter()
        self._limits = {"calls": max_calls, "tokens": max_total_tokens}
        api_key = os.environ[api_key_env] if api_key_env else None
        self._transport = Transport(url, deadline_s=deadline_s, connections=concurrency, api_key=api_key)

    async def ask(self, body: Callable[[int], Mapping[str, Any]], read: Callable[[str], T]) -> T:
        """Return ``read(text)`` for the model's answer to ``body(attempt)``; retry if `read` raises UnreachableError.

        Raises UnreachableError after the last attempt, RefusedError if the server refuses or the budget is used up.
        """

        async def attempt(number: int) -> T:
            for what, limit in self._limits.items():
                if limit is not None and self.counts[what] >= limit:
                    raise RefusedError(f"the budget of {limit} {what} is used up")
            self.counts["calls"] += 1
            request = {"model": self.model, **body(number)}
            return read(self._text(await self._transport.post("/chat/completions", request)))

        return await self.retry.run(attempt)

    async def together(self, work: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results of all of the work, which asks at once; then disconnect."""
        try:
            return list(await asyncio.gather(*work))
        finally:
            await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connections, which belong to the running event loop; the next request opens new ones."""
        await self._transport.close()

    def _text(self, reply: Any) -> str:
        try:
            choice = reply["choices"][0]
            text = choice["message"].get("content")
            filtered = choice.get("finish_reason") == "content_filter" or choice["message"].get("refusal")
            self.counts["tokens"] += int((reply.get("usage") or {}).get("total_tokens", 0))
            if not (filtered or isinstance(text, str)):
                raise TypeError(text)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UnreachableError(f"the server sent no valid chat completion: {reply!r:.200}") from error
        if filtered:
            raise RefusedError(f"the model refused to answer: {choice!r:.200}", status=FILTERED)
        return str(text)

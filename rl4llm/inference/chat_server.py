"""A language model behind an OpenAI-compatible server, for whoever only wants its text: judges and opponents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rl4llm.core.errors import ConfigError, RefusedError, UnreachableError
from rl4llm.inference.transport import Retry, Transport

T = TypeVar("T")


class ChatServer:
    """Chat completions with a deadline for each request, retries, and a budget.

    Args:
        where: the configuration key that messages name.
        url: of the server, up to /v1.
        model: its name there.
        api_key_env: the environment variable that holds the server's key.
        attempts: requests for one text at most.
        deadline_s: of one request.
        concurrency: requests at a time.
        max_calls: requests of this process at most, None without a limit; other ranks have a budget of their own.
        max_total_tokens: tokens read and written by the model for this process, as it counts them.

    `counts` has the calls and tokens so far.
    """

    def __init__(
        self,
        where: str,
        *,
        url: str,
        model: str,
        api_key_env: str | None = None,
        attempts: int = 4,
        deadline_s: float = 60.0,
        concurrency: int = 16,
        max_calls: int | None = None,
        max_total_tokens: int | None = None,
    ):
        for option, value in {"attempts": attempts, "deadline_s": deadline_s, "concurrency": concurrency}.items():
            if not value > 0:
                raise ConfigError(f"{where}.{option}={value!r} is not accepted: above 0.")
        if api_key_env and not os.environ.get(api_key_env):
            raise ConfigError(f"{where}.api_key_env={api_key_env!r}: this environment variable is not set.")
        self.model = model
        self.retry = Retry(attempts)
        self.counts: Counter[str] = Counter()
        self._limits = {"calls": max_calls, "tokens": max_total_tokens}
        api_key = os.environ.get(api_key_env) if api_key_env else None
        self._transport = Transport(url, deadline_s=deadline_s, connections=concurrency, api_key=api_key)

    async def ask(self, body: Callable[[int], Mapping[str, Any]], read: Callable[[str], T]) -> T:
        """What `read` makes of the text that the model answers to ``body(attempt)``, for which it is asked again when `read`
        raises UnreachableError.

        Raises UnreachableError after the last attempt, RefusedError when the server refuses or the budget is used up.
        """

        async def attempt(number: int) -> T:
            self._spend()
            return read(self._text(await self._transport.post("/chat/completions", {"model": self.model, **body(number)})))

        return await self.retry.run(attempt)

    async def disconnect(self) -> None:
        """Close the connections, which belong to the running event loop; the next request opens others."""
        await self._transport.close()

    def _spend(self) -> None:
        for what, limit in self._limits.items():
            if limit is not None and self.counts[what] >= limit:
                raise RefusedError(f"the budget of {limit} {what} is used up")
        self.counts["calls"] += 1

    def _text(self, reply: Any) -> str:
        try:
            text = reply["choices"][0]["message"]["content"]
            self.counts["tokens"] += int((reply.get("usage") or {}).get("total_tokens", 0))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UnreachableError(f"its reply is no chat completion: {reply!r:.200}") from error
        if not isinstance(text, str):
            raise UnreachableError(f"its reply is no chat completion: {reply!r:.200}")
        return text

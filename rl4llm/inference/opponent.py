"""Language models as opponents and simulated users: behind an OpenAI-compatible server, or in an engine of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_opponent import BaseOpponent
from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.data.render import Renderer
from rl4llm.inference.chat_server import ChatServer

SEEDS = 2**31  # servers take no larger ones
PROBE = (ChatMessage("user", "Say yes."),)


class ServerOpponent(BaseOpponent):
    """A model behind any OpenAI-compatible server.

        opponents: {con: {name: server, url: "http://127.0.0.1:30000/v1", model: rival}}

    A request that fails is tried again; after the last attempt, or where the server refuses, the episode fails. Before a run
    starts the server is asked for a word.

    Args:
        url: of the server, up to /v1.
        model: its name there.
        temperature: of its lines.
        max_tokens: of one line; None for as many as the policy may say.
        api_key_env: the environment variable that holds the server's key.
        attempts: requests for one line at most.
        deadline_s: of one request.
        concurrency: requests at a time.
        max_calls: requests of this process at most, None without a limit.
    """

    reply_timeout_s = None  # every request has its own deadline, which begins when it leaves

    def __init__(
        self,
        url: str,
        model: str,
        *,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        api_key_env: str | None = None,
        attempts: int = 4,
        deadline_s: float = 60.0,
        concurrency: int = 64,
        max_calls: int | None = None,
    ):
        self.server = ChatServer(
            "env.opponents",
            url=url,
            model=model,
            api_key_env=api_key_env,
            attempts=attempts,
            deadline_s=deadline_s,
            concurrency=concurrency,
            max_calls=max_calls,
        )
        self.url, self.temperature, self.max_tokens = url, temperature, max_tokens

    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        body = {
            "messages": [message.to_dict() for message in messages],
            "max_tokens": self.max_tokens or sampling_params.max_tokens,
            "temperature": self.temperature,
            "seed": sampling_params.seed % SEEDS,
        }
        return await self.server.ask(lambda attempt: body, lambda text: text)

    def check(self) -> None:
        try:
            asyncio.run(self._probe())
        except (UnreachableError, RefusedError) as error:
            raise ConfigError(
                f"env.opponents: the model {self.server.model!r} at {self.url} says nothing: {error} Next step: start the "
                "server, or correct url and model; url ends where /chat/completions begins, most often in /v1."
            ) from error

    async def disconnect(self) -> None:
        await self.server.disconnect()

    async def _probe(self) -> None:
        try:
            await self.reply(PROBE, SamplingParams(max_tokens=1))
        finally:
            await self.disconnect()


class EngineOpponent(BaseOpponent):
    """A model behind any inference client, which is not the one that trains.

    Args:
        client: the engine, with weights loaded.
        tokenizer: of its model, with a chat template.
    """

    reply_timeout_s = None  # engines that stand still say so themselves

    def __init__(self, client: BaseClient, tokenizer: Any):
        self.client = client
        self.renderer = Renderer(tokenizer, roles=())

    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        stops = (*sampling_params.stop_token_ids, *self.renderer.stop_token_ids)
        prompt_ids = self.renderer.first(messages)
        completion = await self.client.generate(prompt_ids, sampling_params.replace(stop_token_ids=stops))
        if completion.finish_reason == "abort":
            raise EngineError("the opponent's engine gave up a line")
        return self.renderer.content(completion.text)

    async def disconnect(self) -> None:
        await self.client.disconnect()

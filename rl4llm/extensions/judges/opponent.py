"""Language models as opponents and simulated users, behind an OpenAI-compatible server or in an engine of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_opponent import BaseOpponent
from rl4llm.core.errors import EngineError
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.extensions.judges.chat_server import ChatServer
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.runner import run

SEEDS = 2**31  # servers accept no larger seeds
PROBE = (ChatMessage("user", "Say yes."),)


class ServerOpponent(BaseOpponent):
    """A model behind any OpenAI-compatible server.

        opponents: {con: {name: server, url: "http://127.0.0.1:30000/v1", model: rival}}

    A request that fails is retried; after the last attempt, or if the server refuses, the episode fails. Before a run
    starts, one token is requested as a test.

    Args:
        url: URL of the server, up to /v1.
        model: the model's name on the server.
        temperature: sampling temperature of its lines.
        max_tokens: maximum number of tokens of one line; None for the policy's limit.
        api_key_env: the environment variable that holds the server's key.
        attempts: maximum number of requests for one line.
        deadline_s: deadline of one request, in seconds.
        concurrency: maximum number of simultaneous requests.
        max_calls: maximum number of requests of this process, None for no limit.
    """

    reply_timeout_s = None  # every request has a separate deadline, which starts when it is sent

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
        self.temperature, self.max_tokens = temperature, max_tokens

    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        body = {
            "messages": [message.to_dict() for message in messages],
            "max_tokens": self.max_tokens or sampling_params.max_tokens,
            "temperature": self.temperature,
            "seed": sampling_params.seed % SEEDS,
        }
        return await self.server.ask(lambda attempt: body, lambda text: text)

    def check(self) -> None:
        run(self._probe())

    async def disconnect(self) -> None:
        await self.server.disconnect()

    async def _probe(self) -> None:
        try:
            await self.reply(PROBE, SamplingParams(max_tokens=1))
        finally:
            await self.disconnect()


class EngineOpponent(BaseOpponent):
    """A model behind any inference client, other than the one that trains.

    Args:
        client: the engine, with weights loaded.
        tokenizer: the model's tokenizer, with a chat template.
        template_args: variables of the chat template, such as ``{"enable_thinking": False}``.
        special_tokens: what special tokens in messages become, as `data.special_tokens`.
    """

    reply_timeout_s = None  # engines detect by themselves that they are stuck

    def __init__(
        self,
        client: BaseClient,
        tokenizer: Any,
        template_args: Mapping[str, Any] | None = None,
        special_tokens: str = "escape",
    ):
        self.client = client
        self.renderer = Renderer(
            tokenizer, roles=(), template_args=template_args, special_tokens=special_tokens
        )

    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        stops = (*sampling_params.stop_token_ids, *self.renderer.stop_token_ids)
        prompt_ids = self.renderer.first(messages)
        completion = await self.client.generate(prompt_ids, sampling_params.replace(stop_token_ids=stops))
        if completion.finish_reason == "abort":
            raise EngineError("the opponent's engine aborted a line")
        return self.renderer.reply(completion).content

    async def disconnect(self) -> None:
        await self.client.disconnect()


def opponent_model(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    template_args: Mapping[str, Any] | None = None,
    special_tokens: str = "escape",
) -> EngineOpponent:
    """Load a model from disk or the hub into a separate engine of this process; its weights never change."""
    tokenizer = load_tokenizer(path)
    client = LocalClient(load_model(path, dtype, device), tokenizer)
    run(client.load(WeightRef(0)))
    return EngineOpponent(client, tokenizer, template_args, special_tokens)

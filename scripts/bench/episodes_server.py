"""What both sides of `episodes.py` play, and its model: a server that knows at once what it says, in a separate process.

Add one to 41, then one to the result. What is it?      increment(41)  42  increment(42)  43  "The answer is 43."

`/v1/chat/completions` speaks OpenAI's messages with native tool calls, `/generate` SGLang's token ids; both say the same.
A turn follows from the request alone, and a request that lacks the result of a call before it is refused, so neither side
can leave anything out.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable
from typing import Any

from aiohttp import web

SYSTEM = "Answer the question. Call the tool for every step of it."
TURNS = 3


def question(number: int) -> str:
    """The prompt of a task; no two have the same number."""
    return f"Add one to {number}, then one to the result. What is it?"


def scored(said: str, number: int) -> float:
    """The reward: 1 where the last message says the sum."""
    return float(str(number + 2) in said)


async def increment(number: int) -> int:
    """Add one.

    Args:
        number: to which one is added.
    """
    return number + 1


QUESTION = re.compile(question(0).replace("0", r"(\d+)").replace("?", r"\?"))
RESULT = re.compile(r"<\|im_start\|>tool\n(\d+)<\|im_end\|>")
ASKED = "<|im_start|>assistant"
CALL = '<tool_call>{"name": "increment", "arguments": {"number": %d}}</tool_call>'


def texts(number: int) -> list[str]:
    """What the model says to a question, turn by turn, as a text."""
    return [*(CALL % (number + turn) for turn in range(TURNS - 1)), f"The answer is {number + 2}."]


def check_results(number: int, turn: int, results: list[str]) -> None:
    """Refuse a conversation whose tool results are not those of its calls."""
    expected = [str(number + earlier + 1) for earlier in range(turn)]
    if results != expected:
        raise web.HTTPBadRequest(text=f"turn {turn} of question {number}: results {results}, not {expected}")


async def chat(request: web.Request) -> web.Response:
    """OpenAI's chat completions."""
    body = await request.json()
    if not body.get("tools"):
        raise web.HTTPBadRequest(text="no tools were given")
    messages = body["messages"]
    number = next(int(QUESTION.search(item["content"])[1]) for item in messages if item["role"] == "user")
    results = [item["content"] for item in messages if item["role"] == "tool"]
    turn = sum(item["role"] == "assistant" for item in messages)
    check_results(number, turn, results)
    return web.Response(body=_chat_reply(number, turn), content_type="application/json")


@functools.cache
def _chat_reply(number: int, turn: int) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": texts(number)[turn]}
    reason = "stop"
    if turn < TURNS - 1:
        function = {"name": "increment", "arguments": json.dumps({"number": number + turn})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        message |= {"content": None, "tool_calls": [call]}
        reason = "tool_calls"
    reply = {
        "id": f"chatcmpl-{number}-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": "mock",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 50, "completion_tokens": 20, "total_tokens": 70},
    }
    return json.dumps(reply).encode()


def generate(tokenizer: Any) -> Callable[[web.Request], Any]:
    """SGLang's native interface."""

    @functools.cache
    def reply(number: int, turn: int) -> dict[str, Any]:
        token_ids = [
            *tokenizer(texts(number)[turn], add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        meta = {
            "finish_reason": {"type": "stop", "matched": tokenizer.eos_token_id},
            "weight_version": "0",
            "output_token_logprobs": [[-0.5123, token, None] for token in token_ids],
        }
        return {"text": "", "output_ids": token_ids, "meta_info": meta}

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        text = tokenizer.backend_tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        number, turn = int(QUESTION.search(text)[1]), text.count(ASKED) - 1
        check_results(number, turn, RESULT.findall(text))
        answer = reply(number, turn)
        named = {**answer, "meta_info": {**answer["meta_info"], "id": body["rid"]}}
        return web.Response(body=json.dumps(named).encode(), content_type="application/json")

    return handler


def serve(tokenizer: Any, report: Callable[[int], None]) -> None:
    """Serve until killed, from when the port is reported."""

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_post("/generate", generate(tokenizer))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        report(site._server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())

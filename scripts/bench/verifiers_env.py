"""The tasks of `episodes.py` as verifiers 0.4 has them, and the fastest harness that its contract allows.

Its own harnesses start a process for each rollout, and tools are MCP servers in further processes. A harness may also run
its loop in the process of the environment, "as long as every model call goes through `endpoint`" (`Harness.launch`): this
one does, calls the tool as a function, and speaks to that endpoint through one shared pool of connections.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import verifiers.v1 as vf
from episodes_server import SYSTEM, increment, question, scored
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessHarness", "IncrementTaskset"]

TOOL = {
    "type": "function",
    "function": {
        "name": "increment",
        "description": "Add one.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "to which one is added."}},
            "required": ["number"],
        },
    },
}


class IncrementData(vf.TaskData):
    number: int


class IncrementTask(vf.Task[IncrementData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def says_the_sum(self, task: IncrementData, trace: vf.Trace) -> float:
        return scored(trace.last_reply, task.number)


class IncrementConfig(vf.TasksetConfig):
    first: int = 0
    prompts: int = 1


class IncrementTaskset(vf.Taskset[IncrementTask, IncrementConfig]):
    def load(self) -> Iterable[IncrementTask]:
        for number in range(self.config.first, self.config.first + self.config.prompts):
            data = IncrementData(prompt=question(number), system_prompt=SYSTEM, number=number)
            yield IncrementTask(data, self.config.task)


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http: aiohttp.ClientSession | None = None  # one for all rollouts, opened in their event loop

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        while True:
            message = await self._ask(endpoint, secret, ctx.model, messages)
            if not message.get("tool_calls"):
                return ProgramResult(exit_code=0, stdout="", stderr="")
            messages.append(message)
            for call in message["tool_calls"]:
                result = await increment(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})

    async def _ask(
        self, endpoint: str, secret: str, model: str, messages: list[dict[str, Any]]
    ) -> dict[str, Any]:
        body = {"model": model, "messages": messages, "tools": [TOOL]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with self.http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            return (await response.json())["choices"][0]["message"]

"""The embedded engine: continuous batching in the caller's event loop, on the trainer's own weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import EngineError
from rl4llm.core.types import Completion, SamplingParams, WeightRef
from rl4llm.inference.engine import SHARE_FROM, Engine
from rl4llm.inference.paths import Path
from rl4llm.inference.rows import Request


class LocalClient(BaseClient):
    """Generates with a Hugging Face causal LM in this process, sharing its parameters without a copy.

        client = LocalClient(model, tokenizer)
        completions = client.generate_batch([prompt_ids] * 8, [SamplingParams(seed=seed) for seed in range(8)])

    A pump task decodes one token for every running request, then lets other coroutines run, and so on; requests join and
    leave between two tokens. After the optimizer changed the parameters in place, `load` must be told their version.

    Args:
        model: the causal LM; its device and dtype are the engine's.
        tokenizer: for the text of completions, stop strings and the end-of-text token.
        max_rows: how many requests decode at once; parked sessions use rows that are free.
        context_length: prompt plus completion, in tokens; by default what the model allows.
        path: "fast" (functions for the Llama family), "model" (the model's own forward), or "auto": the first that is
            proven equal to the model's own forward.
        deterministic: decode only while every session that `expect` announced has a request here, so that batches, and
            with them the last bits of log-probs, do not depend on how long tools take.
        stall_timeout_s: how long requests may wait for `resume`, or for such a session, before they fail.
        share_from: on the fast path the prompts of groups are read in place, instead of copied for each request, when
            that saves at least this many cached tokens.
    """

    in_process = True
    publishers = ("memory",)

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_rows: int = 256,
        context_length: int | None = None,
        path: Path = "auto",
        deterministic: bool = False,
        stall_timeout_s: float = 600.0,
        share_from: int = SHARE_FROM,
    ):
        self._engine = Engine(model, tokenizer, max_rows, context_length, path, share_from)
        self._model = model
        self.context_length = self._engine.context_length
        self.vocab_size = self._engine.vocab_size
        self._deterministic = deterministic
        self._stall_timeout_s = stall_timeout_s
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._expected: set[str] = set()
        self._paused = self._closed = False
        self._asleep: set[str] = set()
        self._pump: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        self._check_awake()
        request = self._engine.request(prompt_ids, sampling_params, session)
        self._start_pump()
        future = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        self._engine.waiting.append(request)
        self._changed.set()
        try:
            return await future
        finally:
            request.cancelled = self._futures.pop(request, None) is not None
            self._changed.set()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._check_awake()
        return self._engine.score(token_ids)

    async def load(self, weight_ref: WeightRef) -> None:
        if weight_ref.kind != "memory":
            raise EngineError(
                f"load: WeightRef.kind={weight_ref.kind!r} is not accepted by the embedded engine, which shares the "
                "trainer's weights: update the parameters in place and pass kind='memory'."
            )
        if weight_ref.tensors is not None:
            self._copy(weight_ref.tensors())
        self._engine.take_weights(weight_ref.version)

    @torch.no_grad()
    def _copy(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        own = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        for name, tensor in tensors:
            own[name].copy_(tensor)

    async def version(self) -> int:
        return self._engine.version

    async def release(self, session: str) -> None:
        self._engine.release(session)
        self._engine.rest()
        self._expected.discard(session)
        self._wake_pump()

    async def expect(self, session: str) -> None:
        self._expected.add(session)

    async def park(self, session: str) -> None:
        self._expected.discard(session)
        self._wake_pump()

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wake_pump()

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Drop the cache ("kv_cache"); the weights are the trainer's. Raises EngineError while requests run."""
        if self._engine.busy:
            raise EngineError(f"sleep: {len(self._futures)} requests are under way; await them first.")
        self._asleep |= set(tags)
        if "kv_cache" in tags:
            self._engine.reset()

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._asleep -= set(tags)

    async def health(self) -> dict[str, Any]:
        if self._closed:
            raise EngineError("The embedded engine is closed.")
        return {"version": self._engine.version, **self._engine.describe()}

    async def close(self) -> None:
        self._closed = True
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
        self._fail(EngineError("The embedded engine was closed while requests were under way."))

    def _check_awake(self) -> None:
        if self._closed:
            raise EngineError("The embedded engine is closed; build a new one.")
        if self._asleep:
            raise EngineError(f"The embedded engine sleeps ({', '.join(sorted(self._asleep))}); call wake first.")

    def _start_pump(self) -> None:
        """Have a pump in this event loop. One that died with its own loop is replaced, its requests are gone."""
        loop = asyncio.get_running_loop()
        if self._pump is not None and not self._pump.done():
            if self._pump.get_loop() is loop:
                return
            if self._pump.get_loop().is_running():
                raise EngineError("The embedded engine already serves another running event loop; use one at a time.")
            self._fail(EngineError("The event loop of this request ended."))
        self._changed = asyncio.Event()
        self._pump = loop.create_task(self._run(), name="rl4llm-local-engine")
        self._pump.add_done_callback(self._pump_ended)

    def _wake_pump(self) -> None:
        self._changed.set()

    async def _run(self) -> None:
        while self._futures and self._pump is asyncio.current_task():
            reason = self._stalled()
            if reason:
                await self._wait(reason)
                continue
            for request, completion in self._engine.step():
                future = self._futures.pop(request, None)
                if future is not None and not future.done():
                    future.set_result(completion)
            await asyncio.sleep(0)
        self._engine.drop_cancelled()
        self._engine.rest()

    def _stalled(self) -> str:
        """Why no step may be taken now, or nothing."""
        if self._paused:
            return "the engine is paused; call resume"
        if self._deterministic:
            self._engine.waiting.sort(key=lambda request: request.session)
            absent = sorted(self._expected - {request.session for request in self._futures})
            if absent:
                return f"sessions announced by expect neither generate nor are released: {', '.join(absent)}"
        return ""

    async def _wait(self, reason: str) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._changed.wait()
        except TimeoutError:
            raise EngineError(f"Requests waited {self._stall_timeout_s:g} s: {reason}.") from None

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        """Nobody waits for a dead pump: whatever ended it reaches every request."""
        if pump is not self._pump:
            return
        if pump.cancelled():
            self._fail(EngineError("The embedded engine's event loop ended while requests were under way."))
        elif (cause := pump.exception()) is not None:
            self._fail(cause)

    def _fail(self, cause: BaseException) -> None:
        self._engine.reset()
        futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(_as_engine_error(cause))


def _as_engine_error(cause: BaseException) -> EngineError:
    """One exception object per waiter, as each raises it with a traceback of its own."""
    error = type(cause)(*cause.args) if type(cause) is EngineError else EngineError(f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error

"""The embedded engine: continuous batching in the caller's event loop, on the trainer's own weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch

from rl4llm.core.base_backend import AUTOCAST
from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import EngineError
from rl4llm.core.images import ImagePlace, tower_of
from rl4llm.core.model_memory import FP32, EngineLoad, ModelShape, Precision
from rl4llm.core.registry import load
from rl4llm.core.schema import Count, Range, checked
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.inference.embedded.engine import LOOKAHEAD, SHARE_FROM, Engine, Finished
from rl4llm.inference.embedded.kv_cache import LENGTH_STEP, KVCache, padded_rows
from rl4llm.inference.embedded.llama_decode import FAMILY
from rl4llm.inference.embedded.rows import PREFILL_TOKENS, Request
from rl4llm.inference.paths import Path, choose_decoder
from rl4llm.runtime.threads import in_own_thread

MAX_ROWS = 256  # that decode at once
TURNS = 4  # of the event loop between two steps, as many as a server takes from the bytes of a request to its answer
GRAPHS = "CUDA graphs (estimate)"


class LocalClient(BaseClient):
    """Generates with a Hugging Face causal LM in this process, sharing its parameters without a copy.

        client = LocalClient(model, tokenizer)
        completions = client.generate_batch([prompt_ids] * 8, [SamplingParams(seed=seed) for seed in range(8)])

    A pump task decodes one token for every running request, then lets other coroutines run, and so on. Requests join and
    leave between two tokens. After the optimizer changed the parameters in place, call `load` with their new version.

    Args:
        model: the causal LM; its device and dtype are the engine's.
        tokenizer: decodes completions and stop strings; its end-of-text token stops a completion.
        max_rows: how many requests decode at once; parked sessions use the free rows.
        context_length: prompt plus completion, in tokens; by default what the model allows.
        path: "fast" (functions for the Llama family), "graph" (the same in a fixed shape, as CUDA graphs where there is a
            GPU; each request gets a copy of its group's prompt), "model" (the model's own forward), or "auto": "graph" on a
            GPU and "fast" elsewhere, unless its log-probs differ from the model's own forward.
        deterministic: decode only while every session announced with `expect` has a request, so that batches, and with
            them the last bits of log-probs, do not depend on how long tools take.
        stall_timeout_s: how long requests may wait for `resume`, or for such a session, before they fail.
        autocast: "bfloat16" samples as a trainer with that `autocast` computes; the weights of linear layers are copied
            by `load`, in half their memory.
        share_from: on the fast path, read the prompts of groups in place instead of copying them for each request, if
            that saves at least this many cached tokens.
    """

    in_process = takes_images = True
    publishers = ("memory",)

    @checked("inference")
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_rows: Count = MAX_ROWS,
        context_length: Annotated[int, Range(2)] | None = None,
        path: Path = "auto",
        deterministic: bool = False,
        stall_timeout_s: float = 600.0,
        share_from: int = SHARE_FROM,
        autocast: Literal["none", "bfloat16"] = "none",
    ):
        dtype = AUTOCAST[autocast]
        self._engine = Engine(model, tokenizer, max_rows, context_length, path, share_from, dtype)
        self._model, self._path = model, path
        self.context_length = self._engine.context_length
        self.vocab_size = self._engine.vocab_size
        self._tokenizer = tokenizer
        self._deterministic = deterministic
        self._stall_timeout_s = stall_timeout_s
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._expected: set[str] = set()
        self._paused = self._closed = False
        self._asleep: set[str] = set()
        self._pump: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @classmethod
    def memory(
        cls, shape: ModelShape, precision: Precision, options: Mapping[str, Any], load: EngineLoad
    ) -> dict[str, int]:
        """Return the bytes of the cache with all rows at full length, and of a prefill pass or of a step's logits.

        On a GPU the steps of the Llama family are captured unless `path` says otherwise: rows are padded, and what the steps
        keep is an estimate.
        """
        rows = min(int(options.get("max_rows", MAX_ROWS)), load.sequences)
        length = -(-(load.longest + LOOKAHEAD) // LENGTH_STEP) * LENGTH_STEP
        filling = shape.working(precision, min(PREFILL_TOKENS, rows * load.prompt_tokens), backward=False)
        logits = 3 * rows * shape.vocabulary * FP32
        path = options.get("path", "auto")
        graph = path == "graph" or (path == "auto" and precision.gpu and shape.name in FAMILY)
        padded = padded_rows(rows)
        cache = KVCache.memory(shape, padded + 1 if graph else rows, length, precision.computed)
        captured = {GRAPHS: _captured(shape, precision, padded, length)} if graph and precision.gpu else {}
        copied = {"weights in bfloat16": shape.linear * precision.computed} if precision.autocast else {}
        return {"KV cache": cache, "sampling": max(filling, logits), **captured, **copied}

    @property
    def constrains(self) -> bool:
        return bool(load("rl4llm.core.allowed:can_constrain")(self._tokenizer))

    def report_to(self, warn: Callable[[str], None]) -> None:
        """Warn if decoding takes the slower path without having been asked to."""
        description = self._engine.describe()
        if description["path"] == "model" and description["path_reason"] != "requested":
            warn(
                f"The embedded engine samples with the model's own forward, which is slower: {description['path_reason']}."
            )

    def path(self) -> str:
        description = self._engine.describe()
        return f"samples with path={description['path']}, since {description['path_reason']}"

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        self._check_awake()
        request = self._engine.request(prompt_ids, sampling_params, session, images)
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

    async def score(self, token_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> list[float]:
        return (await self.score_top(token_ids, 0, images))[0]

    async def score_top(
        self, token_ids: Sequence[int], top: int, images: Sequence[ImagePlace] = ()
    ) -> tuple[list[float], list[list[tuple[float, int]]]]:
        """Return what `score` does, and log-prob and id of the `top` most probable tokens at each place."""
        self._check_awake()
        return self._engine.score(token_ids, images, top)

    async def compute_in(self, autocast: str) -> None:
        """Sample as a trainer with this `autocast` computes, from the next `load` on; call it while the engine is paused."""
        engine, dtype = self._engine, AUTOCAST[autocast]
        if dtype != engine.autocast:
            choose = partial(choose_decoder, self._model, self._path, self.context_length, dtype)
            engine.prepared = await in_own_thread("rl4llm-decoder", choose)
            engine.autocast = dtype

    async def load(self, weight_ref: WeightRef, keep_cache: bool = False) -> None:
        """Take new weights; with `keep_cache` requests under way continue with what the older ones cached for them."""
        if weight_ref.kind != "memory":
            raise EngineError(
                f"load: kind={weight_ref.kind!r}, but this engine shares the trainer's weights (memory)."
            )
        if weight_ref.tensors is not None:
            tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
            with torch.no_grad():
                for name, tensor in weight_ref.tensors():
                    tensors[name].copy_(tensor)
            if (tower := tower_of(self._model)) is not None:
                tower.forget()
        self._engine.take_weights(weight_ref.version, keep_cache)

    async def version(self) -> int:
        return self._engine.version

    async def release(self, session: str) -> None:
        self._engine.release(session)
        self._engine.rest()
        self._expected.discard(session)
        self._changed.set()

    async def expect(self, session: str) -> None:
        self._expected.add(session)

    async def park(self, session: str) -> None:
        self._expected.discard(session)
        self._changed.set()

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._changed.set()

    @property
    def device(self) -> torch.device:
        """Return where the model is."""
        return self._engine.device

    def sampled(self, session: str) -> list[int]:
        """Return the tokens so far of a session's request; none if it has no request."""
        return next(
            (self._engine.sampled(request) for request in self._futures if request.session == session), []
        )

    async def abort(self, session: str = "") -> None:
        """End the requests of a session, or all; they return the tokens so far with the finish reason "abort"."""
        self._deliver(
            self._engine.abort({request for request in self._futures if session in ("", request.session)})
        )
        self._changed.set()

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Drop the cache ("kv_cache"); the weights belong to the trainer. Raises EngineError while requests run."""
        if self._engine.busy:
            raise EngineError(f"sleep: {len(self._futures)} requests are running; await them first.")
        self._asleep |= set(tags)
        if "kv_cache" in tags:
            self._engine.reset()

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._asleep -= set(tags)

    async def health(self) -> dict[str, Any]:
        return {"version": self._engine.version, **self._engine.describe()}

    async def close(self) -> None:
        self._closed = True
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
        self._fail(EngineError("The embedded engine was closed while requests were running."))

    def _check_awake(self) -> None:
        if self._closed or self._asleep:
            state = "closed; create a new one" if self._closed else "asleep; call wake first"
            raise EngineError(f"The embedded engine is {state}.")

    def _start_pump(self) -> None:
        """Ensure that a pump runs in this event loop. If its loop ended, fail its requests and replace it."""
        loop = asyncio.get_running_loop()
        if self._pump is not None and not self._pump.done():
            if self._pump.get_loop() is loop:
                return
            if self._pump.get_loop().is_running():
                raise EngineError(
                    "The embedded engine already serves another running event loop. Use one event loop at a time."
                )
            self._fail(EngineError("The event loop of this request ended."))
        self._changed = asyncio.Event()
        self._pump = loop.create_task(self._run(), name="rl4llm-local-engine")
        self._pump.add_done_callback(self._pump_ended)

    async def _run(self) -> None:
        while self._futures and self._pump is asyncio.current_task():
            if reason := self._stalled():
                self._changed.clear()
                try:
                    async with asyncio.timeout(self._stall_timeout_s):
                        await self._changed.wait()
                except TimeoutError:
                    raise EngineError(f"Requests waited {self._stall_timeout_s:g} s: {reason}.") from None
                continue
            self._deliver(self._engine.step())
            for _ in range(TURNS):
                await asyncio.sleep(0)
        self._engine.drop_cancelled()
        self._engine.rest()

    def _deliver(self, finished: Iterable[Finished]) -> None:
        for request, completion in finished:
            future = self._futures.pop(request, None)
            if future is not None and not future.done():
                future.set_result(completion)

    def _stalled(self) -> str:
        """Return why no step may be taken now; "" if it may."""
        if self._paused:
            return "the engine is paused; call resume"
        if self._deterministic:
            self._engine.waiting.sort(key=lambda request: request.session)
            absent = sorted(self._expected - {request.session for request in self._futures})
            if absent:
                return (
                    f"sessions announced with expect neither generate nor are released: {', '.join(absent)}"
                )
        return ""

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        if pump is not self._pump:
            return
        if pump.cancelled():
            self._fail(EngineError("The embedded engine's event loop ended while requests were running."))
        elif (cause := pump.exception()) is not None:
            self._fail(cause)

    def _fail(self, cause: BaseException) -> None:
        self._engine.reset()
        futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(_as_engine_error(cause))


def _as_engine_error(cause: BaseException) -> EngineError:
    """Make a new exception for each waiter, since each raises it with a different traceback."""
    error = (
        type(cause)(*cause.args)
        if type(cause) is EngineError
        else EngineError(f"{type(cause).__name__}: {cause}")
    )
    error.__cause__ = cause
    return error


def _captured(shape: ModelShape, precision: Precision, rows: int, length: int) -> int:
    """Return the bytes that captured steps of 1, 2, 4, ... `rows` rows keep, as far as the sizes of tensors tell.

    Each graph keeps its logits. All share one pool, so of the rest it has what the largest step needs: the outputs of an
    MLP, and in fp32 the scores and the probabilities of one layer and the mask. The graphs themselves are not counted.
    """
    number = precision.computed
    logits = (2 * rows - 1) * shape.vocabulary * number
    attended = rows * length * (shape.heads * (number + FP32) + number + 1) if number >= FP32 else 0
    return logits + attended + shape.working(precision, rows, backward=False)

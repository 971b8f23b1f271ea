"""vLLM servers: token ids through OpenAI's completions, weights through a worker extension that knows their version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError
from rl4llm.core.types import FinishReason, SamplingParams, WeightRef
from rl4llm.inference.adapters import Adapters, adapter_version
from rl4llm.inference.server import Sampled, ServerClient, field

T = TypeVar("T")

FINISHED: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NEVER_LOADED = -1
FLOOR = -9999.0  # what vLLM writes where a log-prob is NaN or -inf, since JSON has neither
SETTLE_S = 1.0  # for requests that ended before an update to find out that they did
LEAST_TEMPERATURE = 0.01  # below it, vLLM samples at this temperature and only its log says so
START = "Start the server with scripts/launch_vllm.sh, or with what it passes"


@dataclass(frozen=True, slots=True)
class Held:
    """What the server's workers say about their weights; `ids` differ after every load and every restart."""

    version: int
    ids: tuple[str, ...]
    logprobs_mode: str
    adapters_leak: bool


class FreshReads(Generic[T]):
    """Shares one reading among many callers, but gives nobody one that began before they asked."""

    def __init__(self, read: Callable[[], Awaitable[T]]):
        self._read = read
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The result of a reading that begins after this call."""
        if self._next is None or self._next.done():
            self._next = asyncio.ensure_future(self._after(self._running))
        return await asyncio.shield(self._next)

    async def _after(self, running: asyncio.Task[T] | None) -> T:
        if running is not None and not running.done():
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        return await self._read()


class VLLMClient(ServerClient):
    """One vLLM server (tested with 0.32) with ``VLLM_SERVER_DEV_MODE=1`` and the worker extension of rl4llm.

        client = VLLMClient("http://127.0.0.1:8000", tokenizer, vocab_size=151936, context_length=4096)
        completion = await client.generate(prompt_ids, SamplingParams(max_tokens=64))

    Log-probs: ``--logprobs-mode processed_logprobs`` gives those of the temperature-scaled softmax while top-p and top-k
    are off; ``raw_logprobs``, vLLM's default, gives those of the plain softmax. The first is the convention of
    `Completion` at any temperature, the second at temperatures 0 and 1; what fits neither raises ConfigError.

    Versions: completions carry none, so the workers are asked before and after each; one that spans a change of the weights
    counts as a failed attempt. `load` therefore lets requests under way end first, and new ones wait.

    LoRA: each version is an adapter with a name of its own, which later requests name; nothing has to pause. While a server
    on a CPU holds adapters, requests for the model itself are refused, since vLLM applies an adapter to them as well.

    Args:
        model: the name that the server serves the model under; left out, the server is asked.
        adapter: what the names of LoRA adapters begin with. One trainer at a time may use it on a server.
        sleep_level: 1 keeps a copy of the weights in main memory, 2 throws them away, so a load must follow `wake`.
    """

    publishers = ("filesystem", "lora")
    URL_VARIABLE = "VLLM_BASE_URL"
    USUAL_URL = "http://127.0.0.1:8000"
    UNSEEN = "seen from the server"  # as the worker extension says it
    SAYS_VERSIONS = False  # the server's workers are asked, before and after each request

    def __init__(
        self,
        base_url: str,
        tokenizer: Any,
        *,
        model: str | None = None,
        adapter: str = "rl4llm",
        sleep_level: int = 1,
        **options: Any,
    ):
        super().__init__(base_url, tokenizer, **options)
        if sleep_level not in (1, 2):
            raise ConfigError(f"inference.sleep_level={sleep_level!r} is not accepted: 1 or 2.")
        self._model = model
        self._sleep_level = sleep_level
        self._checked_context = False
        self._adapters = Adapters(adapter)
        self._samples: set[asyncio.Future[None]] = set()
        self._draining: set[asyncio.Future[None]] = set()
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._reads = FreshReads(self._read_held)

    async def sample(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> Sampled:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._samples.add(done)
        try:
            return await self._sample(prompt_ids, params, request_id)
        finally:
            self._samples.discard(done)
            done.set_result(None)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self.check_prompt(token_ids)
        name = self.names.next("", "score")
        return await self.retry.run(lambda attempt: self._score(list(token_ids), f"{name}/a{attempt}"))

    async def version(self) -> int:
        adapter = self._adapters.current
        if adapter is None:
            return (await self.retry.run(lambda _: self._reads.get())).version
        return adapter_version(adapter) if adapter in await self._listed() else NEVER_LOADED

    async def load(self, weight_ref: WeightRef) -> None:
        """Take over weights: "full" stops what runs, "lora" does not."""
        if weight_ref.kind not in ("full", "lora"):
            raise EngineError(f"{self} cannot load WeightRef.kind={weight_ref.kind!r}. Accepted: full, lora.")
        if weight_ref.kind == "full":
            await super().load(weight_ref)
            return
        async with self._loading:
            await self._load_adapter(weight_ref)

    async def load_weights(self, weight_ref: WeightRef) -> None:
        if self._draining:  # they ended; a version that changes before they asked for it would have them sampled again
            await asyncio.wait(self._draining, timeout=SETTLE_S)
        await self._ask_workers("rl4llm_load", str(weight_ref.path), str(weight_ref.version))
        await self.flush()
        if self._adapters.current is not None:
            self._adapters.take(None, {self._adapters.current})
            await self._unload_unused()

    async def pause(self, mode: str = "wait") -> None:
        """Stop generating; new requests wait. Those under way: "wait" lets them end, "abort" ends them, so that they are
        sampled again, "keep" freezes them. The prefix cache is forgotten, except by "keep"."""
        self._draining = set(self._samples) if mode == "wait" else set()
        await self._again_if_needed(f"/pause?mode={mode}")

    async def resume(self) -> None:
        await self._again_if_needed("/resume")

    async def abort(self, request_id: str = "") -> None:
        """End one request, or without an id all of this client; they return what they have, as "abort"."""
        ids = [request_id] if request_id else sorted(self._running)
        self._aborted.update(self._running.intersection(ids))
        if ids:
            await self._admin("/abort_requests", {"request_ids": [f"cmpl-{name}-0" for name in ids]})

    async def flush(self) -> None:
        """Forget the prefix cache; raises EngineError while requests use it."""
        answer = await self._again_if_needed("/reset_prefix_cache")
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineError(f"{self.base_url} could not reset its prefix cache: requests are using it. Pause first.")

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Give device memory back, once requests under way have ended."""
        if set(tags) == {"kv_cache"}:
            await self._admin("/release_kv_cache_memory")
            return
        if set(tags) != {"weights", "kv_cache"}:
            raise EngineError(f"VLLMClient.sleep: tags={list(tags)} is not accepted: weights with kv_cache, or kv_cache.")
        if self._sleep_level == 2:
            if self._adapters.current is not None:
                raise EngineError("VLLMClient.sleep: level 2 throws away the model under the adapter. Set sleep_level=1.")
            await self._ask_workers("rl4llm_forget")
        await self._admin(f"/sleep?level={self._sleep_level}&mode=wait")

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory again, in as many stages as there are calls; requests wait until all of it is back."""
        await self._admin("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def is_sleeping(self) -> bool:
        """Whether requests would wait, because of `sleep` or `pause`."""
        answer = await self.http.get("/is_sleeping", deadline_s=30)
        return bool(field(answer, "is_sleeping", "/is_sleeping"))

    async def health(self) -> dict[str, Any]:
        """What the server says about itself."""
        await self.http.get("/health", deadline_s=30)
        held = await self._reads.get()
        return {
            "version": await self.version(),
            "model": self._adapters.current or await self._served_model(),
            "logprobs_mode": held.logprobs_mode,
            "sleeping": await self.is_sleeping(),
        }

    async def _sample(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> Sampled:
        before = await self._reads.get()
        check_convention(before.logprobs_mode, params)
        with self._adapters.using_current() as adapter:
            self._check_base(before, adapter)
            body = {
                "model": adapter or await self._served_model(),
                "prompt": prompt_ids,
                "request_id": request_id,
                "logprobs": 0,
                "return_token_ids": True,
                **_sampling(params),
            }
            answer, aborted = await self._post_completion(body, request_id, adapter)
        if adapter != self._adapters.current:
            await self._unload_unused()
        sampled = _sampled(answer, request_id, before.version if adapter is None else adapter_version(adapter))
        if sampled.finish_reason == "abort" and not aborted:
            raise UnreachableError(f"{self.base_url} gave up request {request_id} before it was done.")
        after = await self._reads.get()
        self._check_base(after, adapter)
        if after.ids != before.ids:
            raise UnreachableError(f"{self.base_url} changed its weights during request {request_id}.")
        return sampled

    async def _post_completion(self, body: Mapping[str, Any], request_id: str, adapter: str | None) -> tuple[Any, bool]:
        """The answer, and whether this client aborted the request."""
        self._running.add(request_id)
        try:
            answer = await self.http.post("/v1/completions", body)
            return answer, request_id in self._aborted
        except RefusedError as error:
            if adapter is not None and adapter not in await self._listed():
                raise UnreachableError(f"{self.base_url} does not hold adapter {adapter} any more: {error}") from error
            raise
        finally:
            self._running.discard(request_id)
            self._aborted.discard(request_id)

    async def _score(self, token_ids: list[int], request_id: str) -> list[float]:
        held = await self._reads.get()
        check_convention(held.logprobs_mode, SamplingParams())
        self._check_base(held, self._adapters.current)
        body = {
            "model": self._adapters.current or await self._served_model(),
            "prompt": token_ids,
            "request_id": request_id,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = await self.http.post("/v1/completions", body)
        rows = field(_choice(answer, request_id), "prompt_logprobs", request_id)
        if not isinstance(rows, list) or len(rows) != len(token_ids):
            raise UnreachableError(f"{self.base_url} did not score all of {len(token_ids)} tokens.")
        pairs = zip(rows[1:], token_ids[1:], strict=True)
        scores = [field(field(row, str(token), request_id), "logprob", request_id) for row, token in pairs]
        return [float("nan") if score is None else _number(score) for score in scores]

    def _check_base(self, held: Held, adapter: str | None) -> None:
        if adapter is None and held.adapters_leak:
            raise EngineError(
                f"{self.base_url} holds LoRA adapters, and on a CPU vLLM applies them to requests for the model itself too. "
                "Name an adapter, load full weights, or ask another server."
            )

    async def _served_model(self) -> str:
        """The name to ask for, after a check that the server's context is as long as ours."""
        if self._model is None or not self._checked_context:
            models = _models(await self.http.get("/v1/models", deadline_s=30))
            bases = [item for item in models if not item.get("parent")]
            known = [str(item.get("id")) for item in bases]
            name = self._model or next(iter(known), "")
            if name not in known:
                raise ConfigError(f"inference.model={name!r} is unknown to {self.base_url}. Known: {', '.join(known)}.")
            self._check_context(bases[known.index(name)])
            self._model, self._checked_context = name, True
        return self._model

    def _check_context(self, model: Mapping[str, Any]) -> None:
        longest = model.get("max_model_len")
        if longest is not None and longest < self.context_length:
            raise ConfigError(
                f"{self.base_url} takes at most {longest} tokens, less than inference.context_length={self.context_length}. "
                f"Start it with --max-model-len {self.context_length}, or set inference.context_length={longest}."
            )

    async def _load_adapter(self, weight_ref: WeightRef) -> None:
        name = self._adapters.name(weight_ref)
        before = await self._listed()
        if name not in before:
            problem = await self._change_adapters("load", {"lora_name": name, "lora_path": weight_ref.path})
            if name not in await self._listed():
                raise EngineError(
                    f"{self.base_url} was told to load version {weight_ref.version} from {weight_ref.path}, and does not "
                    f"list it afterwards. {problem or 'It reported success.'} Look for the reason in the server's log."
                ) from problem
        self._adapters.take(name, before)
        await self._unload_unused()

    async def _listed(self) -> set[str]:
        """Names of the adapters that the server holds and that are ours."""
        models = _models(await self.retry.run(lambda _: self.http.get("/v1/models", deadline_s=30)))
        return self._adapters.ours(str(item.get("id")) for item in models if item.get("parent"))

    async def _unload_unused(self) -> None:
        """Unload what is superseded and not in use; what the server then still lists is tried again later."""
        unused = self._adapters.to_unload()
        for name in unused:
            await self._change_adapters("unload", {"lora_name": name})
        if unused:
            with suppress(EngineError):
                self._adapters.gone(unused - await self._listed())

    async def _change_adapters(self, verb: str, body: Mapping[str, Any]) -> EngineError | None:
        """What went wrong, if anything did. vLLM answers with a plain sentence, so what it lists afterwards decides."""
        try:
            await self._admin(f"/v1/{verb}_lora_adapter", body)
        except EngineError as error:
            return error
        return None

    async def _read_held(self) -> Held:
        return await self._ask_workers("rl4llm_state", deadline_s=30)

    async def _ask_workers(self, method: str, *arguments: str, deadline_s: float | None = None) -> Held:
        """Call a method of the worker extension in every worker."""
        body = {"method": method, "args": list(arguments)}
        deadline_s = deadline_s or self.admin_deadline_s
        try:
            return _held(await self.http.post("/collective_rpc", body, deadline_s=deadline_s))
        except RefusedError as error:
            raise EngineError(f"{error} {START}: VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls.") from error
        except UnreachableError as error:  # vLLM answers 500 to whatever a worker raises
            if "has no attribute" in str(error) and method in str(error):
                raise EngineError(f"{error} {START}: --worker-extension-cls.") from error
            if self.UNSEEN in str(error):
                raise RefusedError(str(error)) from error
            raise

    async def _again_if_needed(self, path: str) -> Any:
        """An operator's request that does no harm when it is repeated."""
        return await self.retry.run(lambda _: self._admin(path))

    async def _admin(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """An operator's request, one attempt: half-done work must not be repeated without looking."""
        return await self.http.post(path, body or {}, deadline_s=self.admin_deadline_s)


def check_convention(logprobs_mode: str, params: SamplingParams) -> None:
    """Raise ConfigError when a server in this mode cannot give the log-probs that `Completion` asks for."""
    temperature, filtered = params.temperature, params.top_p < 1.0 or params.top_k > 0
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise ConfigError(f"temperature={temperature:g} is not accepted by vLLM: 0 (greedy), {LEAST_TEMPERATURE} or above.")
    if logprobs_mode == "processed_logprobs":
        if temperature > 0.0 and filtered:
            other = "Start vLLM with --logprobs-mode raw_logprobs, or set" if temperature == 1.0 else "Set"
            raise ConfigError(
                f"top_p={params.top_p:g} with top_k={params.top_k}: a vLLM server with --logprobs-mode processed_logprobs "
                f"gives log-probs after these filters, and training needs those before. {other} top_p=1 and top_k=0."
            )
    elif logprobs_mode == "raw_logprobs":
        if temperature not in (0.0, 1.0):
            raise ConfigError(
                f"temperature={temperature:g}: a vLLM server with --logprobs-mode raw_logprobs, its default, gives those "
                "at temperature 1. Start it with --logprobs-mode processed_logprobs and set top_p=1 and top_k=0."
            )
    else:
        raise ConfigError(
            f"vLLM's --logprobs-mode {logprobs_mode} gives no log-probs. Start it with processed_logprobs (any temperature, "
            "without top-p and top-k) or raw_logprobs (temperature 1)."
        )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """All that changes probabilities is said, since a server takes what is left out from the model's generation config."""
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "seed": params.seed % 2**63,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    return sampling


def _sampled(answer: Any, request_id: str, version: int) -> Sampled:
    choice = _choice(answer, request_id)
    reason = choice.get("finish_reason")
    if reason not in list(FINISHED):  # whatever type it has
        raise UnreachableError(f"Request {request_id} ended with {reason!r}.")
    logprobs = field(field(choice, "logprobs", request_id), "token_logprobs", request_id)
    if isinstance(logprobs, list):
        logprobs = [_number(item) for item in logprobs]
    return Sampled(choice.get("token_ids"), logprobs, FINISHED[reason], ((0, version),))


def _number(logprob: Any) -> Any:
    return float("nan") if isinstance(logprob, int | float) and logprob <= FLOOR else logprob


def _choice(answer: Any, what: str) -> Mapping[str, Any]:
    choices = field(answer, "choices", what)
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise UnreachableError(f"A vLLM server's answer to {what} has not one choice.")
    return choices[0]


def _held(answer: Any) -> Held:
    """What all workers together hold: a version only if it is that of each."""
    workers = field(answer, "results", "/collective_rpc")
    if not isinstance(workers, list) or not workers:
        raise UnreachableError("A vLLM server's answer to /collective_rpc names no worker.")
    versions = [field(worker, "version", "/collective_rpc") for worker in workers]
    if not all(isinstance(version, int) for version in versions):
        raise UnreachableError(f"A vLLM server's workers say that they hold versions {versions!r}.")
    ids = tuple(str(field(worker, "id", "/collective_rpc")) for worker in workers)
    mode = str(field(workers[0], "logprobs_mode", "/collective_rpc"))
    leak = any(worker.get("adapters_leak") for worker in workers)
    return Held(versions[0] if len(set(versions)) == 1 else NEVER_LOADED, ids, mode, leak)


def _models(answer: Any) -> list[Mapping[str, Any]]:
    data = field(answer, "data", "/v1/models")
    return [item for item in data if isinstance(item, Mapping)] if isinstance(data, list) else []

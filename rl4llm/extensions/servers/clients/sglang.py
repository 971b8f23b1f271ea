"""SGLang servers: the native HTTP interface, which takes token ids and labels each token with the version of its weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError, UnreadableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.adapters import AdaptingClient, adapter_version
from rl4llm.extensions.servers.clients.images import UNNAMED, collapsed, data_uri, feature_name, outside
from rl4llm.extensions.servers.clients.server import (
    FINISHED,
    NEVER_LOADED,
    Sampled,
    cut_after,
    field,
    sampling_options,
)

IDLE_S = 60.0  # for a server to end its requests before it sleeps
ASLEEP = " asleep:"
UNSURE = "unsure"
"""What sleeps while memory is freed or taken: a trainer that dies then leaves this note."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """The version of a server's weights, and the kinds of memory that it freed.

    SGLang does not report whether it sleeps, and dies when it is put to sleep twice or woken twice. So the client adds what
    sleeps to the version of the weights, which the server keeps until it ends. The note survives the trainer that wrote it.

    >>> ServerState.of("12 asleep:weights").asleep, str(ServerState("13", frozenset({"weights"})))
    (frozenset({'weights'}), '13 asleep:weights')
    """

    version: str
    asleep: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str) -> ServerState:
        """Read what `str` has written."""
        version, _, asleep = text.partition(ASLEEP)
        return cls(version, frozenset(filter(None, asleep.split(","))))

    def __str__(self) -> str:
        return self.version + (ASLEEP + ",".join(sorted(self.asleep)) if self.asleep else "")


class SGLangClient(AdaptingClient):
    """One SGLang server (tested with 0.5.23).

        client = SGLangClient("http://127.0.0.1:30000", tokenizer, vocab_size=151936, context_length=4096)
        completion = await client.generate(prompt_ids, SamplingParams(max_tokens=64))

    Its log-probs are those of the temperature-scaled softmax before top-p and top-k, which is the convention of
    `Completion`, so they are used unchanged. Seeds are sent, but SGLang reproduces tokens only if it was started with
    ``--enable-deterministic-inference``. `trainer_host` is the address at which the server reaches the trainer to broadcast
    weights. The other arguments are those of `AdaptingClient` and `ServerClient`.

    With `keep_cache`, requests that an update interrupts continue with the keys and values of older weights, which are not
    computed again. The log-probs of their later tokens then belong to no single version; the mismatch shows by how much.
    Requests that begin later do not use them.

    For LoRA the server needs ``--enable-lora --max-lora-rank R --lora-target-modules ...``.
    """

    takes_images = keeps_features = True
    EXPANDS: ClassVar[bool] = True  # every placeholder of a prompt with images becomes an image
    publishers: tuple[str, ...] = ("filesystem", "distributed", "lora")
    URL_VARIABLE = "SGLANG_BASE_URL"
    USUAL_URL = "http://127.0.0.1:30000"
    UNSEEN = "Failed to get weights iterator"
    SEEDS: ClassVar[int] = 2**31  # number of seeds that the server accepts

    def __init__(
        self,
        base_url: str,
        tokenizer: Any,
        *,
        trainer_host: str = "127.0.0.1",
        keep_cache: bool = False,
        **options: Any,
    ):
        super().__init__(base_url, tokenizer, **options)
        self.trainer_host, self.keep_cache = trainer_host, keep_cache

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImagePlace]
    ) -> Sampled:
        body = {
            "rid": request_id,
            **self._prompt(prompt_ids, images),
            "sampling_params": {**_sampling(params), "sampling_seed": params.seed % self.SEEDS},
            "return_logprob": True,
            "stream": False,
        }
        if self.keep_cache:
            body["extra_key"] = self.weights_name  # the prefix cache of other weights is not used
        answer, adapter = await self._generate(body)
        sampled = _sampled(answer, request_id)
        tokens = field(answer, "meta_info", request_id).get("prompt_tokens")
        if images and tokens != len(prompt_ids):
            raise EngineError(
                f"{self.base_url} sees {tokens} tokens in a prompt of {len(prompt_ids)} with images. The template must put "
                "each image between its marks, and the server needs the preprocessor_config.json of model.path."
            )
        if not {*self._media}.isdisjoint(sampled.token_ids or ()):
            sampled = replace(cut_after(sampled, self._media), finish_reason="length")
        return sampled if adapter is None else replace(sampled, versions=((0, adapter_version(adapter)),))

    def _prompt(self, token_ids: list[int], images: Sequence[ImagePlace]) -> dict[str, Any]:
        """Return the fields of a request for tokens and their images; SGLang spreads each image from one token."""
        if self.vision is None or not images:
            return {"input_ids": token_ids}
        fields: dict[str, Any] = {
            "input_ids": collapsed(token_ids, images),
            "image_data": [data_uri(self.vision, place.image) for place in images],
        }
        if self.vision.config.model_type in UNNAMED:  # where SGLang's own names do, since the tower is frozen
            return fields
        names = [feature_name(place.image, self.weights_name) for place in images]
        return {**fields, "mm_hashes": names}

    def check_prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> None:
        super().check_prompt(prompt_ids, images)
        if images and outside(self._media, prompt_ids, images):
            raise UnreadableError(f"generate: {self} would take a sampled placeholder for an image.")

    @property
    def _media(self) -> Sequence[int]:
        """The tokens that the server takes for images wherever they are."""
        return self.vision.media if self.EXPANDS and self.vision is not None else ()

    async def base_version(self) -> int:
        return _version((await self.retry.run(lambda _: self._state())).version)

    async def checksum(self) -> str:
        """Return a digest of the weights on the server: the same weights give the same digest on every server."""
        answer = await self.admin("/weights_checker", {"action": "checksum"})
        return str(field(answer, "per_engine_checksum", "/weights_checker"))

    async def lacks_weights(self) -> bool:
        return "weights" in (await self.retry.run(lambda _: self._state())).asleep

    async def load_weights(self, weight_ref: WeightRef) -> None:
        try:
            await (self._broadcast if weight_ref.kind == "distributed" else self._from_disk)(weight_ref)
        except EngineError:
            if self.keep_cache:  # else nothing could be flushed
                await self.attempted("/pause_generation", {"mode": "retract"})
            raise
        await self.sample_from_model()

    async def _generate(self, body: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Return the answer, and the adapter that it comes from."""
        async with self.using_adapter() as adapter:
            body = {**body, "lora_path": adapter} if adapter else body
            return await self.post_with(adapter, "/generate", body), adapter

    async def _from_disk(self, weight_ref: WeightRef) -> None:
        """Have the server load a version from its files."""
        version = str(replace(await self._state(), version=str(weight_ref.version)))
        body = {"model_path": weight_ref.path, "weight_version": version, "flush_cache": not self.keep_cache}
        await self.admin("/update_weights_from_disk", {**body, **self._numerics()})

    def _numerics(self) -> Mapping[str, str]:
        """Return the fields by which a server computes as the trainer does; SGLang has none."""
        return {}

    async def _broadcast(self, weight_ref: WeightRef) -> None:
        """Send the tensors through a process group, one with all servers that load them now."""
        try:
            await self.together.send(self, weight_ref)
        except (EngineError, RuntimeError, OSError) as error:
            raise EngineError(
                f"{self} could not be sent weights: {error} It must reach inference.trainer_host={self.trainer_host!r} and "
                "have the trainer's version of NCCL, which sync.name=filesystem does not need."
            ) from error

    async def transport(self) -> str:
        """Return what the server's process groups use."""
        return "gloo" if (await self._info()).get("device") == "cpu" else "nccl"

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Open and close an update, since SGLang takes tensors only in between; close one that a dead trainer left open."""
        async with AsyncExitStack() as undo:
            # What fails below is the error to report, not what this returns.
            undo.push_async_callback(self.attempted, "/end_weight_update", {})
            try:
                await self.admin("/begin_weight_update", {})
            except RefusedError:
                await self.attempted("/end_weight_update", {})
                await self.admin("/begin_weight_update", {})
            yield
            undo.pop_all()
        await self.admin("/end_weight_update", {})

    async def ranks(self) -> int:
        """Return the number of the server's tensor-parallel ranks."""
        return int((await self._info()).get("tp_size") or 1)

    async def _info(self) -> Mapping[str, Any]:
        return await self.http.get("/server_info", deadline_s=30)

    async def _state(self) -> ServerState:
        """Return the version of the weights and what sleeps; raise EngineError if a trainer died while that changed."""
        info = await self.http.get("/model_info", deadline_s=30)
        state = ServerState.of(str(field(info, "weight_version", "/model_info")))
        if UNSURE in state.asleep:
            raise EngineError(f"{self} may be asleep or awake, since a trainer ended. Restart it.")
        return state

    async def pause(self, mode: str = "") -> None:
        """Stop generating. "retract" keeps requests and recomputes their cache afterwards, "in_place" keeps the cache too,
        "abort" ends them; by default `keep_cache` decides between the first two."""
        mode = mode or ("in_place" if self.keep_cache else "retract")
        await self.admin("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after `pause`. A server that sleeps stays paused, since it would compute with memory that it freed."""
        if not (await self._state()).asleep:
            await self.admin("/continue_generation", {})

    async def abort(self, request_id: str = "") -> None:
        """End one request, or all without an id; they return the tokens so far with the finish reason "abort"."""
        await self.admin("/abort_request", {"rid": request_id, "abort_all": not request_id})

    async def flush(self) -> None:
        """Forget the prefix cache."""
        await self.http.tell("/flush_cache", deadline_s=self.admin_deadline_s)

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """End all requests, pause, and free the memory that is not free yet."""
        state = await self.retry.run(lambda _: self._state())
        if parts := sorted(set(tags) - state.asleep):
            await self._check_saver()
            await self.admin("/pause_generation", {"mode": "abort"}, IDLE_S)
            await self._until_idle()
            await self._move("/release_memory_occupation", parts, state, state.asleep.union(parts))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory that is free again, and continue when no part is missing."""
        state = await self.retry.run(lambda _: self._state())
        if parts := sorted(state.asleep.intersection(tags)):
            await self._move("/resume_memory_occupation", parts, state, state.asleep.difference(parts))
        await self.resume()

    async def _move(self, path: str, tags: Sequence[str], state: ServerState, asleep: frozenset[str]) -> None:
        """Free memory or take it, with a note before and after."""
        await self._note(replace(state, asleep=frozenset({UNSURE})))
        await self.admin(path, {"tags": tags})
        await self._note(replace(state, asleep=asleep))

    async def _note(self, state: ServerState) -> None:
        body = {"new_version": str(state), "abort_all_requests": False}
        await self.admin("/update_weight_version", body)

    async def _until_idle(self) -> None:
        """Flush until the server accepts that, as it does without requests. With one, it would die as it falls asleep."""
        ends = time.monotonic() + IDLE_S
        while True:
            try:
                return await self.flush()
            except RefusedError as error:
                if time.monotonic() > ends:
                    raise EngineError(f"{self.base_url} is busy, so it cannot sleep: {error}") from error
            await asyncio.sleep(0.1)

    async def _check_saver(self) -> None:
        """Raise ConfigError for a server that would keep its memory; on a CPU none frees any."""
        info = await self._info()
        if info.get("device") != "cpu" and not info.get("enable_memory_saver"):
            raise ConfigError(f"inference.cohost=true: start {self.base_url} with --enable-memory-saver.")

    async def health(self) -> dict[str, Any]:
        """Return what the server reports about itself, after it generated a token if it is awake."""
        if not (await self._state()).asleep:
            await self.http.get("/health", deadline_s=30)
        return await self.http.get("/server_info", deadline_s=30)

    async def close(self) -> None:
        await self.together.leave(self)
        await super().close()

    async def score_once(
        self, token_ids: list[int], request_id: str, images: Sequence[ImagePlace]
    ) -> list[float]:
        body = {
            "rid": request_id,
            **self._prompt(token_ids, images),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer, _ = await self._generate(body)
        rows = field(field(answer, "meta_info", request_id), "input_token_logprobs", request_id)
        scores = _column(rows, 0)
        # SGLang 0.5 scores the last token of the vocabulary correctly but labels it 0 in its answer.
        named = token_ids[:]
        for place in images if self.EXPANDS else ():  # whose tokens it labels 0
            named[place.offset : place.end] = [0] * place.length
        labelled = [0 if token == self.vocab_size - 1 else token for token in named]
        if scores is None or _column(rows, 1) not in (named, labelled):
            raise UnreachableError(f"{self.base_url} did not score the tokens of request {request_id}.")
        return [float("nan") if score is None else float(score) for score in scores[1:]]

    async def admin(self, path: str, body: Mapping[str, Any], deadline_s: float | None = None) -> Any:
        answer = await self.http.post(path, body, deadline_s=deadline_s or self.admin_deadline_s)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise RefusedError(f"POST {self.base_url}{path} failed: {answer.get('message', answer)}")
        return answer


def _sampling(params: SamplingParams) -> dict[str, Any]:
    forced = {"ebnf": params.grammar} if params.grammar else {}
    options = {"max_new_tokens": params.max_tokens, "top_k": params.top_k or -1}
    return {**sampling_options(params), **options, **forced}


def _sampled(answer: Any, request_id: str) -> Sampled:
    info = field(answer, "meta_info", request_id)
    token_ids = field(answer, "output_ids", request_id)
    rows = field(info, "output_token_logprobs", request_id)
    kind = field(field(info, "finish_reason", request_id), "type", request_id)
    if kind not in list(FINISHED):  # whatever type it has
        raise UnreachableError(f"Request {request_id} ended with {info['finish_reason']!r}.")
    rows = rows if _column(rows, 1) == token_ids else []  # log-probs of other tokens
    return Sampled(token_ids, _column(rows, 0), FINISHED[kind], _versions(info, request_id), info.get("id"))


def _column(rows: Any, place: int) -> list[Any] | None:
    """Return one value of each row; None if these are not rows."""
    try:
        return [row[place] for row in rows]
    except (TypeError, IndexError, KeyError):
        return None


def _versions(info: Mapping[str, Any], request_id: str) -> tuple[tuple[int, int], ...]:
    """Return (start, version) of each run of tokens that the same weights sampled."""
    spans = info.get("weight_versions") or [{"start": 0, "version": info.get("weight_version")}]
    try:
        return tuple((int(span["start"]), _version(span["version"])) for span in spans)
    except (TypeError, KeyError, ValueError):
        raise UnreachableError(f"The answer to request {request_id} has weight_versions={spans!r}.") from None


def _version(text: Any) -> int:
    """Parse a version; that of a server that never got weights from a trainer is "default"."""
    return int(text) if str(text).removeprefix("-").isdecimal() else NEVER_LOADED

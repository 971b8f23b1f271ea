"""SGLang servers: the native HTTP interface, which speaks in token ids and labels every token with its weights' version."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from torch import Tensor

from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError
from rl4llm.core.threads import in_own_thread
from rl4llm.core.types import FinishReason, SamplingParams, WeightRef
from rl4llm.inference.adapters import Adapters, adapter_version
from rl4llm.inference.broadcast import Broadcast
from rl4llm.inference.server import Sampled, ServerClient, field

FINISHED: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NEVER_LOADED = -1
BUCKET_BYTES = 256 << 20
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LEAVE_S = 5.0  # for a server to leave a process group that nobody needs any more


class SGLangClient(ServerClient):
    """One SGLang server (tested with 0.5.23).

        client = SGLangClient("http://127.0.0.1:30000", tokenizer, vocab_size=151936, context_length=4096)
        completion = await client.generate(prompt_ids, SamplingParams(max_tokens=64))

    Its log-probs are those of the temperature-scaled softmax before top-p and top-k, which is the convention of
    `Completion`, so they are taken as they come. Seeds are sent along, but SGLang reproduces tokens only when it was
    started with ``--enable-deterministic-inference``. `trainer_host` is where the server finds the trainer when weights are
    broadcast; `adapter` is what the names of LoRA adapters begin with, which one trainer at a time may use on a server. The
    other arguments are those of `ServerClient`.

    LoRA: each version is an adapter with a name of its own, which later requests name; nothing has to pause. The server
    needs ``--enable-lora --max-lora-rank R --lora-target-modules ...``.
    """

    publishers = ("filesystem", "tensor", "distributed", "lora")
    URL_VARIABLE = "SGLANG_BASE_URL"
    USUAL_URL = "http://127.0.0.1:30000"
    UNSEEN = "Failed to get weights iterator"

    def __init__(
        self,
        base_url: str,
        tokenizer: Any,
        *,
        trainer_host: str = "127.0.0.1",
        adapter: str = "rl4llm",
        **options: Any,
    ):
        super().__init__(base_url, tokenizer, **options)
        self._adapters = Adapters(adapter)
        self.trainer_host = trainer_host
        self._group: Broadcast | None = None

    async def sample(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> Sampled:
        body = {
            "rid": request_id,
            "input_ids": prompt_ids,
            "sampling_params": _sampling(params),
            "return_logprob": True,
            "stream": False,
        }
        answer, adapter = await self._generate(body)
        sampled = _sampled(answer, request_id)
        return sampled if adapter is None else replace(sampled, versions=((0, adapter_version(adapter)),))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self.check_prompt(token_ids)
        name = self.names.next("", "score")
        return await self.retry.run(lambda attempt: self._score(list(token_ids), f"{name}/a{attempt}"))

    async def version(self) -> int:
        adapter = self._adapters.current
        if adapter is not None:
            return adapter_version(adapter) if adapter in await self._listed() else NEVER_LOADED
        info = await self.retry.run(lambda _: self.http.get("/model_info", deadline_s=30))
        return _version(field(info, "weight_version", "/model_info"))

    async def checksum(self) -> str:
        """A digest of the weights on the server: the same weights give the same digest on every server."""
        answer = await self._admin("/weights_checker", {"action": "checksum"})
        return str(field(answer, "per_engine_checksum", "/weights_checker"))

    async def load(self, weight_ref: WeightRef) -> None:
        """Take over weights; an adapter ("lora") does not stop what runs, which ends with the adapter it began with."""
        if weight_ref.kind != "lora":
            await super().load(weight_ref)
            return
        async with self._loading:
            await self._load_adapter(weight_ref)

    async def load_weights(self, weight_ref: WeightRef) -> None:
        ways = {"full": self._from_disk, "tensor": self._inline, "distributed": self._broadcast}
        if weight_ref.kind not in ways:
            accepted = ", ".join([*ways, "lora"])
            raise EngineError(f"{self} cannot load WeightRef.kind={weight_ref.kind!r}. Accepted: {accepted}.")
        await ways[weight_ref.kind](weight_ref)
        if self._adapters.current is not None:
            self._adapters.take(None, {self._adapters.current})
            await self._unload_unused()

    async def _load_adapter(self, weight_ref: WeightRef) -> None:
        name = self._adapters.name(weight_ref)
        before = await self._listed()
        if name not in before:
            problem = await self._try("/load_lora_adapter", {"lora_name": name, "lora_path": weight_ref.path})
            if name not in await self._listed():
                await self._check_enabled()
                raise EngineError(
                    f"{self.base_url} was told to load version {weight_ref.version} from {weight_ref.path}, and does not "
                    f"list it afterwards. {problem or 'It reported success.'} Look for the reason in the server's log."
                ) from problem
        self._adapters.take(name, before)
        await self._unload_unused()

    async def _check_enabled(self) -> None:
        """Raise ConfigError for a server that was started without adapters."""
        if not (await self._info()).get("enable_lora"):
            raise ConfigError(
                f"sync.name=lora needs a server with --enable-lora, and {self.base_url} was started without. Start it with "
                "--enable-lora --max-lora-rank R --lora-target-modules ..., R >= model.lora.rank, or leave sync.name out."
            )

    async def _unload_unused(self) -> None:
        """Unload what is superseded and not in use; what the server then still lists is tried again later."""
        unused = self._adapters.to_unload()
        for name in unused:
            await self._try("/unload_lora_adapter", {"lora_name": name})
        if unused:
            with suppress(EngineError):
                self._adapters.gone(unused - await self._listed())

    async def _listed(self) -> set[str]:
        """Names of the adapters that the server holds and that are ours."""
        answer = await self.retry.run(lambda _: self.http.get("/v1/models", deadline_s=30))
        models = field(answer, "data", "/v1/models")
        if not isinstance(models, list):
            raise UnreachableError(f"{self.base_url} lists no models.")
        adapters = (item for item in models if isinstance(item, Mapping) and item.get("parent"))
        return self._adapters.ours(str(item.get("id")) for item in adapters)

    async def _generate(self, body: Mapping[str, Any]) -> tuple[Any, str | None]:
        """The answer and the adapter that it is from."""
        with self._adapters.using_current() as adapter:
            try:
                answer = await self.http.post("/generate", {**body, "lora_path": adapter} if adapter else body)
            except RefusedError as error:
                if adapter is not None and adapter not in await self._listed():
                    raise UnreachableError(f"{self.base_url} does not hold adapter {adapter} any more: {error}") from error
                raise
        if adapter != self._adapters.current:
            await self._unload_unused()
        return answer, adapter

    async def _from_disk(self, weight_ref: WeightRef) -> None:
        await self._check_model(weight_ref.path)
        body = {"model_path": weight_ref.path, "weight_version": str(weight_ref.version), "flush_cache": True}
        await self._admin("/update_weights_from_disk", body)

    async def _check_model(self, path: str | None) -> None:
        """Raise ConfigError for weights of another model than the server's, of which it would die.

        Only where the server's files can be read here, as on one machine or a shared disk.
        """
        held: Any = None
        with suppress(EngineError):
            held = (await self._info()).get("model_path")
        own, given = _described(held), _described(path)
        both = [name for name in SHAPE if name in own and name in given]
        differ = [f"{name}={own[name]}, not {given[name]}" for name in both if own[name] != given[name]]
        if differ:
            raise ConfigError(
                f"{self.base_url} serves another model than the one that trains: {held} has {', '.join(differ)}. Start the "
                "server with the model of model.path, or set inference.url to one that has it."
            )

    async def _inline(self, weight_ref: WeightRef) -> None:
        """The tensors in requests, once for each of the server's tensor-parallel ranks."""
        ranks = await self._ranks()
        async with self._update():
            for names, tensors, version in _buckets(weight_ref):
                payload = await asyncio.to_thread(_pickled, names, tensors)
                body = {"serialized_named_tensors": [payload] * ranks, "weight_version": version, "flush_cache": True}
                await self._admin("/update_weights_from_tensor", body)

    async def _broadcast(self, weight_ref: WeightRef) -> None:
        """The tensors through a process group; a group that failed is left, so that the next update makes a new one."""
        try:
            group = self._group or await self._join()
            async with self._update():
                for names, tensors, version in _buckets(weight_ref):
                    body = {
                        "names": names,
                        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
                        "shapes": [list(tensor.shape) for tensor in tensors],
                        "group_name": group.name,
                        "weight_version": version,
                        "flush_cache": True,
                    }
                    whole = [tensor.detach().contiguous() for tensor in tensors]
                    await self._meet("/update_weights_from_distributed", body, group.send, whole)
        except BaseException as error:
            await self._leave()
            if not isinstance(error, EngineError | RuntimeError | OSError):
                raise
            raise EngineError(
                f"{self} could not be sent weights through a process group: {error} The server must find the trainer at "
                f"inference.trainer_host={self.trainer_host!r}."
            ) from error

    async def _join(self) -> Broadcast:
        ranks = await self._ranks()
        backend = "gloo" if (await self._info()).get("device") == "cpu" else "nccl"
        self._group = group = Broadcast(self.trainer_host, 1 + ranks, f"rl4llm-{self.names.next('')}", backend)
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._meet("/init_weights_update_group", body, group.connect)
        return group

    async def _meet(self, path: str, body: Mapping[str, Any], ours: Callable[..., None], *arguments: Any) -> None:
        """Have the server do its part while this process does its own; neither goes on alone when the other fails."""
        theirs = asyncio.create_task(self._admin(path, body))
        try:
            await asyncio.gather(theirs, in_own_thread("rl4llm-broadcast", lambda: ours(*arguments)))
        finally:
            theirs.cancel()

    async def _leave(self) -> None:
        """Leave the process group, at both ends."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
            await self._try("/destroy_weights_update_group", {"group_name": group.name}, deadline_s=LEAVE_S)

    @asynccontextmanager
    async def _update(self) -> AsyncIterator[None]:
        """SGLang takes tensors only between these two requests; what a trainer that died left open is closed first."""
        try:
            try:
                await self._admin("/begin_weight_update", {})
            except RefusedError:
                await self._try("/end_weight_update", {})
                await self._admin("/begin_weight_update", {})
            yield
        except BaseException:
            await self._try("/end_weight_update", {})  # what failed first is what is told
            raise
        await self._admin("/end_weight_update", {})

    async def _ranks(self) -> int:
        return int((await self._info()).get("tp_size") or 1)

    async def _info(self) -> Mapping[str, Any]:
        return await self.http.get("/server_info", deadline_s=30)

    async def pause(self, mode: str = "retract") -> None:
        """Stop generating. "retract" keeps requests and computes their cache again afterwards, "abort" ends them."""
        await self._admin("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._admin("/continue_generation", {})

    async def abort(self, request_id: str = "") -> None:
        """End one request, or without an id all of them; they return what they have, as "abort"."""
        await self._admin("/abort_request", {"rid": request_id, "abort_all": not request_id})

    async def flush(self) -> None:
        """Forget the prefix cache."""
        await self.http.tell("/flush_cache", deadline_s=self.admin_deadline_s)

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._admin("/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._admin("/resume_memory_occupation", {"tags": list(tags)})

    async def health(self) -> dict[str, Any]:
        """What the server says about itself, after it generated a token."""
        await self.http.get("/health", deadline_s=30)
        return await self.http.get("/server_info", deadline_s=30)

    async def close(self) -> None:
        await self._leave()
        await super().close()

    async def _score(self, token_ids: list[int], request_id: str) -> list[float]:
        body = {
            "rid": request_id,
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer, _ = await self._generate(body)
        rows = field(field(answer, "meta_info", request_id), "input_token_logprobs", request_id)
        scores = _column(rows, 0)
        if scores is None or _column(rows, 1) not in (token_ids, self._as_labelled(token_ids)):
            raise UnreachableError(f"{self.base_url} did not score the {len(token_ids)} tokens of request {request_id}.")
        return [float("nan") if score is None else float(score) for score in scores[1:]]

    def _as_labelled(self, token_ids: list[int]) -> list[int]:
        """SGLang 0.5 scores the last token of the vocabulary rightly but calls it 0 in its answer."""
        return [0 if token == self.vocab_size - 1 else token for token in token_ids]

    async def _try(self, path: str, body: Mapping[str, Any], deadline_s: float | None = None) -> EngineError | None:
        """What went wrong with an operator's request, if anything did, where something else decides whether it matters."""
        try:
            await self._admin(path, body, deadline_s)
        except EngineError as error:
            return error
        return None

    async def _admin(self, path: str, body: Mapping[str, Any], deadline_s: float | None = None) -> Any:
        """An operator's request, one attempt: half-done work must not be repeated without looking."""
        answer = await self.http.post(path, body, deadline_s=deadline_s or self.admin_deadline_s)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise RefusedError(f"POST {self.base_url}{path} failed: {answer.get('message', answer)}")
        return answer


def _described(directory: str | None) -> Mapping[str, Any]:
    """The config.json of a model; empty where it cannot be read."""
    if not directory:
        return {}
    try:
        found = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """All that changes probabilities is said, since a server may have been started with preferences of its own."""
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": params.seed % 2**31,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    return sampling


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
    """One value of each row; None when these are no rows."""
    try:
        return [row[place] for row in rows]
    except (TypeError, IndexError, KeyError):
        return None


def _versions(info: Mapping[str, Any], request_id: str) -> tuple[tuple[int, int], ...]:
    """(start, version) of each run of tokens that the same weights sampled."""
    spans = info.get("weight_versions") or [{"start": 0, "version": info.get("weight_version")}]
    try:
        return tuple((int(span["start"]), _version(span["version"])) for span in spans)
    except (TypeError, KeyError, ValueError):
        raise UnreachableError(f"The answer to request {request_id} has weight_versions={spans!r}.") from None


def _version(text: Any) -> int:
    """A server that never got weights from a trainer calls them "default"."""
    return int(text) if str(text).removeprefix("-").isdecimal() else NEVER_LOADED


def _buckets(weight_ref: WeightRef) -> Iterator[tuple[list[str], list[Tensor], str | None]]:
    """Names and tensors of at most BUCKET_BYTES together; the last bucket carries the version, which is then whole."""
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    assert weight_ref.tensors is not None  # it is of a kind that yields them
    for name, tensor in weight_ref.tensors():
        if tensors and size + tensor.nbytes > BUCKET_BYTES:
            yield names, tensors, None
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
    yield names, tensors, str(weight_ref.version)


def _pickled(names: Sequence[str], tensors: Sequence[Tensor]) -> str:
    """Tensors as SGLang unpickles them: from a CPU by value, from a GPU as handles that the server's GPU opens."""
    pairs = [(name, _alone(tensor.detach())) for name, tensor in zip(names, tensors, strict=True)]
    shared = all(tensor.is_cuda for tensor in tensors)
    content = bytes(ForkingPickler.dumps(pairs)) if shared else pickle.dumps(pairs)
    return base64.b64encode(content).decode()


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that is all of its storage, since pickle takes the whole storage along."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

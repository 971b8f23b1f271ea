"""What the server does for its clients: sessions, models that train, samplers, and a promise for each request.

Everything here runs in the event loop of the HTTP server, except the jobs, which the worker's thread runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rl4llm.core.errors import CheckpointError, ConfigError, EngineError, unknown
from rl4llm.core.schema import Natural
from rl4llm_tinker.messages import encode_losses, read_forward_backward
from rl4llm_tinker.models import Base, Samplers, Shape, Trained
from rl4llm_tinker.requests import call
from rl4llm_tinker.sampling import SampleRequest, drawn
from rl4llm_tinker.store import PASSING, SAMPLER, WEIGHTS, Store
from rl4llm_tinker.turns import JobWorker, Order

IDLE_S = 120.0  # a session without a request for so long is over; clients send a heartbeat every 10 s
STILL_S = 10.0  # counts as idle at most between two calls of `tidy`: a process that stood still could not hear its clients
GAP_S = 60.0  # requests of a model wait so long for an earlier one that has not arrived
KEPT_S = 300.0  # a result that was delivered stays so long, for polls that overlap
Body = Mapping[str, Any]
Options = dict[str, Any]
NONE: Options = {}
Item = TypeVar("Item")


@dataclass(slots=True)
class Promise:
    """A request that was accepted; its answer is JSON or, if `binary`, protobuf."""

    session_id: str
    binary: bool = False
    outcome: Future[bytes] = field(default_factory=Future)
    delivered_s: float | None = None  # since then


class Gone(EngineError):
    """A session, model or request that the server does not know: it was restarted, or the session ended."""


class Service:
    """The state of a server. A method with the name of a verb takes the fields of a request, and returns its answer.

    `rest` are the fields that the job reads in its turn: a request that is refused before it has a place would leave a gap.
    """

    def __init__(self, bases: Mapping[str, Base], output: Path, dtype: str, idle_s: float = IDLE_S):
        self.bases, self.store, self.worker = bases, Store(output), JobWorker()
        self._idle_s, self._tidied = idle_s, time.monotonic()
        self._samplers = Samplers(bases, dtype)
        self._idle: dict[str, float] = {}  # seconds without a request, by session
        self._models: dict[str, Trained] = {}
        self._orders: dict[str, Order] = {}
        self._sampling: dict[str, tuple[str, Path | None, Shape | None]] = {}
        self._promises: dict[str, Promise] = {}

    def create_session(self) -> Body:
        session_id = secrets.token_hex(16)
        self._idle[session_id] = 0.0
        return {"type": "create_session", "session_id": session_id}

    def session_heartbeat(self, session_id: str) -> Body:
        self._check(session_id, self._idle, "session")
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str) -> Body:
        """End a session as its client asks to; for one that has ended this does nothing."""
        if session_id in self._idle:
            self._end(session_id)
        return {"type": "finish_session"}

    def create_model(self, session_id: str, model_seq_id: Natural, **rest: Any) -> Body:
        return self._begin(session_id, model_seq_id, self._created, rest)

    def _created(self, model: None, model_id: str, base_model: str, lora_config: Options = NONE) -> bytes:
        self._models[model_id] = self._new(call(Shape, lora_config, "lora_config", base_model=base_model))
        return _json(type="create_model", model_id=model_id)

    def get_info(self, model_id: str) -> Body:
        model = self._check(model_id, self._models, "model")
        base, rank = model.base, model.shape.rank
        data = {"arch": type(base.model).__name__, "model_name": base.name, "tokenizer_id": base.source}
        known = {"model_id": model_id, "model_name": base.name, "model_data": data}
        return {"type": "get_info", **known, "is_lora": rank > 0, "lora_rank": rank}

    def forward_backward(self, request: Any) -> Body:
        """Accept a `Request` of `messages.proto`."""

        def job(model: Trained) -> bytes:
            return encode_losses(*model.forward_backward(read_forward_backward(request)))

        return self._ordered(request.model_id, request.seq_id, job, {}, binary=True)

    def optim_step(self, model_id: str, seq_id: Natural, **rest: Any) -> Body:
        def job(model: Trained, optimizer_params: Options = NONE, adam_params: Options = NONE) -> bytes:
            return _json(type="optim_step", metrics=model.optim_step(optimizer_params or adam_params))

        return self._ordered(model_id, seq_id, job, rest)

    def save_weights(self, model_id: str, seq_id: Natural, **rest: Any) -> Body:
        def job(model: Trained, path: str = "", overwrite: bool = False) -> bytes:
            name, facts = path or f"{seq_id:06d}", asdict(model.shape)
            address = self.store.save(model_id, WEIGHTS, name, facts, model.backend.save, overwrite=overwrite)
            return _json(type="save_weights", path=address)

        return self._ordered(model_id, seq_id, job, rest)

    def load_weights(self, model_id: str = "", seq_id: Natural = -1, **rest: Any) -> Body:
        """Load weights into a model or, with a session in its place, into a new one."""
        if rest.get("session_id"):
            return call(self._load_new, rest, "load_weights")
        return self._ordered(model_id, seq_id, self._loaded, {**rest, "model_id": model_id})

    def _load_new(self, session_id: str, model_seq_id: Natural, **rest: Any) -> Body:
        return self._begin(session_id, model_seq_id, self._loaded, rest)

    def _loaded(
        self, model: Trained | None, model_id: str, path: str, optimizer: bool, base_model: str = ""
    ) -> bytes:
        """Load weights into a model, a new one if it is None; runs as a job."""
        directory, facts = self.store.find(path, WEIGHTS)
        model = model or self._new(Shape(**facts | {"base_model": base_model or facts["base_model"]}))
        if (saved := facts["rank"]) != model.shape.rank:
            raise CheckpointError(
                f"{path} has lora_rank={saved}, and this model {model.shape.rank}. Next: make a model of these weights with "
                "create_training_client_from_state."
            )
        model.load(directory, optimizer=optimizer)
        self._models[model_id] = model
        return _json(type="load_weights", path=path, model_id=model_id)

    def save_weights_for_sampler(self, model_id: str, seq_id: Natural, **rest: Any) -> Body:
        def named(model: Trained, path: str) -> bytes:
            address = self.store.save(model_id, SAMPLER, path, asdict(model.shape), model.publish)
            return _json(type="save_weights_for_sampler", path=address)

        def unnamed(model: Trained, sampling_session_seq_id: Natural) -> bytes:
            name = f"{seq_id:06d}"
            self.store.save(model_id, PASSING, name, asdict(model.shape), model.publish)
            sampling = f"{model_id.partition(':')[0]}:sample:{sampling_session_seq_id}"
            self._sampling[sampling] = (
                model.base.name,
                self.store.root / model_id / PASSING / name,
                model.shape,
            )
            return _json(type="save_weights_for_sampler", sampling_session_id=sampling)

        return self._ordered(model_id, seq_id, named if rest.get("path") else unnamed, rest)

    async def create_sampling_session(
        self, session_id: str, sampling_session_seq_id: Natural, model_path: str = "", base_model: str = ""
    ) -> Body:
        path, shape = None, None
        if model_path:
            path, facts = await asyncio.to_thread(self.store.find, model_path, SAMPLER)  # reads all of it
            shape = Shape(**facts)
        base = self._base(shape.base_model if shape else base_model)
        self._check(session_id, self._idle, "session")
        sampling = f"{session_id}:sample:{sampling_session_seq_id}"
        self._sampling[sampling] = base.name, path, shape
        return {"type": "create_sampling_session", "sampling_session_id": sampling}

    def sampler(self, sampler_id: str) -> Body:
        """Describe what a sampling session samples from."""
        name, path, _ = self._check(sampler_id, self._sampling, "sampling session")
        address = self.store.address(path) if path and path.parent.name == SAMPLER else None
        return {"sampler_id": sampler_id, "base_model": name, "model_path": address}

    def asample(self, sampling_session_id: str, seq_id: Natural, **rest: Any) -> Body:
        sampling = self._check(sampling_session_id, self._sampling, "sampling session")
        request_id, asked = f"{sampling_session_id}:{seq_id}", call(SampleRequest, rest, "asample")
        if request_id not in self._promises:
            promise = self._promise(request_id, sampling_session_id.partition(":")[0], binary=True)
            draw = partial(drawn, partial(self._samplers.of, *sampling), asked)
            self.worker.sample(promise.session_id, asked.num_samples, draw, promise.outcome)
        sequences = [f"{request_id}:{number}" for number in range(asked.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    async def weights_info(self, tinker_path: str) -> Body:
        _, facts = await asyncio.to_thread(self.store.find, tinker_path, WEIGHTS, SAMPLER)
        return {"base_model": facts["base_model"], "is_lora": facts["rank"] > 0, "lora_rank": facts["rank"]}

    def delete(self, address: str) -> Future[bytes]:
        """Delete named weights and what samples from them, so that later ones of that name are loaded; runs as a job."""

        def job() -> bytes:
            deleted = self.store.delete(address)
            for key in [key for key, (_, path, _) in list(self._sampling.items()) if path == deleted]:
                self._sampling.pop(key, None)
            return self._free()

        outcome: Future[bytes] = Future()
        self.worker.put("", job, outcome)
        return outcome

    def unload_model(self, model_id: str) -> Body:
        self._check(model_id, self._orders, "model")
        request_id = f"{model_id}:unload"
        if request_id not in self._promises:
            promise = self._promise(request_id, model_id.partition(":")[0])
            self.worker.put(promise.session_id, partial(self._unload, model_id), promise.outcome)
            self.worker.put(promise.session_id, self._free, Future())
        return {"request_id": request_id, "model_id": model_id}

    def capabilities(self) -> Body:
        known = {"trainable": True, "sampleable": True}
        models = [
            {"model_name": base.name, "max_context_length": base.context_length, **known}
            for base in self.bases.values()
        ]
        return {"supported_models": models}

    def promise(self, request_id: str) -> Promise:
        """Return an accepted request; raise Gone for one that is not known any more."""
        return self._check(request_id, self._promises, "request")

    def tidy(self) -> None:
        """End sessions whose client has disappeared, with all that they hold; refuse requests that wait for a lost one; drop
        results that were delivered."""
        now = time.monotonic()
        passed_s, self._tidied = min(now - self._tidied, STILL_S), now
        for session_id in list(self._idle):
            self._idle[session_id] += passed_s
            if self._idle[session_id] > self._idle_s:
                self._end(session_id)
        for order in list(self._orders.values()):  # the worker's thread removes some
            order.give_up(GAP_S, passed_s)
        for request_id, promise in list(self._promises.items()):
            if promise.delivered_s is not None:
                promise.delivered_s += passed_s
                if promise.delivered_s > KEPT_S:
                    del self._promises[request_id]

    def _end(self, session_id: str) -> None:
        del self._idle[session_id]
        for table in (self._sampling, self._promises):
            for key in list(table):  # the worker's thread adds some
                if key.partition(":")[0] == session_id:
                    table.pop(key, None)
        self.worker.drop(session_id)
        for model_id in [key for key in list(self._orders) if key.partition(":")[0] == session_id]:
            self._models.pop(model_id, None)  # so that what is queued for it is not computed
            self.worker.put(session_id, partial(self._unload, model_id), Future())
        self.worker.put(session_id, self._free, Future())

    def _unload(self, model_id: str) -> bytes:
        """Free a model; runs as a job, since jobs before it use the model."""
        self._models.pop(model_id, None)
        passing = self.store.root / model_id / PASSING
        for key, (_, path, _) in list(self._sampling.items()):
            if path is not None and path.parent == passing:
                self._sampling.pop(key, None)
        self.store.drop_passing(model_id)
        self._orders.pop(model_id, None)  # last: who sees it gone finds no files
        return _json(type="unload_model", model_id=model_id)

    def _free(self) -> bytes:
        """Forget the samplers that no client can ask any more, and return the memory of what has gone; runs as a job."""
        self._samplers.keep({path for _, path, _ in list(self._sampling.values())})
        return_freed_memory()
        return b""

    def _begin(self, session_id: str, number: int, job: Callable[..., bytes], rest: Options) -> Body:
        """Accept the first request of a model; a repeated one is the same request."""
        self._check(session_id, self._idle, "session")
        model_id = f"{session_id}:train:{number}"
        if model_id not in self._orders:
            promise = self._promise(f"{model_id}:0", session_id)
            self._orders[model_id] = Order(self.worker, model_id)
            first = partial(call, job, {**rest, "model_id": model_id}, "request", model=None)
            self.worker.put(session_id, first, promise.outcome)
        return {"request_id": f"{model_id}:0", "model_id": model_id}

    def _ordered(
        self, model_id: str, seq_id: int, job: Callable[..., bytes], rest: Options, *, binary: bool = False
    ) -> Body:
        """Accept a request of a model, which runs in its turn; a repeated one is the same request.

        The job takes the model and the fields that it reads of `rest`.
        """
        self._check(model_id, self._orders, "model")
        request_id = f"{model_id}:{seq_id}"
        if request_id not in self._promises:
            promise = Promise(model_id.partition(":")[0], binary)

            def checked() -> bytes:
                model = self._check(model_id, self._models, "model", alive=False)
                return call(job, rest, "request", model=model)

            self._orders[model_id].add(seq_id, checked, promise.outcome)
            self._promises[request_id] = promise
        return {"request_id": request_id, "model_id": model_id}

    def _promise(self, request_id: str, session_id: str, *, binary: bool = False) -> Promise:
        promise = self._promises[request_id] = Promise(session_id, binary)
        return promise

    def _new(self, shape: Shape) -> Trained:
        return Trained(self._base(shape.base_model), shape)

    def _base(self, name: str) -> Base:
        if name not in self.bases:
            raise ConfigError(
                f"{unknown('base_model', name, self.bases)} Next: serve it with --model {name}=DIRECTORY."
            )
        return self.bases[name]

    def _check(self, key: str, table: Mapping[str, Item], what: str, *, alive: bool = True) -> Item:
        """Return what a client names; a request, but not a job, is a sign that the client is `alive`."""
        if key not in table:
            raise Gone(
                f"The {what} {key:.200} is unknown: the server was restarted, or its session ended. Next: begin again from "
                "saved weights."
            )
        if alive and (session_id := key.partition(":")[0]) in self._idle:
            self._idle[session_id] = 0.0
        return table[key]


def _json(**answer: Any) -> bytes:
    return json.dumps(answer).encode()


def return_freed_memory() -> None:
    """Have glibc return what is free to the kernel, in the middle of the heap too; do nothing with another malloc."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)

"""What the server does for its clients: sessions, models that train, samplers, and a promise for each request.

Everything here runs in the event loop of the HTTP server, except the jobs, which the worker's thread runs.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rl4llm.core.errors import CheckpointError, ConfigError, EngineError, unknown
from rl4llm.extensions.tinker.messages import encode_losses, parse, read, read_forward_backward
from rl4llm.extensions.tinker.models import Base, Samplers, Shape, Trained
from rl4llm.extensions.tinker.sampling import count_of, drawn
from rl4llm.extensions.tinker.store import PASSING, SAMPLER, WEIGHTS, Store
from rl4llm.extensions.tinker.turns import Job, JobWorker, Order
from rl4llm.runtime.cpu import return_freed_memory

IDLE_S = 120.0  # a session without a heartbeat for so long is over; clients send one every 10 s
GAP_S = 60.0  # requests of a model wait so long for an earlier one that has not arrived
KEPT_S = 300.0  # a result that was delivered stays so long, for polls that overlap
Body = Mapping[str, Any]


@dataclass(slots=True)
class Promise:
    """A request that was accepted; its answer is JSON or, if `binary`, protobuf."""

    session_id: str
    binary: bool = False
    outcome: Future[bytes] = field(default_factory=Future)
    delivered: float = 0.0


class Gone(EngineError):
    """A session, model or request that the server does not know: it was restarted, or the session ended."""


class Service:
    """The state of a server. Methods named as verbs of the protocol take the body of a request and return its answer."""

    def __init__(self, bases: Mapping[str, Base], output: Path, dtype: str, idle_s: float = IDLE_S):
        self.bases, self.store, self.worker = bases, Store(output), JobWorker()
        self._idle_s = idle_s
        self._samplers = Samplers(bases, dtype)
        self._seen: dict[str, float] = {}
        self._models: dict[str, Trained] = {}
        self._orders: dict[str, Order] = {}
        self._sampling: dict[str, tuple[str, Path | None, Shape | None]] = {}
        self._promises: dict[str, Promise] = {}

    def create_session(self, body: Body) -> Body:
        session_id = secrets.token_hex(8)
        self._seen[session_id] = time.monotonic()
        return {"type": "create_session", "session_id": session_id}

    def session_heartbeat(self, body: Body) -> Body:
        self._check(body["session_id"], self._seen, "session")
        self._seen[body["session_id"]] = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str) -> Body:
        """End a session as its client asks to; for one that has ended this does nothing."""
        if session_id in self._seen:
            self._end(session_id)
        return {"type": "finish_session"}

    def create_model(self, body: Body) -> Body:
        model_id = self._model_id(body)

        def job() -> bytes:
            shape = read(Shape, body.get("lora_config") or {}, "lora_config", base_model=body["base_model"])
            _check_optimizer(body.get("optimizer_config"))
            self._models[model_id] = self._new(shape)
            return _json(type="create_model", model_id=model_id)

        return self._begin(model_id, body["session_id"], job)

    def get_info(self, body: Body) -> Body:
        self._check(body["model_id"], self._models, "model")
        model = self._models[body["model_id"]]
        base = model.base
        data = {
            "arch": type(base.model).__name__,
            "model_name": base.name,
            "tokenizer_id": base.source,
        }
        return {
            "type": "get_info",
            "model_id": body["model_id"],
            "model_name": base.name,
            "model_data": data,
            "is_lora": bool(model.shape.rank),
            "lora_rank": model.shape.rank,
        }

    def forward_backward(self, body: bytes) -> Body:
        request = parse(body)
        model_id = request.model_id

        def job() -> bytes:
            # Tensors are read here: a request that is refused before it has a place would leave a gap.
            return encode_losses(*self._models[model_id].forward_backward(read_forward_backward(request)))

        return self._ordered(model_id, request.seq_id, job, binary=True)

    def optim_step(self, body: Body) -> Body:
        model_id = body["model_id"]

        def job() -> bytes:
            given = body.get("optimizer_params") or body.get("adam_params") or {}
            _check_optimizer(given)
            return _json(type="optim_step", metrics=self._models[model_id].optim_step(given))

        return self._ordered(model_id, body["seq_id"], job)

    def save_weights(self, body: Body) -> Body:
        model_id, name = body["model_id"], body.get("path") or f"{body['seq_id']:06d}"

        def job() -> bytes:
            model = self._models[model_id]
            overwrite = bool(body.get("overwrite"))
            facts = asdict(model.shape)
            path = self.store.save(model_id, WEIGHTS, name, facts, model.backend.save, overwrite=overwrite)
            return _json(type="save_weights", path=path)

        return self._ordered(model_id, body["seq_id"], job)

    def load_weights(self, body: Body) -> Body:
        created = body.get("session_id") is not None
        model_id = self._model_id(body) if created else body["model_id"]

        def job() -> bytes:
            path, facts = self.store.find(body["path"], WEIGHTS)
            _check_optimizer(body.get("optimizer_config"))
            facts |= {"base_model": body.get("base_model") or facts["base_model"]}
            model = self._new(Shape(**facts)) if created else self._models[model_id]
            if (saved := facts["rank"]) != model.shape.rank:
                raise CheckpointError(
                    f"{body['path']} has lora_rank={saved}, and this model {model.shape.rank}. Next: make a model of "
                    "these weights with create_training_client_from_state."
                )
            model.load(path, optimizer=body["optimizer"])
            self._models[model_id] = model
            return _json(type="load_weights", path=body["path"], model_id=model_id)

        if created:
            return self._begin(model_id, body["session_id"], job)
        return self._ordered(model_id, body["seq_id"], job)

    def save_weights_for_sampler(self, body: Body) -> Body:
        model_id, name = body["model_id"], body.get("path")
        session_id = model_id.partition(":")[0]

        def job() -> bytes:
            model = self._models[model_id]
            facts, passing = asdict(model.shape), f"{body['seq_id']:06d}"
            if name:
                path = self.store.save(model_id, SAMPLER, name, facts, model.publish)
                return _json(type="save_weights_for_sampler", path=path)
            self.store.save(model_id, PASSING, passing, facts, model.publish)
            sampling = f"{session_id}:sample:{body['sampling_session_seq_id']}"
            self._sampling[sampling] = (
                model.base.name,
                self.store.root / model_id / PASSING / passing,
                model.shape,
            )
            return _json(type="save_weights_for_sampler", sampling_session_id=sampling)

        return self._ordered(model_id, body["seq_id"], job)

    def create_sampling_session(self, body: Body) -> Body:
        self._check(body["session_id"], self._seen, "session")
        sampling = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        if body.get("model_path"):
            path, facts = self.store.find(body["model_path"], SAMPLER)
            shape = Shape(**facts)
            self._sampling[sampling] = self._base(shape.base_model).name, path, shape
        else:
            self._sampling[sampling] = self._base(body.get("base_model") or "").name, None, None
        return {"type": "create_sampling_session", "sampling_session_id": sampling}

    def asample(self, body: Body) -> Body:
        sampling = body.get("sampling_session_id") or ""
        self._check(sampling, self._sampling, "sampling session")
        request_id, count = f"{sampling}:{body['seq_id']}", count_of(body)
        if request_id not in self._promises:
            promise = self._promise(request_id, sampling.partition(":")[0], binary=True)
            of = partial(self._samplers.of, *self._sampling[sampling])
            self.worker.sample(promise.session_id, count, partial(drawn, of, body), promise.outcome)
        sequences = [f"{request_id}:{number}" for number in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    def weights_info(self, body: Body) -> Body:
        _, facts = self.store.find(body["tinker_path"], WEIGHTS, SAMPLER)
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

    def unload_model(self, body: Body) -> Body:
        model_id = body["model_id"]
        self._check(model_id, self._orders, "model")
        request_id = f"{model_id}:unload"
        if request_id not in self._promises:
            promise = self._promise(request_id, model_id.partition(":")[0])
            self.worker.put(promise.session_id, partial(self._unload, model_id), promise.outcome)
            self.worker.put(promise.session_id, self._free, Future())
        return {"request_id": request_id, "model_id": model_id}

    def telemetry(self, body: Body) -> Body:
        return {"status": "accepted"}

    def capabilities(self) -> Body:
        models = [
            {
                "model_name": base.name,
                "max_context_length": base.context_length,
                "trainable": True,
                "sampleable": True,
            }
            for base in self.bases.values()
        ]
        return {"supported_models": models}

    def promise(self, request_id: str) -> Promise:
        """Return an accepted request; raise Gone for one that is not known any more."""
        if request_id not in self._promises:
            raise Gone(
                f"The request {request_id} is unknown: the server was restarted, or its session ended."
            )
        return self._promises[request_id]

    def tidy(self) -> None:
        """End sessions whose client has disappeared, with all that they hold; refuse requests that wait for a lost one; drop
        results that were delivered."""
        now = time.monotonic()
        for session_id in [key for key, seen in self._seen.items() if now - seen > self._idle_s]:
            self._end(session_id)
        for order in list(self._orders.values()):  # the worker's thread removes some
            order.give_up(GAP_S)
        old = [key for key, one in self._promises.items() if one.delivered and now - one.delivered > KEPT_S]
        for request_id in old:
            del self._promises[request_id]

    def _end(self, session_id: str) -> None:
        del self._seen[session_id]
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

    def _begin(self, model_id: str, session_id: str, job: Job) -> Body:
        self._check(session_id, self._seen, "session")
        if model_id not in self._orders:
            promise = self._promise(f"{model_id}:0", session_id)
            self._orders[model_id] = Order(self.worker, model_id)
            self.worker.put(session_id, job, promise.outcome)
        return {"request_id": f"{model_id}:0", "model_id": model_id}

    def _ordered(self, model_id: str, seq_id: int, job: Job, *, binary: bool = False) -> Body:
        """Accept a request of a model, which runs in its turn; a repeated one is the same request."""
        self._check(model_id, self._orders, "model")
        request_id = f"{model_id}:{seq_id}"
        if request_id not in self._promises:
            promise = Promise(model_id.partition(":")[0], binary)

            def checked() -> bytes:
                self._check(model_id, self._models, "model")
                return job()

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

    def _check(self, key: str, table: Mapping[str, Any], what: str) -> None:
        if key not in table:
            raise Gone(
                f"The {what} {key} is unknown: the server was restarted, or its session ended. Next: begin again from saved "
                "weights."
            )

    def _model_id(self, body: Body) -> str:
        return f"{body['session_id']}:train:{body['model_seq_id']}"


def _check_optimizer(given: Mapping[str, Any] | None) -> None:
    kind = (given or {}).get("type", "adamw")
    if kind not in ("adamw", "adam"):
        raise ConfigError(f"The optimizer {kind!r} is not available. Accepted: adamw.")


def _json(**answer: Any) -> bytes:
    return json.dumps(answer).encode()

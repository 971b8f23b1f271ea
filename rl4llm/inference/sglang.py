"""SGLang servers: the native HTTP interface, which speaks in token ids and labels every token with its weights' version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.core.errors import EngineError, RefusedError, UnreachableError
from rl4llm.core.types import FinishReason, SamplingParams, WeightRef
from rl4llm.inference.server import Sampled, ServerClient

FINISHED: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NEVER_LOADED = -1


class SGLangClient(ServerClient):
    """One SGLang server (0.5 or newer).

        client = SGLangClient("http://127.0.0.1:30000", tokenizer, vocab_size=151936, context_length=4096)
        completion = await client.generate(prompt_ids, SamplingParams(max_tokens=64))

    Its log-probs are those of the temperature-scaled softmax before top-p and top-k, which is the convention of
    `Completion`, so they are taken as they come. Seeds are sent along, but SGLang reproduces tokens only when it was
    started with ``--enable-deterministic-inference``.
    """

    URL_VARIABLE = "SGLANG_BASE_URL"
    USUAL_URL = "http://127.0.0.1:30000"

    async def sample(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> Sampled:
        body = {
            "rid": request_id,
            "input_ids": prompt_ids,
            "sampling_params": _sampling(params),
            "return_logprob": True,
            "stream": False,
        }
        return _sampled(await self.http.post("/generate", body), request_id)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self.check_prompt(token_ids)
        name = self.request_name("score")
        return await self.retry.run(lambda attempt: self._score(list(token_ids), f"{name}/a{attempt}"))

    async def version(self) -> int:
        info = await self.retry.run(lambda _: self.http.get("/model_info", deadline_s=30))
        return _version(_field(info, "weight_version", "/model_info"))

    async def checksum(self) -> str:
        """A digest of the weights on the server: the same weights give the same digest on every server."""
        answer = await self._admin("/weights_checker", {"action": "checksum"})
        return str(answer)

    async def load_weights(self, weight_ref: WeightRef) -> None:
        if weight_ref.kind != "full" or weight_ref.path is None:
            raise EngineError(f"SGLangClient.load: WeightRef.kind={weight_ref.kind!r} is not accepted: full, with a path.")
        await self._admin(
            "/update_weights_from_disk",
            {"model_path": weight_ref.path, "weight_version": str(weight_ref.version), "flush_cache": True},
        )

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
        await self._admin("/flush_cache", {})

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._admin("/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._admin("/resume_memory_occupation", {"tags": list(tags)})

    async def health(self) -> dict[str, Any]:
        """What the server says about itself, after it generated a token."""
        await self.http.get("/health", deadline_s=30)
        return await self.http.get("/server_info", deadline_s=30)

    async def _score(self, token_ids: list[int], request_id: str) -> list[float]:
        body = {
            "rid": request_id,
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self.http.post("/generate", body)
        rows = _field(_field(answer, "meta_info", request_id), "input_token_logprobs", request_id)
        scores = [row[0] for row in rows[1:]]
        if len(scores) != len(token_ids) - 1:
            raise UnreachableError(f"{self.base_url} scored {len(scores)} of {len(token_ids) - 1} tokens.")
        return [float("nan") if score is None else float(score) for score in scores]

    async def _admin(self, path: str, body: Mapping[str, Any]) -> Any:
        """An operator's request, one attempt: half-done work must not be repeated without looking."""
        answer = await self.http.post(path, body, deadline_s=self.admin_deadline_s)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise RefusedError(f"POST {self.base_url}{path} failed: {answer.get('message', answer)}")
        return answer


def _sampling(params: SamplingParams) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": params.seed % 2**31,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    return sampling


def _sampled(answer: Any, request_id: str) -> Sampled:
    info = _field(answer, "meta_info", request_id)
    rows = info.get("output_token_logprobs")
    token_ids = _field(answer, "output_ids", request_id)
    kind = (info.get("finish_reason") or {}).get("type")
    if kind not in FINISHED:
        raise UnreachableError(f"Request {request_id} ended with {info.get('finish_reason')!r}.")
    try:
        logprobs = [row[0] for row in rows] if rows is not None else None
    except (TypeError, IndexError, KeyError):
        logprobs = None
    return Sampled(token_ids, logprobs, FINISHED[kind], _versions(info))


def _versions(info: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """(start, version) of each run of tokens that the same weights sampled."""
    spans = info.get("weight_versions") or [{"start": 0, "version": info.get("weight_version")}]
    return tuple((int(span["start"]), _version(span["version"])) for span in spans)


def _version(text: Any) -> int:
    """A server that never got weights from a trainer calls them "default"."""
    return int(text) if str(text).lstrip("-").isdigit() else NEVER_LOADED


def _field(answer: Any, name: str, what: str) -> Any:
    if not isinstance(answer, Mapping) or name not in answer:
        raise UnreachableError(f"An SGLang server's answer to {what} has no {name!r}.")
    return answer[name]

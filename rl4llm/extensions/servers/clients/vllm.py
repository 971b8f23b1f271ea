"""vLLM servers: token ids through OpenAI's completions, weights through a worker extension that reports their version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.adapters import AdaptingClient, adapter_version
from rl4llm.extensions.servers.clients.server import FINISHED, Sampled, cut, field, sampling_options
from rl4llm.extensions.servers.clients.vllm_held import FreshReads, HeldVersions, held_by
from rl4llm.extensions.servers.clients.vllm_images import (
    GENERATE,
    RenderedImages,
    as_completion,
    with_features,
)
from rl4llm.inference.embedded.stops import StopRules
from rl4llm.runtime.seeds import derive_seed

FLOOR = -9999.0  # what vLLM writes where a log-prob is NaN or -inf, since JSON has neither
PIECES = 32  # of a turn, at most; each publish ends one
LEAST_TEMPERATURE = 0.01  # below it, vLLM samples at this temperature, with no more than a line in its log
START = (
    "Start the server with scripts/launch_vllm.sh, or with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls."
)


class VLLMClient(AdaptingClient):
    """One vLLM server (tested with 0.32) with ``VLLM_SERVER_DEV_MODE=1`` and the worker extension of rl4llm.

        client = VLLMClient("http://127.0.0.1:8000", tokenizer, vocab_size=151936, context_length=4096)
        completion = await client.generate(prompt_ids, SamplingParams(max_tokens=64))

    Log-probs: ``--logprobs-mode processed_logprobs`` gives those of the temperature-scaled softmax while top-p and top-k
    are off; ``raw_logprobs``, vLLM's default, gives those of the plain softmax. The first matches the convention of
    `Completion` at any temperature, the second at temperatures 0 and 1. Other combinations raise ConfigError.

    Versions: completions contain none, so the workers are asked before and after each request. `load` freezes the requests
    under way and ends them when the new weights are in place, before any of these sample. The tokens of an ended request
    become part of the next one's prompt, so a turn continues with the new weights. A request that may have sampled with
    either weights counts as a failed attempt.

    LoRA: while a server on a CPU holds adapters, requests for the model itself are refused, since vLLM applies an adapter to
    them as well.

    Args:
        model: the name of the model on the server; by default the server is asked.
    """

    takes_images = True
    publishers = ("filesystem", "lora")
    ADAPTERS_AT = "/v1"
    URL_VARIABLE = "VLLM_BASE_URL"
    USUAL_URL = "http://127.0.0.1:8000"
    UNSEEN = "seen from the server"  # in the worker extension's message
    SAYS_VERSIONS = False  # the server's workers are asked, before and after each request

    def __init__(self, base_url: str, tokenizer: Any, *, model: str | None = None, **options: Any):
        super().__init__(base_url, tokenizer, **options)
        self._model = model
        self._checked_context = False
        self._rendered = RenderedImages(self.http.post, str(self))
        self._reads = FreshReads(lambda: self._ask_workers("rl4llm_state", deadline_s=30))

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImagePlace]
    ) -> Sampled:
        """Sample a turn, with another request each time that the server ends one, as it does for new weights."""
        turn = Sampled([], [], "abort", ())
        for number in range(PIECES):
            start = len(turn.token_ids)
            remaining = params.replace(max_tokens=params.max_tokens - start)
            name = request_id
            if number:
                name = f"{request_id}/{number}"
                remaining = remaining.replace(seed=derive_seed(params.seed, number))
            piece = await self._sample([*prompt_ids, *turn.token_ids], remaining, name, images)
            self._check_sampled(piece, name)
            turn = joined(turn, piece)
            if (end := self._split_stop(turn.token_ids, start, params)) is not None:
                return cut(turn, end)
            if turn.finish_reason != "abort":
                return turn
            if len(turn.token_ids) == params.max_tokens:
                return replace(turn, finish_reason="length")
            if params.grammar:  # a server begins each request at the start of its grammar
                turn = Sampled([], [], "abort", ())
            if not piece.token_ids:
                await asyncio.sleep(self.retry.wait_s(number))
        raise UnreachableError(f"{self.base_url} aborted request {request_id} {PIECES} times.")

    async def base_version(self) -> int:
        return (await self.retry.run(lambda _: self._reads.get())).version

    async def load_weights(self, weight_ref: WeightRef) -> None:
        await self._reads.get()  # behind those of requests that have ended, which still have the old weights
        try:
            await self._ask_workers("rl4llm_load", str(weight_ref.path), str(weight_ref.version))
        finally:
            await self.pause("abort")  # what is frozen, and has a cache of the old weights
        await self.flush()
        await self.sample_from_model()

    async def pause(self, mode: str = "keep") -> None:
        """Stop generating; new requests wait. "keep" freezes those under way, "wait" lets them end, "abort" ends them.

        All but "keep" forget the prefix cache.
        """
        await self._again_if_needed(f"/pause?mode={mode}")

    async def resume(self) -> None:
        """Continue after `pause`. A server that sleeps stays paused, since it would compute with memory that it freed."""
        await self._again_if_needed("/wake_up?tags=scheduling")  # /resume would continue it

    async def lacks_weights(self) -> bool:
        return "weights" in (await self.retry.run(lambda _: self._reads.get())).asleep

    async def flush(self) -> None:
        """Forget the prefix cache; raise EngineError while requests use it."""
        answer = await self._again_if_needed("/reset_prefix_cache")
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineError(f"{self.base_url} could not reset its prefix cache. Pause first.")

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free device memory, after running requests have ended; vLLM keeps a copy of the weights in main memory."""
        if not (await self._reads.get()).can_sleep:
            raise ConfigError(f"inference.cohost=true: start {self.base_url} with --enable-sleep-mode.")
        await self._note(("weights", "kv_cache"))  # whatever was asked for
        await self.admin("/sleep?level=1&mode=wait")

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate device memory again, in one call or in several; requests wait until all of it is back."""
        await self.admin("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))
        await self._note((await self._reads.get()).asleep.difference(tags))

    async def _note(self, asleep: Iterable[str]) -> None:
        """Have the workers keep what sleeps: vLLM reports a paused server as sleeping too. It survives this trainer."""
        await self._ask_workers("rl4llm_note", ",".join(sorted(asleep)))

    async def health(self) -> dict[str, Any]:
        await self.http.get("/health", deadline_s=30)
        return {"version": await self.version(), "model": self.adapter or await self._served_model()}

    async def _sample(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImagePlace]
    ) -> Sampled:
        before = await self._reads.get()
        check_convention(before.logprobs_mode, params)
        async with self.using_adapter() as adapter:
            self._check_base(before, adapter)
            body = {"request_id": request_id, "logprobs": 0, "return_token_ids": True, **_sampling(params)}
            answer = await self._post_completion(prompt_ids, images, body, before, adapter)
        sampled = _sampled(
            answer, request_id, before.version if adapter is None else adapter_version(adapter)
        )
        after = await self._reads.get()
        self._check_base(after, adapter)
        # A load ends all requests before the new weights sample, so what ends with one load has the weights before it.
        ended_by_load = sampled.finish_reason == "abort" and after.replaced == before.ids
        if after.ids != before.ids and not ended_by_load:
            raise UnreachableError(f"{self.base_url} changed its weights during request {request_id}.")
        return sampled

    def _split_stop(self, token_ids: Sequence[int], start: int, params: SamplingParams) -> int | None:
        """Return where a stop string ends that begins before token `start`, which the server got as prompt from there on."""
        rules = StopRules(self._tokenizer, self.vocab_size, torch.device("cpu"))
        strings = rules.rule(params)[1]
        reach = start + max((len(text.encode()) for text in strings), default=0) if start else 0
        ends = range(start + 1, min(reach, len(token_ids)) + 1)
        return next((end for end in ends if rules.ends_in_string(token_ids[:end], strings)), None)

    async def _post_completion(
        self,
        token_ids: list[int],
        images: Sequence[ImagePlace],
        body: dict[str, Any],
        state: HeldVersions,
        adapter: str | None,
    ) -> Any:
        model = await self._served_model()
        if self.vision is None or not images:
            body = {"model": adapter or model, "prompt": token_ids, **body}
            return await self.post_with(adapter, "/v1/completions", body)
        features = await self._rendered.features(self.vision, images, model, "/".join(state.ids))
        body = with_features(body, adapter or model, token_ids, features)
        return as_completion(await self.post_with(adapter, GENERATE, body), token_ids, str(self))

    async def score_once(
        self, token_ids: list[int], request_id: str, images: Sequence[ImagePlace]
    ) -> list[float]:
        state = await self._reads.get()
        check_convention(state.logprobs_mode, SamplingParams())
        self._check_base(state, self.adapter)
        body = {"request_id": request_id, "return_token_ids": True, "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = 0
        answer = await self._post_completion(token_ids, images, body, state, self.adapter)
        rows = field(_choice(answer, request_id), "prompt_logprobs", request_id)
        if not isinstance(rows, list) or len(rows) != len(token_ids):
            raise UnreachableError(f"{self.base_url} did not score all of {len(token_ids)} tokens.")
        pairs = zip(rows[1:], token_ids[1:], strict=True)
        scores = [field(field(row, str(token), request_id), "logprob", request_id) for row, token in pairs]
        return [float("nan") if score is None else _number(score) for score in scores]

    def _check_base(self, state: HeldVersions, adapter: str | None) -> None:
        if adapter is None and state.adapters_leak:
            raise EngineError(
                f"{self} would also apply its LoRA adapters to the model itself. Use another server."
            )

    async def _served_model(self) -> str:
        """Return the model's name on the server, after a check that the server's context is long enough."""
        if self._model is None or not self._checked_context:
            models = await self.models(retries=False)
            longest = {
                str(item.get("id")): item.get("max_model_len") for item in models if not item.get("parent")
            }
            name = self._model or next(iter(longest), "")
            if name not in longest or (longest[name] or self.context_length) < self.context_length:
                raise ConfigError(
                    f"{self.base_url} serves {longest} (--max-model-len), which do not fit inference.model={name!r} with "
                    f"inference.context_length={self.context_length}. Change the server or these keys."
                )
            self._model, self._checked_context = name, True
        return self._model

    async def _ask_workers(
        self, method: str, *arguments: str, deadline_s: float | None = None
    ) -> HeldVersions:
        """Call a method of the worker extension in every worker."""
        body = {"method": method, "args": list(arguments)}
        deadline_s = deadline_s or self.admin_deadline_s
        try:
            return held_by(await self.http.post("/collective_rpc", body, deadline_s=deadline_s))
        except (RefusedError, UnreachableError) as error:  # vLLM answers 500 to every error of a worker
            lacks = "has no attribute" in str(error) and method in str(error)
            if lacks or isinstance(error, RefusedError):
                raise EngineError(f"{error} {START}") from error
            if self.UNSEEN in str(error):
                raise RefusedError(str(error)) from error
            raise

    async def _again_if_needed(self, path: str) -> Any:
        """Send an operator's request that is safe to repeat, with retries."""
        return await self.retry.run(lambda _: self.admin(path))

    async def admin(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self.http.post(path, body or {}, deadline_s=self.admin_deadline_s)


def check_convention(logprobs_mode: str, params: SamplingParams) -> None:
    """Raise ConfigError if a server in this mode cannot give the log-probs that `Completion` requires."""
    temperature, filtered = params.temperature, params.top_p < 1.0 or params.top_k > 0
    accepted = {
        "processed_logprobs": temperature == 0.0 or not filtered,
        "raw_logprobs": temperature in (0.0, 1.0),
    }
    if 0.0 < temperature < LEAST_TEMPERATURE or not accepted.get(logprobs_mode):
        raise ConfigError(
            f"temperature={temperature:g}, top_p={params.top_p:g}, top_k={params.top_k} do not fit --logprobs-mode "
            f"{logprobs_mode} of vLLM. Accepted: processed_logprobs with temperature 0, or with {LEAST_TEMPERATURE} or "
            "above, top_p=1 and top_k=0; raw_logprobs with temperature 0 or 1."
        )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    options = {"max_tokens": params.max_tokens, "top_k": params.top_k, "seed": params.seed % 2**63}
    forced = {"structured_outputs": {"grammar": params.grammar}} if params.grammar else {}
    return {**sampling_options(params), **options, **forced}


def _sampled(answer: Any, request_id: str, version: int) -> Sampled:
    choice = _choice(answer, request_id)
    reason = choice.get("finish_reason")
    if reason not in list(FINISHED):  # whatever type it has
        raise UnreachableError(f"Request {request_id} ended with {reason!r}.")
    logprobs = field(field(choice, "logprobs", request_id), "token_logprobs", request_id)
    if isinstance(logprobs, list):
        logprobs = [_number(item) for item in logprobs]
    return Sampled(choice.get("token_ids"), logprobs, FINISHED[reason], ((0, version),))


def joined(turn: Sampled, piece: Sampled) -> Sampled:
    """Return a turn with one more piece, which one version of the weights sampled."""
    versions, (_, version) = turn.versions, piece.versions[0]
    if not turn.token_ids:
        versions = piece.versions
    elif piece.token_ids and versions[-1][1] != version:
        versions = (*versions, (len(turn.token_ids), version))
    token_ids, logprobs = turn.token_ids + piece.token_ids, turn.logprobs + piece.logprobs
    return Sampled(token_ids, logprobs, piece.finish_reason, versions)


def _number(logprob: Any) -> Any:
    return float("nan") if isinstance(logprob, int | float) and logprob <= FLOOR else logprob


def _choice(answer: Any, what: str) -> Mapping[str, Any]:
    choices = field(answer, "choices", what)
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise UnreachableError(f"A vLLM server's answer to {what} does not have exactly one choice.")
    return choices[0]

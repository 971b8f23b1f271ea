"""A teacher behind an inference server, which gives log-probs of tokens that the student sampled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl4llm.backends.distributions import ReferenceHead
from rl4llm.backends.heads import asked_tokens, spread
from rl4llm.backends.model_backend import REFERRED
from rl4llm.core.errors import ConfigError, EngineError, UnreachableError
from rl4llm.core.types import TrainBatch
from rl4llm.runtime.runner import run
from rl4llm.runtime.transport import Retry, Transport

TEXT = "The 3 naïve Größen: x_1 += 0.25;\n\t漢字 → 🙂"
"""What two tokenizers are compared on."""

Scores = list[tuple[float, list[tuple[int, float]]]]
"""For each token of a sequence its log-prob, and ids with log-probs of the most probable ones."""

NAN, A_MINUTE = float("nan"), Retry(12)


class ServedTeacher:
    """A reference at the address of vLLM, SGLang or the embedded engine, which must serve it with the student's tokenizer.

    Requests are retried for a minute. Tokens of a sequence that the server did not score, such as one that is too long for
    it, get NaN, like those that a grammar constrained: the server's numbers are of all tokens. A server that does not
    score with `top` is refused at once. RL4LLM_TEACHER_KEY is sent as a bearer token.
    """

    problem = ""

    def __init__(
        self, url: str, tokenizer: Any, top: int = 0, *, retry: Retry = A_MINUTE, deadline_s: float = 600.0
    ):
        key = os.environ.get("RL4LLM_TEACHER_KEY")
        self._http = Transport(url, deadline_s=deadline_s, connections=64, api_key=key)
        self._retry, self._answers = retry, True
        run(self._open(tokenizer, top))

    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """Return what `BaseBackend.forward` returns."""
        return self._numbers(batch, 0)[0]

    def refer(self, batch: TrainBatch, top: int, *, temperature: float = 1.0) -> dict[str, Tensor]:
        """Return what `BaseBackend.refer` returns for one token or more."""
        return dict(zip(REFERRED[1], self._numbers(batch, top), strict=True))

    def _numbers(self, batch: TrainBatch, top: int) -> list[Tensor]:
        asked_N, _, _ = asked_tokens(batch)
        zeros_BT = torch.zeros(batch.mask_BT.shape)
        if not len(asked_N):
            return list(ReferenceHead(top).nothing(zeros_BT, False))
        sequences, owners_N = _sequences(batch, asked_N)
        scores = run(self._all(sequences, top))
        places = zip(owners_N.tolist(), batch.position_ids_BT.flatten()[asked_N].tolist(), strict=True)
        logprobs, tops = zip(*(scores[owner][place] for owner, place in places), strict=True)
        numbers = [torch.tensor(logprobs)]
        if batch.allowed_ids_BT is not None:
            numbers[0][batch.allowed_ids_BT.flatten()[asked_N] >= 0] = NAN
        if top:
            ids_NK, logprobs_NK = torch.tensor(tops, dtype=torch.float64).unbind(-1)
            numbers += [ids_NK.long(), logprobs_NK.float()]
        return [spread(column, asked_N, batch) for column in numbers]

    async def _open(self, tokenizer: Any, top: int) -> None:
        """Learn the model's name, and whether the server is vLLM; raise ConfigError for another tokenizer."""
        models = (await self._retry.run(lambda _: self._http.get("/v1/models")))["data"]
        self._model, self._is_vllm = str(models[0]["id"]), models[0].get("owned_by") == "vllm"
        body = {"model": self._model, "prompt": TEXT, "add_special_tokens": False}
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        answer = await self._retry.run(lambda _: self._http.post("/tokenize", body))
        if list(answer["tokens"]) != list(ids):
            place = self._http.base_url
            raise ConfigError(f"The tokenizer of {place} is not that of model.path. Serve another teacher.")
        await self._retry.run(lambda _: self._scored(ids[:2], top))
        await self._http.close()

    async def _all(self, sequences: Sequence[list[int]], top: int) -> list[Scores]:
        retry = self._retry if self._answers else Retry(1)  # a minute a step, not for each of its batches

        async def scored(token_ids: list[int]) -> Scores | EngineError:
            try:
                return await retry.run(lambda _: self._scored(token_ids, top))
            except EngineError as error:
                return error

        answers = await asyncio.gather(*map(scored, sequences))
        await self._http.close()
        self.problem = next((str(each) for each in answers if isinstance(each, EngineError)), self.problem)
        self._answers = not all(isinstance(each, UnreachableError) for each in answers)
        return [
            [(NAN, [(0, NAN)] * top)] * len(ids) if isinstance(answer, EngineError) else answer
            for ids, answer in zip(sequences, answers, strict=True)
        ]

    async def _scored(self, token_ids: list[int], top: int) -> Scores:
        one = {"temperature": 1.0, "max_tokens": 1}
        body: dict[str, Any] = {"model": self._model, "prompt": token_ids, "prompt_logprobs": top, **one}
        path, read = "/v1/completions", _of_vllm
        if not self._is_vllm:
            body = {"input_ids": token_ids, "return_logprob": True, "logprob_start_len": 0}
            body["sampling_params"] = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
            body |= {"top_logprobs_num": top} if top else {}
            path, read = "/generate", _of_sglang
        answer = await self._http.post(path, body)
        try:
            scores = read(answer, token_ids, top)
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{self._http.base_url} did not score {len(token_ids)} tokens: {error!r}"
            raise UnreachableError(reason) from error
        return [(NAN, [(0, NAN)] * top), *scores]


def _sequences(batch: TrainBatch, asked_N: Tensor) -> tuple[list[list[int]], Tensor]:
    """Return the whole sequences of the trajectories that have asked tokens, and which of them each token is in (N,)."""
    segments_BT = batch.segment_ids_BT
    begins_M = (segments_BT.diff(dim=1, prepend=segments_BT[:, :1] - 1) != 0).flatten()
    computed_M = torch.arange(segments_BT.numel())
    if batch.computed_BT is not None:
        computed_M += batch.computed_BT.flatten() - computed_M % segments_BT.shape[1]
    owners_M = begins_M.cumsum(0)
    numbers, owners_N = owners_M[asked_N].unique(return_inverse=True)
    ends = torch.searchsorted(owners_M, numbers, right=True) - 1
    tokens, begins, computed = batch.token_ids_BT.flatten().tolist(), begins_M.tolist(), computed_M.tolist()
    shown = (
        set()
        if (ids_BT := batch.feature_ids_BT) is None
        else {*(ids_BT.flatten() >= 0).nonzero().flatten().tolist()}
    )
    sequences = []
    for end in ends.tolist():
        places = [computed[end]]  # the last token, then back through what others share with this trajectory
        while not begins[places[-1]]:
            places.append(computed[places[-1] - 1])
        if not shown.isdisjoint(places):
            raise ConfigError("A teacher on a server sees no images. Use algorithm.teacher_path.")
        sequences.append([tokens[place] for place in reversed(places)])
    return sequences, owners_N


def _of_sglang(answer: Any, token_ids: list[int], top: int) -> Scores:
    """Read `input_token_logprobs` and `input_top_logprobs`, whose rows are [log-prob, id, text]."""
    meta, rest = answer["meta_info"], token_ids[1:]
    tops = meta["input_top_logprobs"][1:] if top else [()] * len(rest)
    return [
        (float(row[0]), [(int(number), float(logprob)) for logprob, number, *_ in best])
        for _, row, best in zip(rest, meta["input_token_logprobs"][1:], tops, strict=True)
    ]


def _of_vllm(answer: Any, token_ids: list[int], top: int) -> Scores:
    """Read `prompt_logprobs`: by id the log-prob and rank of the token itself and of the most probable ones."""
    scores = []
    for token, row in zip(token_ids[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True):
        ranked = sorted((item["rank"], int(number), float(item["logprob"])) for number, item in row.items())
        scores.append(
            (float(row[str(token)]["logprob"]), [(number, logprob) for _, number, logprob in ranked[:top]])
        )
    return scores

"""The canary: after every publish the engine proves that it holds the trainer's weights.

An engine can report success and go on sampling from stale, half-loaded or corrupted weights. What cannot lie is what it
computes: the log-probs of fixed tokens, compared with the trainer's own.
"""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import StaleWeightsError, UnreachableError
from rl4llm.core.seeds import derive_seed
from rl4llm.core.types import TrainBatch, WeightRef

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest accepted difference of a log-prob (nats) by the dtype that the trainer computes in, which the engine's should be;
random tokens are improbable ones, where rounding shows most."""
NOISE = {"float32": 1e-6, "bfloat16": 0.05, "float16": 0.01}
"""A change of the trainer's log-probs (nats) that must show in an engine, where it is more than rounding."""
ROUNDS = 3  # of questions that nobody answers


class Canary:
    """A few random tokens, the same in every run, that both sides score."""

    def __init__(self, vocab_size: int, *, dtype: str, num_sequences: int = 2, length: int = 24, tolerance: float = 0.0):
        generator = torch.Generator().manual_seed(derive_seed("canary", vocab_size))
        self._token_ids_BT = torch.randint(0, vocab_size, (num_sequences, length), generator=generator)
        self._tolerance = tolerance or TOLERANCES[dtype]
        self._noise = NOISE[dtype]
        self._last: dict[str, tuple[Tensor, Tensor]] = {}  # by engine: its scores, and the trainer's when it gave them first

    def expected(self, backend: BaseBackend) -> Tensor:
        """The trainer's own log-probs (sequences, length - 1); to be asked for while it is on its device."""
        return backend.forward(_batch(self._token_ids_BT))[:, 1:].cpu()

    async def verify(self, backend: BaseBackend, client: BaseClient, weight_ref: WeightRef) -> float:
        """`compare` with what the backend says now."""
        return await self.compare(self.expected(backend), client, weight_ref)

    async def compare(self, expected_BT: Tensor, client: BaseClient, weight_ref: WeightRef) -> float:
        """The largest difference in nats over all engines of `client`; raises StaleWeightsError when one of them is beyond
        the tolerance, or reports another version than was published.

        An engine that cannot be reached is the fleet's affair, but one at least must answer: while there is none, this
        waits as `client` does.
        """
        for _ in range(ROUNDS):
            questions = [self._ask(engine, expected_BT, weight_ref) for engine in client.engines()]
            answers = await asyncio.gather(*questions, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, UnreachableError):
                    raise answer
            differences = [answer for answer in answers if isinstance(answer, float)]
            if differences:
                return max(differences)
            await client.version()  # a fleet waits here for a server, and says so when none comes
        raise UnreachableError(
            f"{client} could not be asked whether it holds version {weight_ref.version}, {ROUNDS} times over. "
            f"{'; '.join(map(str, answers))} Training stops; look for the reason in the log of the server."
        )

    async def _ask(self, engine: BaseClient, expected_BT: Tensor, weight_ref: WeightRef) -> float:
        version = await engine.version()
        if version != weight_ref.version:
            raise StaleWeightsError(
                f"{engine} reports version {version} after version {weight_ref.version} was published. "
                "Training stops, since what it samples now would come from other weights."
            )
        scored_BT = torch.tensor([await engine.score(row) for row in self._token_ids_BT.tolist()])
        difference = (scored_BT - expected_BT).abs().max().item()
        if not difference <= self._tolerance:  # NaN is beyond any tolerance
            raise StaleWeightsError(
                f"{engine} does not hold version {version}: its log-probs of the canary's tokens differ from "
                f"the trainer's by {difference:.3g}, more than {self._tolerance:g}. Training stops; check how the weights "
                "reach the engine. Where its dtype is coarser than the trainer's, set sync.tolerance (0.25 for bfloat16)."
            )
        self._check_moved(engine, scored_BT, expected_BT, version)
        return difference

    def _check_moved(self, engine: BaseClient, scored_BT: Tensor, expected_BT: Tensor, version: int) -> None:
        """One step may change less than the tolerance, but an engine that says the very same again kept its weights.

        Steps too small to show add up: they count from when the engine said this first.
        """
        before_BT, expected_before_BT = self._last.get(str(engine), (None, expected_BT))
        if before_BT is None or not torch.equal(scored_BT, before_BT):
            self._last[str(engine)] = scored_BT, expected_BT
            return
        moved = (expected_BT - expected_before_BT).abs().max().item()
        if moved > self._noise:
            raise StaleWeightsError(
                f"{engine} still holds the weights before version {version}: its log-probs of the canary's tokens are those "
                f"of the last time, to the last bit, while the trainer's moved by {moved:.3g}. Training stops; check how "
                "the weights reach the engine."
            )


def _batch(token_ids_BT: Tensor) -> TrainBatch:
    rows, length = token_ids_BT.shape
    zeros_BT = torch.zeros(rows, length)
    mask_BT = torch.ones(rows, length, dtype=torch.bool)
    mask_BT[:, 0] = False
    return TrainBatch(
        token_ids_BT=token_ids_BT,
        position_ids_BT=torch.arange(length).expand(rows, length),
        segment_ids_BT=torch.ones(rows, length, dtype=torch.long),
        mask_BT=mask_BT,
        sampled_logprobs_BT=zeros_BT,
        credits_BT=zeros_BT,
        weights_BT=zeros_BT,
    )

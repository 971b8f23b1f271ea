"""Whether engine and trainer agree: a canary after every publish, and the mismatch on the tokens that train.

The canary: an engine can report success and keep sampling from stale, half-loaded or corrupted weights. Its log-probs of
a run's fixed tokens, compared with the trainer's, show what it really holds.

The mismatch: both compute the log-prob of the same token from the same weights, but kernels, dtypes and bugs make them
differ. Sampling from one distribution and learning as if from another biases every step, so it is measured in every step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl4llm.core.base_backend import BaseBackend, TokenMetrics
from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import DivergedError, EngineError, MismatchError, StaleWeightsError, UnreachableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import SamplingParams, TokenSpan, TrainBatch
from rl4llm.core.weights import WeightRef
from rl4llm.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

BOUNDS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05, "nf4": 1.0}
"""Largest accepted mean difference of log-probs (nats) by the dtype that the trainer computes in; the engine should use it
too. It is wide, since the first comparison of a run does not know what is usual; "nf4" is for a base that the engine may
have in more bits."""
FLOORS = {"float32": 1e-5, "bfloat16": 0.04, "float16": 5e-3, "nf4": 0.04}
"""A mean difference of unlikely tokens (nats) that is rounding in any model, though an engine was closer at first: two bf16
forwards of a real model of 30 layers differ by 0.03 to 0.06, even if their kernels agreed on the first weights."""
FACTOR = 3.0
"""How much an engine's difference may grow. In a real model of 30 layers in bf16, two swapped layers give 7 times it."""
LEAP = 1.0
"""A mean change of the trainer's log-probs (nats) in one step that shows divergence: steps that learn move them by 0.1 at
most. Logits that large differ by rounding alone, so an engine with the right weights is beyond its tolerance too."""
PEAK = 10.0  # how often the bound of the mean a single token may differ
LEAST_UNCERTAINTY = 0.1  # below it, rounding does not shrink any more
NOISE = {"float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-4, "nf4": 1e-3}
"""A mean change of the trainer's log-probs (nats) that must show in an engine, if only in the last bit. In bf16 the
smallest step changes the rounding everywhere, which moves them by about 0.04 nats in such a model."""
SAMPLING_S = 60.0  # how long an engine may take to sample the tokens
ROUNDS = 3  # attempts to reach at least one engine
PREFIX = "mismatch/"
WEIGHT, SQUARE, NEWEST = PREFIX + "weight", PREFIX + "weight_squared", PREFIX + "newest"


class Canary:
    """A few tokens that engine and trainer score, to find an engine without the trainer's weights.

    Likely tokens show rounding least, so `sample` has an engine sample them before the first publish. Tokens that no
    engine sampled are random ones, the same in every run.

    The mean difference of the log-probs decides. At the first comparison of a run the weights are equal by construction:
    it may be as large as `bound`, and calibrates the tolerance of each engine. An engine that joins later, whose weights
    may be old, gets the tolerance of the worst engine of that first comparison. A `tolerance` given in nats replaces all
    of this.

    With an `image` one more sequence begins with it.

    Rounding changes logits. A log-prob changes with them in proportion to the probability of other tokens, so
    tolerances follow that while training makes the tokens more or less likely.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        dtype: str,
        num_sequences: int = 2,
        length: int = 24,
        tolerance: float = 0.0,
        image: CanaryImage | None = None,
    ):
        self._image = image
        if image is not None:
            num_sequences, length = num_sequences + 1, length + len(image.token_ids)
        generator = torch.Generator().manual_seed(derive_seed("canary", vocab_size))
        self.token_ids_BT = torch.randint(0, vocab_size, (num_sequences, length), generator=generator)
        if image is not None:
            self.token_ids_BT = image.begun(self.token_ids_BT)
        # In every usual vocabulary frequent tokens, neither special ones nor single bytes nor unused ones.
        ordinary = vocab_size // 8, vocab_size // 4 + 1
        self._prompts_B = torch.randint(*ordinary, (num_sequences,), generator=generator)
        self.sampled = False  # whether `sample` was tried
        self.apart: float | None = None  # what `compare` returned last
        self.bound = tolerance or BOUNDS[dtype]
        self._floor = math.inf if tolerance else FLOORS[dtype]
        self._noise = NOISE[dtype]
        # By engine: its mean difference at the first comparison of the run, per uncertainty.
        self._calibrated: dict[str, float] = {}
        # By engine: its scores, and the trainer's at that time.
        self._last: dict[str, tuple[Tensor, Tensor]] = {}

    async def sample(self, client: BaseClient) -> Tensor:
        """Return tokens (sequences, length) that an engine of `client` samples; random ones if none can.

        Engines that share the trainer's device are not asked: they may be asleep after an earlier run.
        """
        for engine in () if hasattr(client, "awake") else client.engines():
            try:
                async with asyncio.timeout(SAMPLING_S):
                    await engine.resume()
                    return await self._sampled_by(engine)
            except (EngineError, TimeoutError):
                continue  # publishing reports what is wrong with it
        return self.token_ids_BT

    async def _sampled_by(self, engine: BaseClient) -> Tensor:
        """Return sequences that begin with what is given; where the engine stopped early, random tokens follow."""
        params = SamplingParams(max_tokens=self.token_ids_BT.shape[1] - 1, ignore_eos=True)
        token_ids_BT = self.token_ids_BT.clone()
        prompts = [[prompt] for prompt in self._prompts_B.tolist()]
        if self._image is not None:
            prompts[-1] = list(self._image.token_ids)
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, params.replace(seed=row), **self._seen(row))
                for row, prompt in enumerate(prompts)
            )
        )
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            token_ids = torch.tensor([*prompt, *completion.token_ids][: token_ids_BT.shape[1]])
            token_ids_BT[row, : len(token_ids)] = token_ids
        return self._image.begun(token_ids_BT) if self._image else token_ids_BT

    def expected(self, backend: BaseBackend) -> Tensor:
        """Return the trainer's log-probs (sequences, length - 1); call this while its model is on its device.

        Raises DivergedError if they are not finite.
        """
        batch = _batch(self.token_ids_BT)
        expected_BT = backend.forward(self._image.shown(batch) if self._image else batch)[:, 1:].cpu()
        if not expected_BT.isfinite().all():
            raise DivergedError(
                "The policy's log-probs are not finite (NaN or infinite). Lower training.lr and resume from an earlier "
                "checkpoint; before the first step, check the weights in model.path."
            )
        return self._image.compared(expected_BT) if self._image else expected_BT

    def _seen(self, row: int) -> dict[str, Any]:
        """Return the option `images` of a sequence with any."""
        images = self._image.images(row, len(self.token_ids_BT)) if self._image else ()
        return {"images": images} if images else {}

    async def verify(self, backend: BaseBackend, client: BaseClient, weight_ref: WeightRef) -> float:
        """Call `compare` with the backend's current log-probs."""
        return await self.compare(self.expected(backend), client, weight_ref)

    async def compare(self, expected_BT: Tensor, client: BaseClient, weight_ref: WeightRef) -> float:
        """Return the largest of all engines' mean differences in nats; the first call calibrates their tolerances.

        Raises StaleWeightsError when an engine exceeds the tolerance or reports another version than was published, and
        DivergedError when it follows a policy that moved too far in one step.
        The fleet handles engines that cannot be reached, but at least one must answer: while there is none, this waits as
        `client` does, and raises UnreachableError after a few attempts.
        """
        for _ in range(ROUNDS):
            engines = client.engines()
            questions = [
                self._ask(engine, expected_BT, weight_ref, self.tolerance(engine, expected_BT))
                for engine in engines
            ]
            answers = await asyncio.gather(*questions, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, UnreachableError):
                    raise answer
            differences = {
                str(engine): answer
                for engine, answer in zip(engines, answers, strict=True)
                if isinstance(answer, float)
            }
            if differences:
                uncertain = _uncertainty(expected_BT)
                self._calibrated = self._calibrated or {
                    name: apart / uncertain for name, apart in differences.items()
                }
                self.apart = max(differences.values())
                return self.apart
            await client.version()  # a fleet waits here for a server, and raises when none comes back
        raise UnreachableError(
            f"{client} could not be asked whether it holds version {weight_ref.version}, in {ROUNDS} attempts. "
            f"{'; '.join(map(str, answers))} Training stops; look for the reason in the server's log."
        )

    def tolerance(self, engine: BaseClient, expected_BT: Tensor) -> float:
        """Return the largest accepted mean difference of this engine in nats, given the trainer's log-probs."""
        if not self._calibrated:
            return self.bound
        usual = self._calibrated.get(str(engine), max(self._calibrated.values()))
        return min(self.bound, FACTOR * max(usual, self._floor) * _uncertainty(expected_BT))

    async def _ask(
        self, engine: BaseClient, expected_BT: Tensor, weight_ref: WeightRef, tolerance: float
    ) -> float:
        version = await engine.version()
        if version != weight_ref.version:
            raise StaleWeightsError(
                f"{engine} reports version {version} after version {weight_ref.version} was published, so training stops."
            )
        rows = enumerate(self.token_ids_BT.tolist())
        scored_BT = torch.tensor([await engine.score(ids, **self._seen(row)) for row, ids in rows])
        scored_BT = self._image.compared(scored_BT) if self._image else scored_BT
        difference = (scored_BT - expected_BT).abs().mean().item()
        if not difference <= tolerance:  # NaN is beyond any tolerance
            _, before_BT = self._last.get(str(engine), (None, expected_BT))
            moved = (expected_BT - before_BT).abs().mean().item()
            if moved > LEAP and difference <= moved * self.bound:  # the engine did follow, all of it
                raise DivergedError(
                    f"Training diverges: the step to version {version} moved the policy's log-probs of the canary's tokens "
                    f"by {moved:.3g} nats on average. Lower training.lr, and resume from a checkpoint before the change."
                )
            raise StaleWeightsError(
                f"{engine} does not hold version {version}: its log-probs of the canary's tokens differ from "
                f"the trainer's by {difference:.3g} nats on average, more than {tolerance:.3g}. Check how the weights reach "
                "it, and its dtype; if it is quantized, set sync.tolerance to what that may cost."
            )
        self._check_moved(engine, scored_BT, expected_BT, version)
        return difference

    def _check_moved(self, engine: BaseClient, scored_BT: Tensor, expected_BT: Tensor, version: int) -> None:
        """Raise StaleWeightsError if the engine's scores stayed the same to the last bit while the trainer's moved.

        One step may change less than the tolerance, but identical scores mean that the engine kept its weights. Changes
        too small to show add up, since they are measured from when the engine first gave these scores.
        """
        before_BT, expected_before_BT = self._last.get(str(engine), (None, expected_BT))
        if before_BT is None or not torch.equal(scored_BT, before_BT):
            self._last[str(engine)] = scored_BT, expected_BT
            return
        moved = (expected_BT - expected_before_BT).abs().mean().item()
        if moved > self._noise:
            raise StaleWeightsError(
                f"{engine} still holds the weights before version {version}: its log-probs of the canary's tokens have not "
                f"changed, while the trainer's moved by {moved:.3g} nats. Check how the weights reach the engine."
            )


class CanaryImage:
    """Begins the last of the canary's sequences: a few tokens with an image of noise, the same in every run.

    Attributes:
        token_ids: how the sequence begins.
        places: that of the image among them.
    """

    def __init__(self, vision: Vision):
        self._vision = vision
        self.token_ids, self.places = vision.probe()

    def begun(self, token_ids_BT: Tensor) -> Tensor:
        """Return the sequences; the last one begins with the image, and no other token is a placeholder.

        Some servers take every placeholder for an image.
        """
        token_ids_BT[torch.isin(token_ids_BT, torch.tensor(self._vision.media))] = 0
        token_ids_BT[-1, : len(self.token_ids)] = torch.tensor(self.token_ids)
        return token_ids_BT

    def images(self, row: int, rows: int) -> Sequence[ImagePlace]:
        return self.places if row == rows - 1 else ()

    def compared(self, logprobs_BT: Tensor) -> Tensor:
        """Return the log-probs of the tokens that follow what is given, (N,); those of image tokens mean nothing."""
        compared_BT = torch.ones_like(logprobs_BT, dtype=torch.bool)
        compared_BT[-1, : len(self.token_ids) - 1] = False
        return logprobs_BT[compared_BT]

    def shown(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch of the sequences with the image in the last."""
        rows, length = batch.token_ids_BT.shape
        feature_ids_BT = torch.full((rows, length), -1)
        (place,) = self.places
        feature_ids_BT[-1, place.offset : place.end] = torch.arange(place.length)
        axes = [self._vision.positions(length, self.images(row, rows)) for row in range(rows)]
        axes_BTA = torch.stack([torch.from_numpy(positions) for positions in axes])
        several = axes_BTA if self._vision.axes > 1 else None
        return replace(batch, feature_ids_BT=feature_ids_BT, images=(place.image,), axes_BTA=several)


def token_mismatch(batch: TrainBatch, logprobs_BT: Tensor, newest_BT: Tensor | None = None) -> TokenMetrics:
    """Return numbers per token (B, T): |difference| in nats, k3 of KL(engine || trainer), importance weight, its square.

    They are only meaningful before the first optimizer step of a rollout, when both hold the same weights. Where older
    weights sampled too, `newest_BT` says which tokens the trainer's weights sampled; the others count as 0 in all of them.
    """
    difference_BT = logprobs_BT.detach() - batch.sampled_logprobs_BT
    weight_BT = difference_BT.exp()
    metrics = {
        PREFIX + "mean": difference_BT.abs(),
        PREFIX + "max": difference_BT.abs(),
        PREFIX + "k3": weight_BT - 1 - difference_BT,
        WEIGHT: weight_BT,
        SQUARE: weight_BT.square(),
    }
    if newest_BT is None:
        return metrics
    return {name: value_BT.where(newest_BT, 0.0) for name, value_BT in metrics.items()} | {
        NEWEST: newest_BT.to(difference_BT.dtype)
    }


def sampled_by(version: int, records: Sequence[tuple[TokenSpan, ...]], batch: TrainBatch) -> Tensor:
    """Return which policy tokens (B, T) of a batch a version of the weights sampled; `records` are those of its update."""
    sampled_BT, mask_BT = torch.zeros_like(batch.mask_BT), batch.mask_BT
    if batch.record_ids_BT is None:
        return sampled_BT
    record_ids, places = batch.record_ids_BT[mask_BT].tolist(), batch.position_ids_BT[mask_BT].tolist()
    versions = {i: [span.version for span in records[i] for _ in span.token_ids] for i in {*record_ids}}
    matches = [versions[i][place] == version for i, place in zip(record_ids, places, strict=True)]
    sampled_BT[mask_BT] = torch.tensor(matches, dtype=torch.bool, device=mask_BT.device)
    return sampled_BT


def summarize_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the importance weights in the metrics of a step with their effective sample size, as a share.

    The share is mean(w)^2 / mean(w^2) over the tokens (Kong 1992): 1 when engine and trainer agree. Means are those of the
    tokens that the newest weights sampled; without such tokens nothing was measured.
    """
    if NEWEST in metrics:
        share, apart = metrics[NEWEST], {PREFIX + "max", NEWEST}
        mismatches = {name: value for name, value in metrics.items() if name.startswith(PREFIX)}
        means = {
            name: value if name in apart else value / share for name, value in mismatches.items() if share
        }
        metrics = (
            {name: metrics[name] for name in metrics.keys() - mismatches.keys()} | {NEWEST: share} | means
        )
    summary = {name: value for name, value in metrics.items() if name not in (WEIGHT, SQUARE)}
    if WEIGHT in metrics:
        summary[PREFIX + "ess"] = metrics[WEIGHT] ** 2 / max(metrics[SQUARE], 1e-30)
    return summary


def check_mismatch(
    metrics: Mapping[str, float], stop_above: float | None, apart: float | None = None
) -> None:
    """Raise MismatchError if the mean difference in nats exceeds `stop_above`.

    In a step that measured none, such as one that trains on old tokens only, it is that of the canary's tokens, `apart`.
    """
    mean, tokens = metrics.get(PREFIX + "mean"), f"largest {metrics.get(PREFIX + 'max', 0.0):.3g}"
    if mean is None:
        mean, tokens = apart or 0.0, "of the canary's tokens"
    if stop_above is not None and not mean <= stop_above:
        raise MismatchError(
            f"Log-probs of engine and trainer differ by {mean:.3g} nats on average, more than mismatch.stop_above="
            f"{stop_above:g} ({tokens}). Next: give both the same dtype, check the engine's kernels, or raise the limit."
        )


def mismatch_warning(metrics: Mapping[str, float], bound: float) -> str:
    """Return a warning if a step's mismatch is more than rounding, else "".

    Its mean may be as large as `bound` nats, the canary's, and that of one token 10 times as large.
    """
    mean, largest = metrics.get(PREFIX + "mean", 0.0), metrics.get(PREFIX + "max", 0.0)
    if mean <= bound and largest <= PEAK * bound:
        return ""
    return (
        f"Log-probs of engine and trainer differ by {mean:.3g} nats on average, by {largest:.3g} at most. Rounding explains "
        f"{bound:g} and {PEAK * bound:g}. Samples of another distribution bias every step. Next: check the engine's "
        "sampling options, kernels and dtype; mismatch.stop_above stops a run on it."
    )


def _uncertainty(logprobs_BT: Tensor) -> float:
    """Return the mean probability of all tokens other than these."""
    return max(1 - logprobs_BT.exp().mean().item(), LEAST_UNCERTAINTY)


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

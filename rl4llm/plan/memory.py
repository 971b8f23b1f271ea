"""How much memory each phase of a step takes on one device, from sizes alone.

Every term is a formula with its reason beside it. What is counted: tensors of the models, their optimizers, activations, the
head's logits, the cache of an embedded engine. What is not: CUDA's own context and the holes between blocks, for which
`RESERVE` is left; on a CPU, Python and its libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl4llm.backends.heads import KEEP_BYTES, TILE_BYTES
from rl4llm.build.models import device_of
from rl4llm.config import Config
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.inference.engine import LOOKAHEAD, PREFILL_TOKENS
from rl4llm.inference.kv_cache import LENGTH_STEP
from rl4llm.plan.counts import Counts
from rl4llm.plan.shape import ModelShape

FP32 = 4
MOMENTS = 2
BATCH_BYTES = 80
"""Of a token in a TrainBatch: six columns of 8 bytes, six of 4, one of 1, and what the algorithm adds."""
ZERO_BUCKET = 500_000_000
"""Numbers in DeepSpeed's bucket of gradients, at most; see rl4llm.backends.deepspeed_config."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which parts of a model the ranks share out, and which lie in the memory of the CPU instead.

    `master` says that the optimizer has fp32 copies of what it trains, `sums` how many bytes a number of a gradient has, 0
    where it has those of the weight. Rajbhandari et al. 2020 (ZeRO), section 5; DeepSpeed keeps a master also for fp32.
    """

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    master: bool = False
    sums: int = 0
    bucket: bool = False
    weights_on_cpu: bool = False
    optimizer_on_cpu: bool = False


def sharing_of(backend: Mapping[str, Any], ranks: int, weight_bytes: int) -> Sharing:
    """What the options of `backend` say; one rank alone shares nothing."""
    if backend["name"] == "deepspeed":
        given = backend.get("config")
        section = given if isinstance(given, Mapping) else {}
        stage = backend.get("zero_stage")
        stage = section.get("zero_optimization", {}).get("stage", 2) if stage is None else stage
        return Sharing(
            weights=stage >= 3 and ranks > 1,
            gradients=stage >= 2 and ranks > 1,
            optimizer=stage >= 1 and ranks > 1,
            master=stage >= 1,
            sums=FP32 if stage >= 1 or weight_bytes == FP32 else 0,
            bucket=stage >= 1,
            weights_on_cpu=bool(backend.get("offload_param")),
            optimizer_on_cpu=bool(backend.get("offload_optimizer")),
        )
    sharded = backend.get("shard") == "fsdp2" and ranks > 1
    offloads = bool(backend.get("cpu_offload")) and sharded
    return Sharing(sharded, sharded, sharded, weights_on_cpu=offloads, optimizer_on_cpu=offloads)


@dataclass(frozen=True, slots=True)
class Model:
    """One model on one device, in bytes. `gathered` is what exists only while it runs, of what the ranks share; `piece` the
    most of it that comes to the device at once when it is loaded."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    whole: int  # its weights before they are shared out
    piece: int


def model_memory(
    shape: ModelShape, sharing: Sharing, ranks: int, *, weight_bytes: int, trains: bool, autocast: bool
) -> Model:
    """Weights, gradients and Adam's two moments (Kingma & Ba 2015, algorithm 1) of a model that `trains`, or not.

    An adapter is fp32 whatever the model's dtype; its base has neither gradients nor moments.
    """
    trained = shape.trained() if trains else 0
    adapter = shape.adapter if trains else 0
    number = FP32 if adapter else weight_bytes
    whole = shape.parameters * weight_bytes + adapter * FP32
    gathered = 0
    if sharing.weights or sharing.weights_on_cpu:  # the root stays whole from forward to backward, a layer comes ahead
        computed = 2 if autocast else weight_bytes
        gathered = shape.root * weight_bytes + 2 * shape.layer * computed
        gathered += (shape.root * weight_bytes + shape.layer * FP32) if trained == shape.parameters else 0
    if sharing.bucket and trained:
        gathered += min(ZERO_BUCKET, trained) * (sharing.sums or number)
    state = trained * (MOMENTS * (FP32 if sharing.master else number) + (FP32 if sharing.master else 0))
    gradient = trained * (sharing.sums or number)
    return Model(
        weights=0 if sharing.weights_on_cpu else _share(whole, ranks, sharing.weights),
        gradients=0 if sharing.weights_on_cpu else _share(gradient, ranks, sharing.gradients),
        optimizer=0 if sharing.optimizer_on_cpu else _share(state, ranks, sharing.optimizer),
        gathered=gathered,
        whole=whole,
        piece=max(shape.root, shape.layer) * weight_bytes,
    )


def _share(size: int, ranks: int, sharded: bool) -> int:
    return -(-size // ranks) if sharded else size


@dataclass(frozen=True, slots=True)
class Numbers:
    """How many bytes a number has: of weights, of what layers compute, and of what stands between layers."""

    weights: int
    computed: int
    between: int
    autocast: bool

    @classmethod
    def of(cls, config: Config) -> Numbers:
        weights = 2 if config.model.dtype == "bfloat16" else FP32
        autocast = config.model.autocast == "bfloat16" and weights == FP32
        return cls(weights, 2 if autocast else weights, weights, autocast)


def layer_activations(shape: ModelShape, numbers: Numbers, tokens: int, keys: int) -> int:
    """What one layer keeps for its backward pass, counted from the saved tensors of a Llama layer (tests/plan).

    Between layers: the two inputs of its norms. Computed: the outputs of the norms, which all projections behind them share;
    queries, attention's output and the copy of it that the projection reads; keys and values of all positions that are
    attended to; of a gated MLP gate, its activation, up and their product. Korthikanti et al. 2022, section 4.1, count those
    of GPT in the same way.
    """
    attention, keyed = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    computed = tokens * (2 * shape.hidden + 3 * attention + (4 if shape.gated else 2) * shape.mlp) + keys * 2 * keyed
    between = tokens * 2 * shape.hidden
    normalisers = tokens * (shape.heads + 2) * FP32
    return computed * numbers.computed + between * numbers.between + normalisers


def activations(shape: ModelShape, numbers: Numbers, tokens: int, keys: int, *, checkpointing: bool) -> int:
    """What a forward pass leaves for the backward pass: all layers, or with checkpointing (Chen et al. 2016) the input of
    each, and one whole layer that is computed again."""
    layer = layer_activations(shape, numbers, tokens, keys)
    ends = tokens * shape.hidden * (numbers.between + numbers.computed)  # before and behind the last norm
    if checkpointing:
        return shape.layers * tokens * shape.hidden * numbers.between + layer + ends
    return shape.layers * layer + ends


def working(shape: ModelShape, numbers: Numbers, tokens: int, *, backward: bool) -> int:
    """What one layer has beside that while it computes: the outputs of its MLP, or their gradients, and the stream's."""
    wide = (3 if shape.gated else 2) * shape.mlp
    return tokens * (wide * numbers.computed + (4 if backward else 3) * shape.hidden * numbers.between)


def head(shape: ModelShape, numbers: Numbers, asked: int, *, backward: bool, trains: bool, values: bool) -> int:
    """Log-probs of `asked` tokens by `rl4llm.backends.heads`: a tile of fp32 logits at a time, of which so many are kept.

    In the backward pass also the fp32 gradients of the hidden states and, where the output layer trains, of its weight,
    which are added to the model's own at its end. A value head has one number per token.
    """
    hidden = asked * shape.hidden
    if values:
        return hidden * (numbers.between + FP32)
    logits = asked * shape.vocabulary * FP32
    tiles = 3 * min(TILE_BYTES, logits)
    if not backward:
        return hidden * numbers.between + tiles
    weight = shape.vocabulary * shape.hidden * FP32 if trains else 0
    return hidden * (2 * numbers.between + FP32) + tiles + min(KEEP_BYTES, logits) + weight


def cache_bytes(shape: ModelShape, rows: int, length: int, number: int) -> int:
    """Keys and values of all layers for so many rows of so many tokens: 2 x layers x heads x width."""
    return rows * length * shape.layers * 2 * shape.kv_heads * shape.head_dim * number


@dataclass(frozen=True, slots=True)
class Phase:
    """What is on a device at once in a phase of a step, in bytes by what it is."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Models:
    """The shapes of a run's models: critic and reference where the algorithm has them, and `others` that judge or play."""

    policy: ModelShape
    critic: ModelShape | None = None
    reference: ModelShape | None = None
    others: Mapping[str, int] = field(default_factory=dict)  # bytes by name


def phases(config: Config, algorithm: BaseAlgorithm, counts: Counts, models: Models, ranks: int) -> list[Phase]:
    """What a device holds in each phase, once the optimizer has its moments."""
    return _Memory(config, algorithm, counts, models, ranks).phases()


class _Memory:
    """One device's phases."""

    def __init__(self, config: Config, algorithm: BaseAlgorithm, counts: Counts, models: Models, ranks: int):
        self.config, self.needs, self.counts, self.models, self.ranks = config, algorithm.needs(), counts, models, ranks
        self.numbers = Numbers.of(config)
        sharing = sharing_of(config.backend, ranks, self.numbers.weights)
        self.policy = self._model(models.policy, sharing, trains=True)
        self.critic = self._model(models.critic, sharing, trains=True) if models.critic else None
        self.reference = self._model(models.reference, sharing, trains=False) if models.reference else None
        self.samples = self.needs.learns_from == "episodes"
        self.embedded = self.samples and config.inference["name"] == "local"
        self.cohosted = self.samples and bool(config.inference.get("cohost"))

    def phases(self) -> list[Phase]:
        found = [self._start()]
        if self.samples:
            found.append(self._rollout())
        if self.needs.old_logprobs or self.needs.reference or self.needs.critic:
            found.append(self._logprobs())
        if self.critic and self.models.critic:
            found.append(self._update("critic", self.models.critic, self.critic, values=True))
        found.append(self._update("update", self.models.policy, self.policy, values=self.needs.value_head))
        return [Phase(phase.name, {name: size for name, size in phase.parts.items() if size}) for phase in found]

    def _model(self, shape: ModelShape, sharing: Sharing, *, trains: bool) -> Model:
        numbers = self.numbers
        return model_memory(
            shape, sharing, self.ranks, weight_bytes=numbers.weights, trains=trains, autocast=numbers.autocast
        )

    def _resident(self) -> dict[str, int]:
        """What stays through all phases."""
        return {
            "weights": self.policy.weights,
            "optimizer": self.policy.optimizer,
            "critic": self.critic.weights + self.critic.optimizer if self.critic else 0,
            "reference": self.reference.weights if self.reference else 0,
            **self.models.others,
        }

    def _start(self) -> Phase:
        """One model after the other is loaded. What the ranks share out comes to a device in pieces; on a CPU it is in the
        first one's memory before."""
        kept, most = sum(self.models.others.values()), 0
        for model in filter(None, (self.policy, self.critic, self.reference)):
            in_pieces = model.weights < model.whole and device_of(self.config) != "cpu"
            most = max(most, kept + (model.weights + model.piece if in_pieces else model.whole))
            kept += model.weights
        return Phase("start", {"weights of all models": most})

    def _rollout(self) -> Phase:
        """The engine plays; of a server that takes turns on the device the trainer has left it."""
        shape, counts = self.models.policy, self.counts
        if self.cohosted:
            cache = cache_bytes(shape, counts.trajectories * self.ranks, counts.longest, self.numbers.weights)
            own = shape.parameters * self.numbers.weights
            return Phase("rollout", {"server's weights": own, "server's KV cache": cache})
        if not self.embedded:
            return Phase("rollout", self._resident())
        rows = min(int(self.config.inference.get("max_rows", 256)), max(counts.trajectories, counts.held_out))
        length = -(-(counts.longest + LOOKAHEAD) // LENGTH_STEP) * LENGTH_STEP
        filling = min(PREFILL_TOKENS, rows * counts.prompt_tokens)
        sampling = max(working(shape, self.numbers, filling, backward=False), 3 * rows * shape.vocabulary * FP32)
        cache = cache_bytes(shape, rows, length, self.numbers.weights)
        return Phase("rollout", {**self._resident(), "KV cache": cache, "sampling": sampling})

    def _logprobs(self) -> Phase:
        """Passes without a gradient: of the policy before its update, the reference, the critic."""
        counts, shape = self.counts, self.models.policy
        passing = working(shape, self.numbers, counts.tokens, backward=False) + self._casts(shape)
        asked = head(shape, self.numbers, counts.trains, backward=False, trains=False, values=self.needs.value_head)
        running = max(model.gathered for model in (self.policy, self.critic, self.reference) if model)
        parts = {"layers": passing, "log-probs": asked, "gathered": running, "batches": self._batches()}
        return Phase("log-probs", {**self._resident(), **parts})

    def _update(self, name: str, shape: ModelShape, model: Model, *, values: bool) -> Phase:
        counts, checkpointing = self.counts, self.config.model.gradient_checkpointing
        kept = activations(shape, self.numbers, counts.tokens, counts.keys, checkpointing=checkpointing)
        trains_head = not shape.adapter
        asked = head(shape, self.numbers, counts.trains, backward=True, trains=trains_head, values=values)
        # A first micro-batch makes gradients while its activations go; a second one meets all of them.
        gradients = model.gradients
        layers = kept + working(shape, self.numbers, counts.tokens, backward=True) + self._casts(shape)
        parts = {"gradients": gradients, "activations": layers, "log-probs": asked, "gathered": model.gathered}
        if counts.micro_batches == 1:
            parts = _either(gradients, layers, asked) | {"gathered": model.gathered}
        return Phase(name, {**self._resident(), **parts, "batches": self._batches()})

    def _casts(self, shape: ModelShape) -> int:
        """Autocast keeps a copy of each weight of a linear layer until the pass is over; FSDP2 casts what it gathers."""
        sharded = self.config.backend.get("shard") == "fsdp2" and self.ranks > 1
        return 2 * shape.linear if self.numbers.autocast and not sharded else 0

    def _batches(self) -> int:
        """Batches stay in the memory of the CPU; a GPU has one micro-batch at a time."""
        return (self.counts.step_tokens if device_of(self.config) == "cpu" else self.counts.padded) * BATCH_BYTES


def _either(gradients: int, layers: int, asked: int) -> dict[str, int]:
    """Of a single micro-batch: layers give up their activations as their gradients come, so the larger of both counts."""
    if gradients > layers:
        return {"gradients": gradients, "log-probs": asked}
    return {"activations": layers, "log-probs": asked}

"""The memory of a model in bytes, computed from its sizes alone; nothing is loaded.

Backends and engines answer `memory(...)` with these records; `rl4llm plan` adds the answers up.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4
NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # a weight, a byte of scale for 64, an fp32 scale for 256 of these
INT8 = 1 + 4 / 256  # a number of a moment, and an fp32 scale for 256 of them
ONE_SEQUENCE = "server's KV cache of one sequence"


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a number: `weights` of what is stored and of what stands between layers, `computed` inside the layers.

    `moments` are those of one of Adam's two moments. `gpu` says whether a GPU computes, which works on larger pieces.
    """

    weights: int = FP32
    autocast: bool = False
    gpu: bool = False
    moments: float = FP32

    @classmethod
    def of(cls, dtype: str, autocast: str = "none", *, gpu: bool = False) -> Precision:
        """Return the precision of `model.dtype` and `model.autocast`."""
        weights = 2 if dtype == "bfloat16" else FP32
        return cls(weights, autocast == "bfloat16" and weights == FP32, gpu)

    @property
    def computed(self) -> int:
        return 2 if self.autocast else self.weights


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model, in numbers, not bytes.

    `linear` counts the weights of linear layers, which autocast copies, and `packed` those in 4 bits, which it does not;
    `root` those outside the layers, of embeddings, head and last norm; `layer` those of one layer. `gated` says whether the
    MLP multiplies two projections, as Llama's does.
    """

    name: str
    parameters: int
    linear: int
    root: int
    layer: int
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool
    adapter: int = 0
    packed: int = 0

    def layer_activations(self, precision: Precision, tokens: int, keys: int) -> int:
        """Return the bytes that one layer keeps for its backward pass, counted from the saved tensors of a Llama layer.

        Between layers: the two inputs of its norms. Computed: the outputs of the norms, which all projections behind them
        share; queries, attention's output and the copy of it that the projection reads; keys and values of all positions
        that are attended to; of a gated MLP gate, its activation, up and their product. Korthikanti et al. 2022, section
        4.1, count those of GPT in the same way. In fp32 a GPU repeats the keys of shared prompts for all heads.
        """
        attention = self.heads * self.head_dim
        repeated = precision.gpu and precision.computed == FP32 and keys > tokens
        keyed = (self.heads if repeated else self.kv_heads) * self.head_dim
        wide = (4 if self.gated else 2) * self.mlp
        computed = tokens * (2 * self.hidden + 3 * attention + wide) + keys * 2 * keyed
        between = tokens * 2 * self.hidden
        normalisers = tokens * (self.heads + 2) * FP32
        num_bytes = computed * precision.computed + between * precision.weights + normalisers
        return num_bytes + tokens * self._adapter_inputs(precision)

    def _adapter_inputs(self, precision: Precision) -> int:
        """Return what an adapter keeps of each token beyond the inputs that all projections share.

        Each adapted layer casts its input for itself; the frozen layer beside it keeps none.
        """
        if not self.adapter or precision.computed == FP32:
            return 0
        ends = self.heads * self.head_dim + self.mlp  # of attention's output and the MLP's
        inputs = (5 if self.gated else 4) * self.hidden + ends
        return inputs * (2 if precision.autocast else FP32) - (2 * self.hidden + ends) * precision.computed

    def activations(self, precision: Precision, tokens: int, keys: int, *, checkpointing: bool) -> int:
        """Return the bytes that a forward pass keeps for the backward pass: all layers, or with checkpointing the input of
        each layer and one whole layer that is computed again (Chen et al. 2016)."""
        layer = self.layer_activations(precision, tokens, keys)
        # before and behind the last norm
        ends = tokens * self.hidden * (precision.weights + precision.computed)
        if checkpointing:
            return self.layers * tokens * self.hidden * precision.weights + layer + ends
        return self.layers * layer + ends

    def working(self, precision: Precision, tokens: int, *, backward: bool) -> int:
        """Return further bytes while one layer computes: the outputs of its MLP, or their gradients, and the stream's."""
        wide = (3 if self.gated else 2) * self.mlp * (FP32 if self.adapter else precision.computed)
        return tokens * (wide + (4 if backward else 3) * self.hidden * precision.weights)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """One model on one rank, in bytes.

    `gathered` exists only while the model runs, of what the ranks share; `casts` are the copies that autocast makes of
    weights for the time of a pass. `whole` is its weights before they are shared out, and `piece` the most of them that
    comes to the device at once while they are loaded. `saved` is what a checkpoint writes. `host` is what offload keeps in
    the CPU's memory beside a GPU, all the time. `buckets` are those of DDP, which never leave the device.
    """

    weights: int
    gradients: int
    optimizer: int
    whole: int
    piece: int
    saved: int
    casts: int = 0
    gathered: int = 0
    host: int = 0
    buckets: int = 0

    @classmethod
    def of(cls, shape: ModelShape, precision: Precision, *, trains: bool) -> ModelMemory:
        """Return the memory of a whole model on one rank: weights and, where it `trains`, gradients and Adam's two moments
        (Kingma & Ba 2015, algorithm 1), which are fp32 when the optimizer steps. Weights of 16 bits have fp32 masters too.
        An adapter is always fp32; its base has neither gradients nor moments."""
        base = (shape.parameters - shape.packed) * precision.weights + round(shape.packed * NF4)
        adapter = shape.adapter * FP32 if trains else 0
        trained = (shape.adapter or shape.parameters) * FP32 if trains else 0
        masters = trained if precision.weights < FP32 and not adapter else 0
        moments = round(2 * trained / FP32 * precision.moments)
        dequantized = shape.hidden * shape.mlp if shape.packed else 0  # the largest layer while it computes
        return cls(
            weights=base + adapter,
            gradients=trained,
            optimizer=masters + moments,
            whole=base + adapter,
            piece=max(shape.root, shape.layer) * precision.weights,
            saved=trained + moments,
            # Autocast keeps a copy of each weight of a linear layer until the pass is over.
            casts=(2 * (shape.linear + dequantized) if precision.autocast else 0)
            + dequantized * precision.weights,
        )


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine plays for a rank at most: sequences, and the tokens of a prompt and of the longest sequence."""

    sequences: int
    prompt_tokens: int
    longest: int

"""How long a rollout decodes on a GPU, from the numbers of the card: the embedded engine beside a server.

These are estimates for answers of the maximum length. Prompts, tools, rewards and the weight sync are not counted. The
numbers of the embedded engine are those that docs/gpu.md measured on an H100. Those of a server are not measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.model_memory import FP32
from rl4llm.extensions.inspect.check.times import span
from rl4llm.extensions.inspect.plan.plan import SERVER_SHARE, RunPlan
from rl4llm.inference.embedded.kv_cache import KVCache
from rl4llm.inference.embedded.llama_decode import FAMILY
from rl4llm.inference.local import MAX_ROWS

CLEARLY = 1.3
"""A server is advised if it decodes more than this many times as fast."""

LOGITS = 4
"""Times that a sampler reads or writes the logits of a step in fp32."""


class Card(NamedTuple):
    """What a GPU reaches: bytes of memory, bytes/s of a copy, FLOP/s in bf16.

    A kernel takes `kernel_s` seconds in a CUDA graph, and `launch_s` if the host launches it.
    """

    memory: int
    bandwidth: float
    flops: float
    kernel_s: float = 3e-6
    launch_s: float = 10.8e-6


class Kernels(NamedTuple):
    """The kernels of a decoding step in each layer and outside the layers, and the seconds that the host adds to it."""

    layer: float
    others: int
    host_s: float = 0.0


CAPTURED, LAUNCHED, SERVER = Kernels(14.5, 60, 3e-4), Kernels(32, 40), Kernels(11, 0)
"""The embedded engine with CUDA graphs and without, and a server."""


def _sheet(memory: int, bandwidth: float, flops: float) -> Card:
    """Return what programs reach of the TB/s and the dense bf16 TFLOP/s in a data sheet; the memory is in GiB."""
    return Card(memory << 30, 0.9e12 * bandwidth, 0.6e12 * flops)


CARDS = {  # with the memory that torch finds
    "H200": _sheet(139, 4.8, 989),
    "H100": Card(79 << 30, 3.0e12, 600e12),
    "A100-80GB": _sheet(79, 2.0, 312),
    "A100-40GB": _sheet(39, 1.555, 312),
    "L40S": _sheet(44, 0.864, 362),
    "RTX-4090": _sheet(23, 1.008, 165),
    "RTX-3090": _sheet(23, 0.936, 71),
}


class DecodingTime(NamedTuple):
    """A rollout on one device: `rows` decode at once, in `waves` one after the other, each `steps` tokens."""

    rows: int
    waves: int
    steps: int
    step_s: float
    total_s: float

    def __str__(self) -> str:
        return f"{span(self.total_s)} ({self.waves} x {self.rows:,} rows, {1e3 * self.step_s:.1f} ms a token)"


class RolloutTime(NamedTuple):
    """The same rollout on a card, with the embedded engine and with a server on each device."""

    card: str
    embedded: DecodingTime
    server: DecodingTime
    sequences: int
    local: bool  # the configuration has the embedded engine

    def lines(self) -> Iterator[str]:
        """Yield the report for people, with advice if a server is clearly better."""
        yield f"A rollout on {self.card} decodes for {self.embedded} with the embedded engine, {self.server} with a server."
        yield "This is an estimate for answers of the maximum length, without prompts, tools and the weight sync."
        ratio = self.embedded.total_s / self.server.total_s
        if self.local and ratio > CLEARLY:
            rows = f", or try inference.max_rows={self.sequences}" if self.embedded.waves > 1 else ""
            yield (
                f"inference.name=local: a server would decode {ratio:.1f} times as fast. Next: start one with "
                f"scripts/launch_sglang.sh and set inference.name=sglang (docs/engines.md){rows}."
            )

    def as_json(self) -> dict[str, Any]:
        """Return the card, and the rows, tokens and seconds of both."""
        return {"gpu": self.card, "embedded": self.embedded._asdict(), "server": self.server._asdict()}


class NotEstimated(NamedTuple):
    """Why it is not known how long a rollout decodes on a card."""

    card: str
    reason: str

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        yield f"How long a rollout decodes on {self.card} is not estimated: {self.reason}."

    def as_json(self) -> dict[str, Any]:
        """Return the card and the reason."""
        return {"gpu": self.card, "not_estimated": self.reason}


def find_card(words: str) -> str | None:
    """Return the key in `CARDS` of a name such as "NVIDIA A100-SXM4-80GB"; None for other cards and parts of one."""
    given = set(re.split(r"[\s-]+", words.upper()))
    found = [name for name in CARDS if set(name.upper().split("-")) <= given]
    slower = given & {"MIG", "LAPTOP"} or {"H100", "PCIE"} <= given
    return found[0] if found and not slower else None


def given_card(words: str, device: str) -> str:
    """Return the key of the card that --gpu names. Raises ConfigError for an unknown card, or a plan for a CPU."""
    if device == "cpu":
        raise ConfigError(f"--gpu {words} needs a GPU, but model.device='cpu'. Use model.device=auto.")
    name = find_card(words)
    if name is None:
        raise ConfigError(unknown("--gpu", words, CARDS))
    return name


def estimate(plan: RunPlan, card: str | None, *, here: bool) -> RolloutTime | NotEstimated | None:
    """Return how a rollout decodes on a card, by default on this machine's if the plan is for it, or why that is unknown.

    None for a CPU or another card, and if nothing decodes.
    """
    if here and plan.device != "cpu":
        card = find_card(torch.cuda.get_device_name(torch.device(plan.device)))
    config, counts, shape = plan.config, plan.counts, plan.models.policy
    if card is None or all(phase.name != "rollout" for phase in plan.phases):
        return None
    number = plan.machine.precision.computed
    sequence = KVCache.memory(shape, 1, counts.longest, number)
    room = (int(plan.memory * SERVER_SHARE) - shape.parameters * number) // sequence
    local = config.inference["name"] == "local"
    options = config.inference if local else {}
    path = options.get("path", "auto")
    reason = ""
    if number != 2:
        reason = "products are in float32, and only bfloat16 was measured. Next: set model.autocast=auto"
    elif room < 1:
        reason = "a server has no room for one sequence beside its weights"
    elif path == "model" or shape.name not in FAMILY:
        reason = f"the embedded engine runs {shape.name} with its own forward, which was not measured"
    if reason:
        return NotEstimated(card, reason)
    captured = path in ("auto", "graph")
    limit, kernels = int(options.get("max_rows", MAX_ROWS)), CAPTURED if captured else LAUNCHED
    embedded = _decoding(plan, CARDS[card], kernels, limit)
    server = _decoding(plan, CARDS[card], SERVER, room)
    return RolloutTime(card, embedded, server, counts.trajectories, local)


def _decoding(plan: RunPlan, card: Card, kernels: Kernels, limit: int) -> DecodingTime:
    sequences, steps = plan.counts.trajectories, plan.counts.new_tokens
    rows = min(limit, sequences)
    waves, one = -(-sequences // rows), step_s(plan, card, kernels, rows)
    return DecodingTime(rows, waves, steps, one, waves * steps * one)


def step_s(plan: RunPlan, card: Card, kernels: Kernels, rows: int) -> float:
    """Return the seconds of one more token for each of `rows` sequences, when half of each answer exists.

    Products take the time of reading all weights or of computing, whichever is longer. The cache is read once.
    """
    shape, counts = plan.models.policy, plan.counts
    products = 2 * shape.parameters * max(1 / card.bandwidth, rows / card.flops)
    cache = KVCache.memory(shape, rows, counts.prompt_tokens + counts.new_tokens // 2, 2) / card.bandwidth
    each_s = card.launch_s if kernels is LAUNCHED else card.kernel_s
    launches = (kernels.layer * shape.layers + kernels.others) * each_s + kernels.host_s
    return products + cache + launches + LOGITS * rows * shape.vocabulary * FP32 / card.bandwidth

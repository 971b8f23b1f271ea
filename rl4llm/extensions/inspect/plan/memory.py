"""How much memory each phase of a step takes on one device: the sum of the estimates of backend, head and engine.

Counted are tensors of the models, their optimizers, activations, the head's logits, and the cache of an embedded
engine. Not counted are CUDA's context and the gaps between blocks, for which `RESERVE` is left; on a CPU, Python and
its libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from rl4llm.backends.heads import head_memory
from rl4llm.backends.tower import FEATURE_BYTES, TOGETHER
from rl4llm.compose.engines import server_urls
from rl4llm.compose.setup import Setup
from rl4llm.core.model_memory import INT8, EngineLoad, ModelMemory, ModelShape
from rl4llm.core.tables import BACKENDS, ENGINES
from rl4llm.core.types import TrainBatch
from rl4llm.data.images import KEPT
from rl4llm.extensions.inspect.plan.counts import Counts
from rl4llm.extensions.inspect.plan.shape import TowerShape, with_tower
from rl4llm.runtime.ports import is_loopback

VERSIONS = "versions of the weights in shared memory"

SLEEPING = 2 << 30
"""Bytes of a GPU that a server keeps while it sleeps: CUDA's context, its graphs and communication buffers."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What is on a device at the same time in a phase of a step, in bytes by kind."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Models:
    """The shapes of a run's models: critic and references if there are any, and `others` on the device that judge or play.

    A `tower` is beside policy, critic and each reference if they see images.
    """

    policy: ModelShape
    critic: ModelShape | None = None
    references: Sequence[ModelShape] = ()
    others: Mapping[str, int] = field(default_factory=dict)  # bytes by name
    tower: TowerShape | None = None


def _nonzero(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


class Memory:
    """The memory of one of `ranks` devices."""

    def __init__(self, setup: Setup, counts: Counts, models: Models, ranks: int):
        self.config, self.counts, self.models, self.ranks = setup.config, counts, models, ranks
        self.needs = setup.needs
        self.on_gpu, self.precision = setup.machine.on_gpu, setup.machine.precision
        if setup.config.training.optimizer != "adamw":
            self.precision = replace(self.precision, moments=INT8)
        self.trained = models.tower if setup.config.model.vision == "train" else None
        self.frozen = models.tower if self.trained is None else None
        self.policy = self._held(models.policy)
        self.critic = self._held(models.critic) if models.critic else None
        self.references = [self._held(shape, trains=False) for shape in models.references]
        self.all = [self.policy, *filter(None, [self.critic]), *self.references]

    def phases(self) -> list[Phase]:
        """Return what the device holds in each phase, once the optimizer has its moments."""
        phases = [self._start()]
        if self.needs.learns_from == "episodes":
            phases.extend(self._rollouts())
        if self.needs.old_logprobs or self.needs.reference or self.needs.critic:
            phases.append(self._logprobs())
        if self.critic and self.models.critic:
            phases.append(self._update("critic", self.models.critic, self.critic, values=True))
        phases.append(self._update("update", self.models.policy, self.policy, values=self.needs.value_head))
        return [Phase(phase.name, _nonzero(phase.parts)) for phase in phases]

    def on_host(self) -> Phase:
        """Return what offload keeps in the machine's memory for this device."""
        if not self.on_gpu:
            return Phase("host")
        waiting = self.all if self.config.inference.get("cohost") else []
        parts = {
            "offloaded": sum(model.host for model in self.all),
            "models while the server has the device": sum(item.weights + item.optimizer for item in waiting),
            VERSIONS: -(-self._versions() // self.ranks),
        }
        return Phase("host", _nonzero(parts))

    def _versions(self) -> int:
        """Return the bytes of all versions of the weights if servers read them from shared memory, once for all ranks."""
        sync, engine = self.config.sync, ENGINES[self.config.inference["name"]]
        if not engine.is_server or self.needs.learns_from != "episodes" or sync.dir:
            return 0
        name = engine.publishers[0] if sync.name == "auto" else sync.name
        hosts = [urlsplit(url).hostname or "" for url in server_urls(self.config)]
        if name != "filesystem" or not all(map(is_loopback, hosts)):
            return 0
        return (sync.keep + 1) * self._whole.parameters * self.precision.computed

    @property
    def _whole(self) -> ModelShape:
        """The policy as servers hold it, with its image tower."""
        return with_tower(self.models.policy, self.models.tower)

    def _held(self, shape: ModelShape, *, trains: bool = True) -> ModelMemory:
        backend = BACKENDS[self.config.backend["name"]]
        whole = with_tower(shape, self.trained)
        return backend.memory(whole, self.precision, self.config.backend, self.ranks, trains=trains)

    def _resident(self) -> dict[str, int]:
        """Return what stays through all phases."""
        return {
            "weights": self.policy.weights,
            "optimizer": self.policy.optimizer,
            "critic": self.critic.weights + self.critic.optimizer if self.critic else 0,
            "reference": sum(model.weights for model in self.references),
            "sleeping server": self._sleeping,
            **self._fixed(),
        }

    def _fixed(self) -> dict[str, int]:
        """Return what stays on the device while a server has it too."""
        trained = [model.buckets for model in (self.policy, self.critic) if model]
        return {"gradient buckets": sum(trained), **self.models.others, **self._images()}

    def _images(self) -> dict[str, int]:
        """Return frozen image towers, the features that they keep, and on a CPU the pixels of images."""
        tower, counts = self.models.tower, self.counts
        if tower is None:
            return {}
        images, feature = counts.rows + counts.held_out, tower.features * self.precision.weights
        features = max(
            min(FEATURE_BYTES, images * counts.image_tokens * feature), counts.seen_tokens * feature
        )
        pixels = min(KEPT, images) * counts.image_tokens * tower.pixels
        return {
            "image towers": self._towers,
            "features of images": self._sighted * features if self.frozen else 0,
            "pixels of images": 0 if self.on_gpu else pixels,
        }

    @property
    def _sighted(self) -> int:
        """The number of models that have an image tower."""
        return len(self.all)

    @property
    def _towers(self) -> int:
        """The bytes of frozen image towers, which no backend shards or offloads."""
        return self._sighted * self.frozen.layers.parameters * self.precision.weights if self.frozen else 0

    @property
    def _sleeping(self) -> int:
        return SLEEPING if self.on_gpu and self.config.inference.get("cohost") else 0

    def _start(self) -> Phase:
        """Plan the loading of one model after the other.

        Models that the ranks shard come to a device in pieces; on a CPU they are first in the memory of the first rank.
        """
        loaded, most = sum(self.models.others.values()) + self._towers, 0
        for model in self.all:
            in_pieces = model.weights < model.whole and self.on_gpu
            most = max(most, loaded + (model.weights + model.piece if in_pieces else model.whole))
            loaded += model.weights + model.buckets
        most = max(most, loaded)
        return Phase("start", {"weights of all models": most, "sleeping server": self._sleeping})

    def _rollouts(self) -> Iterator[Phase]:
        """Plan the rollout, and the evaluation if it takes more than that.

        For an engine that shares the device in turns, the models that train and their reference have left it. Their buckets
        of gradients have not.
        """
        counts, options = self.counts, self.config.inference
        engine = ENGINES[options["name"]]
        resident = self._fixed() if options.get("cohost") else self._resident()
        most = 0
        for name, sequences in (("rollout", counts.trajectories), ("evaluation", counts.held_out)):
            load = EngineLoad(sequences, counts.prompt_tokens, counts.longest)
            playing = engine.memory(self._whole, self.precision, options, load)
            phase = Phase(name, {**resident, **playing})
            if phase.total > most:
                yield phase
            most = phase.total

    def _logprobs(self) -> Phase:
        """Plan the passes without a gradient: the policy before its update, the reference, the critic."""
        counts, shape = self.counts, self.models.policy
        values = self.needs.value_head
        working = shape.working(self.precision, counts.tokens, backward=False)
        parts = {
            "layers": max(working, self._seeing(backward=False)) + self.policy.casts,
            "log-probs": head_memory(shape, self.precision, counts.trains, backward=False, values=values),
            "gathered": max(model.gathered for model in self.all),
            "batches": self._batches(),
        }
        return Phase("log-probs", {**self._resident(), **parts})

    def _update(self, name: str, shape: ModelShape, model: ModelMemory, *, values: bool) -> Phase:
        counts, precision = self.counts, self.precision
        checkpointing = self.config.model.gradient_checkpointing
        activations = shape.activations(precision, counts.tokens, counts.keys, checkpointing=checkpointing)
        activations += shape.working(precision, counts.tokens, backward=True) + self._seeing(backward=True)
        grown = {"gradients": model.gradients, "activations": activations + model.casts}
        if counts.micro_batches == 1:
            # Layers free their activations as their gradients appear. Only a second micro-batch coexists with all gradients.
            larger = max(reversed(grown), key=grown.__getitem__)
            grown = {larger: grown[larger]}
        head = head_memory(shape, precision, counts.trains, backward=True, values=values)
        parts = {**grown, "log-probs": head, "gathered": model.gathered, "batches": self._batches()}
        return Phase(name, {**self._resident(), **parts})

    def _seeing(self, *, backward: bool) -> int:
        """Return what an image tower takes while it computes: all images of a micro-batch if it trains, else a few of
        them, before the layers. With `backward`, what it keeps for its gradient too."""
        tower = self.models.tower
        if tower is None or (backward and self.frozen):
            return 0
        tokens = self.counts.seen_tokens
        tokens = tokens if self.trained else min(tokens, max(TOGETHER, self.counts.image_tokens))
        patches, plain = tokens * tower.patches, replace(self.precision, autocast=False)
        graph = tokens * tower.merged * plain.weights if backward else 0
        graph += tower.layers.activations(plain, patches, patches, checkpointing=False) if backward else 0
        return tokens * tower.inputs + graph + tower.layers.working(plain, patches, backward=backward)

    def _batches(self) -> int:
        """Return the bytes of batches: all are in the CPU's memory, but only one micro-batch at a time on a GPU."""
        tokens = self.counts.padded if self.on_gpu else self.counts.step_tokens
        return tokens * TrainBatch.TOKEN_BYTES

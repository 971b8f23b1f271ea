"""Training on several devices with DeepSpeed: policy, critic or reference, sharded by ZeRO stages 0 to 3.

This is the only file that imports deepspeed.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rl4llm.backends.heads import ValueHead
from rl4llm.backends.lora import LoraAdapter
from rl4llm.backends.model_backend import FORMAT, MOMENTS, STATE, WEIGHTS, ModelBackend, gathered, part_of
from rl4llm.backends.optimizer import Optimizer, OptimizerOptions
from rl4llm.backends.runner import nothing_of
from rl4llm.core.base_backend import Head, TokenLosses, TokenMeasures, of_batch
from rl4llm.core.errors import ConfigError
from rl4llm.core.model_memory import FP32, ModelMemory, ModelShape, Precision
from rl4llm.core.registry import needed
from rl4llm.core.types import TrainBatch
from rl4llm.core.weights import TensorSpec
from rl4llm.extensions.deepspeed.builds import watched_builds
from rl4llm.extensions.deepspeed.config import (
    Source,
    ZeroOptions,
    check_leaves,
    check_precision,
    engine_config,
    zero_section,
)
from rl4llm.extensions.deepspeed.zero_optimizer import NoOptimizer, ReplicatedOptimizer, ZeroOptimizer
from rl4llm.extensions.deepspeed.zero_parts import GatheredAdapter, put_together, whole_shape
from rl4llm.runs.tensor_file import TensorFile
from rl4llm.runtime import devices
from rl4llm.runtime.ranks import Ranks

OFFLOADS = ("offload_optimizer", "offload_param")
# With these, the parts differ from plain slices.
ALTERED = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights")
START_S = 900.0  # for DeepSpeed to start, including the extensions that it compiles


class DeepSpeedBackend(ModelBackend):
    """A causal language model that several ranks train together.

        >>> ranks = join_ranks(timeout_s=600)
        >>> backend = DeepSpeedBackend(load_model("models/tiny", device="cpu"), ranks=ranks, zero_stage=3, lr=1e-5)
        >>> for batch in batches:                       # the same number on every rank
        ...     backend.forward_backward(batch, algorithm.token_losses)
        >>> backend.optim_step()["grad_norm"]

    `zero_stage` 0 replicates everything, 1 shards the optimizer, 2 also the gradients, 3 also the weights; by default
    it is the stage in `config`, or 2. `config` is DeepSpeed's configuration: a mapping, or a JSON or YAML file. A model
    in bf16 trains with fp32 master weights. `trains=False` is for a reference model, which has no optimizer.

    All other options are those of `TorchBackend`, and so is the format of `save`: another number of ranks, another
    stage and the other backend resume from the same files. All ranks call its methods together, except `info`,
    `weight_specs`, `write_config`, `offload` and `onload`. The first rank writes the files.
    """

    adapter: GatheredAdapter | None = None

    def __init__(  # noqa: PLR0913 - options of a configuration
        self,
        model: PreTrainedModel,
        *,
        ranks: Ranks,
        zero_stage: Literal[0, 1, 2, 3] | None = None,
        offload_optimizer: bool = False,
        offload_param: bool = False,
        config: Source = None,
        autocast: str = "none",
        value_head: ValueHead | None = None,
        adapter: LoraAdapter | None = None,
        trains: bool = True,
        device: torch.device | str | None = None,
        **optimizer: Any,
    ):
        if not trains:
            model.requires_grad_(False)
        parameters = [*model.parameters(), *(() if value_head is None else value_head.parameters())]
        options = OptimizerOptions(**({"lr": 0.0} | optimizer))
        zero = ZeroOptions(zero_stage, offload_optimizer, offload_param)
        self._settings = engine_config(
            config,
            zero,
            bf16=model.dtype == torch.bfloat16,
            max_grad_norm=options.max_grad_norm,
            trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        )
        self.stage: int = self._settings["zero_optimization"]["stage"]
        self.whole = self.stage < 3
        check_precision(str(model.dtype).removeprefix("torch."), self.stage, trains)
        self._deepspeed = _import_deepspeed(self._settings)
        super().__init__(model, ranks=ranks, autocast=autocast, value_head=value_head, device=device)
        _check_device(self.device, self._deepspeed)
        self._module.always_runs = True
        if adapter is not None:
            self.adapter = GatheredAdapter(adapter, self._gathered, ranks)
        self._optimizer = self._start(options) if trains else self._start_frozen()

    @classmethod
    def shares_weights(cls, ranks: Ranks, options: Mapping[str, Any]) -> bool:
        zero = zero_section(options.get("config"), ZeroOptions(options.get("zero_stage")), trained=0)
        return bool(ranks.size > 1 and zero["stage"] == 3)

    @classmethod
    def check_trains(cls, options: Mapping[str, Any], dtype: str) -> None:
        source, bf16 = options.get("config"), dtype == "bfloat16"
        if isinstance(source, str | Path) and not Path(source).is_file():
            return  # the machine that trains may have it
        settings = engine_config(source, ZeroOptions.of(options), bf16=bf16, max_grad_norm=None, trained=0)
        check_precision(dtype, settings["zero_optimization"]["stage"], trains=True)

    @classmethod
    def check_leaves(cls, options: Mapping[str, Any], dtype: str, *, reference: bool) -> None:
        zero = zero_section(options.get("config"), ZeroOptions.of(options), trained=0)
        check_leaves(zero, dtype, reference)

    @classmethod
    def memory(
        cls,
        shape: ModelShape,
        precision: Precision,
        options: Mapping[str, Any],
        ranks: int = 1,
        *,
        trains: bool = True,
    ) -> ModelMemory:
        """Estimate memory by Rajbhandari et al. 2020 (ZeRO), section 5.

        DeepSpeed also keeps a master copy for fp32, and accumulates gradients in it.
        """
        plain = super().memory(shape, precision, options, ranks, trains=trains)
        trained = (shape.adapter or shape.parameters) if trains else 0
        zero = zero_section(options.get("config"), ZeroOptions.of(options), trained)
        stage: int = zero["stage"]
        places = {key: zero.get(key, {}).get("device", "none") for key in OFFLOADS}
        away = {key for key, place in places.items() if place != "none"}
        gradients, optimizer = plain.gradients, plain.optimizer
        together = 0
        if stage >= 1:
            gradients, optimizer = trained * FP32, part_of(3 * trained * FP32, ranks)
            together = min(int(zero["reduce_bucket_size"]), trained) * FP32
        if (stage == 3 and ranks > 1) or "offload_param" in away:
            together += gathered(shape, precision, trains=trains)
        weights = part_of(plain.weights, ranks if stage == 3 else 1)
        host = part_of(4 * trained * FP32, ranks) if places["offload_optimizer"] == "cpu" else 0
        return replace(
            plain,
            weights=0 if "offload_param" in away else weights,
            gradients=0 if "offload_param" in away else part_of(gradients, ranks if stage >= 2 else 1),
            optimizer=0 if "offload_optimizer" in away else optimizer,
            saved=3 * trained * FP32,
            gathered=together,
            host=host + (weights if places["offload_param"] == "cpu" else 0),
        )

    def _pass(self, batch: TrainBatch, *how: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = self._engine(batch.to(self.device), *how)
        return outputs

    def forward_backward(
        self,
        batch: TrainBatch,
        token_losses: TokenLosses,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        measures: TokenMeasures | None = None,
        head: Head | None = None,
        last: bool = True,
    ) -> dict[str, float]:
        batch = batch.to(self.device)
        numbers_BT, entropy_BT, *more = self._engine(batch, temperature, entropy, head)
        if more:
            batch.ref_divergence_BT = more[0]
        losses_BT, metrics = token_losses(batch, numbers_BT, entropy_BT)
        if measures is not None:
            metrics = metrics | measures(batch, numbers_BT, metrics)
        loss = (losses_BT * batch.weights_BT).sum()
        if torch.is_grad_enabled():
            # DeepSpeed averages over the ranks, but losses must be summed; every rank has to run a backward pass.
            total = nothing_of(numbers_BT) + loss * float(self._ranks.size)
            self._engine.backward(total, scale_wrt_gas=False)
        return of_batch(loss.detach(), metrics, batch)

    def optim_step(self) -> dict[str, float]:
        return self._optimizer.step()

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        named = dict(self.model.named_parameters())
        yield from self._wholes(named) if self.adapter is None else self.adapter.merged(named)
        yield from self._buffers()

    @torch.no_grad()
    def take_weights(self, weights: Iterator[tuple[str, Tensor]], rate: float = 1.0) -> None:
        tensors = dict(self.model.named_parameters()) | dict(self._buffers())
        for name, tensor in weights:
            for _, before in self._wholes({name: tensors[name]}) if rate < 1 else ():  # whole only in here
                tensor = before.lerp(tensor.to(before), rate)
            self._put(tensors[name], tensor)

    def _own_specs(self) -> list[TensorSpec]:
        named = dict(self.model.named_parameters())
        if self.adapter is not None:
            named = self.adapter.frozen(named)
        return [self._spec(name, tensor) for name, tensor in (*named.items(), *self._buffers())]

    def save(self, directory: Path) -> dict[str, str]:
        steps = {"step": self._optimizer.step_number, "parameter_steps": self._optimizer.steps()}
        state = {"format": FORMAT, **steps}
        if self.adapter is not None:
            state["base"] = self.adapter.base_digest()
        specs = []
        for name, tensor in self._tensors().items():
            spec = self._spec(name, tensor)
            specs.append(replace(spec, dtype=torch.float32) if tensor.requires_grad else spec)
        hashes = self._write(directory / WEIGHTS, specs, self._masters())
        hashes |= self._write(directory / MOMENTS, self._optimizer.moment_specs(), self._optimizer.moments())
        self._on_first(lambda: (directory / STATE).write_text(json.dumps(state, indent=1)))
        return hashes

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Load what `save` wrote.

        If parameters have taken different numbers of steps, which only plain torch counts, all get the largest number.
        """
        weights, moments, state = self._agreed(lambda: self._checked(directory))
        self._optimizer.restore(moments, state["parameter_steps"], state["step"])
        for name, tensor in self._tensors().items():
            self._put(tensor, weights[name])

    def info(self) -> dict[str, Any]:
        zero = self._settings["zero_optimization"]
        places = {key.removeprefix("offload_"): zero.get(key, {}).get("device", "none") for key in OFFLOADS}
        offloaded = [f"{what} on the {place}" for what, place in places.items() if place != "none"]
        return super().info() | ({"offloaded": ", ".join(offloaded)} if offloaded else {})

    def offload(self) -> None:
        self._optimizer.offload()
        devices.call(self.device, "empty_cache")

    def onload(self) -> None:
        self._optimizer.onload()

    def _start(self, options: OptimizerOptions) -> ReplicatedOptimizer | ZeroOptimizer:
        inner = Optimizer(self._named_parameters(), options, masters=False)
        self._engine = self._initialize(optimizer=inner.adam)
        if self.stage == 0:
            return ReplicatedOptimizer(self._engine, inner, self.device)
        return ZeroOptimizer(self._engine, inner, self._deepspeed, self._take_no_step)

    def _start_frozen(self) -> NoOptimizer:
        """Shard the model in stage 3, where it stays on the device except with offload_param; below it, every rank
        keeps a full copy.
        """
        if self.stage < 3:
            self._engine = self._module
            return NoOptimizer(self._module, self.device)
        self._engine = self._initialize()
        return NoOptimizer(None, self.device)

    def _initialize(self, **options: Any) -> Any:
        _join_alone(self.device)
        with watched_builds("DeepSpeed's start", START_S):
            try:
                if self.stage == 3:
                    self._share_out()
                engine = self._deepspeed.initialize(model=self._module, config=self._settings, **options)[0]
            except (ValueError, AssertionError, self._deepspeed.DeepSpeedConfigError) as error:
                raise ConfigError(f"DeepSpeed refuses its configuration: {error}") from error
        output = self.model.get_output_embeddings()
        if self.stage == 3 and output is not None and self.value_head is None:
            for parameter in output.parameters():  # used outside their layer
                self._deepspeed.zero.register_external_parameter(self._module, parameter)
        return engine

    def _share_out(self) -> None:
        """Shard every parameter over the ranks, one at a time on the device, with the first rank's values.

        DeepSpeed's initialization would move the whole model to the device first.
        """
        for buffer in self._module.buffers():
            buffer.data = buffer.data.to(self.device)
        self._deepspeed.zero.Init(
            module=self._module, config_dict_or_path=self._settings, dtype=self.model.dtype
        )

    def _take_no_step(self) -> None:
        probe = self._module.runner.probe
        asks_nothing = replace(probe, mask_BT=torch.zeros_like(probe.mask_BT))
        with torch.enable_grad():
            self.forward_backward(asks_nothing, lambda batch, numbers_BT, _: (numbers_BT, {}))
        self._engine.step()

    def _gathered(
        self, parameters: Sequence[Tensor], modifier_rank: int | None = None
    ) -> AbstractContextManager[Any]:
        """Gather sharded parameters for the time of the context."""
        return self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)

    def _sharing(self) -> str:
        return f"{self._ranks.size} (DeepSpeed ZeRO-{self.stage})"

    def _wholes(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named.items():
            if self._lies_plainly(tensor):
                yield name, put_together(tensor)
            else:
                with self._gathered([tensor]):
                    yield name, tensor.detach()

    def _lies_plainly(self, tensor: Tensor) -> bool:
        """Return whether each rank holds a plain slice of the tensor in its memory."""
        zero = self._settings["zero_optimization"]
        if zero.get("offload_param", {}).get("device") == "nvme" or any(zero.get(key) for key in ALTERED):
            return False
        return whole_shape(tensor) != tuple(tensor.shape)

    def _spec(self, name: str, tensor: Tensor) -> TensorSpec:
        return TensorSpec(name, whole_shape(tensor), tensor.dtype)

    def _masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint stores: each tensor whole, in the precision that trains."""
        for name, tensor in self._tensors().items():
            if tensor.requires_grad:
                yield name, self._optimizer.master(tensor)
            else:
                yield from self._wholes({name: tensor})

    def _put(self, target: Tensor, tensor: Tensor) -> None:
        with self._gathered([target], modifier_rank=0):
            target.data.copy_(tensor)
        if target.requires_grad:
            self._optimizer.put(target, tensor.to(self.device, torch.float32))

    def _checked(self, directory: Path) -> tuple[TensorFile, TensorFile, dict[str, Any]]:
        weights, moments, state = super()._checked(directory)
        self._optimizer.check(moments, state["parameter_steps"])
        return weights, moments, state


def _import_deepspeed(settings: Mapping[str, Any]) -> Any:
    deepspeed = needed("deepspeed", "backend.name=deepspeed")  # which takes seconds to import
    if "log_level" not in settings:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # from its calls
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    # On a CPU it would compile its own collectives at the start, for up to a minute; only its inference uses them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _check_device(device: torch.device, deepspeed: Any) -> None:
    accelerator = deepspeed.accelerator.get_accelerator().device_name()
    if device.type != accelerator:
        settings = f"DS_ACCELERATOR={device.type}, or model.device={accelerator}"
        raise ConfigError(f"DeepSpeed uses {accelerator} on this machine. Set {settings}.")


def _join_alone(device: torch.device) -> None:
    """Start a process group of one process, which DeepSpeed requires even without a launcher."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # from which it takes its GPU
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined] # public, and not exported
        dist.init_process_group(devices.collective_backend(), store=store, rank=0, world_size=1)

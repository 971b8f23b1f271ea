"""From the configuration to models on their backend: the one that trains, its critic and its reference."""

from __future__ import annotations

import copy
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.compose.tables import BACKENDS
from rl4llm.config import Config
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import BaseBackend, TokenScorer
from rl4llm.core.errors import ConfigError, ModelError
from rl4llm.core.registry import load
from rl4llm.core.schema import check_options, with_options
from rl4llm.runtime.cpu import keep_freed_memory, multiplies_bfloat16
from rl4llm.runtime.ranks import Ranks, join_ranks

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

CRITIC_RATE = 10  # of the policy's learning rate: a critic learns from every token, and its head from nothing
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # what a user has set stays


def all_ranks(config: Config) -> Ranks:
    """Return the processes that train together; they are joined on the first call."""
    return join_ranks(config.timeout_s)


def set_up_torch(config: Config) -> None:
    """Set threads, determinism and seed of this process, before a model is made."""
    demand_device(device_of(config))
    if device_of(config) == "cpu":
        keep_freed_memory()
        # Without it DeepSpeed guesses the accelerator and prints its guess.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        _set_up_gpu(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)


def _set_up_gpu(config: Config) -> None:
    """Set the kernels and the allocator of a GPU; prepare cuBLAS for the deterministic mode.

    A device with a number becomes the current one, for calls that name none.
    """
    from rl4llm.runtime.gpus import use_exact_kernels  # noqa: PLC0415 - only on a GPU

    use_exact_kernels()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    if "tensor" not in (config.sync.name, config.sync.fallback) and not ALLOCATOR & os.environ.keys():
        # Batches have other shapes in each step, which would fragment the memory. Set here and not in the environment, which
        # servers inherit; and not for CUDA IPC, since importing such memory takes the right to trace this process.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    device = torch.device(device_of(config))
    if device.index is not None:
        torch.cuda.set_device(device)


def device_of(config: Config) -> str:
    """Return the device of the models; "auto" uses a GPU if there is one."""
    if config.model.device != "auto":
        if not re.fullmatch(r"cpu|cuda(:\d+)?", config.model.device):
            raise ConfigError(
                f"model.device={config.model.device!r} is not accepted. Accepted: auto, cpu, cuda or cuda:1."
            )
        return config.model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def autocast_of(config: Config) -> str:
    """Return the dtype of matrix products, "none" for that of the weights; "auto" is bfloat16 where it is faster.

    A GPU that only a plan knows multiplies in bfloat16.
    """
    if config.model.autocast != "auto":
        return config.model.autocast
    planned = not torch.cuda.is_available()
    faster = (
        multiplies_bfloat16()
        if device_of(config) == "cpu"
        else planned or torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return "bfloat16" if faster and config.model.dtype == "float32" else "none"


def vision_of(config: Config) -> Vision | None:
    """Return what the model makes of images, the same object for all of a run; None if it is to read text alone."""
    if config.model.vision == "none":
        return None
    found: Vision = _vision(config.model.path, config.output.dir)
    return found


@lru_cache(1)
def _vision(path: str, directory: str) -> Any:
    store = load("rl4llm.data.images:ImageStore")(Path(directory) / "images", Path(directory) / "run.json")
    return load("rl4llm.data.vision:Vision")(path, store)


def demand_device(name: str) -> None:
    """Raise ConfigError for a GPU that this machine does not have."""
    device, gpus = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(
            f"model.device={name!r} is not available: torch {torch.__version__} finds {gpus} GPU(s). Next: use "
            "model.device=auto, or install a CUDA build of torch. To plan for another machine, use "
            "`rl4llm plan --device-memory`."
        )


def build_policy(config: Config, algorithm: BaseAlgorithm, given: Any) -> BaseBackend:
    """Make the model that trains: the policy, or a reward or value model."""
    values, lora = algorithm.needs().value_head, config.model.lora
    model = _model_to_place(config, given, values=values)
    adapter = value_head = None
    if values:
        from rl4llm.backends.classifier import check_classifier, load_value_head  # noqa: PLC0415 - few runs need it

        check_classifier(model)
        value_head = load_value_head(config.model.path if given is None else None, model)
    if lora.rank:
        from rl4llm.backends.lora import add_adapter  # noqa: PLC0415 - most runs have no adapter

        adapter = add_adapter(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed)
    if not any(
        item.requires_grad for part in (model, value_head) if part is not None for item in part.parameters()
    ):
        raise ModelError(
            f"None of the parameters of {config.model.path} trains: requires_grad is False for all. Next: set it with "
            "model.requires_grad_(True), or set model.lora.rank to train an adapter."
        )
    critic = algorithm.needs().critic
    steps = config.max_steps - (critic.warmup_steps if critic else 0)  # in which the policy learns
    options = _optimizer(config, config.training.epochs, steps)
    return _on_backend(config, model, adapter=adapter, value_head=value_head, **options)


def build_critic(config: Config, algorithm: BaseAlgorithm, start: Any) -> BaseBackend | None:
    """Make the value model, with a separate optimizer; return None if the algorithm needs none."""
    critic = algorithm.needs().critic
    if critic is None:
        return None
    from rl4llm.backends.classifier import load_value_head  # noqa: PLC0415 - few runs need it

    path = critic.path or (None if start is not None else config.model.path)
    model = _model_to_place(config, copy.deepcopy(start) if path is None else None, path, values=True)
    options = _optimizer(config, critic.epochs, config.max_steps)
    options["lr"] = CRITIC_RATE * config.training.lr if critic.lr is None else critic.lr
    return _on_backend(config, model, value_head=load_value_head(path, model), **options)


def build_reference(
    config: Config, algorithm: BaseAlgorithm, policy: BaseBackend, start: Any, tokenizer: Any
) -> TokenScorer | None:
    """Make the reference model, which never trains; return None if the algorithm needs none."""
    needs = algorithm.needs()
    if not needs.reference:
        return None
    if policy.adapter is not None and not needs.separate_reference(adapter=True):
        from rl4llm.backends.lora import FrozenModel  # noqa: PLC0415 - most runs have no adapter

        return FrozenModel(policy, policy.adapter)
    if needs.reference_path is not None:
        _check_same_tokens(tokenizer, needs.reference_path, config.model.pad_token)
    model = _model_to_place(config, start if needs.reference_path is None else None, needs.reference_path)
    if model.get_input_embeddings().num_embeddings < len(tokenizer):
        raise ConfigError(
            f"The model {needs.reference_path!r} has {model.get_input_embeddings().num_embeddings} tokens, but the "
            f"tokenizer has {len(tokenizer)}. Use a model with the same vocabulary."
        )
    return _on_backend(config, model, trains=False)


def build_model(config: Config, algorithm: BaseAlgorithm, name: str) -> BaseBackend:
    """Make one of the models that train, "model" or "critic", without a trainer."""
    set_up_torch(config)
    if name != "critic":
        return build_policy(config, algorithm, None)
    critic = build_critic(config, algorithm, None)
    if critic is None:
        raise ConfigError(f"algorithm.name={config.algorithm['name']!r} has no critic.")
    return critic


def _check_same_tokens(tokenizer: Any, path: str, pad_token: str | None) -> None:
    """Raise ConfigError unless both tokenizers map the same tokens to the same ids."""
    own, other = tokenizer.get_vocab(), load_tokenizer(path, pad_token=pad_token).get_vocab()
    different = sorted(own.items() - other.items(), key=lambda item: item[1]) or sorted(
        other.items() - own.items()
    )
    if different:
        token, _ = different[0]
        raise ConfigError(
            f"The tokenizer of {path!r} differs from that of model.path: {len(other)} tokens, not {len(own)}, and {token!r} "
            f"has the id {other.get(token, 'none')}, not {own.get(token, 'none')}. A teacher or reference must have the "
            "same tokenizer."
        )


def check_backend(config: Config, needs: Needs) -> None:
    """Raise ConfigError for options that the backend does not accept; load nothing."""
    own = dict(config.backend)
    backend = BACKENDS[own.pop("name")]
    fixed = {"model", "autocast", "ranks", "device", "value_head", "adapter", "trains"}
    fixed |= _optimizer(config, 1, 1).keys()
    check_options("backend", backend, own, fixed)
    backend.check_trains(own, config.model.dtype)
    if config.inference.get("cohost"):
        reference = needs.separate_reference(adapter=config.model.lora.rank > 0)
        backend.check_leaves(own, config.model.dtype, reference=reference and device_of(config) != "cpu")


def _on_backend(config: Config, model: Any, **options: Any) -> BaseBackend:
    """Put a model on the configured backend."""
    own = dict(config.backend)
    make = BACKENDS[own.pop("name")]
    fixed = {"autocast": autocast_of(config), "ranks": all_ranks(config), "device": device_of(config)}
    return with_options("backend", make, own, model, **fixed, **options)


def _model_to_place(config: Config, given: Any, path: str | None = None, *, values: bool = False) -> Any:
    """Load a causal LM for the backend, which moves it to the device itself if ranks shard its weights."""
    ranks = all_ranks(config)
    shares = BACKENDS[config.backend["name"]].shares_weights(ranks, config.backend)
    return plain_model(config, given, path, shared_by=ranks if shares else None, values=values)


def plain_model(
    config: Config,
    given: Any,
    path: str | None = None,
    *,
    shared_by: Ranks | None = None,
    values: bool = False,
) -> Any:
    """Load a causal LM without a backend: the one given, that of `path`, or that of the configuration; see `load_model`."""
    vision = vision_of(config)
    model = load_model(
        given if given is not None else path or config.model.path,
        dtype=config.model.dtype,
        device=device_of(config),
        gradient_checkpointing=config.model.gradient_checkpointing,
        shared_by=shared_by,
        values=values,
    )
    if vision is not None:
        trains = config.model.vision == "train"
        load("rl4llm.backends.tower:add_tower")(
            model, path or config.model.path, vision, shared_by, trains=trains
        )
    return model


def _optimizer(config: Config, epochs: int, steps: int) -> dict[str, Any]:
    training = config.training
    return {
        "lr": training.lr,
        "weight_decay": training.weight_decay,
        "betas": tuple(training.betas),
        "max_grad_norm": training.max_grad_norm,
        "schedule": training.schedule,
        "warmup_steps": training.warmup_steps,
        "total_steps": max(1, steps) * training.updates_per_rollout * epochs,
    }

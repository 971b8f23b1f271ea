"""From the configuration to models on their backend: the one that trains, its critic and its reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4llm.backends.models import has_4_bits, load_model, load_tokenizer
from rl4llm.compose.setup import Given, Machine, Setup, device_of, set_up_torch
from rl4llm.config import Config
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs, is_address
from rl4llm.core.base_backend import BaseBackend, TokenScorer
from rl4llm.core.errors import ConfigError, ModelError
from rl4llm.core.registry import from_extension, load
from rl4llm.core.schema import check_options, with_options
from rl4llm.core.tables import BACKENDS
from rl4llm.runtime.quantized import quantized_layers
from rl4llm.runtime.ranks import Ranks, join_ranks

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

CRITIC_RATE = 10  # of the policy's learning rate: a critic learns from every token, and its head from nothing


def vision_of(config: Config) -> Vision | None:
    """Return what the model makes of images, the same object for all of a run; None if it is to read text alone."""
    if config.model.vision == "none":
        return None
    vision: Vision = _vision(config.model.path, config.output.dir)
    return vision


@lru_cache(1)
def _vision(path: str, directory: str) -> Any:
    store = load("rl4llm.data.images:ImageStore")(Path(directory) / "images", Path(directory) / "run.json")
    return load("rl4llm.data.vision:Vision")(path, store)


def build_policy(setup: Setup) -> BaseBackend:
    """Make the model that trains: the policy, or a reward or value model."""
    config, needs, loaded = setup.config, setup.needs, setup.given.model
    values, lora = needs.value_head, config.model.lora
    model = _model_to_place(setup, loaded, values=values, nf4_skips=_nf4_skips(setup))
    adapter = value_head = None
    if values:
        from rl4llm.backends.classifier import check_classifier, load_value_head  # noqa: PLC0415 - few runs need it

        check_classifier(model)
        value_head = load_value_head(config.model.path if loaded is None else None, model)
    if lora.rank:
        from rl4llm.backends.lora import add_adapter  # noqa: PLC0415 - most runs have no adapter

        adapter = add_adapter(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed)
    learns = [*model.parameters(), *(value_head.parameters() if value_head is not None else ())]
    if not any(item.requires_grad for item in learns):
        raise ModelError(
            f"{config.model.path}: requires_grad is False for all parameters. Set it, or model.lora.rank."
        )
    # in which the policy learns
    steps = config.max_steps - (needs.critic.warmup_steps if needs.critic else 0)
    options = _optimizer(config, config.training.passes_per_rollout, steps)
    return _on_backend(setup, model, adapter=adapter, value_head=value_head, **options)


def build_critic(setup: Setup, start: Any) -> BaseBackend | None:
    """Make the value model, with a separate optimizer; return None if the algorithm needs none."""
    config, critic = setup.config, setup.needs.critic
    if critic is None:
        return None
    from rl4llm.backends.classifier import load_value_head  # noqa: PLC0415 - few runs need it

    path = critic.path or (None if start is not None else config.model.path)
    model = _model_to_place(setup, copy.deepcopy(start) if path is None else None, path, values=True)
    options = _optimizer(config, critic.passes, config.max_steps)
    options["lr"] = CRITIC_RATE * config.training.lr if critic.lr is None else critic.lr
    return _on_backend(setup, model, value_head=load_value_head(path, model), **options)


def build_reference(setup: Setup, policy: BaseBackend, start: Any) -> TokenScorer | None:
    """Make the reference models, which never train; return None if the algorithm needs none."""
    needs = setup.needs
    if not needs.reference:
        return None
    if needs.reference_live:
        return policy
    others = {name: _teacher(setup, policy, place) for name, place in needs.references.items()}
    if place := needs.reference_url or needs.reference_path:
        others[""] = _teacher(setup, policy, place)
    if others:
        return others[""] if [*others] == [""] else load("rl4llm.trainers.teachers:Teachers")(others)
    if policy.adapter is not None and not needs.separate_references(adapter=True):
        from rl4llm.backends.lora import FrozenModel  # noqa: PLC0415 - most runs have no adapter

        return FrozenModel(policy, policy.adapter)
    model = _model_to_place(setup, start, nf4_skips=_nf4_skips(setup), packed=False)
    setup.identity.add_weights(setup.config.model.path, model)
    return _on_backend(setup, model, trains=False)


def _teacher(setup: Setup, policy: BaseBackend, place: str) -> TokenScorer:
    """Make a reference that is another model than the policy's start, from a path or behind an address."""
    if is_address(place):
        top = 0 if (divergence := setup.needs.divergence) is None else divergence.top
        teacher: TokenScorer = from_extension("teacher", "algorithm.teacher_url")(place, setup.tokenizer, top)
        return teacher
    _check_same_tokens(setup.tokenizer, place, setup.config.model.pad_token)
    model = _model_to_place(setup, None, place)
    size, most = (each.config.get_text_config().vocab_size for each in (model, policy.model))
    if setup.needs.divergence is not None and size > most:  # the same tokenizer, and more padding
        model.resize_token_embeddings(most)
    setup.identity.add_weights(place, model)
    return _on_backend(setup, model, trains=False)


def build_model(config: Config, algorithm: BaseAlgorithm, name: str) -> BaseBackend:
    """Make one of the models that train, "model" or "critic", without a trainer."""
    setup = Setup(config, Given(), Machine.of(config, join_ranks(config.timeout_s)), algorithm)
    set_up_torch(config, setup.machine)
    if name != "critic":
        return build_policy(setup)
    critic = build_critic(setup, None)
    if critic is None:
        raise ConfigError(f"algorithm.name={config.algorithm['name']!r} has no critic.")
    return critic


def build_teacher(config: Config, algorithm: BaseAlgorithm, policy: BaseBackend) -> TokenScorer | None:
    """Make the reference of one of them, without a trainer; None if the algorithm needs none."""
    tokenizer = load_tokenizer(config.model.path)
    machine = Machine.of(config, join_ranks(config.timeout_s))
    return build_reference(Setup(config, Given(), machine, algorithm, tokenizer), policy, None)


def _check_same_tokens(tokenizer: Any, path: str, pad_token: str | None) -> None:
    """Raise ConfigError unless both tokenizers map the same tokens to the same ids."""
    ids, reference_ids = tokenizer.get_vocab(), load_tokenizer(path, pad_token=pad_token).get_vocab()
    if different := sorted(ids.items() ^ reference_ids.items(), key=lambda item: item[1]):
        raise ConfigError(
            f"The tokenizer of {path!r} is not that of model.path, first in {different[0][0]!r}. A reference or teacher "
            "must have the same tokenizer."
        )


def check_backend(config: Config, needs: Needs) -> None:
    """Raise ConfigError for options that the backend does not accept; load nothing."""
    options = dict(config.backend)
    backend = BACKENDS[options.pop("name")]
    fixed = {"model", "autocast", "ranks", "device", "value_head", "adapter", "trains"}
    fixed |= _optimizer(config, 1, 1).keys()
    check_options("backend", backend, options, fixed)
    backend.check_trains(options, config.model.dtype)
    if (config.model.quantize, config.training.optimizer) != ("none", "adamw") and not backend.takes_low_bits:
        raise ConfigError(
            f"backend.name={config.backend['name']} takes neither model.quantize nor a training.optimizer of 8 bits. Use "
            "backend.name=torch."
        )
    if config.inference.get("cohost"):
        reference = device_of(config) != "cpu" and bool(needs.separate_references(config.model.lora.rank > 0))
        backend.check_leaves(options, config.model.dtype, reference=reference)


def _on_backend(setup: Setup, model: Any, **options: Any) -> BaseBackend:
    """Put a model on the configured backend."""
    backend_options, machine = dict(setup.config.backend), setup.machine
    make = BACKENDS[backend_options.pop("name")]
    trains_all = options.get("trains", True) and options.get("adapter") is None
    if quantized_layers(model) and (trains_all or not make.takes_low_bits):
        raise ModelError(
            f"{model.name_or_path} has weights in 4 bits, over which only an adapter trains. Set model.lora.rank=16 "
            "and backend.name=torch; a critic needs other weights."
        )
    fixed = {"autocast": machine.autocast, "ranks": machine.ranks, "device": machine.device}
    return with_options("backend", make, backend_options, model, **fixed, **options)


def _model_to_place(setup: Setup, given: Any, path: str | None = None, **options: Any) -> Any:
    """Load a causal LM for the backend, which moves it to the device itself if ranks shard its weights."""
    ranks, backend = setup.machine.ranks, setup.config.backend
    shares = BACKENDS[backend["name"]].shares_weights(ranks, backend)
    stored = given is None and has_4_bits(path or setup.config.model.path)
    if shares and (stored or options.get("nf4_skips") is not None):
        raise ConfigError("Ranks do not share weights in 4 bits. Use backend.shard=ddp.")
    return plain_model(setup, given, path, shared_by=ranks if shares else None, **options)


def _nf4_skips(setup: Setup) -> Sequence[str] | None:
    model = setup.config.model
    return None if model.quantize == "none" else model.quantize_skip


def plain_model(
    setup: Setup, given: Any, path: str | None = None, *, shared_by: Ranks | None = None, **options: Any
) -> Any:
    """Load a causal LM without a backend: the one given, that of `path`, or that of the configuration; see `load_model`."""
    config, vision = setup.config, vision_of(setup.config)
    model = load_model(
        given if given is not None else path or config.model.path,
        dtype=config.model.dtype,
        device=setup.machine.device,
        gradient_checkpointing=config.model.gradient_checkpointing,
        shared_by=shared_by,
        **options,
    )
    if vision is not None:
        trains = config.model.vision == "train"
        load("rl4llm.backends.tower:add_tower")(
            model, path or config.model.path, vision, shared_by, trains=trains
        )
    return model


def _optimizer(config: Config, passes: int, steps: int) -> dict[str, Any]:
    training = config.training
    return {
        "optimizer": training.optimizer,
        "lr": training.lr,
        "weight_decay": training.weight_decay,
        "betas": tuple(training.betas),
        "max_grad_norm": training.max_grad_norm,
        "schedule": training.schedule,
        "warmup_steps": training.warmup_steps,
        "total_steps": max(1, steps) * training.updates_per_rollout * passes,
    }

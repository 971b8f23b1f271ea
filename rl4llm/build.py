"""The composition root: the only file that knows every class. From a configuration to a trainer that is ready to run."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from rl4llm.algorithms import ALGORITHMS
from rl4llm.backends.deepspeed_backend import DeepSpeedBackend
from rl4llm.backends.learned_reward import LearnedReward
from rl4llm.backends.lora import FrozenModel, add_adapter
from rl4llm.backends.models import load_model, load_tokenizer, load_value_head
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.config import Config, flatten, to_yaml
from rl4llm.core.allocator import keep_freed_memory
from rl4llm.core.base_algorithm import BaseAlgorithm, LearnsFrom, Needs
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.base_trainer import BaseTrainer, Schedule
from rl4llm.core.errors import ConfigError, DataError, unknown
from rl4llm.core.ranks import Ranks, join_ranks
from rl4llm.core.registry import Registry
from rl4llm.core.run_dir import RunDir
from rl4llm.core.types import ChatMessage, Group, SamplingParams
from rl4llm.data.answers import ANSWER_COLUMNS, label_group, pair_group, valued_at_the_end
from rl4llm.data.arithmetic import arithmetic_rows
from rl4llm.data.demonstrations import Read, check_rows, demonstration_group
from rl4llm.data.load import load_rows
from rl4llm.data.pack import plan_table
from rl4llm.data.prompts import PromptStream
from rl4llm.data.read import has_splits
from rl4llm.data.render import Renderer
from rl4llm.envs import ENVIRONMENTS
from rl4llm.envs.rollout import Rollout
from rl4llm.inference.fleet import FleetClient
from rl4llm.inference.local import LocalClient
from rl4llm.inference.server import ServerClient
from rl4llm.inference.sglang import SGLangClient
from rl4llm.inference.vllm import VLLMClient
from rl4llm.rewards import as_reward_function, register_reward, weighted_sum
from rl4llm.rewards.score import check_examples
from rl4llm.sync.claim import ClaimingPublisher
from rl4llm.sync.cohost import CohostedClient, CohostPublisher
from rl4llm.sync.fallback import FallbackPublisher
from rl4llm.sync.filesystem import FilesystemPublisher
from rl4llm.sync.lora import LoraPublisher
from rl4llm.sync.memory import MemoryPublisher
from rl4llm.sync.store import WeightStore
from rl4llm.sync.tensor import TensorPublisher
from rl4llm.sync.verify import Canary
from rl4llm.tracking.run import RunTracker
from rl4llm.trainers.dataset import DatasetTrainer
from rl4llm.trainers.prepare import Batching, Preparation
from rl4llm.trainers.rl import Inference, RLTrainer

GENERATED: dict[str, Callable[..., list[dict[str, Any]]]] = {"arithmetic": arithmetic_rows}
"""Tasks that `data.path` may name instead of a file."""

register_reward("reward_model")(LearnedReward)

ENGINES: Registry[type[BaseClient]] = Registry("inference.name")
ENGINES.register("local")(LocalClient)
ENGINES.register("sglang")(SGLangClient)
ENGINES.register("vllm")(VLLMClient)

BACKENDS: Registry[Callable[..., BaseBackend]] = Registry("backend.name")
BACKENDS.register("torch")(TorchBackend)
BACKENDS.register("deepspeed")(DeepSpeedBackend)

PUBLISHERS: Registry[Callable[[BaseClient, WeightStore, Any], BasePublisher]] = Registry("sync.name")


@PUBLISHERS.register("memory")
def _in_memory(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return MemoryPublisher(client)


@PUBLISHERS.register("filesystem")
def _by_file_system(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return FilesystemPublisher(client, store, tokenizer.save_pretrained)


@PUBLISHERS.register("tensor")
def _in_requests(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return TensorPublisher(client, "tensor")


@PUBLISHERS.register("distributed")
def _by_broadcast(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return TensorPublisher(client, "distributed")


@PUBLISHERS.register("lora")
def _by_adapter(client: BaseClient, store: WeightStore, tokenizer: Any) -> BasePublisher:
    return LoraPublisher(client, store)


READERS: dict[str, Callable[[Renderer, Mapping[str, Any], str], Group]] = {
    "demonstrations": demonstration_group,
    "worlds": partial(demonstration_group, learned="context"),
    "conversations": partial(demonstration_group, learned="all"),
    "pairs": pair_group,
    "labels": label_group,
}
"""How a row of a dataset becomes a group, by what an algorithm learns from."""

LOOKED_AT = 256
"""Of so many of the longest rows of a dataset it is checked before a run that they can be learned from."""

MAY_CHANGE = (
    "max_steps", "threads", "timeout_s", "backend.", "eval.", "checkpoint.", "tracking.", "output.", "inference.", "sync.",
    "mismatch.", "rollout.max_failed_share",
)  # fmt: skip
"""Keys that a resumed run may change without becoming another run."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the Python API hands over as objects instead of names; None is taken from the configuration."""

    model: Any = None
    tokenizer: Any = None
    dataset: Any = None
    eval_dataset: Any = None
    reward_functions: Sequence[Any] | None = None
    reward_transform_fn: Any = None
    env_class: type[BaseMDPEnv] | None = None


def build_trainer(config: Config, given: Given | None = None, *, force: bool = False) -> BaseTrainer:
    """Everything a run needs, checked; raises an RL4LLMError before any file of the run is touched where it can."""
    given = given or Given()
    ranks = _ranks(config)
    _set_up_torch(config)
    algorithm = build_algorithm(config)
    _check_names(config)
    tokenizer = given.tokenizer or load_tokenizer(config.model.path, pad_token=config.model.pad_token)
    learns_from = algorithm.needs().learns_from
    dataset = _rows(config, given.dataset, learns_from)
    parts = _reinforced if learns_from == "episodes" else _supervised
    make = parts(config, given, algorithm, tokenizer, dataset)
    run = RunDir(config.output.dir)
    if ranks.is_first:
        identity = fingerprint(config) | {"rollout.prompts": config.rollout.prompts * ranks.size}  # of all ranks
        run = RunDir.open(config.output.dir, identity | _given_identity(given, dataset), allow_changes=force)
    ranks.wait()
    try:
        if ranks.is_first:
            run.write_text("config.yaml", to_yaml(config))
        return make(run)
    except BaseException:
        run.close()
        raise


def _ranks(config: Config) -> Ranks:
    """The processes that train together; asked for wherever it matters, they are joined once."""
    return join_ranks(config.timeout_s)


def build_algorithm(config: Config) -> BaseAlgorithm:
    """The algorithm with its options; raises ConfigError for unknown or impossible ones."""
    options = dict(config.algorithm)
    algorithm = with_options("algorithm", ALGORITHMS[options.pop("name")], options)
    algorithm.check(config.rollout.group_size)
    return algorithm


def build_model(config: Config, algorithm: BaseAlgorithm, name: str) -> BaseBackend:
    """One of the models that train, "model" or "critic", without anything around it."""
    _set_up_torch(config)
    return _critic(config, algorithm, None) if name == "critic" else _backend(config, algorithm, None)


def _check_names(config: Config) -> None:
    """What can be wrong without opening a single file is said first."""
    BACKENDS[config.backend["name"]]
    ENVIRONMENTS[config.env["name"]]
    _check_sync(config)
    if "lora" in (config.sync.name, config.sync.fallback):
        _check_adapter_alone(config)


def _check_sync(config: Config) -> None:
    engine = ENGINES[config.inference["name"]]
    for key, name in (("sync.name", config.sync.name), ("sync.fallback", config.sync.fallback)):
        if name in ("auto", None):
            continue
        PUBLISHERS[name]
        if name not in engine.publishers:
            raise ConfigError(
                f"{key}={name!r} is not accepted with inference.name={config.inference['name']!r}. "
                f"Accepted: {', '.join(engine.publishers)}."
            )
    if config.inference.get("cohost") and (config.sync.name not in ("auto", "filesystem") or config.sync.fallback):
        raise ConfigError("inference.cohost=true publishes through files: leave sync.name and sync.fallback out.")
    if config.sync.dir and Path(config.sync.dir).resolve() == Path(config.output.dir).resolve():
        raise ConfigError(
            f"sync.dir={config.sync.dir!r} is output.dir, which belongs to the run. Leave sync.dir out, for weights/ in it, "
            "or give another directory."
        )


def _check_adapter_alone(config: Config) -> None:
    """Servers can be given the adapter alone only where nothing else ever changes their own weights."""
    impossible = {
        "model.lora.rank=0: the whole model trains. Set it, e.g. to 16": not config.model.lora.rank,
        "inference.router, which is not told of adapters. Leave it out": config.inference.get("router"),
        "sync.fallback: merged weights under an adapter would count twice. Leave it out": config.sync.fallback,
    }
    for reason, holds in impossible.items():
        if holds:
            raise ConfigError(f"sync.name=lora does not go with {reason}.")


def fingerprint(config: Config) -> dict[str, Any]:
    """What makes this run this run: every key that a resumed run must not change."""
    return {key: value for key, value in flatten(config).items() if not key.startswith(MAY_CHANGE)}


def _given_identity(given: Given, dataset: Any) -> dict[str, Any]:
    """What makes a run from Python objects this run; its configuration names only their types."""
    identity: dict[str, Any] = {}
    if given.dataset is not None:
        text = "\n".join(str(row.get("prompt_id", row)) for row in dataset)
        identity["given.dataset"] = f"{len(dataset)} rows, {xxhash.xxh3_64_hexdigest(text.encode())}"
    if given.model is not None:
        identity["given.model"] = f"{type(given.model).__name__}, {given.model.num_parameters():,} parameters"
    if given.reward_functions is not None:
        names = [getattr(item, "__qualname__", None) or type(item).__qualname__ for item in given.reward_functions]
        identity["given.reward_functions"] = names
    if given.env_class is not None:
        identity["given.env"] = given.env_class.__qualname__
    return identity


def with_options(where: str, make: Callable[..., Any], options: Mapping[str, Any], *args: Any, **fixed: Any) -> Any:
    """Call `make` with a user's options, after checking that it takes them."""
    accepted = _accepted(make) - set(fixed)
    for name in options:
        if name not in accepted:
            raise ConfigError(unknown(f"{where} option", name, accepted))
    try:
        return make(*args, **fixed, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}. Options: {', '.join(sorted(accepted))}.") from error


def _accepted(make: Callable[..., Any]) -> set[str]:
    """Names of the keyword parameters of a function or of a class and the bases it passes **kwargs to."""
    makers = [cls.__init__ for cls in make.__mro__ if "__init__" in vars(cls)] if inspect.isclass(make) else [make]
    names: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names |= {parameter.name for parameter in parameters if parameter.kind in kinds}
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names - {"self"}


def _set_up_torch(config: Config) -> None:
    if _device(config) == "cpu":
        keep_freed_memory()
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)


def _rows(config: Config, dataset: Any, learns_from: LearnsFrom) -> Any:
    data = config.data
    source = data.path if dataset is None else dataset
    return _load(config, source, data.split, data.limit, learns_from)


def _load(config: Config, source: Any, split: str, limit: int | None, learns_from: LearnsFrom = "episodes") -> Any:
    if isinstance(source, str) and source in GENERATED:
        if learns_from != "episodes":
            raise ConfigError(
                f"data.path={source!r} is a generated task for episodes, but algorithm.name={config.algorithm['name']!r} "
                f"learns from {learns_from}. Give it a dataset of those."
            )
        return GENERATED[source](split, limit)
    data = config.data
    return load_rows(
        source,
        split=split,
        learns_from=learns_from,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        answer_pattern=data.answer_pattern,
        system_prompt=data.system_prompt,
        prompt_template=data.prompt_template,
        limit=limit,
    )


def _supervised(config: Config, given: Given, algorithm: BaseAlgorithm, tokenizer: Any, dataset: Any) -> Callable:
    needs = algorithm.needs()
    _check_supervised(config, given, needs)
    held_out = _held_out(config, given, needs.learns_from) or ()
    answers = ANSWER_COLUMNS.get(needs.learns_from, ())
    read = _reader(needs, Renderer(tokenizer, roles=_roles(dataset, answers)))
    prompts = _prompts(config, dataset)
    start = copy.deepcopy(given.model) if needs.reference else None  # before the policy's weights move
    backend = _backend(config, algorithm, given.model)
    reference = _reference(config, algorithm, backend, start, tokenizer)
    prepared = partial(
        Preparation, algorithm=algorithm, policy=backend, reference=reference, ranks=_ranks(config)
    )
    batching = _batching(config, algorithm, tokenizer)
    context_length = backend.model.config.get_text_config().max_position_embeddings
    for rows in (dataset, held_out):
        check_rows(read, _longest(rows, LOOKED_AT, ("messages", *answers)), context_length)

    def make(run: RunDir) -> DatasetTrainer:
        tracker = _tracker(config, run)
        return DatasetTrainer(
            dataset=dataset,
            tokenizer=tokenizer,
            read=read,
            prompts=prompts,
            preparation=prepared(batching=batching),
            held_out=held_out,
            measuring=prepared(batching=replace(batching, updates_per_rollout=1, epochs=1)),
            tracker=tracker,
            **_base(config, algorithm, backend, run, tracker),
        )

    return make


def _prompts(config: Config, dataset: Any) -> PromptStream:
    ranks = _ranks(config)
    return PromptStream(
        len(dataset),
        config.rollout.prompts,
        rank=ranks.rank,
        world_size=ranks.size,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )


def _reader(needs: Needs, renderer: Renderer) -> Read:
    """How rows are read: as tokens with log-probs, or for a model that gives values with one value at the end."""
    read = partial(READERS[needs.learns_from], renderer)
    if not needs.value_head:
        return read

    def read_valued(row: Mapping[str, Any], name: str) -> Group:
        group = read(row, name)
        return replace(
            group, trajectories=tuple(valued_at_the_end(t, renderer.stop_token_ids[0]) for t in group.trajectories)
        )

    return read_valued


def _check_supervised(config: Config, given: Given, needs: Needs) -> None:
    """What has no meaning where nothing is sampled, or cannot work."""
    for what, item in (("reward_functions", given.reward_functions), ("env", given.env_class)):
        if item is not None:
            raise ConfigError(
                f"{what} is not accepted with algorithm.name={config.algorithm['name']!r}, which samples nothing and learns "
                f"from {needs.learns_from} in a dataset. Leave it out."
            )
    if needs.mismatched and config.rollout.prompts < 2:
        raise ConfigError(
            f"rollout.prompts={config.rollout.prompts} is not accepted with algorithm.name={config.algorithm['name']!r}: "
            "each step compares answers with other prompts of the step. Use 2 or more."
        )


def _reinforced(config: Config, given: Given, algorithm: BaseAlgorithm, tokenizer: Any, dataset: Any) -> Callable:
    rewards, transform = _rewards(config, given)
    for name in algorithm.needs().rewards:
        if name not in (known := [reward.name for reward in rewards]):
            raise ConfigError(unknown("a reward that the algorithm asks for", name, known))
    env = _env(config, given, dataset, tokenizer, rewards, transform)
    held_out = _held_out(config, given)
    eval_env = _env(config, given, held_out, tokenizer, rewards, transform) if held_out is not None else None
    renderer = Renderer(tokenizer, env.tool_schemas, roles=env.reply_roles if env.max_steps > 1 else ())
    prompts = _prompts(config, dataset)
    check_examples(rewards)
    start = copy.deepcopy(given.model)  # before the policy's weights move
    backend = _backend(config, algorithm, given.model)
    client = _client(config, backend.model if backend.whole else _model(config, copy.deepcopy(start)), tokenizer)
    for rows, where in ((dataset, "data"), (held_out or (), "eval")):
        _check_prompts(rows, renderer, client.context_length, where)
    new_tokens = min(client.context_length, env.max_steps * config.rollout.max_tokens)
    batching = _batching(config, algorithm, tokenizer, longest_completion=new_tokens)
    preparation = Preparation(
        algorithm=algorithm,
        policy=backend,
        batching=batching,
        temperature=config.rollout.temperature or 1.0,
        critic=_critic(config, algorithm, start),
        reference=_reference(config, algorithm, backend, start, tokenizer),
        ranks=_ranks(config),
    )
    plan = _plan(config, batching, dataset, renderer, new_tokens, client.context_length)
    runner = asyncio.Runner()
    played = {"seed": config.seed, "max_failed_share": config.rollout.max_failed_share}

    def make(run: RunDir) -> RLTrainer:
        tracker = _tracker(config, run)
        client.report_to(tracker.warn)
        return RLTrainer(
            inference=Inference(
                client=client,
                runner=runner,
                publisher=_publisher(config, client, run, tokenizer, tracker),
                canary=_canary(config, client),
                stop_above=config.mismatch.stop_above,
            ),
            rollout=Rollout(env, client, renderer, runner, **played),
            prompts=prompts,
            plan=plan,
            sampling_params=_sampling(config),
            eval_params=_sampling(config).replace(temperature=config.eval.temperature, top_p=1.0, top_k=0),
            preparation=preparation,
            tracker=tracker,
            evaluation=Rollout(eval_env, client, renderer, runner, **played) if eval_env else None,
            **_base(config, algorithm, backend, run, tracker),
        )

    return make


def _client(config: Config, model: Any, tokenizer: Any) -> BaseClient:
    options = dict(config.inference)
    engine = ENGINES[options.pop("name")]
    if not issubclass(engine, ServerClient):
        return with_options("inference", engine, options, model, tokenizer, deterministic=config.deterministic)
    cohost, router, urls = options.pop("cohost", False), options.pop("router", None), server_urls(config)
    options.pop("url", None)
    text = model.config.get_text_config()
    options.setdefault("context_length", text.max_position_embeddings)
    vocab_size = model.get_input_embeddings().num_embeddings

    def make(url: str) -> ServerClient:
        return with_options("inference", engine, options, url, tokenizer, vocab_size=vocab_size)

    fleet = FleetClient([make(url) for url in urls], router=make(router) if router else None)
    return CohostedClient(fleet) if cohost else fleet


def server_urls(config: Config) -> list[str]:
    """Where the servers are; none for the embedded engine."""
    engine = ENGINES[config.inference["name"]]
    if not issubclass(engine, ServerClient):
        return []
    urls = config.inference.get("url", engine.usual_url())
    return [urls] if isinstance(urls, str) else list(urls)


def _publisher(config: Config, client: BaseClient, run: RunDir, tokenizer: Any, tracker: RunTracker) -> BasePublisher:
    """The way that weights take, and the one they take when it fails."""
    sync = config.sync
    store = WeightStore(Path(sync.dir) if sync.dir else run.weights_dir, keep=sync.keep)
    if isinstance(client, CohostedClient):
        publisher: BasePublisher = CohostPublisher(client, FilesystemPublisher(client, store, tokenizer.save_pretrained))
    else:
        publisher = PUBLISHERS[client.publishers[0] if sync.name == "auto" else sync.name](client, store, tokenizer)
    if sync.fallback is not None:
        publisher = FallbackPublisher(publisher, PUBLISHERS[sync.fallback](client, store, tokenizer), tracker.warn)
    urls = server_urls(config)
    return ClaimingPublisher(publisher, urls) if urls else publisher


def _canary(config: Config, client: BaseClient) -> Canary | None:
    if not config.sync.verify:
        return None
    coarse = config.model.dtype if config.model.autocast == "none" else config.model.autocast
    return Canary(client.vocab_size, dtype=coarse, tolerance=config.sync.tolerance or 0.0)


def _base(
    config: Config, algorithm: BaseAlgorithm, backend: BaseBackend, run: RunDir, tracker: RunTracker
) -> dict[str, Any]:
    schedule = Schedule(
        config.max_steps,
        config.eval.every,
        config.checkpoint.every,
        config.checkpoint.keep,
        config.training.max_skipped,
        config.timeout_s,
    )
    return {
        "algorithm": algorithm,
        "backend": backend,
        "clock": tracker.clock,
        "schedule": schedule,
        "run": run,
        "ranks": _ranks(config),
    }


def _backend(config: Config, algorithm: BaseAlgorithm, given: Any) -> BaseBackend:
    """The model that trains: the policy, or one that gives values."""
    model, lora = _model(config, given), config.model.lora
    adapter = value_head = None
    if algorithm.needs().value_head:
        value_head = load_value_head(config.model.path if given is None else None, model)
    if lora.rank:
        adapter = add_adapter(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed)
    critic = algorithm.needs().critic
    steps = config.max_steps - (critic.warmup_steps if critic else 0)  # of the loop, in which the policy learns
    options = _optimizer(config, config.training.epochs, steps)
    return _on_backend(config, model, adapter=adapter, value_head=value_head, **options)


def _reference(
    config: Config, algorithm: BaseAlgorithm, policy: BaseBackend, start: Any, tokenizer: Any
) -> BaseBackend | FrozenModel | None:
    """The model that log-probs are compared with; it never trains."""
    needs = algorithm.needs()
    if not needs.reference:
        return None
    if policy.adapter is not None and needs.reference_path is None and not needs.reference_every:
        return FrozenModel(policy, policy.adapter)
    if needs.reference_path is not None:
        _check_same_tokens(tokenizer, needs.reference_path, config.model.pad_token)
    model = _model(config, start if needs.reference_path is None else None, needs.reference_path)
    if model.get_input_embeddings().num_embeddings < len(tokenizer):
        raise ConfigError(
            f"The model {needs.reference_path!r} knows {model.get_input_embeddings().num_embeddings} tokens, but the "
            f"tokenizer has {len(tokenizer)}. Take one with the same vocabulary."
        )
    return _on_backend(config, model, trains=False)


def _check_same_tokens(tokenizer: Any, path: str, pad_token: str | None) -> None:
    """Two models can judge the same tokens only if these mean the same to both."""
    own, other = tokenizer.get_vocab(), load_tokenizer(path, pad_token=pad_token).get_vocab()
    different = sorted(own.items() - other.items(), key=lambda item: item[1]) or sorted(other.items() - own.items())
    if different:
        token, _ = different[0]
        raise ConfigError(
            f"The tokenizer of {path!r} is another than that of model.path: {len(other)} tokens against {len(own)}, and "
            f"{token!r} is number {own.get(token, 'none')} in one and {other.get(token, 'none')} in the other. A teacher or "
            "reference must have the same tokenizer."
        )


def _critic(config: Config, algorithm: BaseAlgorithm, start: Any) -> BaseBackend | None:
    """The value model, with an optimizer of its own."""
    critic = algorithm.needs().critic
    if critic is None:
        return None
    path = critic.path or (None if start is not None else config.model.path)
    model = _model(config, copy.deepcopy(start) if path is None else None, path)
    options = _optimizer(config, critic.epochs, config.max_steps)
    if critic.lr is not None:
        options["lr"] = critic.lr
    return _on_backend(config, model, value_head=load_value_head(path, model), **options)


def _on_backend(config: Config, model: Any, **options: Any) -> BaseBackend:
    """A model on the backend of the configuration."""
    own = dict(config.backend)
    make = BACKENDS[own.pop("name")]
    return with_options("backend", make, own, model, autocast=config.model.autocast, ranks=_ranks(config), **options)


def _model(config: Config, given: Any, path: str | None = None) -> Any:
    return load_model(
        given if given is not None else path or config.model.path,
        dtype=config.model.dtype,
        device=_device(config),
        gradient_checkpointing=config.model.gradient_checkpointing,
    )


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


def _device(config: Config) -> str:
    if config.model.device != "auto":
        try:
            torch.device(config.model.device)
        except RuntimeError as error:
            raise ConfigError(f"model.device={config.model.device!r} is not accepted: auto, cpu, cuda or cuda:1.") from error
        return config.model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _batching(config: Config, algorithm: BaseAlgorithm, tokenizer: Any, longest_completion: int = 0) -> Batching:
    training = config.training
    return Batching(
        layout=training.layout,
        aggregation=algorithm.aggregation,
        pad_token_id=tokenizer.pad_token_id,
        max_tokens_per_batch=training.max_tokens_per_batch,
        usual_tokens_per_batch=16384 if _device(config) == "cuda" else 2048,
        updates_per_rollout=training.updates_per_rollout,
        epochs=training.epochs,
        constant_length=training.constant_length or longest_completion,
        whole_groups=algorithm.needs().whole_groups,
    )


def _sampling(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )


def _tracker(config: Config, run: RunDir) -> RunTracker:
    tracking = config.tracking
    return RunTracker(
        run,
        total_steps=config.max_steps,
        tensorboard=tracking.tensorboard,
        wandb_project=tracking.wandb_project if tracking.wandb else None,
        episodes_every=tracking.episodes_every,
        episodes_per_step=tracking.episodes_per_step,
        config=flatten(config),
        ranks=_ranks(config),
    )


def _env(
    config: Config,
    given: Given,
    dataset: Any,
    tokenizer: Any,
    rewards: Sequence[BaseRewardFunction],
    transform: Any,
) -> BaseMDPEnv:
    options = dict(config.env)
    name = options.pop("name")
    fixed = {
        "dataset": dataset,
        "tokenizer": tokenizer,
        "reward_functions": rewards,
        "batch_size": config.rollout.prompts,
        "group_size": config.rollout.group_size,
        "rank": _ranks(config).rank,
        "world_size": _ranks(config).size,
        "seed": config.seed,
        "shuffle_dataset": config.data.shuffle,
        "reward_transform_fn": transform,
    }
    return with_options("env", given.env_class or ENVIRONMENTS[name], options, **fixed)


def _rewards(config: Config, given: Given) -> tuple[list[BaseRewardFunction], Any]:
    if given.reward_functions is not None:
        return [as_reward_function(item) for item in given.reward_functions], given.reward_transform_fn
    functions, weights = [], {}
    for item in config.rewards:
        if not isinstance(item, str | Mapping):
            raise ConfigError(f"rewards: {item!r} is not accepted: a name, or a mapping with name, weight and options.")
        options = {"name": item} if isinstance(item, str) else dict(item)
        weight = options.pop("weight", 1.0)
        if not isinstance(weight, int | float):
            raise ConfigError(f"rewards: weight={weight!r} of {options.get('name')!r} is not accepted: a number.")
        weight = float(weight)
        function = as_reward_function(options)
        functions.append(function)
        weights[function.name] = weight
    plain = list(weights.values()) == [1.0]
    return functions, None if plain else weighted_sum(weights)


def _held_out(config: Config, given: Given, learns_from: LearnsFrom = "episodes") -> Any:
    if config.eval.every == 0:
        return None
    if given.eval_dataset is not None:
        source = given.eval_dataset
    elif given.dataset is not None and config.eval.path is None:
        return None
    else:
        source = config.eval.path or config.data.path
    if config.eval.path is None and source == config.data.path and source not in GENERATED and not has_splits(source):
        raise ConfigError(
            f"eval: data.path={source!r} is one file without splits, so the held-out set would be the training set. "
            "Set eval.path to other prompts, or eval.every=0 to measure none."
        )
    return _load(config, source, config.eval.split, config.eval.limit, learns_from)


def _roles(dataset: Any, answers: Sequence[str]) -> tuple[str, ...]:
    """Who speaks between two answers of a dataset: in these columns, or where there are none in its messages."""
    columns = answers or ("messages",)
    roles = {message["role"] for row in dataset for column in columns for message in row[column]}
    return tuple(sorted(roles - {"assistant", "system"}))


def _check_prompts(rows: Any, renderer: Renderer, context_length: int, where: str) -> None:
    """A prompt that leaves no room for an answer is found now, not in the middle of a run."""
    for number in range(len(rows)):
        length = renderer.prompt_too_long(_messages(rows[number]), context_length - 1)
        if length is not None:
            raise DataError(
                f"{where}: prompt {rows[number].get('prompt_id', number)!r} has {length} tokens, but the model's context "
                f"holds {context_length}, and an answer must fit too. Remove or shorten it."
            )


def _plan(
    config: Config, batching: Batching, rows: Any, renderer: Renderer, new_tokens: int, context_length: int
) -> list[dict[str, Any]]:
    """How prompts x samples become micro-batches; raises ConfigError when they cannot."""
    longest = max(len(renderer.first(_messages(row))) for row in _longest(rows, 16))
    new_tokens = min(new_tokens, context_length - longest)
    return plan_table(
        prompts=config.rollout.prompts,
        samples=config.rollout.group_size,
        max_prompt_tokens=longest,
        max_new_tokens=new_tokens,
        max_tokens_per_batch=batching.max_tokens_per_batch or batching.budget([longest + new_tokens]),
        layout=config.training.layout,
        updates=config.training.updates_per_rollout,
    )


def _messages(row: Mapping[str, Any], column: str = "messages") -> list[ChatMessage]:
    return [item if isinstance(item, ChatMessage) else ChatMessage.from_dict(item) for item in row[column]]


def _longest(rows: Any, count: int, columns: Sequence[str] = ("messages",)) -> list[Mapping[str, Any]]:
    """The rows with the most text in some columns of messages."""

    def size(number: int) -> int:
        return sum(len(item.content) for column in columns for item in _messages(rows[number], column))

    return [rows[number] for number in sorted(range(len(rows)), key=size, reverse=True)[:count]]

"""The configuration: typed dataclasses, filled from a YAML file and ``key.sub=value`` overrides.

Options of an algorithm, environment, reward, engine or backend stand beside its `name`; they are checked against the
class that the name stands for, see `rl4llm.build`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException, ValidationError

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.option_types import in_words

CONFIGS = Path(__file__).parent / "configs"
"""Those that rl4llm brings: in a checkout a link to its configs/, in a wheel a copy."""


@dataclass
class LoraConfig:
    """An adapter that trains while the model stays frozen; needs the extra `lora`."""

    rank: int = 0  # 0: the whole model trains
    alpha: int | None = None  # the adapter counts alpha / rank; null: twice the rank
    targets: list[str] = field(default_factory=list)  # names of linear layers; empty: all but the output layer


@dataclass
class ModelConfig:
    """The policy: a Hugging Face directory, or a name on the hub."""

    path: str = MISSING
    dtype: str = "float32"  # of the weights: float32 or bfloat16
    autocast: str = "none"  # bfloat16: matrix products in bf16 while the weights stay float32
    device: str = "auto"  # auto: cuda where there is one
    gradient_checkpointing: bool = False
    pad_token: str | None = None  # for tokenizers without one
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class DataConfig:
    """Where prompts come from; rows without `messages` and `ground_truth` are made from two columns."""

    path: str | None = None  # directory, .jsonl, .parquet, hub name, or a generated task; null: what the environment brings
    split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None
    answer_pattern: str | None = None  # regular expression; its first group is the ground truth
    system_prompt: str | None = None
    prompt_template: str | None = None  # with {prompt}
    limit: int | None = None
    shuffle: bool = True


@dataclass
class EvalConfig:
    """The fixed held-out set."""

    path: str | None = None  # null: data.path
    split: str = "test"
    limit: int | None = 256
    every: int = 10  # steps; 0 is never
    temperature: float = 0.0


@dataclass
class RolloutConfig:
    """How much is sampled per step, and how."""

    prompts: int = 16  # per step and rank
    group_size: int = 8  # samples per prompt
    max_tokens: int = 256  # per turn
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] = field(default_factory=list)
    max_failed_share: float = 0.1
    ahead: bool = False  # play the next step's episodes while this one trains, with weights one step older; for servers


@dataclass
class SyncConfig:
    """How new weights reach the engines, and how they prove it."""

    name: str = "auto"  # memory for the embedded engine, filesystem for servers; see PUBLISHERS in rl4llm/build/engines.py
    fallback: str | None = None  # the way that is taken, and reported, when the first one fails
    dir: str | None = None  # of the weight store, an absolute path on all servers; null: weights/ in output.dir
    keep: int = 2  # versions
    verify: bool = True  # ask every engine for the log-probs of fixed tokens after every publish
    tolerance: float | None = None  # nats; null: by dtype, see rl4llm.sync.verify


@dataclass
class SandboxConfig:
    """Where programs that a model wrote are run, see `rl4llm.sandbox`."""

    level: str = "auto"  # the strongest that works here; prefork, bubblewrap, rlimits, or package.module:Name elsewhere
    allow_weak: bool = False  # take a level that does not keep programs from the host's files and network
    slots: int = 2  # programs at a time
    packages: list[str] = field(default_factory=list)  # directories that programs may import from


@dataclass
class MismatchConfig:
    """How far log-probs of engine and trainer may be apart."""

    stop_above: float | None = None  # mean |difference| in nats of a step; null only measures


@dataclass
class TrainingConfig:
    """How batches become optimizer steps."""

    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0
    schedule: str = "constant"  # constant, linear or cosine, after the warm-up
    warmup_steps: int = 0
    max_tokens_per_batch: int | None = None  # or the longest trajectory; null: 2048 on a CPU, 16384 on a GPU
    layout: str = "shared"  # sorted, packed or shared, see rl4llm.data.pack
    constant_length: int | None = None  # of aggregation "constant"; null: all tokens that a trajectory may sample
    updates_per_rollout: int = 1
    epochs: int = 1
    max_skipped: int = 3  # optimizer steps in a row whose loss or gradient is not finite, before the run stops


@dataclass
class CheckpointConfig:
    every: int = 50  # steps; 0 is only at the end
    keep: int = 2


@dataclass
class TrackingConfig:
    tensorboard: bool = True
    wandb: bool = False  # WANDB_MODE=offline keeps it in files that `wandb sync` uploads
    mlflow: bool = False  # where MLFLOW_TRACKING_URI says, else in mlflow.db of the working directory
    trackio: bool = False  # on this machine, for `trackio show`
    project: str = "rl4llm"  # of W&B and Trackio, and the experiment of MLflow
    episodes_every: int = 1  # steps; 0 stores none
    episodes_per_step: int = 64


@dataclass
class OutputConfig:
    dir: str = "runs/rl4llm"
    console: str = "auto"  # plain: no panel; quiet: warnings only; verbose: a line with more numbers for each step


@dataclass
class LaunchConfig:
    """The processes of a run, for `rl4llm launch`; other commands need none of it."""

    nodes: int = 1  # machines that train
    nproc: int = 1  # processes on each of them, one per GPU
    gpu: str | None = None  # their type, as the engine of --on names it, such as H100
    servers: int = 0  # inference servers to start; 0: those of inference.url are there, or the engine is embedded
    server_gpus: int = 1  # of each server; 0 starts it with --cpu
    server_gpu: str | None = None  # null: gpu
    server_flags: list[str] = field(default_factory=list)  # the server's own
    router: bool = False  # sglang-router in front of the servers
    env_hosts: int = 0  # hosts of environments to start; 0: those of env.remote are there, or the trainer plays them


@dataclass
class Config:
    """Everything a run needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    env: dict[str, Any] = field(default_factory=lambda: {"name": "chat"})
    rewards: list[Any] | None = None  # names, or mappings with name, weight and options; null: the environment's own
    parts: dict[str, Any] = field(default_factory=dict)  # several environments in one run by name, see `by_part`
    curriculum: float | None = None  # the least share of its weight that a part keeps, see rl4llm.data.mixture; null: all
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    inference: dict[str, Any] = field(default_factory=lambda: {"name": "local"})
    sync: SyncConfig = field(default_factory=SyncConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    algorithm: dict[str, Any] = field(default_factory=lambda: {"name": "grpo"})
    training: TrainingConfig = field(default_factory=TrainingConfig)
    backend: dict[str, Any] = field(default_factory=lambda: {"name": "torch"})
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    max_steps: int = 100
    seed: int = 42
    deterministic: bool = False  # the same steps bit for bit, also after a resume
    threads: int = 0  # of torch on the CPU; 0 leaves torch's own choice
    timeout_s: float = 1800.0  # of waiting for the other ranks, of which one process has none


def load_config(path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Read a YAML file, apply overrides, and check every key and type; raises ConfigError.

    Overrides are a mapping, or texts: ``key.sub=value``, and further YAML files that are laid over the first one. A name
    such as ``configs/quickstart.yaml`` that is no file here means the one that rl4llm brings.

    >>> load_config(overrides=["model.path=m", "data.path=d", "training.lr=1e-4"]).training.lr
    0.0001
    """
    files = [Path(path)] if path is not None else []
    if not isinstance(overrides, Mapping):
        files += [Path(text) for text in overrides if _is_file(text)]
        overrides = [text for text in overrides if not _is_file(text)]
    merged = OmegaConf.structured(Config)
    for file in files:
        try:
            merged = _merge(merged, _read(file))
        except ConfigError as error:
            raise ConfigError(error if str(file) in str(error) else f"{file}: {error}") from None
    merged = _merge(merged, _overrides(overrides))
    return _checked(merged)


def by_part(config: Config) -> dict[str, Config]:
    """The configuration of each environment of a run: of the only one, named "", or of each of its `parts`.

    A part has a weight, and keys of `PART_KEYS`, which are laid over those of the run:

        parts:
          sums: {weight: 2, data: {path: arithmetic}, rewards: [{name: math, extract: answer}]}
          tools: {data: {path: arithmetic}, env: {name: tool}, rollout: {max_tokens: 128}}
    """
    if not config.parts:
        return {"": config}
    whole = OmegaConf.structured(dataclasses.replace(config, parts={}, curriculum=None))
    return {name: _part(name, part, whole) for name, part in config.parts.items()}


def _part(name: str, part: Any, whole: DictConfig) -> Config:
    where = f"parts.{name}"
    if not re.fullmatch(r"[a-zA-Z0-9_\-]+", str(name)):
        raise ConfigError(f"{where}: the name {name!r} is not accepted: letters, digits, '_' and '-' only.")
    if not isinstance(part, Mapping):
        raise ConfigError(f"{where}={part!r} is not accepted: a mapping with weight and any of {', '.join(PART_KEYS)}.")
    keys = {key: value for key, value in part.items() if key != "weight"}
    for section, value in keys.items():
        if section not in PART_KEYS:
            raise ConfigError(unknown(f"{where}: the key", str(section), ("weight", *PART_KEYS)))
        accepted = PART_KEYS[section]
        for key in value if accepted and isinstance(value, Mapping) else ():
            if key not in accepted:
                raise ConfigError(f"{unknown(f'{where}.{section}: the key', str(key), accepted)} Others are the run's.")
    try:
        return _checked(_merge(whole, OmegaConf.create(keys)))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def to_yaml(config: Config) -> str:
    """The resolved configuration, as it is written beside a run."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf by its dotted key."""
    if dataclasses.is_dataclass(config):
        config = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    if not isinstance(config, Mapping):
        return {prefix[:-1]: config}
    return {key: value for name in config for key, value in flatten(config[name], f"{prefix}{name}.").items()}


def _read(path: Path) -> DictConfig:
    path = _found(path)
    try:
        layer = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of keys, not a list.")
    return layer


def _found(path: Path) -> Path:
    """The file itself or, for a name such as configs/quickstart.yaml that is not here, the one that rl4llm brings."""
    places = [path, CONFIGS.parent / path] if path.parts[:1] == (CONFIGS.name,) else [path]
    for place in places:
        if place.is_file():
            return place
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a directory, not a configuration file.")
    known = {item.name for place in places for item in place.parent.glob("*.yaml") if item.is_file()}
    near = difflib.get_close_matches(path.name, sorted(known), n=1)
    hint = f" Did you mean {path.parent / near[0]}?" if near else ""
    raise ConfigError(f"There is no configuration file {path}.{hint}")


def _is_file(text: str) -> bool:
    return "=" not in text and text.endswith((".yaml", ".yml"))


def _overrides(overrides: Sequence[str] | Mapping[str, Any]) -> DictConfig:
    try:
        return _layer(overrides)
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"An override's value is not valid YAML: {' '.join(str(error).split())}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"An override's value cannot be read: {str(error).splitlines()[0]}.") from None


def _layer(overrides: Sequence[str] | Mapping[str, Any]) -> DictConfig:
    if isinstance(overrides, Mapping):
        layer = OmegaConf.create()
        try:
            for key, value in overrides.items():
                OmegaConf.update(layer, key, value, force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}. Accepted: what YAML can say.") from None
        return layer
    wrong = [text for text in overrides if "=" not in text or text.startswith("=")]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is not an override. Accepted: key.sub=value, for example training.lr=1e-5.")
    return OmegaConf.from_dotlist(list(overrides))


def _checked(merged: DictConfig) -> Config:
    """All keys with their values; raises ConfigError for one that is not set, refers to none, or cannot be."""
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"{missing[0]} is not set. Set it in the YAML file or on the command line: {missing[0]}=...")
        config = OmegaConf.to_object(merged)
    except InterpolationResolutionError as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}. Accepted in ${{...}}: another key.") from None
    assert isinstance(config, Config)  # it is what everything was merged into
    _check(config)
    return config


def _merge(config: DictConfig, layer: DictConfig) -> DictConfig:
    given = OmegaConf.to_container(layer)
    assert isinstance(given, dict)  # as the layer is
    for name, value in given.items():
        if name in config and OmegaConf.is_dict(config[name]) and not isinstance(value, Mapping):
            raise ConfigError(f"{name!s}={value!r} is not accepted: a mapping of keys")
    _check_keys(flatten(given), config)
    try:
        merged = OmegaConf.merge(config, layer)
        assert isinstance(merged, DictConfig)
    except ValidationError as error:
        key = re.sub(r"\[\d+\]$", "", str(error.full_key))  # of a list, not of one of its items
        raise ConfigError(f"{key}={flatten(given)[key]!r} is not accepted: {_wanted(key)}.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    for part in FREE:  # another name brings other options, so those from before do not stay
        named = layer[part].get("name") if part in layer and layer[part] is not None else None
        if named not in (None, config[part].get("name")):
            merged[part] = layer[part]
    return merged


def _wanted(key: str) -> str:
    """What values a key may have, in words."""
    kind: Any = Config
    for name in key.split("."):
        kind = get_type_hints(kind)[name]
    return in_words(kind)


def _check_keys(given: Iterable[str], config: DictConfig) -> None:
    free = (*FREE, "rewards", "parts")
    known = [key for key in flatten(OmegaConf.to_container(config)) if key.split(".")[0] not in free]
    for key in given:
        sections = {name.split(".")[0] for name in known}
        if key.split(".")[0] in free or key in known or key in sections:
            continue
        tail = {name.split(".")[-1]: name for name in known}
        close = difflib.get_close_matches(key, known, n=1) or [
            tail[name] for name in difflib.get_close_matches(key.split(".")[-1], tail, n=1)
        ]
        hint = f" Did you mean {close[0]!r}?" if close else ""
        section = key.split(".")[0]
        near = [name for name in known if name.split(".")[0] == section] or sorted(sections | set(free))
        raise ConfigError(f"Unknown configuration key {key!r}.{hint} Known: {', '.join(near)}.")


FREE = ("env", "inference", "algorithm", "backend")
"""Parts whose keys are the options of the class that their `name` stands for."""

PART_KEYS: dict[str, tuple[str, ...]] = {
    "env": (),
    "data": (),
    "rewards": (),
    "eval": ("path", "split", "limit"),
    "rollout": ("max_tokens", "top_p", "top_k", "stop"),  # log-probs are of one temperature, so parts have the same
}
"""What a part of a run may have of its own: whole sections, or these keys of them."""

CHOICES = {
    "output.console": ("auto", "plain", "quiet", "verbose"),
    "model.dtype": ("float32", "bfloat16"),
    "model.autocast": ("none", "bfloat16"),
    "training.schedule": ("constant", "linear", "cosine"),
    "training.layout": ("sorted", "packed", "shared"),
}
AT_LEAST = {
    "model.lora.rank": 0,
    "model.lora.alpha": 1,
    "rollout.prompts": 1,
    "rollout.group_size": 1,
    "rollout.max_tokens": 1,
    "rollout.temperature": 0,
    "rollout.top_p": 0,
    "rollout.top_k": 0,
    "rollout.max_failed_share": 0,
    "data.limit": 1,
    "eval.limit": 1,
    "eval.temperature": 0,
    "training.weight_decay": 0,
    "training.max_grad_norm": 0,
    "training.warmup_steps": 0,
    "tracking.episodes_every": 0,
    "tracking.episodes_per_step": 0,
    "mismatch.stop_above": 0,
    "sync.tolerance": 0,
    "threads": 0,
    "timeout_s": 1,
    "training.lr": 0,
    "training.updates_per_rollout": 1,
    "training.epochs": 1,
    "training.max_skipped": 1,
    "training.max_tokens_per_batch": 1,
    "training.constant_length": 1,
    "sync.keep": 1,
    "sandbox.slots": 1,
    "eval.every": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "launch.nodes": 1,
    "launch.nproc": 1,
    "launch.servers": 0,
    "launch.server_gpus": 0,
    "launch.env_hosts": 0,
    "max_steps": 0,
    "seed": 0,
}
AT_MOST = {"rollout.top_p": 1, "rollout.max_failed_share": 1, "seed": 2**63 - 1, "threads": 1024}


def _check(config: Config) -> None:
    values = flatten(config)
    for key, accepted in CHOICES.items():
        if values[key] not in accepted:
            raise ConfigError(f"{key}={values[key]!r} is not accepted. Accepted: {', '.join(accepted)}.")
    _check_numbers(values)
    if values["rollout.top_p"] == 0:
        raise ConfigError("rollout.top_p=0 is not accepted: above 0; 1 switches it off.")
    for part in FREE:
        if not isinstance(getattr(config, part).get("name"), str):
            raise ConfigError(f"{part}.name is not set; `rl4llm info` lists what it may be.")
    if config.curriculum is not None and not config.parts:
        raise ConfigError(f"curriculum={config.curriculum} is not accepted without `parts`, whose weights it changes.")
    by_part(config)


def _check_numbers(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        free = key.split(".")[0] in (*FREE, "rewards", "parts")  # where each class says what it takes
        if not free and any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ConfigError(f"{key}={value} is not accepted: a finite number.")
    for key in AT_LEAST.keys() | AT_MOST.keys():
        _check_range(key, values[key])


def _check_range(key: str, value: float | None) -> None:
    if value is None:
        return
    if not value >= AT_LEAST.get(key, value):
        raise ConfigError(f"{key}={value} is not accepted: {AT_LEAST[key]} or above.")
    if not value <= AT_MOST.get(key, value):
        raise ConfigError(f"{key}={value} is not accepted: {AT_MOST[key]} or below.")

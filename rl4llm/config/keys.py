"""The keys that a configuration has, with types, ranges, defaults and purposes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import MISSING, OmegaConf

from rl4llm.config.overrides import layer_of
from rl4llm.config.resolve import VARIABLE, Origin, built, flatten, merged, resolved, with_references
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.redact import redacted
from rl4llm.core.schema import Beta, Count, Fraction, Natural, NonNegative, Positive, Range, Share, refusal

FREE = ("env", "inference", "algorithm", "backend")
"""Parts whose keys are the options of the class that their `name` stands for."""

PART_KEYS = (
    "env", "data", "rewards", "eval.path", "eval.split", "eval.limit",
    "rollout.max_tokens", "rollout.top_p", "rollout.top_k", "rollout.stop",  # not temperature: log-probs are all of one
)  # fmt: skip
"""What a part of a run may have for itself: whole sections, or these keys of them."""


@dataclass
class LoraConfig:
    """An adapter that trains while the model stays frozen; needs the extra `lora`."""

    rank: Natural = 0  # 0: the whole model trains
    alpha: Count | None = None  # the adapter counts alpha / rank; null: twice the rank
    targets: list[str] = field(default_factory=list)  # linear layers; empty: all inner ones that PEFT adapts


@dataclass
class ModelConfig:
    """The policy: a Hugging Face directory, or a name on the hub."""

    path: str = MISSING
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights; bfloat16 trains with float32 masters
    # bfloat16: matrix products in bf16, weights in float32; auto: bfloat16 where the processor or GPU multiplies in it
    autocast: Literal["none", "bfloat16", "auto"] = "auto"
    device: str = "auto"  # a type that torch knows, such as cuda, xpu or mps; auto: cuda where there is one
    # nf4: linear layers stay frozen in 4 bits under an adapter, except `quantize_skip`; needs the extra `bitsandbytes`
    quantize: Literal["none", "nf4"] = "none"
    quantize_skip: list[str] = field(default_factory=list)  # names, or beginnings or ends of them
    gradient_checkpointing: bool = False
    pad_token: str | None = None  # for tokenizers without one
    # frozen: rows and tools may have images, and the image tower stays as in the files; train: it learns too; none: text
    vision: Literal["none", "frozen", "train"] = "none"
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class DataConfig:
    """Where prompts come from; rows without `messages` and `ground_truth` are made from two columns."""

    # A directory, .jsonl, .parquet, .csv, hub name, or a generated task; null: what the environment brings.
    path: str | None = None
    split: str = "train"
    prompt_column: str | None = None  # messages or a text; null: messages, or else prompt
    # a dot leads into a nested column; null: ground_truth, which may be missing
    answer_column: str | None = None
    answer_pattern: str | None = None  # regular expression; its first group is the ground truth
    system_prompt: str | None = None
    prompt_template: str | None = None  # with {prompt}
    limit: Count | None = None
    shuffle: bool = True
    bad_rows: Literal["stop", "skip"] = "stop"  # too long, empty, with equal answers ...; skip counts them
    # Special tokens in texts: escape encodes them as ordinary text, allow lets them open and close turns.
    special_tokens: Literal["escape", "refuse", "allow"] = "escape"


@dataclass
class EvalConfig:
    """The fixed held-out set."""

    path: str | None = None  # null: data.path
    split: str = "test"
    limit: Count | None = 256
    every: Natural = 10  # steps; 0 is never
    temperature: NonNegative = 0.0


@dataclass
class RolloutConfig:
    """How much is sampled per step, and how."""

    prompts: Count = 16  # per step and rank
    group_size: Count = 8  # samples per prompt
    max_tokens: Count = 256  # per turn
    temperature: NonNegative = 1.0
    top_p: Share = 1.0  # 1 switches it off
    top_k: Natural = 0  # 0 switches it off
    stop: list[str] = field(default_factory=list)
    max_failed_share: Fraction = 0.1
    max_staleness: Natural = 0  # steps that episodes may begin early, with older weights; above 0 for servers
    # age in versions up to which groups of earlier steps train once more in the places of zero-variance groups; 0 is never
    replay: Natural = 0


@dataclass
class SyncConfig:
    """How new weights reach the engines, and how they prove it."""

    # memory for the embedded engine, filesystem for servers; see PUBLISHERS in rl4llm/core/tables.py
    name: str = "auto"
    fallback: str | None = None  # the way that is taken, and reported, when the first one fails
    dir: str | None = None  # absolute and on all servers; null: in shared memory, or weights/ in output.dir
    keep: Count = 2  # versions
    verify: bool = True  # ask every engine for the log-probs of a few tokens after every publish
    tolerance: NonNegative | None = None  # nats on average; null: calibrated, see rl4llm.sync.verify


@dataclass
class SandboxConfig:
    """Where programs that a model wrote are run; the options of the sandbox."""

    # auto: the strongest that works here; or prefork, bubblewrap, rlimits, or package.module:Name elsewhere
    level: str = "auto"
    allow_weak: bool = False  # take a level that does not keep programs from the host's files and network
    slots: Count = 2  # programs at a time
    # installed packages that programs may import, such as numpy
    packages: list[str] = field(default_factory=list)
    loopback: bool = False  # let programs talk to themselves over 127.0.0.1 and ::1


@dataclass
class MismatchConfig:
    """How far log-probs of engine and trainer may be apart."""

    stop_above: NonNegative | None = None  # mean |difference| in nats of a step; null only measures


@dataclass
class TrainingConfig:
    """How batches become optimizer steps."""

    # the other two keep Adam's moments in 8 bits, paged_ in memory that a full GPU moves to the CPU
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    lr: NonNegative = 1e-6
    weight_decay: NonNegative = 0.0
    betas: list[Beta] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: NonNegative = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: Natural = 0
    # a longer trajectory is computed alone; null: 2048 on a CPU, 16384 on a GPU
    max_tokens_per_batch: Count | None = None
    layout: Literal["sorted", "packed", "shared"] = "shared"  # see rl4llm.data.layouts
    constant_length: Count | None = None  # of aggregation "constant"; null: all that a trajectory may sample
    updates_per_rollout: Count = 1
    passes_per_rollout: Count = 1  # over the samples of a step, each of updates_per_rollout optimizer steps
    # passes over a dataset, from which the number of steps follows; a max_steps that is set may end the run earlier
    epochs: Positive | None = None
    # optimizer steps in a row with a loss or gradient that is not finite, before it stops
    max_skipped: Count = 3


@dataclass
class CheckpointConfig:
    every: Natural = 50  # steps; 0 is only at the end
    keep: Count = 2


@dataclass
class TrackingConfig:
    tensorboard: bool = True
    wandb: bool = False  # WANDB_MODE=offline keeps it in files that `wandb sync` uploads
    project: str = "rl4llm"  # of W&B, OpenTelemetry and Prometheus
    opentelemetry: bool = False  # spans of each step; OTEL_EXPORTER_OTLP_ENDPOINT and its like say where to
    prometheus: Annotated[int, Range(0, 65535)] = (
        0  # port on 127.0.0.1 that serves the metrics; 0 serves none
    )
    episodes_every: Natural = 1  # steps; 0 stores none
    episodes_per_step: Natural = 64


@dataclass
class OutputConfig:
    dir: str = "runs/rl4llm"
    # plain: no picture in a notebook; quiet: warnings only; verbose: a line with more numbers for each step
    console: Literal["auto", "plain", "quiet", "verbose"] = "auto"


@dataclass
class LaunchConfig:
    """The processes of a run, for `rl4llm launch`; other commands need none of it."""

    nodes: Count = 1  # machines that train
    nproc: Count = 1  # processes on each of them, one per GPU
    gpu: str | None = None  # their type, as the engine of --on names it, such as H100
    servers: Natural = 0  # inference servers to start; 0: those of inference.url, or the embedded engine
    server_gpus: Natural = 1  # of each server; 0 starts it with --cpu
    server_gpu: str | None = None  # null: gpu
    server_flags: list[str] = field(default_factory=list)  # the server's own
    router: bool = False  # sglang-router in front of the servers
    # hosts of environments to start; 0: those of env.remote, or the trainer plays them
    env_hosts: Natural = 0


@dataclass
class Config:
    """Everything a run needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    env: dict[str, Any] = field(default_factory=lambda: {"name": "chat"})
    # names, or mappings with name, weight and options; null: the environment's
    rewards: list[Any] | None = None
    # several environments in one run by name, see `environments`
    parts: dict[str, Any] = field(default_factory=dict)
    # Draw more often what is solved half of the time: the least share of its weight that each of `parts` or, without
    # parts, each prompt keeps, or the column of the dataset whose values are pools; see data.mixture and data.curriculum.
    curriculum: Share | str | None = None
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
    max_steps: Natural = 100
    seed: Annotated[int, Range(0, 2**63 - 1)] = 42
    deterministic: bool = False  # the same steps bit for bit, also after a resume
    threads: Annotated[int, Range(0, 1024)] = 0  # of torch on the CPU; 0 leaves torch's own choice
    timeout_s: Annotated[float, Range(1)] = 1800.0  # of waiting for the other ranks, if there are any
    origin: Origin = field(default=Origin(), repr=False, compare=False)

    @property
    def environments(self) -> dict[str, Config]:
        """The configuration of each environment: the only one is named "", or there is one for each of `parts`.

        A part has a weight, and keys of `PART_KEYS`, which are laid over those of the run:

            parts:
              sums: {weight: 2, data: {path: arithmetic}, rewards: [{name: math, extract: answer}]}
              tools: {data: {path: arithmetic}, env: {name: tool}, rollout: {max_tokens: 128}}
        """
        return {name: self._part(name, part) for name, part in self.parts.items()} or {"": self}

    def _part(self, name: str, part: Any) -> Config:
        if not isinstance(part, Mapping):
            raise ConfigError(refusal(f"parts.{name}", part, dict))
        try:
            for key in flatten(part):
                if not f"{key}.".startswith(tuple(f"{name}." for name in ("weight", *PART_KEYS))):
                    section = key.partition(".")[0]
                    inside = any(name.startswith(f"{section}.") for name in PART_KEYS)
                    raise ConfigError(unknown("the key", key if inside else section, ("weight", *PART_KEYS)))
            layer = layer_of({key: value for key, value in part.items() if key != "weight"}, Config)
            values = self.values() | {"parts": {}, "curriculum": None}
            return self._built(merged(values, layer, FREE), self.origin)  # resolved with the run
        except ConfigError as error:
            raise ConfigError(f"parts.{name}: {error}") from None

    @classmethod
    def of(
        cls, values: Mapping[str, Any], keys: frozenset[str] = frozenset(), *, of_run: bool = False
    ) -> Config:
        """Return the configuration of merged layers, in which `keys` were set; raise ConfigError if it is wrong."""
        plain, references = resolved(cls, values, of_run=of_run)
        config = cls._built(plain, Origin(keys, references))
        if not config.output.dir:
            raise ConfigError("output.dir is empty. Set it to the directory of the run.")
        config.output.dir = str(Path(config.output.dir))
        if isinstance(config.curriculum, str) and config.parts:
            raise ConfigError(
                f"curriculum={config.curriculum!r} is not accepted with `parts`. Set the least share of its weight that a "
                "part keeps, such as 0.1."
            )
        config.environments  # noqa: B018 - refuses a wrong part
        return config

    @classmethod
    def _built(cls, values: Mapping[str, Any], origin: Origin) -> Config:
        config = built(cls, values)
        config.origin = origin
        for section in FREE:
            if not isinstance(getattr(config, section).get("name"), str):
                raise ConfigError(f"{section}.name is not set; `rl4llm info` lists the accepted names.")
        return config

    def values(self) -> dict[str, Any]:
        """Return the keys and values as nested mappings."""
        return {name: value for name, value in asdict(self).items() if name != "origin"}

    def stored(self, *, elsewhere: bool = False, escape: bool = False) -> dict[str, Any]:
        """Return the values in a form for other readers: without secrets, and with ``${oc.env:NAME}`` unresolved.

        For processes `elsewhere`, only secret references stay unresolved. `escape` is for what `load_config` reads back.
        """
        pairs = self.origin.references.items()
        texts = {keys: reference for keys, reference in pairs if reference[2] or not elsewhere}
        visible: dict[str, Any] = redacted(with_references(self.values(), texts, escape=escape))
        return visible

    def to_yaml(self, *, elsewhere: bool = False) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.stored(elsewhere=elsewhere, escape=True)))

    def variables(self) -> dict[str, bool]:
        """Return the environment variables that the values read, and whether each contains a secret."""
        secrets: dict[str, bool] = {}
        for text, _, secret in self.origin.references.values():
            for name in VARIABLE.findall(text):
                secrets[name] = secrets.get(name, False) or secret
        return secrets

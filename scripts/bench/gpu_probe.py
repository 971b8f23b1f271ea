"""What the checks of `gpu.py` share: findings and errors, models, batches, engines, and programs that they run."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose.setup import Machine, set_up_torch
from rl4llm.config import load_config
from rl4llm.core.types import SamplingParams, TokenSpan, TrainBatch, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.inference.embedded.engine import Engine

ROOT = Path(__file__).parents[2]
GIB = 2**30
GROUP = 8  # answers to a prompt
PROMPT = 150  # tokens
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
SHAPES = {
    "tiny": (64, 128, 2, 4, 2),
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "7b": (3584, 18_944, 28, 28, 4),
}
VOCABULARY, TINY_VOCABULARY, PADDING = 151_936, 4096, 271
BF16 = {"dtype": "bfloat16", "autocast": "none"}
CASES: dict[str, dict[str, Any]] = {  # options of `Probe.trainer`
    "0.5b autocast": {"size": "0.5b"},
    "1.5b autocast": {},
    "1.5b bfloat16, checkpointing": {"checkpointing": True} | BF16,
    "7b bfloat16, LoRA, checkpointing": {"size": "7b", "lora": 16, "checkpointing": True} | BF16,
}


class Probe:
    """One check: where its findings go, what it measures with, and on which device."""

    def __init__(self, check: str, out: Path, work: Path, *, tiny: bool, limit: float):
        self.check, self.out, self.work, self.tiny, self.limit = check, out, work, tiny, limit
        self.vocabulary = TINY_VOCABULARY if tiny else VOCABULARY
        self.cuda, self.failed = torch.cuda.is_available(), False
        self.device = torch.empty(0, device="cuda" if self.cuda else "cpu").device

    def run(self, check: Callable[[Probe], None], write: Callable[..., None]) -> None:
        """Run the check, in a process that is prepared as for a run of rl4llm."""
        self._write = write
        transformers.utils.logging.set_verbosity_error()
        with self.finding("begin"):
            self.set_up()
        with self.finding("end"):
            check(self)

    def set_up(self, **options: Any) -> None:
        """Set up torch as a run with these options does."""
        config = load_config(None, {"model.path": "random", "model.device": self.device.type} | options)
        set_up_torch(config, Machine.of(config))

    @contextlib.contextmanager
    def finding(self, what: str) -> Iterator[dict[str, Any]]:
        """Write one finding: facts that the block enters, its error if it has one, and warnings of rl4llm."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        facts: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield facts
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                facts |= {"error": f"{type(error).__name__}: {str(error)[:600]}"}
                facts |= {"where": traceback.format_exc(limit=-4)[-900:]}
        if ours := {str(item.message)[:240] for item in caught if "rl4llm/" in item.filename}:
            facts["warnings"] = sorted(ours)
        self.failed = self.failed or "error" in facts
        self._write(self.out, self.check, what, **facts)

    def seconds(self, run: Callable[[], object], repeats: int = 1, *, warm: int = 0) -> float:
        """Return the seconds of one run; the first `warm` runs do not count."""
        wait = torch.cuda.synchronize if self.cuda else lambda: None
        for _ in range(warm):
            run()
        wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        return (time.perf_counter() - begin) / repeats

    def gib(self) -> dict[str, float]:
        """Return the GiB of tensors on the device, and the most of them since the last `finding`."""
        if not self.cuda:
            return {"held_gib": 0.0, "peak_gib": 0.0}
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return {"held_gib": now / GIB, "peak_gib": most / GIB}

    def product_tflops(self) -> float:
        """Return the TFLOP/s of a large product in bf16, the ceiling of everything else."""
        n = 256 if self.tiny else 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * n**3 / self.seconds(lambda: a @ b, 10, warm=3) / 1e12

    def model(self, size: str, dtype: str = "float32", layers: int = 99, device: Any = None) -> Any:
        """Make a model with random weights."""
        sizes: dict[str, Any] = dict(zip(SIZES, SHAPES["tiny" if self.tiny else size], strict=True))
        sizes["num_hidden_layers"] = min(layers, sizes["num_hidden_layers"])
        config = transformers.Qwen2Config(
            **sizes, vocab_size=self.vocabulary, tie_word_embeddings=size != "7b"
        )
        torch.manual_seed(0)
        with torch.device(device or self.device):
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        return load_model(made, dtype, device or self.device)

    def trainer(self, size: str = "1.5b", dtype: str = "float32", **options: Any) -> TorchBackend:
        """Make a backend as a run would."""
        model = self.model(size, dtype, options.pop("layers", 99))
        if options.pop("checkpointing", False):
            load_model(model, dtype, self.device, gradient_checkpointing=True)
        rank = options.pop("lora", 0)
        options = {"autocast": "bfloat16", "lr": 1e-6} | options
        return TorchBackend(model, adapter=add_adapter(model, rank=rank) if rank else None, **options)

    def batch(self, prompts: int, mean: int, seed: int = 0) -> TrainBatch:
        """Make prompts with eight answers each behind them, whose lengths are as spread out as those of real answers."""
        rng, tokens, trajectories = random.Random(seed), range(2, 4000), []
        mean = 24 if self.tiny else mean
        for number in range(prompts):
            prompt = rng.choices(tokens, k=rng.randint(75, 225))
            for _ in range(GROUP):
                answer = rng.choices(tokens, k=max(8, int(rng.lognormvariate(0, 0.5) * mean)))
                trajectories.append(trajectory(f"p{number}", prompt, answer, [-1.0] * len(answer)))
        return packed(trajectories)

    def python(self, *words: object, limit: float) -> tuple[int | str, str]:
        """Run a Python program; return its exit code, or "stopped" after `limit` seconds, and what it printed."""
        command = [sys.executable, *map(str, words)]
        with (self.work / f"{self.check}_{time.time_ns()}.txt").open("w+", errors="replace") as printed:
            try:
                code: int | str = subprocess.run(
                    command, cwd=ROOT, stdout=printed, stderr=printed, timeout=limit
                ).returncode
            except subprocess.TimeoutExpired:
                code = "stopped"
            printed.seek(0)
            text = printed.read()
        with (self.out / f"{self.check}.log").open("a") as log:
            log.write(f"##### {' '.join(command)}\n{text[-20_000:]}\n")
        return code, text


def trajectory(
    name: str, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float]
) -> Trajectory:
    """Return a prompt and the tokens that were sampled behind it."""
    sampled = TokenSpan(tuple(answer), "policy", tuple(logprobs), 0)
    return Trajectory(name, (TokenSpan.context(tuple(prompt)), sampled), (), {}, 0.0, "stop")


def packed(trajectories: list[Trajectory]) -> TrainBatch:
    """Return one batch with all of them."""
    batching = Batching(max_tokens_per_batch=1 << 24)
    (batch,) = batching.pack(trajectories, [1.0] * len(trajectories))
    return batch


def loss(batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """Return the simplest loss."""
    return -logprobs, {}


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer for a model with as many embeddings, which lacks as many tokens as that of Qwen2.5."""
    small = build_tokenizer(["1 + 1 = 2", "What is the sum?"] * 8, 320)
    parts = json.loads(small.backend_tokenizer.to_str())
    parts["model"]["vocab"] |= {f"<{number}>": number for number in range(len(small), vocabulary - PADDING)}
    named = {"eos_token": small.eos_token, "pad_token": small.pad_token}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)), **named)


def served(model: Any, path: Any, rows: int, autocast: str = "none") -> Engine:
    """Return an engine for as many rows, as a run makes it."""
    dtype = torch.bfloat16 if autocast == "bfloat16" else None
    return Engine(model, tokenizer(model.config.vocab_size), rows, 4096, path, autocast=dtype)


def ask(engine: Engine, lengths: Sequence[int], name: str = "", **sampled: Any) -> None:
    """Put requests into an engine, in groups with the same prompt; it looks for a stop token that hardly ever comes."""
    for row, count in enumerate(lengths):
        params = SamplingParams(max_tokens=count, stop_token_ids=(3,), seed=row, **sampled)
        prompt = [5 + row // GROUP, *range(5, 4 + PROMPT)]
        engine.waiting.append(engine.request(prompt, params, f"{name}{row}"))

"""Measure what rl4llm does on a GPU: numbers, speed and memory, without a download and without a server.

    python scripts/bench/gpu.py numbers attention head update --out findings
    python scripts/bench/gpu.py all --tiny                            # on a CPU: does every part still run?

Models have random weights in the shapes of Qwen2.5 and are made on the device. Each measurement is one JSON line, printed
and, with --out, appended to OUT/gpu.jsonl. A part that fails writes its error in the same way, and the next one starts.

    numbers     log-probs and gradients in every dtype against float32 on the CPU; deterministic mode, twice
    attention   an update with answers in one call a layer and block by block, at lengths that are new each time
    head        log-probs of 8,192 tokens with tiles of 8 MiB to 1 GiB
    update      tokens and TFLOP per second, plain and compiled; memory beside that of `rl4llm plan`; offload and onload
    decode      the embedded engine at 1, 64 and 256 rows, with CUDA graphs and without
    deepspeed   ZeRO 1, 2, 3 and 2 with offload_optimizer on one rank: a step; from ZeRO 2 on offload, onload, another step

With --tiny the numbers only prove that this script calls the library correctly.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from rl4llm.backends import runner
from rl4llm.backends.attention import stream_of
from rl4llm.backends.heads import OutputLayer, head_memory, selected_logprobs
from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose.models import set_up_torch
from rl4llm.config import load_config
from rl4llm.core.model_memory import Precision
from rl4llm.core.types import SamplingParams, TokenSpan, TrainBatch, Trajectory
from rl4llm.data.aggregation import totals_of
from rl4llm.data.pack import pack
from rl4llm.inference.embedded.engine import Engine
from rl4llm.inference.embedded.sampling import Sampler

GIB = 2**30
GROUP = 8  # answers to a prompt
TILES_MIB = (8, 32, 128, 256, 1024)
SHAPES = {  # hidden, MLP, layers, heads, heads of keys, vocabulary
    "tiny": (64, 128, 2, 4, 2, 4096),
    "0.5b": (896, 4864, 24, 14, 2, 151_936),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "7b": (3584, 18_944, 28, 28, 4, 152_064),
}


class Probe:
    """What the command line asked for, and where findings go."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.tiny, self.part = options, options.tiny, ""
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.gpu = torch.cuda.get_device_name() if self.cuda else "cpu"

    def report(self, what: str, **facts: Any) -> None:
        """Write one finding."""
        line = json.dumps({"part": self.part, "what": what, **facts}, default=str)
        print(line, flush=True)
        if self.options.out:
            with (Path(self.options.out) / "gpu.jsonl").open("a") as file:
                file.write(line + "\n")

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Report an error of a measurement instead of ending; free memory before."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            self.report(what, error=f"{type(error).__name__}: {str(error)[:600]}")

    def held(self) -> float:
        """Return the GiB of tensors on the device."""
        return torch.cuda.memory_allocated() / GIB if self.cuda else 0.0

    def peak(self) -> float:
        """Return the most GiB of tensors since the last `guard`."""
        return torch.cuda.max_memory_allocated() / GIB if self.cuda else 0.0

    def seconds(self, run: Callable[[], object], repeats: int = 1, *, warm: bool = False) -> float:
        """Return the seconds of one run; `warm` runs it once before."""
        if warm:
            run()
        wait = torch.cuda.synchronize if self.cuda else lambda: None
        wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        return (time.perf_counter() - begin) / repeats

    def answers(self, mean: int) -> int:
        """Return the mean length of answers, short with --tiny."""
        return 24 if self.tiny else mean


def build(probe: Probe, size: str, layers: int | None = None, device: str = "") -> Any:
    """Make a model with random float32 weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, mlp, most, heads, kv_heads, vocabulary = SHAPES["tiny" if probe.tiny else size]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=min(layers or most, most),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=size != "7b",
    )
    torch.manual_seed(0)
    with torch.device(device or probe.device):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if size == "7b" else torch.float32
        )


def trainer(
    probe: Probe, size: str, dtype: str = "float32", autocast: str = "bfloat16", **options: Any
) -> Any:
    """Make a backend as a run would."""
    layers, checkpointing = options.pop("layers", None), options.pop("checkpointing", False)
    model = load_model(build(probe, size, layers), dtype, probe.device, gradient_checkpointing=checkpointing)
    return TorchBackend(model, autocast=autocast, **{"lr": 1e-6} | options)


def batch_of(prompts: int, mean: int, seed: int = 0) -> TrainBatch:
    """Make prompts with eight answers each behind them, whose lengths are as spread out as those of real answers."""
    rng = random.Random(seed)
    tokens = range(2, 4000)
    trajectories = []
    for number in range(prompts):
        prompt = TokenSpan.context(tuple(rng.choices(tokens, k=rng.randint(75, 225))))
        for _ in range(GROUP):
            answer = tuple(rng.choices(tokens, k=max(8, int(rng.lognormvariate(0, 0.5) * mean))))
            spans = (prompt, TokenSpan(answer, "policy", (-1.0,) * len(answer), 0))
            trajectories.append(Trajectory(f"p{number}", spans, (), {}, 0.0, "stop"))
    (batch,) = pack(
        trajectories,
        [1.0] * len(trajectories),
        max_tokens_per_batch=1 << 24,
        layout="shared",
        aggregation="token",
        totals=totals_of(trajectories),
        pad_token_id=0,
    )
    return batch


def loss(batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """Return the simplest loss."""
    return -logprobs, {}


def gradients(backend: Any) -> Tensor:
    """Return the first numbers of each gradient."""
    return torch.cat([x.grad.double().flatten()[:20_000].cpu() for x in backend.model.parameters()])


def numbers(probe: Probe) -> None:
    """Are log-probs and gradients right, and is the deterministic mode deterministic?"""
    probe.report("machine", torch=torch.__version__, cuda=torch.version.cuda, gpu=probe.gpu)
    model, batch = build(probe, "1.5b", 4, "cpu"), batch_of(2, probe.answers(300))

    def computed(dtype: str, autocast: str, device: str) -> tuple[Tensor, Tensor]:
        backend = TorchBackend(load_model(copy.deepcopy(model), dtype, device), lr=0.0, autocast=autocast)
        logprobs = backend.forward(batch).float().cpu()
        backend.forward_backward(batch, loss)
        return logprobs, gradients(backend)

    expected = computed("float32", "none", "cpu")
    for dtype, autocast in (("float32", "none"), ("float32", "bfloat16"), ("bfloat16", "none")):
        what = f"{dtype} autocast={autocast}"
        with probe.guard(what):
            logprobs, gradient = computed(dtype, autocast, probe.device)
            differ = (logprobs - expected[0]).abs()
            probe.report(
                what,
                logprob_max=differ.max().item(),
                logprob_mean=(differ.sum() / batch.mask_BT.sum()).item(),
                gradient_cosine=F.cosine_similarity(gradient, expected[1], dim=0).item(),
            )
    set_up_torch(
        load_config(None, {"model.path": "random", "model.device": probe.device, "deterministic": True})
    )
    with probe.guard("deterministic"):
        one, other = (computed("float32", "bfloat16", probe.device) for _ in range(2))
        sampler = Sampler([SamplingParams(seed=1)] * 4, [0] * 4, torch.device(probe.device))
        tokens, _ = sampler(torch.randn(4, 151_936, device=probe.device))
        probe.report("deterministic", equal=one[1].equal(other[1]), sampled=tokens.tolist())
    torch.use_deterministic_algorithms(False)


def attention(probe: Probe) -> None:
    """What does one call a layer save, and what does cuDNN cost when every length is new?"""
    one_call = runner.kernel_for
    ways = {"one call": (one_call, False), "blocks": (None, False), "blocks, cuDNN": (None, True)}
    for name, (kernel, cudnn) in ways.items():
        with probe.guard(name):
            runner.kernel_for = kernel or (lambda *sizes: None)  # type: ignore[assignment]
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            backend = trainer(probe, "1.5b", layers=4)
            sizes = (
                torch.device(probe.device),
                torch.bfloat16,
                *SHAPES["tiny" if probe.tiny else "1.5b"][3:5],
            )
            for seed in range(1 if probe.tiny else 4):
                batch = batch_of(3, probe.answers(450), seed)
                first, again = (
                    probe.seconds(partial(backend.forward_backward, batch, loss)) for _ in range(2)
                )
                probe.report(
                    name,
                    seed=seed,
                    kernel=runner.kernel_for(*sizes, backend.model.config.hidden_size // sizes[2])
                    is not None,
                    first_s=first,
                    again_s=again,
                    peak_gib=probe.peak(),
                )
    runner.kernel_for = one_call
    torch.backends.cuda.enable_cudnn_sdp(False)


def head(probe: Probe) -> None:
    """How large should a tile of the output layer be?"""
    rows, hidden, vocabulary = (256, 64, 4096) if probe.tiny else (8192, 1536, 151_936)
    states = torch.randn(rows, hidden, device=probe.device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device=probe.device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,), device=probe.device)
    for mib in TILES_MIB:
        with probe.guard(f"{mib} MiB"):

            def run(tile_bytes: int = mib << 20) -> None:
                found, _ = selected_logprobs(
                    states, OutputLayer(weight), targets, dtype=torch.bfloat16, tile_bytes=tile_bytes
                )
                found.sum().backward()
                states.grad = weight.grad = None

            held = probe.held()
            seconds = probe.seconds(run, 3, warm=True)
            flops = 8 * rows * hidden * vocabulary / seconds  # forward, once more, and two gradients
            probe.report(f"{mib} MiB", seconds=seconds, tflops=flops / 1e12, extra_gib=probe.peak() - held)


CASES: dict[str, tuple[str, int, str, str, dict[str, bool]]] = {  # size, prompts, dtype, autocast, options
    "0.5b autocast": ("0.5b", 2, "float32", "bfloat16", {}),
    "0.5b float32": ("0.5b", 2, "float32", "none", {}),
    "1.5b autocast": ("1.5b", 2, "float32", "bfloat16", {}),
    "1.5b autocast, compiled": ("1.5b", 2, "float32", "bfloat16", {"compile_layers": True}),
    "1.5b autocast, checkpointing": ("1.5b", 3, "float32", "bfloat16", {"checkpointing": True}),
    "1.5b bfloat16, checkpointing": ("1.5b", 3, "bfloat16", "none", {"checkpointing": True}),
    "7b bfloat16, checkpointing": ("7b", 3, "bfloat16", "none", {"checkpointing": True}),
}


def update(probe: Probe) -> None:
    """How fast is an update, and does it take the memory that `rl4llm plan` says?"""
    for what in list(CASES)[::3] if probe.tiny else CASES:
        with probe.guard(what):
            _update(probe, what, *CASES[what])


def _update(
    probe: Probe, what: str, size: str, prompts: int, dtype: str, autocast: str, options: dict[str, bool]
) -> None:
    from rl4llm.extensions.inspect.plan.shape import shape_of

    backend, checkpointing = trainer(probe, size, dtype, autocast, **options), "checkpointing" in options
    batch = batch_of(prompts, probe.answers(450))
    for _ in range(2):  # makes the optimizer's moments, and a kernel for each shape
        backend.forward_backward(batch, loss)
        backend.optim_step()
    held, stream, asked = probe.held(), stream_of(batch), int(batch.mask_BT.sum())
    if probe.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = probe.seconds(partial(backend.forward_backward, batch, loss), 3)
    extra, step = probe.peak() - held, probe.seconds(backend.optim_step)
    tokens = stream.token_ids_1N.shape[1]
    keys = tokens + sum(block.count * block.prompt_length for block in stream.blocks)
    shape, precision = shape_of(backend.model), Precision.of(dtype, autocast, gpu=probe.cuda)
    kept = shape.activations(precision, tokens, keys, checkpointing=checkpointing)
    planned = TorchBackend.memory(shape, precision, {})
    probe.report(
        what,
        compiled=backend.info()["compiled"],
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        tflops=6 * shape.parameters * tokens / seconds / 1e12,
        optimizer_s=step,
        held_gib=held,
        planned_held_gib=(planned.weights + planned.optimizer) / GIB,
        extra_gib=extra,
        planned_activations_gib=(kept + shape.working(precision, tokens, backward=True) + planned.casts)
        / GIB,
        planned_gradients_gib=planned.gradients / GIB,
        planned_head_gib=head_memory(shape, precision, asked, backward=True) / GIB,
    )
    off, left, on = probe.seconds(backend.offload), probe.held(), probe.seconds(backend.onload)
    probe.report(f"{what}: offload", off_s=off, left_gib=left, on_s=on)


def decode(probe: Probe) -> None:
    """How fast does the embedded engine sample?"""
    tokenizer, new = build_tokenizer(["1 + 1 = 2", "What is the sum?"] * 8, 320), 8 if probe.tiny else 256
    for rows, path in product((1, 4) if probe.tiny else (1, 64, 256), ("fast", "graph")):
        with probe.guard(f"{rows} rows, {path}"):
            model = load_model(build(probe, "1.5b"), "bfloat16", probe.device)
            engine = Engine(model, tokenizer, rows, 4096, path)
            for row in range(rows):
                params = SamplingParams(max_tokens=new, ignore_eos=True, seed=row)
                engine.waiting.append(engine.request([5 + row // GROUP, *range(5, 155)], params, f"s{row}"))
            prefill, begin, steps = probe.seconds(engine.step), time.perf_counter(), 0
            while engine.busy:
                engine.step()
                steps += 1
            seconds = time.perf_counter() - begin
            probe.report(
                f"{rows} rows, {path}",
                prefill_s=prefill,
                tokens_per_s=rows * steps / seconds,
                peak_gib=probe.peak(),
            )


def deepspeed(probe: Probe) -> None:
    """Does every ZeRO stage step, leave the device, come back and step again?"""
    from rl4llm.extensions.deepspeed.backend import DeepSpeedBackend
    from rl4llm.runtime.ranks import Ranks

    batch = batch_of(2, probe.answers(300))
    for stage, away in ((1, False), (2, False), (3, False), (2, True)):
        what = f"ZeRO-{stage}{' offload_optimizer' if away else ''}"
        with probe.guard(what):
            model = load_model(build(probe, "0.5b"), "bfloat16", probe.device)
            options = {"zero_stage": stage, "offload_optimizer": away, "lr": 1e-6, "device": probe.device}
            backend = DeepSpeedBackend(model, ranks=Ranks(), **options)

            def step(backend: Any = backend) -> None:
                backend.forward_backward(batch, loss)
                backend.optim_step()

            probe.report(what, seconds=probe.seconds(step, 2, warm=True), peak_gib=probe.peak())
            if stage == 1:  # a bf16 model cannot leave the device
                continue
            off, left, on = probe.seconds(backend.offload), probe.held(), probe.seconds(backend.onload)
            step()
            probe.report(f"{what}: offload", off_s=off, left_gib=left, on_s=on)


PARTS = {part.__name__: part for part in (numbers, attention, head, update, decode, deepspeed)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"])
    parser.add_argument("--tiny", action="store_true", help="small models; the only choice without a GPU")
    parser.add_argument("--out", metavar="DIR", help="append the lines to DIR/gpu.jsonl too")
    options = parser.parse_args()
    probe = Probe(options)
    if not probe.cuda and not probe.tiny:
        parser.error("torch sees no GPU. Use --tiny to run on a CPU.")
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    set_up_torch(load_config(None, {"model.path": "random", "model.device": probe.device}))
    for name in PARTS if "all" in options.parts else options.parts:
        probe.part = name
        with probe.guard(name):
            seconds = probe.seconds(partial(PARTS[name], probe))
            probe.report("done", seconds=seconds)


if __name__ == "__main__":
    main()

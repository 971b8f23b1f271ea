"""One whole GRPO step, ours against TRL's GRPOTrainer: the same model, prompts, lengths, threads and optimizer.

    python scripts/bench/step.py --size 1m --mode same --peer-python ../trl/bin/python
    python scripts/bench/step.py --model SMOLLM2 --prompts 4 --mode shipped --peer-python ../trl/bin/python
    python scripts/bench/step.py --model SMOLLM2 --prompts 4 --mode shipped --before ../checkout [--busy 1]

16 prompts of 64 tokens x 8 samples x 64 new tokens of forced length, one AdamW step per rollout, no KL. Each side is a
process of a separate environment; they take steps in alternation, and the one that does not work waits. `--mode same` gives
both the same dtype (fp32) and kernels: TRL computes with MKL, which is slow on processors that are not Intel's unless told
otherwise, so a tiny library that tells it otherwise is loaded into both. `--mode shipped` leaves that out, runs ours with
its defaults and TRL with its fastest settings, found by trying them. `--before` measures another checkout of rl4llm instead
of TRL, and `--busy` keeps cores busy meanwhile. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from models import (
    PROMPTS,
    SHAPES,
    build_model,
    build_prompts,
    build_tokenizer,
    load_model,
    processor,
    word_prompts,
)
from peer import Peer, in_turns, parser_of, ratios, spread

HERE = Path(__file__).parent
SAMPLES, NEW_TOKENS, LEARNING_RATE = 8, 64, 1e-6
STEPS = 64  # that the prompts of the data set are enough for; the sides read them in the same order
SHIM = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


KERNELS = {
    "same": "MKL told to be fast on both sides; linear layers of ours by oneDNN where this machine prefers it",
    "shipped": "as installed",
}


FAIR = ("float32", 32)  # TRL's dtype, and samples of a micro-batch
CANDIDATES = [(dtype, size) for dtype in ("float32", "bfloat16") for size in (8, 32, 128)]


class Bench:
    """What both sides are given, in a directory that goes away."""

    def __init__(self, directory: Path, options: argparse.Namespace):
        self._directory, self._python = directory, options.peer_python
        model, data, count = directory / "model", directory / "prompts.jsonl", options.prompts * STEPS
        self._job = {
            "model": str(model),
            "data": str(data),
            "threads": options.threads,
            "prompts": options.prompts,
        }
        self._job |= {"group_size": SAMPLES, "new_tokens": NEW_TOKENS, "lr": LEARNING_RATE}
        saved = (
            save_pretrained(options.model, model, count)
            if options.model
            else save_model(options.size, model, count)
        )
        rows = [{"messages": [{"role": "user", "content": prompt}], "ground_truth": ""} for prompt in saved]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        self._environment = {**os.environ, **offline, "OMP_NUM_THREADS": str(options.threads)}
        if options.mode == "same":
            self._environment["LD_PRELOAD"] = str(build_shim(directory))

    def ours(self) -> Peer:
        return self._start("ours", sys.executable, "rl4llm_peer.py", {"overrides": {}})

    def before(self, checkout: Path) -> Peer:
        script = str(checkout.resolve() / "scripts/bench/rl4llm_peer.py")
        return self._start("before", sys.executable, script, {"overrides": {}})

    def trl(self, dtype: str, micro_batch: int) -> Peer:
        return self._start("TRL", self._python, "trl_peer.py", {"dtype": dtype, "micro_batch": micro_batch})

    def _start(self, name: str, python: str, script: str, more: dict[str, Any]) -> Peer:
        output = tempfile.mktemp(prefix=f"{name}-", dir=self._directory)
        command = [python, str(HERE / script), json.dumps({**self._job, **more, "output": output})]
        return Peer(name, command, self._environment, Path(f"{output}.log"))


def save_model(size: str, directory: Path, count: int) -> list[str]:
    """Save a model that never samples its end token, so that every answer has the same length; return prompts for it."""
    model, tokenizer = build_model(size), build_tokenizer(size)
    end = model.config.vocab_size - 1
    tokenizer.add_special_tokens({"eos_token": f"w{end}"})
    tokenizer.chat_template = CHAT_TEMPLATE
    silence(model, end)
    for config in (model.config, model.generation_config):
        config.eos_token_id = end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    prompts = build_prompts(SHAPES[size]["vocab_size"], count)
    return [" ".join(f"w{token}" for token in prompt) for prompt in prompts]


def save_pretrained(source: str, directory: Path, count: int) -> list[str]:
    """Save a pretrained model with another end token, one that it practically never samples; return prompts for it."""
    model, tokenizer = load_model(source)
    end = max(tokenizer.get_added_vocab().values())
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.chat_template = CHAT_TEMPLATE
    for config in (model.config, model.generation_config):
        config.eos_token_id = end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return word_prompts(tokenizer, count)


@torch.no_grad()
def silence(model: Any, token: int) -> None:
    """Give `token` a probability of 0: one hidden channel is a positive constant, and its logit falls with it."""
    model.model.embed_tokens.weight[:, 0] = 0.02
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
    model.lm_head.weight[:, 0] = 0
    model.lm_head.weight[token] = 0
    model.lm_head.weight[token, 0] = -1e4


def build_shim(directory: Path) -> Path:
    """A library that answers MKL's question whether the processor is Intel's with yes, for every process it is loaded in."""
    source, library = directory / "shim.c", directory / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def choose(bench: Bench, options: argparse.Namespace) -> tuple[str, int]:
    """Return TRL's settings: in mode "shipped" the fastest of the candidates in a short trial."""
    if options.mode == "same":
        return FAIR
    times = {}
    for dtype, size in CANDIDATES:
        if size <= options.prompts * SAMPLES:
            with bench.trl(dtype, size) as peer:
                times[dtype, size] = min(peer.ask()["seconds"]["step"] for _ in range(3))
            print(f"TRL with {dtype}/{size}: {times[dtype, size]:.2f} s a step")
    return min(times, key=times.__getitem__)


def step(peer: Peer, tokens: int) -> dict[str, Any]:
    """Have a side take one step; return seconds by phase, tokens and memory."""
    taken = peer.ask()
    if taken["tokens"] != tokens:
        raise SystemExit(f"{peer.name} trained on {taken['tokens']} tokens, not {tokens}")
    return taken


def show(steps: dict[str, list[dict[str, Any]]]) -> None:
    phases = ("step", "generation", "update", "cpu")
    heads = "".join(f"{phase:>11}" for phase in phases)
    print(f"{'':5}{heads}  peak memory, of it above the loaded model")
    for name, taken in steps.items():
        times = "".join(f"{seconds(taken, phase):9.3f} s" for phase in phases)
        print(f"{name:5}{times}  {taken[-1]['peak_gb']:.2f} GB, {taken[-1]['growth_gb']:.2f} GB")
    ours, theirs = steps.values()
    times = "".join(f"{seconds(theirs, phase) / seconds(ours, phase):11.2f}" for phase in phases)
    memory = (theirs[-1][name] / ours[-1][name] for name in ("peak_gb", "growth_gb"))
    print(f"ratio{times}  {', '.join(f'{ratio:.2f}' for ratio in memory)}")
    pairs = ratios(*([step["seconds"]["step"] for step in taken] for taken in (theirs, ours)))
    print(f"ratio of steps, median of the pairs: {spread(pairs)}")


def seconds(taken: Sequence[dict[str, Any]], phase: str) -> float:
    return statistics.median(step["seconds"][phase] for step in taken)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="1m")
    parser.add_argument("--model", help="the directory of a pretrained model, instead of --size")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="in a step, with 8 samples each")
    parser.add_argument("--mode", choices=["same", "shipped"], default="same")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="1 step to warm up instead of 2, and 2 pairs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy meanwhile")
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--peer-python", help="the Python of an environment with torch, trl and datasets")
    other.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of rl4llm")
    return parser.parse_args()


def main() -> None:
    options = parse()
    warm_up, pairs = (1, 2) if options.quick else (2, options.pairs)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    with ExitStack() as stack:
        bench = Bench(Path(stack.enter_context(tempfile.TemporaryDirectory())), options)
        if options.before:
            other = bench.before(options.before)
        else:
            dtype, micro_batch = choose(bench, options)
            other = bench.trl(dtype, micro_batch)
        sides = [stack.enter_context(bench.ours()), stack.enter_context(other)]
        for _ in range(options.busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        what = f"{options.prompts} prompts x {SAMPLES} samples x {NEW_TOKENS} new tokens"
        print(
            f"{options.model or options.size}: {what}, {pairs} pairs; {processor()}, kernels: {KERNELS[options.mode]}"
        )
        for peer in sides:
            print(
                f"{peer.name}: " + ", ".join(f"{name} {version}" for name, version in peer.versions.items())
            )
        if not options.before:
            print(f"TRL's dtype/micro-batch: {dtype}/{micro_batch}")
        tokens = options.prompts * SAMPLES * NEW_TOKENS
        steps = {peer.name: partial(step, peer, tokens) for peer in sides}
        show(in_turns(steps, pairs, warm_up))


if __name__ == "__main__":
    main()

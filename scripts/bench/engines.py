"""Generation on a CPU: the embedded engine against `model.generate` and servers, with the same prompts and threads.

    python scripts/bench/engines.py --size 1m [--path model]                 # or 30m: against `generate`, in float32
    python scripts/bench/engines.py --model SMOLLM2 --prompts 4 --dtype bfloat16 --sglang ../sglang/bin/python \\
        --vllm ../vllm/bin/python --llama llama.cpp/build/bin/llama-server --gguf smollm2-bf16.gguf

16 prompts of 64 tokens x 8 samples x 64 new tokens of forced length, temperature 1. In bfloat16 the weights of `generate`
and of servers are rounded, and ours float32 under autocast. A server gets all requests at once; unlike `generate`, servers
and the embedded engine return log-probs. Prompts differ between rounds, so prefix caches stay on.
The sides take turns, and processes of servers are stopped (SIGSTOP) while another side computes: some poll while idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
import transformers
from models import PROMPTS, SHAPES, build_model, build_prompts, build_tokenizer, load_model, processor
from peer import in_turns, parser_of, ratios, spread

from rl4llm.core.types import SamplingParams
from rl4llm.extensions.servers.launch import ServerProcess, launch
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.cpu import use_fast_linear
from rl4llm.runtime.ports import free_port

SAMPLES, NEW_TOKENS = 8, 64
Prompts = list[list[int]]
Run = Callable[[Prompts, int], int]  # of a prompt for each answer and a seed; the number of new tokens
Ask = Callable[[list[int]], dict[str, Any]]
Count = Callable[[dict[str, Any]], int]
PATHS: dict[str, tuple[str, Ask, Count]] = {
    "sglang": (
        "/generate",
        lambda prompt: {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
        },
        lambda found: len(found["output_ids"]),
    ),
    "vllm": (
        "/v1/completions",
        lambda prompt: {
            "model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True,
            "logprobs": 0,
        },
        lambda found: found["usage"]["completion_tokens"],
    ),
    "llama": (
        "/completion",
        lambda prompt: {
            "prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True, "top_k": 0,
            "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"], "n_probs": 1, "cache_prompt": True,
        },
        lambda found: found["tokens_predicted"],
    ),
}  # fmt: skip
"""Where each server generates, what it is asked for a prompt, and the number of tokens in its answer."""


def subject(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model in float32, and its tokenizer."""
    if options.model:
        return load_model(options.model)
    return build_model(options.size), build_tokenizer(options.size)


def generate(options: argparse.Namespace) -> Run:
    """Return `model.generate` at its best settings: one batch, equal lengths, dynamic cache, no logits kept."""
    model = subject(options)[0].to(getattr(torch, options.dtype))
    use_fast_linear(model)
    forced = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}

    @torch.inference_mode()
    def run(prompts: Prompts, seed: int) -> int:
        torch.manual_seed(seed)
        tokens_BT = torch.tensor(prompts)
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        output_BT = model.generate(tokens_BT, attention_mask=torch.ones_like(tokens_BT), **drawn, **forced)
        return int(output_BT[:, tokens_BT.shape[1] :].numel())

    return run


def embedded(options: argparse.Namespace) -> Run:
    model, tokenizer = subject(options)
    use_fast_linear(model)
    autocast = "bfloat16" if options.dtype == "bfloat16" else "none"
    client = LocalClient(model, tokenizer, path=options.path, autocast=autocast)

    def run(prompts: Prompts, seed: int) -> int:
        params = [
            SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=seed * 1000 + number)
            for number in range(len(prompts))
        ]
        return sum(len(completion.token_ids) for completion in client.generate_batch(prompts, params))

    return run


def remote(name: str, server: ServerProcess) -> Run:
    path, ask, count = PATHS[name]

    async def load(prompts: Prompts) -> int:
        timeout = aiohttp.ClientTimeout(total=1800)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def one(prompt: list[int]) -> int:
                async with session.post(server.url + path, json=ask(prompt)) as response:
                    response.raise_for_status()
                    return count(await response.json())

            return sum(await asyncio.gather(*map(one, prompts)))

    return lambda prompts, seed: asyncio.run(load(prompts))


def servers(options: argparse.Namespace, logs: Path) -> dict[str, ServerProcess]:
    """Return the servers that are measured, not started."""
    rows, found = str(options.prompts * SAMPLES), {}
    flags = ["--port", "0", "--dtype", options.dtype]
    if options.sglang:
        given = ["--model-path", options.model, "--max-running-requests", rows, *flags]
        found["sglang"] = launch("sglang", given, python=options.sglang, cpu=True, log=logs / "sglang")
    if options.vllm:
        given = [options.model, "--served-model-name", "model", "--max-num-seqs", rows, *flags]
        found["vllm"] = launch("vllm", given, python=options.vllm, cpu=True, log=logs / "vllm")
    if options.llama:
        port = free_port("127.0.0.1")
        command = [options.llama, "-m", options.gguf, "--port", str(port), "-np", rows, "-fa", "on"]
        command += ["--kv-unified", "-c", str(int(rows) * 256), "-t", str(options.threads)]
        found["llama"] = ServerProcess(command, port=port, log=logs / "llama", name="llama")
    return found


@contextlib.contextmanager
def awake(server: ServerProcess | None) -> Iterator[None]:
    """Let the processes of a server run for the length of the block."""
    for process in _family(server):
        process.resume()
    try:
        yield
    finally:
        for process in _family(server):
            process.suspend()


def _family(server: ServerProcess | None) -> list[psutil.Process]:
    port = None if server is None else str(server.url.rsplit(":", 1)[1])
    children = psutil.Process().children(recursive=True)
    roots = [child for child in children if port is not None and port in child.cmdline()]
    return [process for root in roots for process in (root, *root.children(recursive=True))]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="1m")
    parser.add_argument(
        "--model", help="the directory of a pretrained model, instead of --size; servers need it"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--path", choices=["auto", "fast", "model"], default="auto", help="how our engine decodes"
    )
    parser.add_argument("--sglang", help="Python of the environment that SGLang is installed in")
    parser.add_argument("--vllm", help="Python of the environment that vLLM is installed in")
    parser.add_argument("--llama", help="llama.cpp's llama-server")
    parser.add_argument("--gguf", help="the same model, as convert_hf_to_gguf.py --outtype bf16 writes it")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if bool(options.llama) != bool(options.gguf):
        parser.error("--llama and --gguf go together")
    if options.model is None and (options.sglang or options.vllm or options.llama):
        parser.error("Servers need --model.")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # rl4llm sets them; servers run with their defaults
        os.environ.pop(name, None)
    transformers.utils.logging.set_verbosity_error()
    print(f"{options.prompts} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens; {processor()}")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        found = servers(options, Path(place))
        sides: dict[str, Run] = {"rl4llm": embedded(options), "generate": generate(options)}
        for name, server in found.items():
            stack.enter_context(server)
            sides[name] = remote(name, server)
            stack.callback(lambda server=server: [process.resume() for process in _family(server)])
            with awake(server):
                pass
        speeds = measure(sides, found, options)
    for name, values in speeds.items():
        faster = spread(ratios(speeds["rl4llm"], values))
        print(f"{name:8} tokens/s: {spread(values, ',.0f')}; rl4llm is {faster} times as fast")


def measure(
    sides: dict[str, Run], found: dict[str, ServerProcess], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return tokens per second of each side in each round, after one round to warm up."""
    vocabulary = 40_000 if options.model else SHAPES[options.size]["vocab_size"]

    def speed(name: str, rounds: Iterator[int]) -> float:
        number = next(rounds)
        prompts = build_prompts(vocabulary, options.prompts, seed=number)
        prompts = [prompt for prompt in prompts for _ in range(SAMPLES)]
        with awake(found.get(name)):
            start = time.perf_counter()
            tokens = sides[name](prompts, number)
            elapsed = time.perf_counter() - start
        if tokens != len(prompts) * NEW_TOKENS:
            raise SystemExit(f"{name}: expected {len(prompts) * NEW_TOKENS} tokens, got {tokens}")
        print(f"round {number}: {name} {tokens / elapsed:,.0f} tokens/s", flush=True)
        return tokens / elapsed

    return in_turns({name: partial(speed, name, itertools.count()) for name in sides}, options.rounds)


if __name__ == "__main__":
    main()

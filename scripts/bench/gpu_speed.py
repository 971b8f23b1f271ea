"""The checks of `gpu.py` that ask how fast it is; each is a function of a Probe and runs alone."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_probe import BF16, CASES, GIB, PROMPT, Probe, ask, loss, served, tokenizer

from rl4llm.backends import runner
from rl4llm.backends.heads import OutputLayer, selected_logprobs
from rl4llm.data.plan import is_computed
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.inference.embedded.engine import Engine


def decode(probe: Probe) -> None:
    """How many tokens a second do the engine's paths sample, and `generate`?"""
    new = 6 if probe.tiny else 128
    for size, dtype, autocast in (("0.5b", "bfloat16", "none"), ("1.5b", "float32", "bfloat16")):
        model, many = probe.model(size, dtype), 4 if probe.tiny else 256
        name = f"{size} {'bf16' if autocast == 'none' else 'autocast'}"
        cases = {(f"{rows} rows", "graph"): [new] * rows for rows in ((1, 4) if probe.tiny else (1, 32, 256))}
        cases[f"{many} rows", "fast"] = [new] * many
        cases[f"{many} rows that end one by one", "graph"] = _spread(new, many)
        cases[f"{many} rows for {4 * many} requests", "graph"] = _spread(new, 4 * many)
        for (what, path), lengths in cases.items():
            with probe.finding(f"{name}, {what}, {path}") as found:
                rows = min(len(lengths), many)
                found |= _decoded(probe, served(model, path, rows, autocast), lengths)
    model.to(torch.bfloat16)  # in which `generate` is fastest
    for rows in (4,) if probe.tiny else (1, 256):
        with probe.finding(f"1.5b bf16, {rows} rows, generate") as found:
            found |= _generated(probe, model, rows)


def _spread(new: int, count: int) -> list[int]:
    """Return as many lengths, from half of `new` to one and a half, in a fixed order that is not sorted."""
    lengths = [new // 2 + number * new // count for number in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


def _decoded(probe: Probe, made: Engine, lengths: list[int]) -> dict[str, Any]:
    """Run all requests; the first steps compute prompts and capture graphs, and count apart."""
    ask(made, lengths)
    prefill, captures = probe.seconds(made.step), probe.seconds(made.step, 3) * 3
    before = made.describe()

    def rest() -> None:
        while made.busy:
            made.step()

    seconds, after = probe.seconds(rest), made.describe()
    steps, tokens = (after[name] - before[name] for name in ("decode_steps", "decode_tokens"))
    speed = {"tokens_per_s": tokens / seconds, "ms_a_step": 1e3 * seconds / max(steps, 1)}
    return speed | {"prefill_s": prefill, "next_three_s": captures} | probe.gib()


def _generated(probe: Probe, model: Any, rows: int) -> dict[str, float]:
    """Measure the steps of transformers' own loop."""
    ids, count = torch.randint(5, 300, (rows, PROMPT), device=probe.device), 4 if probe.tiny else 32
    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}

    @torch.inference_mode()
    def run(new: int) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)

    first = probe.seconds(partial(run, 1), warm=1)
    seconds = probe.seconds(partial(run, count)) - first
    return {"tokens_per_s": rows * (count - 1) / seconds, "ms_a_step": 1e3 * seconds / (count - 1)}


def update(probe: Probe) -> None:
    """How fast is an update, and which share of the card's products does it reach?"""
    for what in list(CASES)[::3] if probe.tiny else CASES:
        _updates(probe, what, **CASES[what])
    real, runner.kernel_for = runner.kernel_for, lambda *sizes: None
    _updates(probe, "1.5b autocast, blocks")
    runner.kernel_for = real


def _updates(probe: Probe, what: str, **case: Any) -> None:
    with probe.finding(what) as found:
        backend = probe.trainer(**case)
        batches = [probe.batch(2, 450, seed) for seed in range(2 if probe.tiny else 3)]
        runs = [partial(backend.forward_backward, batch, loss) for batch in batches]
        found["new_lengths_s"] = [probe.seconds(run) for run in runs]
        backend.optim_step()
        seconds, tokens = probe.seconds(runs[0], 3, warm=1), int(is_computed(batches[0]).sum())
        tflops = 6 * sum(x.numel() for x in backend.model.parameters()) * tokens / seconds / 1e12
        found |= {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "tflops": tflops}
        found |= {"share_of_product": tflops / probe.product_tflops()}
        found |= {"optimizer_s": probe.seconds(backend.optim_step)} | probe.gib()


def head(probe: Probe) -> None:
    """How large should a tile of the output layer be?"""
    rows, hidden = (256, 64) if probe.tiny else (8192, 1536)
    states = torch.randn(rows, hidden, device=probe.device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(probe.vocabulary, hidden, device=probe.device, requires_grad=True)
    targets = torch.randint(0, probe.vocabulary, (rows,), device=probe.device)

    def run(tile_bytes: int) -> None:
        options = {"dtype": torch.bfloat16, "tile_bytes": tile_bytes}
        selected_logprobs(states, OutputLayer(weight), targets, **options)[0].sum().backward()
        states.grad = weight.grad = None

    for mib in (8, 32, 128, 256, 1024):
        with probe.finding(f"{mib} MiB") as found:
            found["seconds"] = probe.seconds(partial(run, mib << 20), 3, warm=1)
            flops = 8 * rows * hidden * probe.vocabulary  # forward, once more, and two gradients
            found |= {"tflops": flops / found["seconds"] / 1e12} | probe.gib()


def step(probe: Probe) -> None:
    """How long does one GRPO step take, and one of TRL? 16 prompts with 8 answers of 512 tokens, by a 1.5B model."""
    rl4llm_peer: Any = importlib.import_module("rl4llm_peer")
    rl4llm_peer.reward = lambda text: random.random()  # texts of random weights are alike
    rows = [{"messages": [{"role": "user", "content": f"What is {n} plus {n + 7}?"}]} for n in range(64)]
    (probe.work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = _saved(probe, "1.5b")
    job: dict[str, Any] = {"model": str(place), "data": str(probe.work / "rows.jsonl"), "lr": 1e-6}
    small = {"prompts": 2, "group_size": 2, "new_tokens": 8, "micro_batch": 2, "threads": 1}
    large = {"prompts": 16, "group_size": 8, "new_tokens": 512, "micro_batch": 16, "threads": 4}
    job |= {"dtype": "bfloat16"} | (small if probe.tiny else large)
    with probe.finding("rl4llm, autocast") as found:
        job |= {"overrides": {"model.device": probe.device.type}, "output": f"{place} run"}
        with rl4llm_peer.build(job) as ours:
            ours.resume()
            ours.publish()
            found |= _best([rl4llm_peer.step(ours) for _ in range(3)])
    with probe.finding("trl, bf16") as found:
        found["installed"] = importlib.util.find_spec("trl") is not None
        if found["installed"]:
            found |= _best(_trl_steps(probe, job | {"output": f"{place} trl"}))


def _saved(probe: Probe, size: str) -> Path:
    """Save a model with random weights, and a tokenizer that asks without a template."""
    model, tokens = probe.model(size, "bfloat16", device="cpu"), tokenizer(probe.vocabulary)
    tokens.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokens.eos_token_id, tokens.pad_token_id
    for part in (model, tokens):
        part.save_pretrained(probe.work / size)
    return probe.work / size


def _best(steps: list[dict[str, Any]]) -> dict[str, Any]:
    best = min(steps[1:], key=lambda step: step["seconds"]["step"])
    return best["seconds"] | {"tokens": best["tokens"]}


def _trl_steps(probe: Probe, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Take two steps with TRL's trainer, as `step.py` does on a CPU."""
    import datasets

    trl_peer: Any = importlib.import_module("trl_peer")
    found: list[dict[str, Any]] = []

    class Lines:
        def send(self, **line: Any) -> None:
            found.append(line)

        def wait(self) -> bool:
            return len(found) <= 2

    real, trl_peer.reward = trl_peer.GRPOConfig, lambda text: random.random()
    trl_peer.GRPOConfig = lambda **options: real(**(options | {"use_cpu": not probe.cuda}))
    turnstile = trl_peer.Turnstile(Lines())
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    prompts = datasets.Dataset.from_list([{"prompt": row["messages"][0]["content"]} for row in rows])
    options = {"args": trl_peer.config(job), "train_dataset": prompts, "callbacks": [turnstile]}
    try:
        trl_peer.GRPOTrainer(model=job["model"], reward_funcs=turnstile.score, **options).train()
    finally:
        trl_peer.GRPOConfig = real
    return found[1:]


def publish(probe: Probe) -> None:
    """How fast are versions of the weights written for a server?"""
    backend = probe.trainer("1.5b", **BF16)
    specs = backend.weight_specs()
    size = sum(spec.num_bytes for spec in specs)
    for name, parent in {"memory": "/dev/shm", "disk": str(probe.work)}.items():
        place = tempfile.mkdtemp(dir=parent, prefix="rl4llm_gpu_")
        with probe.finding(name) as found, contextlib.closing(WeightStore(place, keep=1)) as store:
            runs = [partial(store.write, n, specs, backend.weights()) for n in (1, 2)]
            found["seconds"] = [probe.seconds(run) for run in runs]
            found |= {"gib": size / GIB, "gb_per_s": size / min(found["seconds"]) / 1e9}
        shutil.rmtree(place, ignore_errors=True)

"""The checks of `gpu.py` that ask whether everything is right; each is a function of a Probe."""

from __future__ import annotations

import copy
import importlib.util
import platform
import subprocess
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from gpu_probe import BF16, CASES, GIB, ROOT, Probe, ask, loss, packed, served, trajectory
from torch import Tensor

from rl4llm.backends import varlen as our_varlen
from rl4llm.backends.attention import stream_of
from rl4llm.backends.heads import head_memory
from rl4llm.backends.runner import TokenNumbers
from rl4llm.backends.sharding import Sharded
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.model_memory import Precision
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.inspect.plan.shape import shape_of
from rl4llm.inference.embedded.sampling import Sampler
from rl4llm.runtime.ranks import DistributedRanks, Ranks

PRECISIONS = (("float32", "none"), ("float32", "bfloat16"), ("bfloat16", "none"))  # of weights, of autocast
LORA = {"layers": 6, "lora": 16}
HEADS = ((14, 2, 64), (12, 2, 128), (28, 4, 128), (16, 8, 128), (9, 3, 64))  # of queries, of keys, width


def machine(probe: Probe) -> None:
    """Report what is installed, and what the machine can do at most."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with probe.finding("versions") as found:
        found |= {"python": platform.python_version(), "commit": git.stdout.strip()}
        found |= {"torch": torch.__version__, "transformers": transformers.__version__}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    with probe.finding(torch.cuda.get_device_name() if probe.cuda else "cpu") as found:
        if probe.cuda:
            found["gib"] = torch.cuda.mem_get_info()[1] / GIB
        found["bf16_tflops"] = probe.product_tflops()
        few, size = torch.zeros(8, device=probe.device), 1 << (18 if probe.tiny else 28)
        found["launch_us"] = 1e6 * probe.seconds(lambda: few.add_(1), 1000, warm=100)
        one, other = (torch.zeros(size, device=probe.device) for _ in range(2))
        found["copy_gb_per_s"] = 2 * one.nbytes / probe.seconds(partial(other.copy_, one), 5, warm=1) / 1e9


def varlen(probe: Probe) -> None:
    """Has torch's attention in one call the numbers of plain attention, and the same ones twice?"""
    for sizes in HEADS[:1] if probe.tiny else HEADS:
        with probe.finding(f"heads, heads of keys, width {sizes}") as found:
            chosen = our_varlen.kernel_for(probe.device, torch.bfloat16, *sizes)
            kernel = chosen or our_varlen.plain_varlen
            found["used"] = chosen is not None
            for name, deterministic in (("differs", False), ("differs_deterministic", True)):
                torch.use_deterministic_algorithms(deterministic)
                twice = [
                    our_varlen._difference(kernel, probe.device, torch.bfloat16, *sizes) for _ in range(2)
                ]
                found |= {name: twice[0], f"{name}_again": twice[1]}
    torch.use_deterministic_algorithms(False)


def engine(probe: Probe) -> None:
    """Do the log-probs of the engine equal those of the trainer, before and after the weights changed?"""
    for dtype, autocast in PRECISIONS:
        fast: list[Any] = []
        for path in ("fast", "graph", "model"):
            with probe.finding(f"{dtype} autocast={autocast}, {path}") as found:
                answers = _served(probe, found, path, dtype=dtype, autocast=autocast, layers=6)
                fast = fast or answers
                found["greedy_as_fast"] = answers == fast
    for name, options in {"auto": BF16, "lora bf16": BF16 | LORA, "lora autocast": LORA}.items():
        with probe.finding(name) as found:
            _served(probe, found, "auto", **options)


def _served(probe: Probe, found: dict[str, Any], path: str, **options: Any) -> list[Any]:
    """Enter how far engine and trainer are apart before and after a step; return the greedy answers."""
    backend, batch = probe.trainer("0.5b", lr=1e-4, **options), probe.batch(1, 100)
    made = served(backend.model, path, 16, options.get("autocast", "bfloat16"))
    before, answers = _mismatch(probe, backend, made, "before")
    backend.forward_backward(batch, loss)
    backend.optim_step()
    made.take_weights(1)
    after, more = _mismatch(probe, backend, made, "after")
    found |= before | {f"{name}_after_step": value for name, value in after.items()}
    found |= {"path": made.describe()["path"], "reason": made.describe()["path_reason"]}
    return answers + more


def _mismatch(probe: Probe, backend: TorchBackend, made: Any, name: str) -> tuple[dict[str, Any], list[Any]]:
    """Return how far log-probs of engine and trainer are apart, and the greedy answers."""
    new, done = 8 if probe.tiny else 40, {}
    ask(made, [new + 8 * row for row in range(4)], f"{name} greedy ", temperature=0.0)
    ask(made, [new + 8 * row for row in range(10)], f"{name} drawn ")
    ask(made, [new] * 2, f"{name} filtered ", top_p=0.9, top_k=50)
    while made.busy:
        done |= {request.session: (request, completion) for request, completion in made.step()}
    sampled = [trajectory("p", a.prompt_ids, b.token_ids, b.logprobs) for a, b in done.values()]
    batch = packed(sampled).to(backend.device)
    gaps = (backend.forward(batch).float() - batch.sampled_logprobs_BT)[batch.mask_BT].abs()
    answers = [done[f"{name} greedy {row}"][1].token_ids for row in range(4)]
    return {"mismatch_mean": gaps.mean().item(), "mismatch_max": gaps.max().item()}, answers


def numbers(probe: Probe) -> None:
    """Are log-probs and gradients right, and is the deterministic mode deterministic?"""
    model, batch = probe.model("1.5b", layers=4, device="cpu"), probe.batch(1, 100)

    def computed(dtype: str, autocast: str, device: Any = probe.device) -> tuple[Tensor, Tensor]:
        placed = copy.deepcopy(model).to(device, getattr(torch, dtype))
        backend = TorchBackend(placed, lr=0.0, autocast=autocast)
        logprobs = backend.forward(batch).float().cpu()
        backend.forward_backward(batch, loss)
        return logprobs[batch.mask_BT], _some([x.grad for x in backend.stepped.values()])

    expected = computed("float32", "none", "cpu")
    for dtype, autocast in PRECISIONS:
        with probe.finding(f"{dtype} autocast={autocast}") as found:
            found |= _compared(computed(dtype, autocast), expected)
    with probe.finding("deterministic") as found:
        probe.set_up(deterministic=True)
        one, other = (computed("float32", "bfloat16") for _ in range(2))
        draw = Sampler([SamplingParams(seed=row) for row in range(4)], [0] * 4, probe.device)
        tokens, _ = draw(torch.randn(4, probe.vocabulary, device=probe.device))
        found |= {"equal": one[1].equal(other[1]), "sampled": tokens.tolist()}
    torch.use_deterministic_algorithms(False)


def _some(gradients: list[Any]) -> Tensor:
    """Return the first numbers of each gradient."""
    return torch.cat([x.detach().flatten()[:20_000].double().cpu() for x in gradients])


def _compared(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> dict[str, float]:
    differ = (found[0] - expected[0]).abs()
    cosine = F.cosine_similarity(found[1], expected[1], dim=0).item()
    logprobs = {"logprob_mean": differ.mean().item(), "logprob_max": differ.max().item()}
    return logprobs | {"gradient_cosine": cosine}


def memory(probe: Probe) -> None:
    """Does an update take the memory that `rl4llm plan` counts, and does it leave the device?"""
    for what in ("0.5b autocast", "1.5b bfloat16, checkpointing")[: 1 if probe.tiny else 2]:
        with probe.finding(what) as found:
            case = {"dtype": "float32", "autocast": "bfloat16"} | CASES[what]
            backend, batch = probe.trainer(**case), probe.batch(2, 450)
            for _ in range(2):  # makes the moments of the optimizer
                backend.forward_backward(batch, loss)
                backend.optim_step()
            held = probe.gib()["held_gib"]
            if probe.cuda:
                torch.cuda.reset_peak_memory_stats()
            backend.forward_backward(batch, loss)
            found |= {"held_gib": held, "extra_gib": probe.gib()["peak_gib"] - held}
            backend.optim_step()
            sizes = _planned(
                backend, batch, Precision.of(case["dtype"], case["autocast"], gpu=probe.cuda), case
            )
            found |= {f"planned_{name}_gib": size / GIB for name, size in sizes.items() if size}
            found["offload_s"] = probe.seconds(backend.offload)
            found["left_gib"] = probe.gib()["held_gib"]
            found["onload_s"] = probe.seconds(backend.onload)
            found["offload_again_s"] = probe.seconds(backend.offload)


def _planned(backend: TorchBackend, batch: Any, precision: Precision, case: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of each part of a plan."""
    stream, shape = stream_of(batch), shape_of(backend.model)
    tokens = stream.token_ids_1N.shape[1]
    keys = tokens + sum(block.count * length for block in stream.blocks for _, length in block.path)
    kept = shape.activations(precision, tokens, keys, checkpointing=case.get("checkpointing", False))
    return asdict(TorchBackend.memory(shape, precision, {})) | {
        "activations": kept + shape.working(precision, tokens, backward=True),
        "head": head_memory(shape, precision, int(batch.mask_BT.sum()), backward=True),
    }


def nccl(probe: Probe) -> None:
    """Does a group of one rank add up, and has a sharded model the log-probs and gradients of a plain one?"""
    with probe.finding("all_reduce") as found:
        backend, place = "cpu:gloo,cuda:nccl" if probe.cuda else "gloo", f"file://{probe.work / 'ranks'}"
        dist.init_process_group(backend, init_method=place, rank=0, world_size=1)
        ones = torch.ones(1 << 16, device=probe.device)
        dist.all_reduce(ones)
        found |= {"backend": str(dist.get_backend_config()), "right": bool((ones == 1).all())}
    with probe.finding("fsdp2") as found:
        model, ranks = probe.model("0.5b", layers=4), DistributedRanks()
        plain, batch = TokenNumbers(model, None, torch.bfloat16, ranks), probe.batch(2, 200).to(probe.device)

        def computed(run: Any) -> tuple[Tensor, Tensor]:
            model.zero_grad()
            logprobs = run(batch, 1.0, False)[0]
            (logprobs * batch.weights_BT).sum().backward()
            grads = (x.grad for x in model.parameters())
            return logprobs.detach(), _some([getattr(x, "full_tensor", x.clone)() for x in grads])

        expected = computed(plain)
        found |= _compared(computed(Sharded(plain, ranks, probe.device).numbers), expected)
        dist.destroy_process_group()


def deepspeed(probe: Probe) -> None:
    """Does every ZeRO stage step, leave the device, come back and step again?"""
    if _lacks(probe, "deepspeed"):
        return
    from rl4llm.extensions.deepspeed.backend import DeepSpeedBackend

    batch = probe.batch(2, 300)
    for stage, away in ((1, False), (2, False), (3, False), (2, True)):
        with probe.finding(f"ZeRO-{stage}{' offload_optimizer' if away else ''}") as found:
            options = {"zero_stage": stage, "offload_optimizer": away, "lr": 1e-6, "device": probe.device}
            backend = DeepSpeedBackend(probe.model("0.5b", "bfloat16"), ranks=Ranks(), **options)

            def step(backend: Any = backend) -> None:
                backend.forward_backward(batch, loss)
                backend.optim_step()

            found |= {"seconds": probe.seconds(step, 2, warm=1)} | probe.gib()
            if stage > 1:  # with ZeRO-1 a bf16 model cannot leave the device
                found |= {"offload_s": probe.seconds(backend.offload), "left_gib": probe.gib()["held_gib"]}
                found["onload_s"] = probe.seconds(backend.onload)
                step()


def _lacks(probe: Probe, package: str) -> bool:
    """Report a package that is not installed."""
    missing = importlib.util.find_spec(package) is None
    if missing:
        with probe.finding(f"{package} is not installed"):
            pass
    return missing

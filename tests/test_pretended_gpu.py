"""What runs on a CPU also runs on a GPU, as far as a pretended one shows: the same tokens, few kernels, few waits."""

import sys
import warnings
from itertools import product

import numpy as np
import pretended_gpu
import pytest
import sweeps
import torch
from forked_python import python
from pretended_gpu import GPU, counted, on_pretended_gpu
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.backends.varlen import kernel_for
from rl4llm.core.types import SamplingParams, TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.inference.embedded.engine import Engine
from rl4llm.inference.embedded.flash import flash_for

GRAPHS_AT_MOST = 8  # of an engine with four rows, whose cache grows
MODES = {"bfloat16": (torch.bfloat16, None), "autocast": (torch.float32, torch.bfloat16)}
IN_THE_GRAPH = {
    "bfloat16": 408,
    "autocast": 325,
}  # kernels of a decode step with 28 layers; 5 leave out padded ids
OUTSIDE = 0  # of the graph
IN_AN_UPDATE = 640  # kernels of a micro-batch with 4 layers
REQUESTS = (
    {}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {},
)  # fmt: skip
RUN = [
    "rewards=[{name: length, unit: chars, min_length: 1000, max_length: 2000, margin: 1000}]", "model.autocast=auto",
    "eval.limit=4", "eval.every=0", "rollout.prompts=2", "rollout.max_tokens=6", "env.max_steps=1", "checkpoint.every=1",
]  # fmt: skip
GROUPS = ["configs/quickstart.yaml", *RUN, "rollout.group_size=2"]
DETERMINISTIC = [*GROUPS, "model.autocast=none", "deterministic=true"]
RUNS = {
    "defaults": GROUPS,
    "bfloat16": [*GROUPS, "model.dtype=bfloat16"],
    "lora": [*GROUPS, "model.lora.rank=4"],
    "gradient_checkpointing": [*GROUPS, "model.gradient_checkpointing=true"],
    "kl": [*GROUPS, "algorithm.kl_coef=0.1"],
    "ppo": ["configs/quickstart_ppo.yaml", *RUN],
}


def build(layers, device="auto", dtype=torch.float32, **options):
    """Return a model with the modules of Qwen2, which is narrow but has a large vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=16_384, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return load_model(Qwen2ForCausalLM(config), dtype, device, **options)


def engine_of(model, path, rows=4, autocast=None):
    warnings.filterwarnings("error", message="(Decoding|Attention) runs")  # slower than it could
    tokenizer = build_tokenizer(["1 + 1 = 2", "What is the sum?"] * 8, 320)
    return Engine(model, tokenizer, rows, 512, path, autocast=autocast)


def prompt(row):
    return [5 + row // 2, *range(5, 25 + row)]


def sampled(model, path, autocast=None):
    """Return tokens and log-probs of requests that differ in lengths and parameters."""
    engine, done = engine_of(model, path, autocast=autocast), {}
    for row, options in enumerate(REQUESTS):
        params = SamplingParams(max_tokens=12 + 9 * row, seed=row, **options)
        engine.waiting.append(engine.request(prompt(row), params, str(row)))
    while engine.busy:
        done |= {request.session: completion for request, completion in engine.step()}
    return [(done[str(row)].token_ids, done[str(row)].logprobs) for row in range(len(REQUESTS))]


def tokens_of(kind, device, paths):
    """Return the tokens by path, and how many graphs the paths made."""
    model = build(2, device, gradient_checkpointing=kind == "gradient_checkpointing")
    if kind == "lora":
        for _, parameter in add_adapter(model, rank=4).parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter)))
            parameter.copy_(noise / 9)
    tokens = {path: [ids for ids, _ in sampled(model, path)] for path in paths}
    return tokens, len(pretended_gpu.Graph.made)


def mismatches(paths):
    """Return by path how far log-probs under autocast are from the model's own, for requests with temperature 1."""
    model = build(2, "cuda")
    completions = {path: sampled(model, path, torch.bfloat16) for path in paths}
    return {
        path: max(mismatch(model, row, *found[row]) for row in (0, 6)) for path, found in completions.items()
    }


def mismatch(model, row, ids, logprobs):
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        logits_TV = model(torch.tensor([prompt(row) + list(ids)], device="cuda")).logits[
            0, -len(ids) - 1 : -1
        ]
    own_TV = logits_TV.float().log_softmax(-1).cpu()
    return float((own_TV[range(len(ids)), ids] - torch.tensor(logprobs)).abs().mean())


def launches(mode, path="auto", rows=8, steps=8):
    """Return the kernels in the graph of a decode step, and kernels, copies and waits outside of it per step."""
    dtype, autocast = MODES[mode]
    engine = engine_of(build(28, "cuda", dtype), path, rows, autocast)
    for row in range(rows):
        params = SamplingParams(max_tokens=100, seed=row, stop_token_ids=(16_000,), ignore_eos=True)
        engine.waiting.append(engine.request(prompt(row), params, str(row)))
    for _ in range(6):
        engine.step()
    with counted() as tally:
        for _ in range(steps):
            assert not engine.step(), "no request ends while kernels are counted"
    graph = pretended_gpu.Graph.made[-1].kernels if tally.total("replay") else 0
    return {"graph": graph} | {event: tally.total(event) / steps for event in ("kernel", "upload", "wait")}


def all_launches(*paths):
    return {(mode, path): launches(mode, path) for mode, path in product(MODES, paths)}


def update_kernels(varlen):
    """Return the kernels of a micro-batch, those of attention, the waits for it, and the norm of its gradient."""
    if not varlen:
        del pretended_gpu.varlen.varlen_attn
    backend = TorchBackend(build(4, "cuda"), autocast="bfloat16")
    generator, group = np.random.default_rng(0), []
    for number, _ in product(range(2), range(4)):
        answer = tuple(generator.integers(5, 300, generator.integers(3, 12)).tolist())
        spans = TokenSpan.context(prompt(number)), TokenSpan(answer, "policy", (-1.0,) * len(answer), 0)
        group.append(Trajectory(f"p{number}", spans, (), {}, 0.0, "stop"))
    batching = Batching()
    [batch] = batching.pack(group, [1.0, -0.5] * 4)
    for _ in range(2):  # the first time, the backend proves its kernels
        with counted() as tally:
            backend.forward_backward(
                batch, lambda batch, logprobs_BT, _: (-logprobs_BT * batch.credits_BT, {})
            )
    norms = [parameter.grad.norm() for parameter in backend.model.parameters()]
    kernels = tally.total("kernel"), tally.total("kernel", "varlen_attn")
    return *kernels, tally.total("wait"), float(torch.stack(norms).norm())


def set_up_by_a_backend():
    """Return where a model is that names no device, and how float32 and attention are computed."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    backend = TorchBackend(build(1))
    placed = {str(parameter.device) for parameter in backend.model.parameters()}
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled()
    return placed, torch.get_float32_matmul_precision(), *flags


def full(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory")


def errors_when_memory_ends():
    """Return the errors of an engine and of a backend when the memory ends in one of the places that they try."""
    work = {
        "rl4llm.inference.embedded.flash.flash_attention": lambda: engine_of(
            build(1, dtype=torch.bfloat16), "auto"
        ),
        "pretended_gpu.Fused.__call__": lambda: engine_of(build(1), "auto"),
        "torch.cuda.graph": lambda: engine_of(build(1), "auto"),
        "rl4llm.inference.paths._replay": lambda: engine_of(build(1), "auto"),
        "torch.nn.attention.varlen.varlen_attn": lambda: kernel_for(GPU, torch.bfloat16, 6, 2, 8),
        "rl4llm.backends.runner.stream_recurrent": lambda: TorchBackend(build(1)),
    }
    found = {}
    for place, make in work.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, full)
            try:
                found[place] = str(make() and "none")
            except torch.OutOfMemoryError as error:
                found[place] = str(error)
    return found


def found_of_a_wrong_kernel():
    """Return the attention of captured steps with a kernel that ignores the lengths of rows, and why."""
    operation = torch.ops.aten._flash_attention_forward.default
    right = pretended_gpu.REPLACED[operation]

    def wrong(*args, seqused_k, **options):
        return right(*args, seqused_k=torch.full_like(seqused_k, 100), **options)

    pretended_gpu.REPLACED[operation] = wrong
    kernel, why = flash_for(GPU, torch.bfloat16, 6, 2, 8)
    return kernel is None, why


def error_of(work):
    """Return the error of a piece of work, "" if there is none."""
    try:
        work()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def captured(work, mode="thread_local"):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        return graph, work()


def refusals():
    """Return the errors of what a GPU refuses, and of what it accepts."""
    gpu, host = torch.ones(3, device="cuda"), torch.ones(3)
    refused = {
        "two devices": lambda: gpu + host,
        "numpy": lambda: np.asarray(gpu),
        "read-back in a capture": lambda: captured(lambda: gpu.sum().item()),
        "a mask in a capture": lambda: captured(lambda: gpu[gpu > 0]),
        "upload in a capture": lambda: captured(lambda: torch.tensor([1, 2], device="cuda")),
        "another thread in a capture": lambda: captured(lambda: gpu * 2, "global"),
        "sum of floats": lambda: gpu.cumsum(0),
    }
    accepted = {
        "a number": lambda: gpu + torch.tensor(1.0),
        "a move": lambda: gpu.cpu().numpy() + host.numpy(),
        "a capture": lambda: captured(lambda: torch.zeros(3, device="cuda") + gpu),
        "sum of integers": lambda: gpu.long().cumsum(0),
    }
    torch.use_deterministic_algorithms(True)
    return [{what: error_of(work) for what, work in cases.items()} for cases in (refused, accepted)]


def replays():
    """Return what memory holds after a capture and after two replays, and a copy before and after a wait for it."""
    x, counter = torch.ones(2, device="cuda"), torch.zeros(1, device="cuda")
    graph, result = captured(lambda: x * 2 + counter.add_(1))
    found = [result.tolist()]
    for number in (3.0, 5.0):
        x.fill_(number)
        graph.replay()
        found.append(result.tolist())
    copy = result.to("cpu", non_blocking=True)
    found.append(copy.tolist())
    torch.cuda.synchronize()
    return [*found, copy.tolist()]


def trained(directory, words, steps=(2, 3)):
    """Train for two steps, then resume for a third one; return the exit codes."""
    from rl4llm.__main__ import program

    codes = []
    for last in steps:
        sys.argv = ["rl4llm", "train", *words, f"max_steps={last}", f"output.dir={directory}"]
        with pytest.raises(SystemExit) as end:
            program()
        codes.append(end.value.code)
    return codes


def test_pretended_gpu_refuses_what_a_gpu_refuses():
    refused, accepted = on_pretended_gpu(refusals)
    assert all(refused.values()), refused
    assert not any(accepted.values()), accepted


def test_backend_puts_a_model_on_the_gpu_with_exact_float32():
    assert on_pretended_gpu(set_up_by_a_backend) == ({"cuda:0"}, "highest", False, False)


def test_memory_that_ends_is_no_reason_for_a_slower_path():
    for place, found in on_pretended_gpu(errors_when_memory_ends).items():
        assert found == "CUDA out of memory", place


def test_kernel_of_attention_with_wrong_numbers_is_not_used():
    unused, why = on_pretended_gpu(found_of_a_wrong_kernel)
    assert unused and "torch's kernel differs by" in why


def test_replays_and_copies_take_effect_when_a_gpu_does_them():
    assert on_pretended_gpu(replays) == [[-1, -1], [7, 7], [12, 12], [-1, -1], [12, 12]]


@pytest.mark.parametrize(
    ("kind", "paths"),
    sweeps.sampled(
        [("plain", ["auto", "fast", "model"]), ("lora", ["auto"]), ("gradient_checkpointing", ["graph"])],
        lambda case: case[0] != "gradient_checkpointing",
    ),
)
def test_engine_samples_on_a_gpu_what_it_samples_on_a_cpu(kind, paths):
    expected, _ = tokens_of(kind, "cpu", ["auto"])
    found, graphs = on_pretended_gpu(tokens_of, kind, "cuda", paths)
    assert found == dict.fromkeys(paths, expected["auto"])
    assert graphs <= GRAPHS_AT_MOST


def test_engine_on_a_gpu_keeps_log_probs_under_autocast():
    for path, found in on_pretended_gpu(mismatches, ["fast", "graph"]).items():
        assert found < 0.02, path


def test_decode_step_launches_few_kernels_and_waits_once():
    for (mode, path), found in on_pretended_gpu(all_launches, "auto").items():
        assert 28 < found["graph"] <= IN_THE_GRAPH[mode], (mode, path, found)
        assert found["kernel"] <= OUTSIDE, (mode, path, found)
        assert found["wait"] <= 1, (mode, path, found)


def test_update_with_varlen_launches_fewer_kernels():
    kernels, attentions, waits, norm = on_pretended_gpu(update_kernels, True)
    without, none, _, other_norm = on_pretended_gpu(update_kernels, False)
    assert kernels <= IN_AN_UPDATE < without and attentions == 8 and none == 0
    assert waits == 1  # for the metrics, at the end
    assert norm == pytest.approx(other_norm, rel=0.02)


def test_update_uses_varlen_without_enable_gqa():
    assert on_pretended_gpu(update_kernels, True, enable_gqa=False)[1] == 8


# all of these have the defaults; the deterministic run below has them alone
@pytest.mark.parametrize("name", sweeps.sampled(RUNS, ["lora", "ppo"]))
def test_run_trains_and_resumes_on_a_gpu(name, tmp_path, model_dir):
    assert on_pretended_gpu(trained, tmp_path, [*RUNS[name], f"model.path={model_dir}"]) == [0, 0]


def test_run_trains_and_resumes_on_a_device_of_another_name(tmp_path, model_dir):
    words = [*GROUPS, "model.device=other", f"model.path={model_dir}"]
    assert on_pretended_gpu(trained, tmp_path, words, kind="other") == [0, 0]


def test_deterministic_run_on_a_gpu_resumes_and_equals_a_cpu(tmp_path, model_dir):
    words = [*DETERMINISTIC, f"model.path={model_dir}"]
    assert on_pretended_gpu(trained, tmp_path / "resumed", words) == [0, 0]
    assert on_pretended_gpu(trained, tmp_path / "straight", words, [3]) == [0]
    done = python("-m", "rl4llm", "train", *words, "max_steps=3", f"output.dir={tmp_path / 'cpu'}")
    assert done.returncode == 0, done.stdout + done.stderr
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("resumed", "straight", "cpu")]
    assert files[0].read_bytes() == files[1].read_bytes()
    start, gpu, cpu = map(load_file, (model_dir / "model.safetensors", files[0], files[2]))
    for name, begin in start.items():
        assert (gpu[name] - cpu[name]).norm() < 1e-3 * (cpu[name] - begin).norm(), name

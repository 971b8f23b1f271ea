"""Log-probs and values from hidden states: equal to the naive path, with its gradient, without its memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_python import python

from rl4llm.backends.heads import KEEP_BYTES, OutputLayer, asked_tokens, head_memory, selected_logprobs
from rl4llm.core.model_memory import Precision
from rl4llm.core.types import TrainBatch
from rl4llm.extensions.inspect.plan.shape import shape_of

PRODUCTS = {"none": torch.float32, "bfloat16": torch.bfloat16}


def naive(hidden_ND, weight_VD, bias_V, targets_N, temperature, softcap):
    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD, bias_V)
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    logp_NV = (logits_NV / temperature).log_softmax(-1)
    return logp_NV.gather(1, targets_N[:, None]).squeeze(1), -(logp_NV.exp() * logp_NV).sum(1)


def tensors(tokens=37, vocabulary=101, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(tokens, 16, generator=generator, dtype=dtype).requires_grad_()
    weight_VD = (0.3 * torch.randn(vocabulary, 16, generator=generator, dtype=dtype)).requires_grad_()
    bias_V = torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_()
    return hidden_ND, weight_VD, bias_V, torch.randint(0, vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("keep_bytes", [0, 700, 1 << 20])
@pytest.mark.parametrize("tile_bytes", [37 * 4 * 7, 1 << 20])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, 0.0), (0.7, 0.0), (1.3, 3.0)])
@pytest.mark.parametrize("entropy", [False, True])
def test_tiles_equal_the_naive_log_probs_and_gradients(keep_bytes, tile_bytes, temperature, softcap, entropy):
    hidden_ND, weight_VD, bias_V, targets_N = tensors(dtype=torch.float32)
    output = OutputLayer(weight_VD, bias_V, softcap)
    logprobs_N, entropy_N = selected_logprobs(
        hidden_ND, output, targets_N,
        temperature=temperature, entropy=entropy, keep_bytes=keep_bytes, tile_bytes=tile_bytes,
    )  # fmt: skip
    exact = [x.detach().double().requires_grad_() for x in (hidden_ND, weight_VD, bias_V)]
    expected = naive(*exact, targets_N, temperature, softcap)
    torch.testing.assert_close(logprobs_N.double(), expected[0], atol=1e-6, rtol=1e-6)
    scale_N = torch.linspace(-1, 1, len(targets_N))
    loss, plain = (logprobs_N * scale_N).sum(), (expected[0] * scale_N).sum()
    if entropy:
        torch.testing.assert_close(entropy_N.double(), expected[1], atol=1e-6, rtol=1e-6)
        loss, plain = (
            loss + (entropy_N * scale_N.flip(0)).sum(),
            plain + (expected[1] * scale_N.flip(0)).sum(),
        )
    grads = torch.autograd.grad(loss, (hidden_ND, weight_VD, bias_V))
    for grad, wanted in zip(grads, torch.autograd.grad(plain, exact), strict=True):
        torch.testing.assert_close(grad.double(), wanted, atol=1e-6, rtol=1e-6)


def test_many_rows_are_cut_into_blocks_without_a_trace(monkeypatch):
    monkeypatch.setattr("rl4llm.backends.heads.TILE_ROWS", 10)
    hidden_ND, weight_VD, bias_V, targets_N = tensors(dtype=torch.float32)
    for keep_bytes in (0, 3 * 440, 1 << 20):
        logprobs_N, _ = selected_logprobs(
            hidden_ND, OutputLayer(weight_VD, bias_V), targets_N, keep_bytes=keep_bytes, tile_bytes=440
        )
        expected_N = naive(hidden_ND, weight_VD, bias_V, targets_N, 1.0, 0.0)[0]
        torch.testing.assert_close(logprobs_N, expected_N, atol=2e-6, rtol=1e-6)
        inputs = (hidden_ND, weight_VD, bias_V)
        grads = torch.autograd.grad(logprobs_N.square().sum(), inputs)
        for grad, wanted in zip(grads, torch.autograd.grad(expected_N.square().sum(), inputs), strict=True):
            torch.testing.assert_close(grad, wanted, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("device", "autocast", "kept"),
    [("cpu", "none", KEEP_BYTES), ("cpu", "bfloat16", 4096 * 20480 * 2), ("meta", "bfloat16", 0)],
)
def test_a_plan_counts_the_logits_that_are_kept(model, device, autocast, kept):
    rows, vocabulary, hidden = 4096, 20480, 8
    states = torch.empty(rows, hidden, device=device, requires_grad=True)
    weight = torch.empty(vocabulary, hidden, device=device)
    targets = torch.zeros(rows, dtype=torch.long, device=device)
    logprobs_N, _ = selected_logprobs(states, OutputLayer(weight), targets, dtype=PRODUCTS[autocast])
    _, _, _, _, _, _, *logits = logprobs_N.grad_fn.saved_tensors
    assert sum(tile.nbytes for tile in logits) == kept
    shape = replace(shape_of(model), vocabulary=vocabulary)
    precision = Precision.of("float32", autocast, gpu=device != "cpu")
    asked = [head_memory(shape, precision, rows, backward=back) for back in (False, True)]
    gradients = 2 * rows * shape.hidden * 4 + vocabulary * shape.hidden * 4
    assert asked[1] - asked[0] - gradients == kept


def test_a_frozen_output_layer_gets_no_gradient():
    hidden_ND, weight_VD, _, targets_N = tensors(dtype=torch.float32)
    selected_logprobs(hidden_ND, OutputLayer(weight_VD.detach()), targets_N)[0].sum().backward()
    assert hidden_ND.grad is not None and weight_VD.grad is None


def test_the_softmax_of_a_bf16_model_is_computed_in_fp32():
    hidden_ND, weight_VD, _, targets_N = (x.detach() for x in tensors(dtype=torch.bfloat16))
    logprobs_N, _ = selected_logprobs(hidden_ND, OutputLayer(weight_VD), targets_N, entropy=True)
    logits_NV = (hidden_ND @ weight_VD.t()).float()
    assert logprobs_N.dtype == torch.float32
    expected_N = logits_NV.log_softmax(-1).gather(1, targets_N[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs_N, expected_N, atol=1e-5, rtol=0)


def test_large_logits_do_not_overflow():
    hidden_ND, weight_VD, _, targets_N = tensors(dtype=torch.float32)
    logprobs_N, entropy_N = selected_logprobs(
        hidden_ND, OutputLayer(weight_VD * 1e4), targets_N, entropy=True
    )
    grads = torch.autograd.grad(logprobs_N.sum() + entropy_N.sum(), (hidden_ND, weight_VD))
    assert logprobs_N.isfinite().all() and entropy_N.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


def test_no_token_at_all_is_no_error():
    hidden_ND, weight_VD, bias_V, targets_N = tensors(tokens=0, dtype=torch.float32)
    logprobs_N, _ = selected_logprobs(hidden_ND, OutputLayer(weight_VD, bias_V), targets_N)
    logprobs_N.sum().backward()
    assert logprobs_N.shape == (0,) and not weight_VD.grad.any()


def batch_of(segments, mask, computed=None):
    segments_BT = torch.tensor(segments)
    zeros_BT = torch.zeros(segments_BT.shape)
    return TrainBatch(
        token_ids_BT=segments_BT, position_ids_BT=segments_BT, segment_ids_BT=segments_BT,
        mask_BT=torch.tensor(mask, dtype=torch.bool), sampled_logprobs_BT=zeros_BT, credits_BT=zeros_BT,
        weights_BT=zeros_BT, computed_BT=None if computed is None else torch.tensor(computed),
    )  # fmt: skip


def test_a_token_is_predicted_within_its_trajectory_only():
    batch = batch_of([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], [[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    asked_N, once_U, entry_N = asked_tokens(batch)
    assert asked_N.tolist() == once_U[entry_N].tolist() == [1, 2, 4, 6]


def test_a_token_of_several_trajectories_is_predicted_once():
    batch = batch_of(
        [[1, 1, 1, 1, 2, 2, 2, 3, 3]],
        [[0, 0, 1, 1, 0, 1, 1, 0, 1]],
        [[0, 1, 2, 3, 1, 2, 6, 6, 8]],
    )
    asked_N, once_U, entry_N = asked_tokens(batch)
    assert asked_N.tolist() == [2, 3, 5, 6, 8]
    assert once_U[entry_N].tolist() == [2, 3, 2, 6, 8]
    assert len(once_U) == 4


MEMORY = """
import re, torch
from rl4llm.backends.heads import OutputLayer, selected_logprobs
torch.set_num_threads(1)
hidden = torch.randn(4096, 32, requires_grad=True)
weight = torch.randn(32000, 32, requires_grad=True)
targets = torch.randint(0, 32000, (4096,))
selected_logprobs(hidden[:8], OutputLayer(weight), targets[:8])[0].sum().backward()
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
before = peak()
selected_logprobs(hidden, OutputLayer(weight), targets)[0].sum().backward()
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_the_logits_are_never_all_in_memory(tmp_path):
    (tmp_path / "memory.py").write_text(MEMORY)
    done = python(tmp_path / "memory.py")
    assert done.returncode == 0, done.stderr
    assert 2**20 < int(done.stdout) < 0.75 * 4096 * 32000 * 4  # one fp32 copy of the logits

"""Streams: only tokens that matter are computed, each once, and attention sees its own trajectory and nothing else."""

import pytest
import torch
from packed import micro_batches, predecessor, tries
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rl4llm.backends import varlen
from rl4llm.backends.attention import rows_of, stream_attention, stream_of
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.backends.varlen import plain_varlen
from rl4llm.core.errors import ModelError
from rl4llm.core.types import TokenSpan, Trajectory


def trajectory(prompt_id, *spans):
    found = [
        TokenSpan(tuple(ids), "policy", (-1.0,) * len(ids), 0)
        if number % 2
        else TokenSpan.context(tuple(ids))
        for number, ids in enumerate(spans)
    ]
    return Trajectory(prompt_id, tuple(found), (), {}, 0.0, "stop")


def batch_of(trajectories, layout="shared"):
    (batch,) = micro_batches(trajectories, layout, 4096, "token", [1.0] * len(trajectories))
    return batch


GROUP = [
    trajectory("a", [1, 2, 3], [11, 12, 13, 14]),
    trajectory("a", [1, 2, 3], [21], [22, 23], [24]),
    trajectory("a", [1, 2, 3], [31]),
    trajectory("b", [4, 5], [41, 42], [43, 44, 45]),  # ends with the environment
]


@pytest.mark.parametrize("layout", ["sorted", "packed", "shared"])
def test_a_stream_omits_padding_and_tokens_nothing_depends_on(layout):
    stream = stream_of(batch_of(GROUP, layout))
    computed = sorted(stream.token_ids_1N[0].tolist())
    prompts = [1, 2, 3] if layout == "shared" else [1, 2, 3] * 3
    assert computed == sorted([*prompts, 11, 12, 13, 21, 22, 23, 4, 5, 41])


def test_place_is_minus_one_for_tokens_that_are_not_computed():
    batch = batch_of(GROUP)
    stream, rows = stream_of(batch), rows_of(batch)
    for found, ids in ((stream, stream.token_ids_1N.flatten()), (rows, rows.token_ids_RT.flatten())):
        there = found.place_BT >= 0
        assert torch.equal(ids[found.place_BT[there]], batch.token_ids_BT[there])
        assert set(batch.token_ids_BT[~there].tolist()) == {14, 24, 31, 42, 43, 44, 45}


def test_rows_repeat_the_prompt_and_number_positions_from_zero():
    rows = rows_of(batch_of(GROUP), pad_token_id=9)
    assert sorted(row for row in rows.token_ids_RT.tolist()) == [
        [1, 2, 3, 11, 12, 13], [1, 2, 3, 21, 22, 23], [4, 5, 41, 9, 9, 9],
    ]  # fmt: skip
    assert rows.attention_mask_RT.sum(1).tolist() == (rows.token_ids_RT != 9).sum(1).tolist()
    assert torch.equal(rows.position_ids_RT, torch.arange(6) * rows.attention_mask_RT)


def reference(batch, stream, q, k, v, scaling, window=None, sinks=None):
    """Compute attention with the mask spelled out: each token sees itself and those before it."""
    total = q.shape[2]
    place = stream.place_BT[0].tolist()
    allowed = torch.zeros(total, total, dtype=torch.bool)
    for column, query in enumerate(place):
        seen = column
        for _ in range(window or total):
            if query >= 0 and seen is not None:
                allowed[query, place[seen]] = True
                seen = predecessor(batch, 0, seen)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    if sinks is not None:  # a key of zeros whose score is the sink's, and whose value is zero
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        bias = torch.cat([bias.expand(len(sinks), -1, -1), sinks[:, None, None].expand(-1, total, 1)], -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling).transpose(
        1, 2
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("kernel", [None, plain_varlen], ids=["blocks", "one call"])
def test_attention_sees_its_ancestors_and_its_own_past_only(window, dtype, sinks, kernel, monkeypatch):
    monkeypatch.setattr("rl4llm.data.layouts.SHORTEST", 1)
    torch.manual_seed(0)
    group = [
        *(trajectory("a", [1] * 7, [10 + n, *[2] * n]) for n in (2, 7, 11, 3, 8)),
        *(trajectory(f"c{n}", [3] * (3 + n), [4] * 6) for n in range(3)),
        *tries(),
    ]
    batch = batch_of(group)
    stream = stream_of(batch, kernel)
    assert stream.pad_M is not None and max(len(block.path) for block in stream.blocks) > 1
    total = stream.token_ids_1N.shape[1]
    q, k, v = (torch.randn(1, heads, total, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    options = {"scaling": 0.3, "stream": stream, "sliding_window": window, "s_aux": sinks}
    out, _ = stream_attention(None, q, k, v, None, **options)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = reference(batch, stream, *exact, 0.3, window, sinks)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=0)
    weight = torch.randn_like(expected)
    grads = torch.autograd.grad((out.float() * weight).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.float(), want, atol=tolerance * 4, rtol=0)


def test_without_a_stream_it_is_the_usual_attention():
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    module = torch.nn.Module()
    out, _ = stream_attention(module, q, k, v, None, scaling=0.5, is_causal=True)
    assert torch.equal(out, sdpa_attention_forward(module, q, k, v, None, scaling=0.5, is_causal=True)[0])


@pytest.mark.parametrize("option", [{"softcap": 20.0}, {"position_bias": torch.zeros(4)}, {"dropout": 0.1}])
def test_variants_it_does_not_compute_are_refused_by_name(option):
    stream = stream_of(batch_of(GROUP))
    q = torch.randn(1, 4, stream.token_ids_1N.shape[1], 8)
    with pytest.raises(ModelError):
        stream_attention(torch.nn.Module(), q, q, q, None, stream=stream, **option)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])  # mistral has a window
def test_a_model_gives_the_same_numbers_through_one_call_a_layer(build, trajectories, name, monkeypatch):
    calls = []

    def one_call(*args, **options):
        calls.append(options["window_size"])
        return plain_varlen(*args, **options)

    found = []
    for kernel in (None, one_call):
        monkeypatch.setattr("rl4llm.backends.runner.kernel_for", lambda *sizes, kernel=kernel: kernel)
        backend = TorchBackend(build(name), lr=0.0)
        calls.clear()
        batch = batch_of(trajectories)
        numbers = backend.forward(batch)
        backend.forward_backward(batch, lambda batch, logprobs, entropy: (-logprobs, {}))
        found.append([numbers, *(parameter.grad for parameter in backend.model.parameters())])
        assert len(calls) == (0 if kernel is None else 2 * 2)  # layers and passes
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_kernel_that_gives_other_numbers_is_refused(monkeypatch):
    sizes = (torch.device("cpu"), torch.bfloat16, 4, 2, 8)
    assert varlen._difference(plain_varlen, *sizes) == 0

    def sees_the_future(q, k, v, *ends, scale, window_size):
        return plain_varlen(q, k, v, *ends, scale=2 * scale, window_size=window_size)

    assert varlen._difference(sees_the_future, *sizes) > varlen.TOLERANCE
    assert varlen.kernel_for(*sizes) is None  # a CPU has none, and is not asked


@pytest.mark.parametrize("asks", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_the_kernel_is_asked_for_fewer_heads_only_if_it_can_be(monkeypatch, asks):
    given = []

    def newer(q, k, v, *ends, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa
        given.append(enable_gqa)
        return plain_varlen(q, k, v, *ends, scale=scale, window_size=window_size)

    def older(q, k, v, *ends, scale=None, window_size=(-1, -1)):
        given.append(None)
        return plain_varlen(q, k, v, *ends, scale=scale, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", newer if asks else older)
    sizes = (torch.device("cpu"), torch.bfloat16, 4, 2, 8)
    assert varlen._difference(varlen._varlen_attn(), *sizes) == 0
    assert given == [True if asks else None] * 2  # with a window and without


def test_a_gpu_without_the_kernel_warns_and_uses_blocks(monkeypatch):
    def fails(*args):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr(varlen, "_difference", fails)
    with pytest.warns(UserWarning, match=r"block by block.*Ampere"):
        assert varlen.kernel_for(torch.device("cuda"), torch.bfloat16, 4, 2, 8) is None
    assert varlen.kernel_for(torch.device("cuda"), torch.float32, 4, 2, 8) is None

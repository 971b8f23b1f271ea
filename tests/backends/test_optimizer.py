"""The optimizer: its schedule, its clipping, and options that cannot work."""

import pytest
import torch

from rl4llm.backends.optimizer import Optimizer, OptimizerOptions
from rl4llm.core.errors import CheckpointError, ConfigError


def parameters(*shapes):
    return {f"p{number}": torch.nn.Parameter(torch.ones(shape)) for number, shape in enumerate(shapes)}


def test_the_warm_up_rises_to_lr_and_the_schedule_falls_to_zero():
    linear = OptimizerOptions(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6)
    assert [linear.lr_at(step) for step in range(7)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    cosine = OptimizerOptions(lr=1.0, schedule="cosine", total_steps=4)
    assert [cosine.lr_at(step) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert OptimizerOptions(lr=0.5).lr_at(10**6) == 0.5


def test_a_large_gradient_is_clipped_and_its_full_norm_reported():
    named = parameters((4,), (2, 2))
    optimizer = Optimizer(named, OptimizerOptions(lr=1.0, max_grad_norm=1.0))
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, 10.0)
    metrics = optimizer.step()
    assert metrics["grad_norm"] == pytest.approx(800**0.5) and metrics["lr"] == 1.0
    moments, _ = optimizer.state()
    assert sum(moments[f"{name}.exp_avg"].square().sum() for name in named).sqrt() == pytest.approx(
        0.1, rel=1e-4
    )


def test_weight_decay_spares_vectors():
    named = parameters((4,), (2, 2))
    optimizer = Optimizer(named, OptimizerOptions(lr=0.1, weight_decay=0.5))
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert named["p0"].detach().tolist() == [1.0] * 4
    assert named["p1"].detach().flatten().tolist() == pytest.approx([0.95] * 4)


def test_frozen_parameters_stay_and_have_no_state():
    named = parameters((2,), (2,))
    named["p0"].requires_grad_(False)
    optimizer = Optimizer(named, OptimizerOptions(lr=0.1))
    named["p1"].grad = torch.ones(2)
    optimizer.step()
    assert named["p0"].tolist() == [1.0, 1.0]
    assert optimizer.state()[1] == {"p1": 1}


def test_a_skipped_step_does_not_advance_the_schedule():
    named = parameters((2,))
    optimizer = Optimizer(named, OptimizerOptions(lr=1.0, schedule="linear", total_steps=2))
    named["p0"].grad = torch.tensor([1.0, float("inf")])
    assert optimizer.step()["skipped"] == 1.0
    assert optimizer.step_number == 0
    assert named["p0"].grad is None


def quadratic(weight_NN, bias_N, step):
    """Return a loss that is computed in bf16, with other inputs at each step."""
    x_BN = torch.randn(8, len(bias_N), generator=torch.Generator().manual_seed(step)).bfloat16()
    return (torch.tanh(x_BN @ weight_NN.bfloat16() + bias_N.bfloat16()) - 0.5).square().mean()


def small_steps(dtype, make=None, lr=1e-5, steps=40):
    """Take small steps from the same weights; return their start, and the weights and masters at the end."""
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(32, 32, generator=generator), "b": torch.randn(32, generator=generator)}
    start = {name: tensor.bfloat16().float() for name, tensor in start.items()}
    named = {name: torch.nn.Parameter(tensor.to(dtype, copy=True)) for name, tensor in start.items()}
    options = OptimizerOptions(lr=lr, weight_decay=0.1, max_grad_norm=0.1, schedule="cosine", total_steps=60)
    optimizer = Optimizer(named, options) if make is None else make(named.values(), lr=lr)
    for step in range(steps):
        quadratic(named["w"], named["b"], step).backward()
        optimizer.step()
        optimizer.zero_grad() if make is not None else None
    return start, named, getattr(optimizer, "masters", {})


def flat(named):
    return torch.cat([tensor.detach().float().flatten() for tensor in named.values()])


def test_bf16_weights_are_rounded_fp32_ones_bit_for_bit():
    start, full, none = small_steps(torch.float32)
    _, half, masters = small_steps(torch.bfloat16)
    assert not none and list(masters) == ["w", "b"]
    for name, parameter in full.items():
        assert torch.equal(masters[name], parameter) and not torch.equal(parameter, start[name])
        assert torch.equal(half[name], parameter.bfloat16()) and half[name].dtype == torch.bfloat16
    _, plain, _ = small_steps(torch.bfloat16, torch.optim.AdamW)
    assert (flat(plain) != flat(start)).float().mean() < 0.02  # what the masters are for


def test_the_state_of_other_parameters_is_refused():
    optimizer = Optimizer(parameters((2,)), OptimizerOptions(lr=1.0))
    with pytest.raises(CheckpointError):
        optimizer.restore({}, {"other": 3}, 3)
    with pytest.raises(CheckpointError):
        optimizer.restore({"p0.exp_avg": torch.zeros(3)}, {"p0": 3}, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": 1.0, "betas": (0.9, 1.0)},
        {"lr": 1.0, "schedule": "cosinus", "total_steps": 3},
        {"lr": 1.0, "schedule": "linear"},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        OptimizerOptions(**options)


@pytest.mark.parametrize("kind", ["adamw8bit", "paged_adamw8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers")
def test_moments_of_8_bits_take_two_bytes_and_the_steps_of_adamw(kind):
    pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: pip install 'rl4llm[bitsandbytes]'"
    )
    weights = []
    for optimizer in ("adamw", kind):
        named = parameters((64, 100), (50,))
        made = Optimizer(named, OptimizerOptions(lr=1e-3, weight_decay=0.1, optimizer=optimizer))
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            for parameter in named.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.5
            made.step()
        weights.append(flat(named))
    moved = (weights[0] - 1).abs().mean()
    assert (weights[1] - weights[0]).abs().mean() < 0.05 * moved and not torch.equal(*weights)
    moments, _ = made.state()
    assert sum(item.nbytes for key, item in moments.items() if key.startswith("p0")) == 2 * 6400 + 2 * 25 * 4
    with pytest.raises(CheckpointError):
        Optimizer(parameters((64, 100), (50,)), OptimizerOptions(lr=1e-3)).restore(moments, {"p0": 20}, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_ratio_is_the_change_of_the_weights(dtype):
    named = {name: torch.nn.Parameter(torch.full((4, 8), 2.0, dtype=dtype)) for name in ("a", "b")}
    optimizer = Optimizer(named, OptimizerOptions(lr=1e-4))
    for lr, ratio in ((1e-4, 5e-5), (1e-4, 5e-5), (1e-9, 0.0)):
        optimizer.options = OptimizerOptions(lr=lr)
        for parameter in optimizer.stepped.values():
            parameter.grad = torch.ones_like(parameter)  # of which Adam makes steps of lr
        assert optimizer.step()["update_ratio"] == pytest.approx(ratio, rel=2e-3)


def test_the_update_ratio_of_a_frozen_model_is_zero():
    assert Optimizer({}, OptimizerOptions(lr=1.0)).step()["update_ratio"] == 0.0

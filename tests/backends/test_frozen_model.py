"""The reference of an adapter on two ranks: the frozen model, wherever its parts lie, and no step that it changes."""

import importlib.util

import pytest
import torch
from packed import micro_batches, policy_gradient
from sweeps import sampled

from rl4llm.backends.lora import FrozenModel, add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose.models import BACKENDS

without_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'rl4llm[deepspeed]'",
)
KINDS = [
    "ddp",
    "fsdp2",
    *(pytest.param(f"zero{n}", marks=[pytest.mark.deepspeed, without_deepspeed]) for n in (2, 3)),
]


def backend_of(ranks, model, kind):
    model = load_model(model)
    adapter = add_adapter(model, rank=4, seed=1)
    if kind.startswith("zero"):
        # else small tensors stay whole
        config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
        return BACKENDS["deepspeed"](
            model, ranks=ranks, adapter=adapter, lr=1e-2, zero_stage=int(kind[-1]), config=config
        )
    return TorchBackend(model, ranks=ranks, adapter=adapter, lr=1e-2, shard=kind)


def learned(ranks, model, trajectories, kind, asks):
    """Return the reference's log-probs before each step and the policy's after them; `asks` says whether it is used."""
    (batch,) = micro_batches(trajectories, budget=1000)
    backend = backend_of(ranks, model, kind)
    reference = FrozenModel(backend, backend.adapter)
    said = []
    for _ in range(3):
        if asks:
            said.append(reference.forward(batch).clone())
        backend.forward_backward(batch, policy_gradient)
        backend.optim_step()
    return said, backend.forward(batch).clone()


@pytest.mark.parametrize("kind", sampled(KINDS, ["fsdp2", KINDS[-1]]))
def test_the_reference_is_frozen_and_does_not_affect_the_policy(on_ranks, build, trajectories, kind):
    (batch,) = micro_batches(trajectories, budget=1000)
    frozen_BT = TorchBackend(load_model(build()), lr=0.0).forward(batch)
    asked = on_ranks(learned, build(), trajectories, kind, True)
    alone = on_ranks(learned, build(), trajectories, kind, False)
    for (said, policy_BT), (_, expected_BT) in zip(asked, alone, strict=True):
        for reference_BT in said:
            torch.testing.assert_close(reference_BT, frozen_BT, atol=1e-6, rtol=0)
        assert torch.equal(policy_BT, expected_BT)
        assert (policy_BT - frozen_BT).abs().max() > 1e-2

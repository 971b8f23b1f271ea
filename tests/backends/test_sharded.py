"""Two ranks that train one model together take the steps that one rank takes, and leave the files that it leaves."""

import copy

import pytest
import torch

from rl4llm.backends.dtensor import whole
from rl4llm.backends.heads import ValueHead
from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.ranks import Ranks
from rl4llm.data.pack import pack, totals_of

SHARDS = ["ddp", "fsdp2"]
KINDS = {
    "policy": {},
    "critic": {"critic": True},
    "adapter": {"rank": 4},
    "adapted critic": {"critic": True, "rank": 4},
    "checkpointed": {"checkpointing": True},
    "checkpointed adapter": {"checkpointing": True, "rank": 4},
}


def losses(batch, numbers_BT, entropy_BT):
    ratio_BT = (numbers_BT - batch.sampled_logprobs_BT).exp()
    losses_BT = -ratio_BT * batch.credits_BT
    return losses_BT - (0 if entropy_BT is None else 0.3 * entropy_BT), {"ratio/max": ratio_BT}


def backend_of(ranks, model, shard="none", *, critic=False, rank=0, dtype="float32", checkpointing=False, **options):
    model = load_model(copy.deepcopy(model), dtype=dtype, gradient_checkpointing=checkpointing)
    adapter = add_adapter(model, rank=rank, seed=1) if rank else None
    head = None
    if critic:
        head = ValueHead(model.config.hidden_size).to(next(model.parameters()).dtype)
        torch.nn.init.constant_(head.linear.weight, 0.1)
    options = {"lr": 1e-3, "weight_decay": 0.1, **options}
    return TorchBackend(model, value_head=head, adapter=adapter, ranks=ranks, shard=shard, **options)


def packed(trajectories, layout="shared", budget=40):
    credits = [1.0 - 0.3 * number for number in range(len(trajectories))]
    return pack(
        trajectories, credits, max_tokens_per_batch=budget, layout=layout, aggregation="sequence",
        totals=totals_of(trajectories), pad_token_id=0,
    )  # fmt: skip


def filler(batch):
    """What a rank gives that has no batch left."""
    empty = batch.map(torch.clone)
    empty.mask_BT = torch.zeros_like(batch.mask_BT)
    empty.weights_BT = torch.zeros_like(batch.weights_BT)
    return empty


def split(batches, of_first):
    """The batches of each of two ranks, the first `of_first` of them and the others, filled up to be as many."""
    first, second = batches[:of_first], batches[of_first:]
    most = max(len(first), len(second))
    return [part + [filler(batches[0])] * (most - len(part)) for part in (first, second)]


def gradients(backend):
    named = {**dict(backend.model.named_parameters()), **backend._named_parameters()}
    return {name: whole(item.grad).clone() for name, item in named.items() if item.requires_grad}


def step(backend, batches, **options):
    parts = [
        backend.forward_backward(batch, losses, last=number == len(batches), **options)
        for number, batch in enumerate(batches, 1)
    ]
    return sum(part["loss"] for part in parts), gradients(backend), backend.optim_step()


def trained(ranks, model, parts, shard, options, steps=3):
    """Of some steps: loss and gradient of the first, metrics of the last, and the weights afterwards."""
    backend = backend_of(ranks, model, shard, **options)
    taken = [step(backend, parts[ranks.rank]) for _ in range(steps)]
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    heads = {name: whole(item).clone() for name, item in backend._named_parameters().items() if "value_head" in name}
    loss = ranks.total(torch.tensor(taken[0][0], dtype=torch.float64)).item()
    return loss, taken[0][1], taken[-1][2], weights | heads


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    scale = max(1.0, *(tensor.abs().max().item() for tensor in expected.values()))
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_take_the_steps_of_one(on_ranks, build, trajectories, shard, kind):
    model = build("qwen2" if "adapter" in kind else "llama")
    batches = packed(trajectories)
    alone = trained(Ranks(), model, [batches], "none", KINDS[kind])
    for loss, grads, metrics, weights in on_ranks(trained, model, split(batches, 4), shard, KINDS[kind]):
        assert loss == pytest.approx(alone[0], abs=1e-6)
        assert_close(grads, alone[1], 1e-6)
        assert metrics == pytest.approx(alone[2], rel=1e-5)
        assert_close(weights, alone[3], 1e-5)

"""DeepSpeed on two ranks does what plain torch does on one: the same losses, gradients, weights and files."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packed import pack, tries
from rank_processes import RankProcesses
from safetensors.torch import load_file, save_file
from sweeps import sampled
from transformers import AutoModelForCausalLM

from rl4llm.backends.heads import ValueHead
from rl4llm.backends.lora import FrozenModel, add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.core.weights import TensorSpec
from rl4llm.data import layouts
from rl4llm.data.pack import totals_of
from rl4llm.extensions.deepspeed.backend import DeepSpeedBackend, _join_alone

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: pip install 'rl4llm[deepspeed]' into an environment that has torch",
    ),
]
STAGES = [0, 1, 2, 3]
# else ZeRO-3 leaves small tensors whole
SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
# Rounding decides about the sign of a step for gradients near 0; eps keeps it from mattering.
OPTIONS = {
    "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 1, "total_steps": 20,
}  # fmt: skip
MICRO_BATCHES = 3  # per step and rank: more than any rank has, so that each fills up


@pytest.fixture(scope="module")
def on_ranks():
    with RankProcesses(size=2, DS_ACCELERATOR="cpu") as processes:
        yield processes


@pytest.fixture(scope="module")
def on_one_rank():
    with RankProcesses(size=1, DS_ACCELERATOR="cpu") as processes:
        yield processes


def losses_of(batch, numbers_BT, entropy_BT):
    return -torch.sigmoid(numbers_BT - batch.sampled_logprobs_BT) * batch.credits_BT, {
        "numbers/max": numbers_BT
    }


def share(trajectories, rank=0, size=1, layout="shared"):
    """One rank's micro-batches, filled up with ones that ask nothing, which stand first."""
    totals = totals_of(trajectories)
    # not the same number on each
    own = [number for number in range(len(trajectories)) if number % 3 % size == rank]
    batches = pack(
        [trajectories[number] for number in own],
        [1.0 - 0.3 * number for number in own],
        max_tokens_per_batch=40,
        layout=layout,
        aggregation="sequence",
        totals=totals,
        pad_token_id=0,
    )
    fillers = MICRO_BATCHES - len(batches) if size > 1 else 0
    return [_asking_nothing(batches[0])] * fillers + batches


def _asking_nothing(batch):
    return dataclasses.replace(
        batch, mask_BT=torch.zeros_like(batch.mask_BT), weights_BT=torch.zeros_like(batch.weights_BT)
    )


def parts(model, kind, dtype="float32", checkpointing=False, shared_by=None):
    """What both backends are made of: the model, and its adapter or its value head."""
    model = load_model(model, dtype=dtype, gradient_checkpointing=checkpointing, shared_by=shared_by)
    if kind == "lora":
        return model, {"adapter": add_adapter(model, rank=4, seed=1)}
    if kind == "critic":
        head = ValueHead(32)
        with torch.no_grad():
            head.linear.weight.copy_(torch.linspace(-1, 1, 32))
        return model, {"value_head": head}
    return model, {}


def deepspeed(ranks, model, stage, kind="policy", dtype="float32", checkpointing=False, **options):
    model, extras = parts(model, kind, dtype, checkpointing, ranks if isinstance(model, Path) else None)
    return DeepSpeedBackend(
        model, ranks=ranks, zero_stage=stage, **{"config": SMALL, **OPTIONS, **extras, **options}
    )


def torch_backend(model, kind="policy", dtype="float32", **options):
    model, extras = parts(model, kind, dtype)
    return TorchBackend(model, **OPTIONS, **extras, **options)


def train(backend, batches, steps, total=lambda number: number):
    """What each optimizer step said; losses of all ranks together."""
    told = []
    for _ in range(steps):
        loss = sum(backend.forward_backward(batch, losses_of)["loss"] for batch in batches)
        told.append({"loss": total(loss), **backend.optim_step()})
    return told


def continued(ranks, given, trajectories, steps, source, target):
    """Resume a backend from `source`, take some steps, save it in `target`, and return its losses and weights."""
    backend = deepspeed(ranks, **given)
    if source is not None:
        backend.load(source)
    batches = share(trajectories, ranks.rank, ranks.size)
    told = train(
        backend, batches, steps, lambda loss: ranks.total(torch.tensor(loss, dtype=torch.float64)).item()
    )
    if target is not None:
        backend.save(target)
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    assert backend.weight_specs() == [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    return told, weights


def assert_same_steps(told, expected, tolerance=1e-6):
    assert len(told) == len(expected)
    for one, other in zip(told, expected, strict=True):
        assert one.keys() ^ other.keys() <= {"update_ratio"}
        for name in one.keys() & other.keys():
            assert one[name] == pytest.approx(other[name], abs=tolerance, rel=tolerance), name


def assert_same_tensors(tensors, expected, tolerance=1e-6):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        difference = (tensor - expected[name]).abs().max().item()
        assert difference <= tolerance, f"{name}: {difference}"


def assert_same_files(one, other, tolerance=1e-6):
    for file in ("weights.safetensors", "optimizer.safetensors"):
        assert_same_tensors(load_file(one / file), load_file(other / file), tolerance)
    assert json.loads((one / "backend.json").read_text()) == json.loads((other / "backend.json").read_text())


@pytest.fixture
def directories(tmp_path):
    """directories("a", "b"): new, empty ones."""

    def make(*names):
        for name in names:
            (tmp_path / name).mkdir()
        return [tmp_path / name for name in names]

    return make


CASES = [(stage, kind) for kind in ("policy", "lora", "critic") for stage in STAGES]


@pytest.mark.parametrize(
    ("stage", "kind"), sampled(CASES, lambda case: case in [(2, "policy"), (3, "policy"), (3, "lora")])
)
def test_two_ranks_train_as_one_of_plain_torch(on_ranks, build, trajectories, directories, stage, kind):
    ours, theirs = directories("ours", "theirs")
    one = torch_backend(build("qwen3"), kind)
    expected = train(one, share(trajectories), 3)
    one.save(theirs)
    model = build("qwen3")
    if stage == 3:  # whose ranks share the weights out, so that only the first one reads them
        (path,) = directories("model")
        model.save_pretrained(path)
        model = path
    first, second = on_ranks(
        continued, {"model": model, "stage": stage, "kind": kind}, trajectories, 3, None, ours
    )
    assert_same_steps(first[0], expected)
    assert first[0] == second[0]
    assert_same_tensors(first[1], dict(one.weights()))
    assert_same_tensors(second[1], first[1], 0.0)
    assert_same_files(ours, theirs)
    moments = load_file(ours / "optimizer.safetensors")
    assert all(moment.abs().max() > 0 for moment in moments.values())  # each trained parameter had a gradient
    assert len(moments) == 2 * sum(p.requires_grad for p in one._named_parameters().values())


def sharing_all(ranks, *arguments):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layouts, "SHORTEST", 1)
        return continued(ranks, *arguments)


@pytest.mark.parametrize("stage", sampled(STAGES, [3]))
def test_two_ranks_share_prefixes_and_train_as_one_without(on_ranks, build, stage):
    expected = train(torch_backend(build("qwen3")), share(tries(groups=1), layout="sorted"), 2)
    given = {"model": build("qwen3"), "stage": stage}
    told, _ = on_ranks(sharing_all, given, tries(groups=1), 2, None, None)[0]
    assert_same_steps(told, expected)


@pytest.mark.parametrize(("stage", "options"), sampled([
    (2, {"offload_optimizer": True}),
    (3, {"offload_optimizer": True, "offload_param": True}),
    (3, {"checkpointing": True}),
    (1, {"autocast": "bfloat16"}),
], lambda case: case[0] != 2))  # fmt: skip
def test_options_that_save_memory_do_not_change_the_steps(on_ranks, build, trajectories, stage, options):
    autocast = {"autocast": options["autocast"]} if "autocast" in options else {}
    expected = train(torch_backend(build("qwen3"), **autocast), share(trajectories), 2)
    told, _ = on_ranks(
        continued, {"model": build("qwen3"), "stage": stage, **options}, trajectories, 2, None, None
    )[0]
    assert_same_steps(told, expected, 1e-2 if autocast else 1e-6)


@pytest.mark.parametrize("stage", sampled([1, 2, 3], [3]))
def test_bf16_model_resumes_from_fp32_weights(on_ranks, build, trajectories, directories, stage):
    half, whole, resumed = directories("half", "whole", "resumed")
    expected = train(torch_backend(build("qwen3")), share(trajectories), 3)
    given = {"model": build("qwen3"), "stage": stage, "dtype": "bfloat16"}
    told, weights = on_ranks(continued, given, trajectories, 3, None, whole)[0]
    assert_same_steps(told, expected, 0.05)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    masters = load_file(whole / "weights.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert all(torch.equal(tensor, masters[name].bfloat16()) for name, tensor in weights.items())
    on_ranks(continued, given, trajectories, 2, None, half)
    on_ranks(continued, given, trajectories, 1, half, resumed)
    assert_same_files(resumed, whole, 0.0)


@pytest.mark.parametrize(
    ("stage", "kind"),
    sampled([*((stage, "policy") for stage in STAGES), (3, "critic")], [(3, "critic")]),
)
def test_resuming_equals_the_uninterrupted_run_bit_for_bit(
    on_ranks, build, trajectories, directories, stage, kind
):
    """A critic has a bias of one number. The second rank holds only padding of it."""
    half, whole, resumed = directories("half", "whole", "resumed")
    given = {"model": build("qwen3"), "stage": stage, "kind": kind}
    told, _ = on_ranks(continued, given, trajectories, 3, None, whole)[0]
    on_ranks(continued, given, trajectories, 2, None, half)
    again, _ = on_ranks(continued, given, trajectories, 1, half, resumed)[0]
    assert again == told[2:]
    assert_same_files(resumed, whole, 0.0)


@pytest.mark.parametrize("kind", sampled(["policy", "lora"], ["policy"]))
def test_other_ranks_stages_and_backends_resume_from_the_files(
    on_ranks, on_one_rank, build, trajectories, directories, kind
):
    of_two, of_one, of_torch, back = directories("two", "one", "torch", "back")
    plain = torch_backend(build("qwen3"), kind)
    expected = train(plain, share(trajectories), 5)
    given = {"model": build("qwen3"), "kind": kind}
    on_ranks(continued, {**given, "stage": 3}, trajectories, 2, None, of_two)
    told, _ = on_one_rank(continued, {**given, "stage": 2}, trajectories, 1, of_two, of_one)[0]
    assert_same_steps(told, expected[2:3], 1e-5)
    other = torch_backend(build("qwen3"), kind)
    other.load(of_one)
    assert_same_steps(train(other, share(trajectories), 1), expected[3:4], 1e-5)
    other.save(of_torch)
    for stage in (0, 1):
        told, weights = on_ranks(continued, {**given, "stage": stage}, trajectories, 1, of_torch, back)[0]
        assert_same_steps(told, expected[4:], 1e-5)
        assert_same_tensors(weights, dict(plain.weights()), 1e-5)


def broken_on_the_second(ranks, given, trajectories):
    backend = deepspeed(ranks, **given)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    batches = share(trajectories, ranks.rank, ranks.size)

    def spoiled(batch, numbers_BT, entropy_BT):
        losses_BT, metrics = losses_of(batch, numbers_BT, entropy_BT)
        return losses_BT * float("nan"), metrics

    for batch in batches:
        backend.forward_backward(batch, spoiled if ranks.rank == 1 else losses_of)
    skipped = backend.optim_step()
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in backend.weights())
    return skipped, unchanged, train(backend, batches, 2)


NOT_FINITE = [
    {"stage": 3},
    {"stage": 2, "offload_optimizer": True},
    {"stage": 1, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("given", sampled([
    *({"stage": stage} for stage in STAGES),
    {"stage": 2, "offload_optimizer": True},
    *({"stage": stage, "dtype": "bfloat16"} for stage in (1, 2)),
], NOT_FINITE))  # fmt: skip
def test_nonfinite_gradient_on_one_rank_is_skipped_by_all(on_ranks, build, trajectories, given):
    expected = train(torch_backend(build("qwen3")), share(trajectories), 2)
    tolerance = 0.05 if given.get("dtype") else 1e-5
    for skipped, unchanged, told in on_ranks(
        broken_on_the_second, {"model": build("qwen3"), **given}, trajectories
    ):
        assert skipped["skipped"] == 1.0
        assert unchanged
        for one, other in zip(told, expected, strict=True):  # its own steps begin where nothing had happened
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=tolerance)
            assert one["lr"] == other["lr"] and "skipped" not in one


def three_models(ranks, model, stage, trajectories, directory):
    """A policy, a critic and a reference in one process; the reference takes the policy's weights over, and comes back to
    those that it saved."""
    policy, critic = deepspeed(ranks, model(), stage), deepspeed(ranks, model(), stage, "critic")
    reference = deepspeed(ranks, model(), stage, trains=False)
    batches = share(trajectories, ranks.rank, ranks.size)
    apart = [(reference.forward(batch) - policy.forward(batch)).abs().max().item() for batch in batches]
    train(policy, batches, 2)
    values = train(critic, batches, 2)
    moved = [(reference.forward(batch) - policy.forward(batch)).abs().max().item() for batch in batches]
    reference.take_weights(policy.own_weights())
    again = [(reference.forward(batch) - policy.forward(batch)).abs().max().item() for batch in batches]
    saved = [reference.forward(batch) for batch in batches]
    reference.save(directory)
    following = train(policy, batches, 1)
    reference.take_weights(policy.own_weights())
    reference.load(directory)
    back = [reference.forward(batch) for batch in batches]
    again += [(one_BT - other_BT).abs().max().item() for one_BT, other_BT in zip(back, saved, strict=True)]
    return max(apart), max(moved), max(again), values, following, policy.info()


def checkpoint_form(ranks, model, rank):
    """What is published of a sharded model, and whether its specs describe it."""
    model = load_model(model, shared_by=ranks)
    adapter = add_adapter(model, rank=rank, seed=1) if rank else None
    backend = DeepSpeedBackend(model, ranks=ranks, zero_stage=3, config=SMALL, adapter=adapter, **OPTIONS)
    found = {name: tensor.clone() for name, tensor in backend.weights()}
    return found, backend.weight_specs() == [TensorSpec.of(name, tensor) for name, tensor in found.items()]


@pytest.mark.parametrize("rank", [0, 4])
def test_experts_of_a_sharded_model_are_published_one_by_one(on_ranks, build, directories, rank):
    (path,) = directories("model")
    build("qwen3_moe").save_pretrained(path)
    expected = load_file(path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in expected
    for found, described in on_ranks(checkpoint_form, path, rank):
        assert described
        assert found.keys() == expected.keys()
        assert_same_tensors(found, expected, 0.0)


def off_and_on(ranks, given, trajectories):
    """Two steps, off the device after each."""
    backend = deepspeed(ranks, **given)
    batches, told = share(trajectories, ranks.rank, ranks.size), []
    for _ in range(2):
        told += train(backend, batches, 1)
        backend.offload()
        backend.onload()
    return told


@pytest.mark.parametrize("given", sampled([
    {"stage": 2},
    {"stage": 2, "offload_optimizer": True},
    {"stage": 3, "dtype": "bfloat16"},
    {"stage": 3, "offload_optimizer": True},
    {"stage": 3, "offload_optimizer": True, "offload_param": True},
], lambda given: len(given) == 3 or given == {"stage": 2, "offload_optimizer": True}))  # fmt: skip
def test_leaving_the_device_between_steps_does_not_change_them(on_ranks, build, trajectories, given):
    expected = train(torch_backend(build("qwen3")), share(trajectories), 2)
    for told in on_ranks(off_and_on, {"model": build("qwen3"), **given}, trajectories):
        for one, other in zip(told, expected, strict=True):
            assert one["grad_norm"] == pytest.approx(
                other["grad_norm"], rel=0.05 if "dtype" in given else 1e-5
            )


def saved_off_the_device(ranks, given, source, away, back):
    """Resume, and save off the device and on it again."""
    backend = deepspeed(ranks, **given)
    backend.load(source)
    backend.offload()
    backend.save(away)
    backend.onload()
    backend.save(back)


@pytest.mark.parametrize("given", sampled([
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "offload_optimizer": True},
    {"stage": 2, "dtype": "bfloat16"},
    {"stage": 3, "dtype": "bfloat16"},
    {"stage": 3, "offload_optimizer": True},
], [{"stage": 2, "dtype": "bfloat16"}]))  # fmt: skip
def test_what_is_saved_off_the_device_is_the_same(on_ranks, build, directories, trajectories, given):
    here, away, back = directories("here", "away", "back")
    given = {"model": build("qwen3"), **given}
    on_ranks(continued, given, trajectories, 2, None, here)
    on_ranks(saved_off_the_device, given, here, away, back)
    for path in here.iterdir():
        for other in (away, back):
            assert (other / path.name).read_bytes() == path.read_bytes(), path.name


class Build:
    """Makes the model on the rank."""

    def __init__(self, model):
        self.model = model

    def __call__(self):
        import copy

        return copy.deepcopy(self.model)


@pytest.mark.parametrize("stage", sampled([2, 3], [3]))
def test_policy_critic_and_reference_live_in_one_process(on_ranks, build, trajectories, directories, stage):
    expected = train(torch_backend(build("qwen3")), share(trajectories), 3)[2]
    (saved,) = directories("reference")
    found = on_ranks(three_models, Build(build("qwen3")), stage, trajectories, saved)
    for apart, moved, again, values, told, info in found:
        assert apart == again == 0.0
        assert moved > 1e-3
        assert all(step["grad_norm"] > 0 for step in values)
        assert told[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert info["ranks"] == f"2 (DeepSpeed ZeRO-{stage})"
        assert info["parameters"] == sum(parameter.numel() for parameter in build("qwen3").parameters())


def published(ranks, model, trajectories, directory):
    """Of an adapter that trained: its weights, its numbers, and those of the frozen model under it."""
    model, extras = parts(model, "lora")
    backend = DeepSpeedBackend(model, ranks=ranks, zero_stage=3, config=SMALL, **OPTIONS, **extras)
    batches = share(trajectories, ranks.rank, ranks.size)
    train(backend, batches, 2)
    backend.export(directory / "model")
    backend.write_adapter(directory / "adapter")
    adapter = {name: tensor.clone() for name, tensor in backend.adapter.weights()}
    assert [TensorSpec.of(name, tensor) for name, tensor in adapter.items()] == backend.adapter.specs()
    frozen = [FrozenModel(backend, extras["adapter"]).forward(batch) for batch in batches]
    return adapter, [backend.forward(batch) for batch in batches], frozen, train(backend, batches, 1)


@pytest.mark.parametrize("family", sampled(["qwen3", "qwen3_moe"], ["qwen3_moe"]))
def test_an_adapter_is_exported_merged_and_published_alone(on_ranks, build, trajectories, tmp_path, family):
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
    (adapter, numbers, frozen, told), _ = on_ranks(published, build(family), trajectories, tmp_path)
    assert_same_tensors(adapter, load_file(tmp_path / "adapter" / "adapter_model.safetensors"), 0.0)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "model")) is type(build(family))
    exported, plain = (
        TorchBackend(load_model(tmp_path / "model"), lr=0.0),
        TorchBackend(load_model(build(family)), lr=0.0),
    )
    for batch, numbers_BT, frozen_BT in zip(share(trajectories, 0, 2), numbers, frozen, strict=True):
        torch.testing.assert_close(exported.forward(batch), numbers_BT, atol=1e-5, rtol=0)
        torch.testing.assert_close(plain.forward(batch), frozen_BT, atol=1e-5, rtol=0)
    expected = train(torch_backend(build(family), "lora"), share(trajectories), 3)
    # the frozen passes left no trace
    assert told[0]["grad_norm"] == pytest.approx(expected[2]["grad_norm"], rel=1e-5)


def refusals(ranks, model, directory):
    """Whether each load was refused and the weights stayed as they were."""
    backend = deepspeed(ranks, model, 2)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    for name in ("nothing", "cut", "foreign", "no moments", "only here"):
        with pytest.raises(CheckpointError):
            backend.load(directory / f"{name}{ranks.rank if name == 'only here' else ''}")
    return all(torch.equal(before[name], tensor) for name, tensor in backend.weights())


def test_invalid_checkpoint_is_refused_on_every_rank(on_ranks, build, trajectories, directories):
    nothing, cut, foreign, without = directories("nothing", "cut", "foreign", "no moments")
    here, _ = directories("only here0", "only here1")
    plain = torch_backend(build("qwen3"))
    train(plain, share(trajectories), 1)
    for directory in (cut, without, here):
        plain.save(directory)
    torch_backend(build("llama")).save(foreign)
    (cut / "optimizer.safetensors").write_bytes((cut / "optimizer.safetensors").read_bytes()[:100])
    moments = load_file(without / "optimizer.safetensors")
    moments.pop("model.norm.weight.exp_avg")
    save_file(moments, without / "optimizer.safetensors")
    assert all(on_ranks(refusals, build("qwen3"), nothing.parent))


def accepted(ranks, model, dtype, options):
    try:
        DeepSpeedBackend(load_model(model, dtype=dtype), ranks=ranks, **options)
    except ConfigError:
        return False
    return True


def started_by_nobody(ranks, given, trajectories):
    os.environ.pop("LOCAL_RANK")
    return train(deepspeed(ranks, **given), share(trajectories), 1)


def test_one_process_needs_no_launcher(on_one_rank, build, trajectories):
    told = on_one_rank(started_by_nobody, {"model": build("qwen3"), "stage": 2}, trajectories)[0]
    assert_same_steps(told, train(torch_backend(build("qwen3")), share(trajectories), 1), 1e-5)


def test_one_process_takes_the_gpu_of_its_model(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    _join_alone(torch.device("cuda:1"))
    assert os.environ["LOCAL_RANK"] == "1"


def test_what_deepspeed_does_not_accept_is_a_configuration_error(on_one_rank, build):
    def starts(dtype="float32", **options):
        return on_one_rank(accepted, build("qwen3"), dtype, options)[0]

    assert not starts("bfloat16", zero_stage=0)
    for section in ({"no_such_key": 1}, {"stage": 4}):
        assert not starts(config={"zero_optimization": section})
    assert not starts(config={"optimizer": {"type": "Adam", "params": {"lr": 1.0}}})
    assert starts(config={"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}})

"""Two ranks that train one model together take the steps that one rank takes, and leave the files that it leaves."""

import copy
import ctypes
import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from packed import micro_batches, tries
from safetensors.torch import load_file
from sweeps import sampled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rl4llm.backends.heads import ValueHead
from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import CheckpointError, ConfigError, ModelError
from rl4llm.core.weights import TensorSpec
from rl4llm.runtime.ranks import Ranks, part, whole

SHARDS = ["ddp", "fsdp2"]
KINDS = {
    "policy": {},
    "critic": {"critic": True},
    "adapter": {"rank": 4},
    "adapted critic": {"critic": True, "rank": 4},
    "checkpointed": {"checkpointing": True},
    "checkpointed adapter": {"checkpointing": True, "rank": 4},
    "adapter of experts": {"rank": 4},
}
M_MMAP_THRESHOLD = -3
LARGE = {
    "vocab_size": 61,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


def losses(batch, numbers_BT, entropy_BT):
    ratio_BT = (numbers_BT - batch.sampled_logprobs_BT).exp()
    losses_BT = -ratio_BT * batch.credits_BT
    return losses_BT - (0 if entropy_BT is None else 0.3 * entropy_BT), {"ratio/max": ratio_BT}


def backend_of(
    ranks, model, shard="none", *, critic=False, rank=0, dtype="float32", checkpointing=False, **options
):
    model = load_model(copy.deepcopy(model), dtype=dtype, gradient_checkpointing=checkpointing)
    adapter = add_adapter(model, rank=rank, seed=1) if rank else None
    head = None
    if critic:
        head = ValueHead(model.config.hidden_size).to(next(model.parameters()).dtype)
        torch.nn.init.constant_(head.linear.weight, 0.1)
    options = {"lr": 1e-3, "weight_decay": 0.1, **options}
    return TorchBackend(model, value_head=head, adapter=adapter, ranks=ranks, shard=shard, **options)


packed = partial(micro_batches, budget=40)


def filler(batch):
    """Return what a rank without a batch gives."""
    empty = batch.map(torch.clone)
    empty.mask_BT = torch.zeros_like(batch.mask_BT)
    empty.weights_BT = torch.zeros_like(batch.weights_BT)
    return empty


def split(batches, of_first):
    """Split batches over two ranks, `of_first` of them to the first; the shorter share is filled up."""
    first, second = batches[:of_first], batches[of_first:]
    most = max(len(first), len(second))
    return [part + [filler(batches[0])] * (most - len(part)) for part in (first, second)]


def gradients(backend):
    return {name: whole(item.grad).clone() for name, item in backend.stepped.items()}


def step(backend, batches, **options):
    parts = [
        backend.forward_backward(batch, losses, last=number == len(batches), **options)
        for number, batch in enumerate(batches, 1)
    ]
    return sum(part["loss"] for part in parts), gradients(backend), backend.optim_step()


def trained(ranks, model, parts, shard, options, steps=2):
    """Take steps; return loss and gradient of the first, metrics of the last, and the weights afterwards."""
    backend = backend_of(ranks, model, shard, **options)
    taken = [step(backend, parts[ranks.rank]) for _ in range(steps)]
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    heads = {
        name: whole(item).clone()
        for name, item in backend._named_parameters().items()
        if "value_head" in name
    }
    loss = ranks.total(torch.tensor(taken[0][0], dtype=torch.float64)).item()
    return loss, taken[0][1], taken[-1][2], weights | heads


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    scale = max([1.0, *(tensor.abs().max().item() for tensor in expected.values())])
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= tolerance * scale, name


# each of the others is part of one of these
SAMPLE = ("policy", "adapted critic", "checkpointed adapter", "adapter of experts")


@pytest.mark.parametrize("kind", sampled(KINDS, SAMPLE))
def test_two_ranks_take_the_steps_of_one(on_ranks, build, trajectories, kind):
    model = build("qwen3_moe" if "experts" in kind else "qwen2" if "adapter" in kind else "llama")
    batches = packed(trajectories)
    alone = trained(Ranks(), model, [batches], "none", KINDS[kind])
    of_two = [on_ranks(trained, model, split(batches, 4), shard, KINDS[kind]) for shard in SHARDS]
    for rank, (loss, grads, metrics, weights) in [*enumerate(of_two[0]), *enumerate(of_two[1])]:
        assert loss == pytest.approx(alone[0], abs=1e-6)
        assert_close(grads, alone[1], 1e-6)
        own = {"update_ratio": metrics["update_ratio"]} if rank else {}  # of other rows; the first rank logs
        assert metrics == pytest.approx(alone[2] | own, rel=1e-5)
        assert_close(weights, alone[3], 1e-5)


def first_gradients(ranks, model, parts_of, shard, options, passes):
    """Return loss and gradient of each layout's batches, without taking a step."""
    backend = backend_of(ranks, model, shard, **options)
    found = []
    for parts in parts_of:
        loss, grads, _ = step(backend, parts[ranks.rank], **passes)
        found.append((ranks.total(torch.tensor(loss, dtype=torch.float64)).item(), grads))
    return found


# two ranks with DDP take the steps of one above
@pytest.mark.parametrize("shard", sampled(SHARDS, ["fsdp2"]))
def test_no_layout_and_no_split_over_ranks_changes_the_gradient(
    on_ranks, build, trajectories, shard, monkeypatch
):
    options, passes = {"lr": 0.0, "dtype": torch.float64}, {"temperature": 0.7, "entropy": True}
    monkeypatch.setattr("rl4llm.data.layouts.SHORTEST", 1)
    trajectories += tries()
    layouts = {layout: packed(trajectories, layout) for layout in ("sorted", "packed", "shared")}
    ((loss, expected),) = first_gradients(Ranks(), build(), [[layouts["sorted"]]], "none", options, passes)
    parts_of = [split(batches, number) for batches in layouts.values() for number in (0, 1, 4)]
    for found in on_ranks(first_gradients, build(), parts_of, shard, options, passes):
        for total, grads in found:
            assert total == pytest.approx(loss, abs=1e-6)  # the algorithm's numbers are fp32
            assert_close(grads, expected, 1e-6)


def first_step_in_parts(ranks, model, parts, shard, lasts):
    backend = backend_of(ranks, model, shard)
    for batch, last in zip(parts[ranks.rank], lasts, strict=True):
        backend.forward_backward(batch, losses, last=last)
    return gradients(backend)


@pytest.mark.parametrize("shard", SHARDS)
def test_exchanging_gradients_early_or_late_gives_the_same(on_ranks, build, trajectories, shard):
    parts = split(packed(trajectories), 3)
    late, early = ([False] * (len(parts[0]) - 1) + [True], [True] * len(parts[0]))
    expected, _ = on_ranks(first_step_in_parts, build(), parts, shard, late)
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    for grads in on_ranks(first_step_in_parts, build(), parts, shard, early):
        assert_close(grads, expected, 1e-6)


def not_finite_on_the_second(ranks, model, parts, shard):
    backend = backend_of(ranks, model, shard)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    for number, batch in enumerate(parts[ranks.rank]):
        broken = batch.map(torch.clone)
        broken.credits_BT *= float("nan") if number == 0 and ranks.rank == 1 else 1.0
        backend.forward_backward(broken, losses, last=number == len(parts[0]) - 1)
    metrics = backend.optim_step()
    same = all(torch.equal(before[name], tensor) for name, tensor in backend.weights())
    _, _, after = step(backend, parts[ranks.rank])
    return metrics, same, after


@pytest.mark.parametrize("shard", SHARDS)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(on_ranks, build, trajectories, shard):
    for metrics, same, after in on_ranks(
        not_finite_on_the_second, build(), split(packed(trajectories), 3), shard
    ):
        assert metrics["skipped"] == 1.0
        assert same
        assert "skipped" not in after  # nothing of it is left


def only_broken_losses(ranks, model, batches, shard):
    """Return gradients where the second rank has no work, and losses that are not finite."""

    def broken(batch, numbers_BT, entropy_BT):
        return losses(batch, numbers_BT, None)[0] * (1.0 if batch.mask_BT.any() else float("nan")), {}

    backend = backend_of(ranks, model, shard)
    backend.forward_backward(batches[0] if ranks.is_first else filler(batches[0]), broken)
    return gradients(backend)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_rank_without_work_adds_exactly_zero(on_ranks, build, trajectories, shard):
    batches = packed(trajectories)
    expected = only_broken_losses(Ranks(), build(), batches, "none")
    for grads in on_ranks(only_broken_losses, build(), batches, shard):
        assert_close(grads, expected, 1e-6)


def logprobs(ranks, model, parts, shard, options):
    backend = backend_of(ranks, model, shard, **options)
    with torch.no_grad():
        measured = [backend.forward_backward(batch, losses)["loss"] for batch in parts[ranks.rank]]
    found = [backend.forward(batch, temperature=0.7) for batch in parts[ranks.rank]]
    held = sum(part(item).numel() for item in backend.model.parameters())
    return measured, found, {name: tensor.clone() for name, tensor in backend.weights()}, held


@pytest.mark.parametrize(("shard", "share"), [("ddp", 1.0), ("fsdp2", 0.5)])
def test_passes_without_a_gradient_leave_weights_sharded(on_ranks, build, trajectories, shard, share):
    model, parts = build("qwen2"), split(packed(trajectories), 4)
    for rank, (measured, found, weights, held) in enumerate(on_ranks(logprobs, model, parts, shard, {})):
        expected = logprobs(Ranks(), model, [parts[rank]], "none", {})
        assert measured == pytest.approx(expected[0], abs=1e-6)
        for one, other in zip(found, expected[1], strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
        assert_close(weights, expected[2], 0.0)
        assert held == pytest.approx(share * expected[3], rel=0.1)


@pytest.mark.parametrize("shard", sampled(SHARDS, ["fsdp2"]))
@pytest.mark.parametrize(
    "options", [{}, {"critic": True, "dtype": "bfloat16"}, {"rank": 4, "dtype": "bfloat16"}]
)
def test_bf16_comes_close_to_that_of_one_rank(on_ranks, build, trajectories, shard, options):
    options = {"autocast": "bfloat16", "lr": 0.0, **options}
    batches = packed(trajectories)
    ((_, expected),) = first_gradients(Ranks(), build(), [[batches]], "none", options, {})
    for ((_, grads),) in on_ranks(first_gradients, build(), [split(batches, 4)], shard, options, {}):
        assert {name: grad.dtype for name, grad in grads.items()} == {
            name: grad.dtype for name, grad in expected.items()
        }
        one, other = (
            torch.cat([grad.float().flatten() for grad in named.values()]) for named in (grads, expected)
        )
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999
        assert one.norm().item() == pytest.approx(other.norm().item(), rel=0.02)


def many_times(ranks, model, parts, shard, times=8):
    """Return the gradient of a step after its first micro-batch, and after the last of `times` equal ones."""
    backend, found = backend_of(ranks, model, shard, dtype="bfloat16"), []
    for count in (1, times):
        for number in range(1, count + 1):
            backend.forward_backward(parts[ranks.rank], losses, last=number == count)
        found.append(gradients(backend))
        for item in backend.stepped.values():
            item.grad = None
    return found


@pytest.mark.parametrize("shard", sampled(SHARDS, ["fsdp2"]))
def test_ranks_add_up_micro_batches_of_bf16_in_fp32(on_ranks, build, trajectories, shard):
    batches = packed(trajectories)
    for once, summed in on_ranks(many_times, build(), batches[:2], shard):
        assert_close(summed, {name: 8 * grad for name, grad in once.items()}, 1e-5)
        assert any(grad.abs().max() > 1e-2 for grad in once.values())
    found, _ = on_ranks(many_times, build(), batches[:2], shard, 1)
    alone = [many_times(Ranks(), build(), [batch], "none", 1)[0] for batch in batches[:2]]
    assert_close(found[0], {name: alone[0][name] + alone[1][name] for name in alone[0]}, 5e-3)


def masters_of(backend):
    return {name: whole(tensor).clone() for name, tensor in backend._optimizer.masters.items()}


def small_bf16_steps(ranks, model, parts, shard, directory, steps=4):
    """Take small steps and save; return the masters, and masters and weights after one more step, loaded or not."""
    backend, loaded = (backend_of(ranks, model, shard, dtype="bfloat16", lr=1e-5) for _ in range(2))
    for _ in range(steps):
        step(backend, parts[ranks.rank])
    backend.save(directory)
    kept = masters_of(backend)
    loaded.load(directory)
    for one in (backend, loaded):
        step(one, parts[ranks.rank])
    after = [
        (masters_of(one), {name: tensor.clone() for name, tensor in one.weights()})
        for one in (backend, loaded)
    ]
    return kept, *after


@pytest.mark.parametrize("shard", sampled(SHARDS, ["fsdp2"]))
def test_ranks_keep_and_save_the_masters_of_bf16(on_ranks, build, trajectories, tmp_path, shard):
    model, batches = build("qwen2"), packed(trajectories)
    places = [tmp_path / name for name in ("of one", "of two")]
    for place in places:
        place.mkdir()
    expected, *_ = small_bf16_steps(Ranks(), model, [batches], "none", places[0])
    start = masters_of(backend_of(Ranks(), model, dtype="bfloat16"))
    for kept, *after in on_ranks(small_bf16_steps, model, split(batches, 4), shard, places[1]):
        assert_close(kept, load_file(places[1] / "weights.safetensors"), 0.0)
        assert_close(after[1][0], after[0][0], 0.0)
        assert any((tensor != kept[name]).any() for name, tensor in after[0][0].items())
        for masters, weights in after:
            assert_close(weights, {name: tensor.bfloat16() for name, tensor in masters.items()}, 0.0)
        one, other = (
            torch.cat([(named[name] - start[name]).flatten() for name in start]) for named in (kept, expected)
        )
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99


def saved_then_trained(ranks, model, parts, shard, options, directories, steps=2):
    """Take `steps`, save, and take as many more; after a load, return the loss and the weights again."""
    backend = backend_of(ranks, model, shard, **options)
    for _ in range(steps):
        step(backend, parts[ranks.rank])
    backend.save(directories[0])
    backend.export(directories[1])
    backend.write_config(directories[1])
    return loaded_then_trained(ranks, backend, parts, None)


def loaded_then_trained(ranks, backend, parts, directory, steps=2):
    if directory is not None:
        backend.load(directory)
    taken = [step(backend, parts[ranks.rank])[0] for _ in range(steps)]
    totals = [ranks.total(torch.tensor(loss, dtype=torch.float64)).item() for loss in taken]
    return totals, {name: tensor.clone() for name, tensor in backend.weights()}


def resumed(ranks, model, parts, shard, options, directory):
    return loaded_then_trained(ranks, backend_of(ranks, model, shard, **options), parts, directory)


RESUMED = [("ddp", "policy"), ("ddp", "adapted critic"), ("fsdp2", "policy"), ("fsdp2", "adapted critic")]


@pytest.mark.parametrize(("shard", "kind"), sampled(RESUMED, [RESUMED[0], RESUMED[3]]))
def test_a_checkpoint_resumes_on_one_rank_or_two(on_ranks, build, trajectories, tmp_path, shard, kind):
    model, batches, options = build("qwen2"), packed(trajectories), KINDS[kind]
    parts = split(batches, 4)
    places = [tmp_path / name for name in ("saved", "exported", "of one", "exported of one")]
    for place in places:
        place.mkdir()
    whole_run = on_ranks(saved_then_trained, model, parts, shard, options, places[:2])
    again = on_ranks(resumed, model, parts, shard, options, places[0])
    for (totals, weights), (same_totals, same_weights) in zip(whole_run, again, strict=True):
        assert totals == same_totals
        assert_close(same_weights, weights, 0.0)
    totals, weights = resumed(Ranks(), model, [batches], "none", options, places[0])
    assert totals == pytest.approx(whole_run[0][0], abs=1e-5)
    alone = saved_then_trained(Ranks(), model, [batches], "none", options, places[2:])
    other = on_ranks(resumed, model, parts, "fsdp2" if shard == "ddp" else "ddp", options, places[2])[0]
    assert other[0] == pytest.approx(alone[0], abs=1e-5)
    assert {path.name for path in places[1].iterdir()} == {path.name for path in places[3].iterdir()}
    exported, of_one = (dict(load_model(place).named_parameters()) for place in (places[1], places[3]))
    assert_close(exported, of_one, 1e-5)


def failing_files(ranks, model, shard, here, full):
    """Return each rank's error for a directory that the first cannot write, and one that the second cannot read."""
    backend = backend_of(ranks, model, shard)
    backend.save(here)
    told = []
    for call in (lambda: backend.save(full), lambda: backend.load(here if ranks.is_first else full)):
        try:
            call()
        except (OSError, CheckpointError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.parametrize("shard", SHARDS)
def test_a_file_that_fails_on_one_rank_is_an_error_on_all(on_ranks, build, tmp_path, shard):
    first, second = on_ranks(failing_files, build(), shard, tmp_path, tmp_path / "missing")
    assert first[0].startswith("FileNotFoundError") and first[1].startswith("CheckpointError: Another rank")
    assert second[0].startswith("CheckpointError: Rank 0") and "cannot be read" in second[1]


def what_is_held(ranks, model, shard):
    """Return this rank's share of the model, whether specs describe weights, and whether another model can take them."""
    backend = backend_of(ranks, model, shard)
    specs = backend.weight_specs()
    held = sum(part(item).numel() for item in backend.model.parameters())
    count = sum(item.numel() for item in backend.model.parameters())
    found = [TensorSpec.of(name, tensor) for name, tensor in backend.weights()]
    other = backend_of(ranks, model, shard)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    other.take_weights(backend.own_weights())
    taken = all(
        torch.equal(one, two) for (_, one), (_, two) in zip(other.weights(), backend.weights(), strict=True)
    )
    return held / count, specs == found == TorchBackend(model, lr=0.0).weight_specs(), taken


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
def test_fsdp2_holds_half_of_the_model_and_gives_the_whole(on_ranks, build, name):
    for held, alike, taken in on_ranks(what_is_held, build(name), "fsdp2"):
        assert held == pytest.approx(0.5, abs=0.05)
        assert alike and taken


def peak_of_making_whole(ranks, count):
    """Memory that this rank needed beyond what it had, in bytes, to make a tensor of `count` rows of 1 MiB whole."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    tensor = distribute_tensor(
        torch.arange(count)[:, None].expand(count, 1 << 17), mesh, [Shard(0)], src_data_rank=None
    )
    assert whole(tensor)[:, -1].tolist() == list(range(count))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    whole(tensor)
    return _status("VmHWM") - before


def _status(key):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{key}:")[2].split()[0])


@pytest.mark.parametrize("count", [64, 63])
def test_gathering_a_tensor_needs_only_the_tensors_memory(on_ranks, count):
    for peak in on_ranks(peak_of_making_whole, count):
        assert peak < 1.3 * (count << 20)


def offloaded(ranks, model, parts):
    return trained(ranks, model, parts, "fsdp2", {"cpu_offload": True})


def test_cpu_offload_takes_the_same_steps(on_ranks, build, trajectories):
    batches = packed(trajectories)
    alone = trained(Ranks(), build(), [batches], "none", {})
    for rank, (_, _, metrics, weights) in enumerate(on_ranks(offloaded, build(), split(batches, 4))):
        own = {"update_ratio": metrics["update_ratio"]} if rank else {}
        assert metrics == pytest.approx(alone[2] | own, rel=1e-5)
        assert_close(weights, alone[3], 1e-5)


def read_then_trained(ranks, path, parts, rank=0):
    """Return what a rank knows of the model before its first step, and the weights and an adapter's base after it."""
    model = load_model(path, shared_by=ranks if ranks.size > 1 else None)
    adapter = add_adapter(model, rank=rank, seed=1) if rank else None
    shard = "fsdp2" if ranks.size > 1 else "none"
    backend = TorchBackend(model, ranks=ranks, shard=shard, adapter=adapter, lr=1e-3, device="cpu")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    for number, batch in enumerate(parts[ranks.rank], 1):
        backend.forward_backward(batch, losses, last=number == len(parts[ranks.rank]))
    backend.optim_step()
    digest = adapter.base_digest() if rank else None
    own = {name: whole(item).clone() for name, item in backend._named_parameters().items()}
    return backend.info()["batches as"], digest, buffers, before, own


@pytest.mark.parametrize(
    ("name", "rank"), [("qwen2", 0), ("gemma2", 0), ("gpt2", 0), ("qwen3_5", 0), ("llama", 4)]
)
def test_only_one_rank_reads_the_model_and_steps_stay_equal(
    on_ranks, build, trajectories, tmp_path, name, rank
):
    build(name).save_pretrained(tmp_path)
    batches = packed(trajectories)
    form, digest, *alone = read_then_trained(Ranks(), tmp_path, [batches], rank)
    for same_form, same_digest, *tensors in on_ranks(read_then_trained, tmp_path, split(batches, 4), rank):
        assert (same_form, same_digest) == (form, digest)
        for found, expected, tolerance in zip(tensors, alone, (0.0, 0.0, 1e-5), strict=True):
            assert_close(found, expected, tolerance)


def loaded(ranks, path):
    """Return how many parameters a model has that this rank has loaded its part of."""
    model = load_model(path, shared_by=ranks)
    return TorchBackend(model, ranks=ranks, shard="fsdp2", device="cpu").info()["parameters"]


def peak_of_loading(ranks, path):
    """Memory that this rank needed beyond what it had, in bytes, from the files to its part of the model.

    The smaller one of two measurements: on a busy machine a process may hold for a moment what it has freed.
    """
    loaded(ranks, path.parent / "small")  # what is made once, is made
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # blocks that are freed are given back at once
    peaks = []
    for _ in range(2):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        size = 4 * loaded(ranks, path)
        peaks.append(_status("VmHWM") - before)
    return min(peaks), size


def test_only_the_first_rank_ever_holds_the_whole_model(on_ranks, build, tmp_path):
    build("llama").save_pretrained(tmp_path / "small")
    LlamaForCausalLM(LlamaConfig(**LARGE)).save_pretrained(tmp_path / "large")
    (first, size), (second, _) = on_ranks(peak_of_loading, tmp_path / "large")
    assert first < 1.8 * size
    assert second < 0.75 * size  # its half, and a layer


def told(ranks, paths):
    try:
        load_model(paths[ranks.rank], shared_by=ranks)
    except ModelError as error:
        return str(error)


def test_a_model_that_one_rank_cannot_load_is_an_error_on_all(on_ranks, build, tmp_path):
    build().save_pretrained(tmp_path / "whole")
    build().save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "empty").mkdir()
    for paths in (["damaged", "whole"], ["whole", "empty"]):
        errors = on_ranks(told, [tmp_path / path for path in paths])
        assert ["Another rank" in error for error in errors] == [path == "whole" for path in paths]


class TwoRanks(Ranks):
    size = 2


def test_what_cannot_train_together_is_refused_by_name(build):
    with pytest.raises(ConfigError):
        backend_of(TwoRanks(), build())
    with pytest.raises(ConfigError):
        backend_of(TwoRanks(), build(), "ddp", cpu_offload=True)

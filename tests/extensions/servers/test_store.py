"""The weight store: a version is complete or absent, and files that a server may be reading never change."""

import asyncio
import errno
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from sweeps import sampled
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import WeightsError
from rl4llm.core.weights import TensorSpec
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.runs.tensor_file import pieces


def tensors(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "scalar": (), "half": (4, 4), "empty": (0, 3), "z": (2, 300)}
    found = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["half"] = found["half"].bfloat16()
    return found


def specs(named):
    return [TensorSpec.of(name, tensor) for name, tensor in named.items()]


def write(store, version, named=None, expected=None):
    named = named if named is not None else tensors(1.0 + version)
    return store.write(version, expected or specs(named), iter(named.items()))


def read(path):
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def names(root):
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("shard_bytes", [1, 100, 10**9])
def test_safetensors_reads_back_streams_of_any_shard_size(tmp_path, shard_bytes):
    store = WeightStore(tmp_path / "w", shard_bytes=shard_bytes)
    weight_ref = write(store, 3)
    assert weight_ref == store.latest()
    assert weight_ref.version == 3
    assert os.path.isabs(weight_ref.path)
    assert_equal(read(store.root / "v000003"), tensors(4.0))
    store.verify(weight_ref)


def test_the_config_of_a_narrow_version_names_its_dtype(tmp_path):
    def write_config(directory):
        sizes = {"dtype": "float32", "text_config": {"dtype": "float32"}, "other": {}}
        (directory / "config.json").write_text(json.dumps(sizes))

    weight_ref = WeightStore(tmp_path, dtype=torch.bfloat16).write(
        1, specs(tensors()), iter(tensors().items()), write_config
    )
    written = json.loads((tmp_path / "v000001" / "config.json").read_text())
    assert (written["dtype"], written["text_config"]["dtype"], written["other"]) == (
        "bfloat16",
        "bfloat16",
        {},
    )
    WeightStore(tmp_path).verify(weight_ref)


def test_float32_matrices_are_written_in_the_servers_dtype(tmp_path):
    store, named = WeightStore(tmp_path, dtype=torch.bfloat16), tensors()
    weight_ref = write(store, 1, named)
    store.verify(weight_ref)
    found = read(store.root / "v000001")
    assert_equal(found, {name: x.bfloat16() if x.dim() > 1 else x for name, x in named.items()})
    assert {str(x.dtype) for x in found.values()} == {"torch.bfloat16", "torch.float32"}
    assert write(store, 1, named) == weight_ref
    with pytest.raises(WeightsError):
        write(store, 2, {**named, "a": torch.zeros(3, 6)}, specs(named))
    with pytest.raises(WeightsError):
        write(store, 2, {**named, "a": torch.full((3, 5), torch.nan)})


@pytest.mark.parametrize("experts", [False, True])
def test_transformers_and_so_every_server_starts_from_a_version(tmp_path, model, tokenizer, experts):
    if experts:
        sizes = {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True,
        }  # fmt: skip
        own = {**model.config.to_dict(), "model_type": "qwen3_moe", "architectures": None, **sizes}
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**own))
    assert model.config.tie_word_embeddings
    backend = TorchBackend(load_model(model), lr=1e-3)
    store = WeightStore(tmp_path, shard_bytes=50_000)

    def write_config(directory):
        backend.write_config(directory)
        tokenizer.save_pretrained(directory)

    weight_ref = store.write(0, backend.weight_specs(), backend.weights(), write_config)
    again = AutoModelForCausalLM.from_pretrained(weight_ref.path)
    assert_equal(dict(again.named_parameters()), dict(backend.model.named_parameters()))
    ids = torch.tensor([[5, 9, 40, 33]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, backend.model(ids).logits, rtol=0, atol=1e-6)
    assert again.config.architectures == [type(backend.model).__name__]  # by which servers start


def test_the_newest_and_leased_versions_are_kept(tmp_path):
    store = WeightStore(tmp_path, keep=2)
    write(store, 1)
    with store.lease(1):
        for version in (2, 3, 4):
            write(store, version)
        assert names(tmp_path) == ["LATEST", "v000001", "v000003", "v000004"]
    assert names(tmp_path) == ["LATEST", "v000003", "v000004"]
    assert store.latest().version == 4


def test_the_same_version_with_the_same_weights_changes_nothing(tmp_path):
    store = WeightStore(tmp_path)
    first = write(store, 5)
    inodes = {file.name: file.stat().st_ino for file in (tmp_path / "v000005").iterdir()}
    assert write(store, 5) == first
    assert {file.name: file.stat().st_ino for file in (tmp_path / "v000005").iterdir()} == inodes


def test_a_replaced_version_keeps_its_old_files_untouched(tmp_path):
    store = WeightStore(tmp_path)
    first = write(store, 5)
    with open(tmp_path / "v000005" / "model-00001-of-00001.safetensors", "rb") as reader:
        second = write(store, 5, tensors(-2.0))
        before = reader.read()
    assert second.checksums != first.checksums
    assert_equal(read(tmp_path / "v000005"), tensors(-2.0))
    (tmp_path / "old.safetensors").write_bytes(before)
    assert_equal(load_file(tmp_path / "old.safetensors"), tensors(6.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["a", "half", "scalar"])
def test_weights_that_are_not_finite_are_not_published(tmp_path, bad, name):
    store = WeightStore(tmp_path)
    write(store, 1)
    named = tensors()
    named[name].view(-1)[-1] = bad
    with pytest.raises(WeightsError):
        write(store, 2, named)
    assert names(tmp_path) == ["LATEST", "v000001"]
    assert store.latest().version == 1


@pytest.mark.parametrize("named", [
    {name: tensor for name, tensor in tensors().items() if name != "z"},
    {name: tensor for name, tensor in tensors().items() if name != "a"},
    {**tensors(), "more": torch.zeros(1)},
    {**tensors(), "a": torch.zeros(5, 3)},
    {**tensors(), "a": torch.zeros(3, 5, dtype=torch.float64)},
])  # fmt: skip
def test_weights_other_than_the_models_own_list_are_refused(tmp_path, named):
    store = WeightStore(tmp_path)
    with pytest.raises(WeightsError):
        write(store, 1, named, specs(tensors()))
    assert names(tmp_path) == []


def damaged(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[-40:]
    else:
        content[len(content) // 2] ^= 8
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "bit flipped"])
def test_a_damaged_version_reaches_no_server_and_is_rewritten(tmp_path, how):
    store = WeightStore(tmp_path)
    weight_ref = write(store, 1)
    damaged(tmp_path / "v000001" / "model-00001-of-00001.safetensors", how)
    with pytest.raises(WeightsError):
        store.verify(weight_ref)
    store.verify(write(store, 1))


def test_a_full_disk_leaves_the_last_version(tmp_path, files_of_at_most):
    store = WeightStore(tmp_path)
    write(store, 1)
    with files_of_at_most(1000), pytest.raises(WeightsError):
        write(store, 2)
    assert names(tmp_path) == ["LATEST", "v000001"]
    store.verify(store.latest())


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def write_config(directory):
        (directory / "missing" / "config.json").write_text("{}")

    named = tensors()
    with pytest.raises(WeightsError):
        WeightStore(tmp_path).write(1, specs(named), iter(named.items()), write_config)
    assert names(tmp_path) == []


def test_a_second_store_deletes_nothing_of_the_first(tmp_path):
    first, second = WeightStore(tmp_path, keep=1), WeightStore(tmp_path, keep=1)
    named = tensors()

    def interrupted():
        for number, item in enumerate(named.items()):
            if number == 3:
                with pytest.raises(WeightsError):
                    write(second, 1)
            yield item

    first.verify(first.write(1, specs(named), interrupted()))
    with first.lease(1):
        write(first, 2)
        for number in (2, 3):
            with pytest.raises(WeightsError):
                write(second, number)
        with pytest.raises(WeightsError), second.lease(1):
            pass
        second.prune()
        assert names(tmp_path) == ["LATEST", "v000001", "v000002"]
    assert second.latest().version == 2


def test_a_second_process_is_refused_while_the_first_lives(tmp_path):
    script = (
        "import sys; from pathlib import Path; from rl4llm.extensions.servers.sync.store import WeightStore\n"
    )
    script += "with WeightStore(Path(sys.argv[1])).lease(1): print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        store = WeightStore(tmp_path)
        with pytest.raises(WeightsError):
            write(store, 2)
        first.kill()
    write(store, 2)
    assert names(tmp_path) == ["LATEST", "v000002"]


def test_a_closed_store_leaves_its_directory_to_the_next(tmp_path):
    first, second = WeightStore(tmp_path), WeightStore(tmp_path)
    write(first, 1)
    asyncio.run(FilesystemPublisher(None, first).close())
    first.close()
    assert write(second, 2) == first.latest()


WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def killed_at(store, version, number, named=None):
    """Write in a child that dies at its `number`-th change of the file system; whether it died."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event, _):
            nonlocal left
            if event in WATCHED:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        write(store, version, named)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_killed_publish_leaves_a_complete_version(tmp_path):
    for number in itertools.count():
        root = tmp_path / str(number)
        store = WeightStore(root, keep=1)
        write(store, 1)
        died = killed_at(store, 2, number)
        latest = store.latest()
        store.verify(latest)
        assert latest.version in (1, 2)
        write(store, 3)
        store.close()
        assert names(root) == ["LATEST", "v000003"]
        if not died:
            break
    assert number > 8


@pytest.mark.parametrize("first", sampled([1, 2], [1]))
def test_latest_survives_a_kill_while_a_version_is_replaced(tmp_path, first):
    for number in itertools.count():
        root = tmp_path / str(number)
        store = WeightStore(root)
        for version in range(first, 3):
            write(store, version)
        died = killed_at(store, 2, number, tensors(-1.0))
        latest = store.latest()
        assert (latest is None) == (not (root / "LATEST").exists())
        assert latest is not None or first == 2
        if latest is not None:
            store.verify(latest)
        store.verify(write(store, 2, tensors(-1.0)))
        store.close()
        assert names(root) == ["LATEST", *(f"v{version:06d}" for version in range(first, 3))]
        if not died:
            break
    assert number > 8


def test_latest_that_names_an_incomplete_version_is_ignored(tmp_path):
    store = WeightStore(tmp_path)
    assert store.latest() is None
    (tmp_path / "LATEST").write_text("v000009\n")
    assert store.latest() is None
    (tmp_path / "v000009").mkdir()
    assert store.latest() is None
    for half in ("", "{", "[]", '{"files": null}', '{"version": 9}'):
        (tmp_path / "v000009" / "manifest.json").write_text(half)
        assert store.latest() is None, half


def test_a_disk_error_that_the_kernel_reports_once_is_raised(tmp_path, monkeypatch):
    asked, fsync = [], os.fsync

    def failing_once(descriptor):
        asked.append(descriptor)
        if len(asked) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr("rl4llm.runs.tensor_file.FLUSH_BYTES", 1)
    monkeypatch.setattr(os, "fsync", failing_once)
    with pytest.raises(WeightsError):
        write(WeightStore(tmp_path), 1)
    assert asked
    assert names(tmp_path) == []


def test_a_dtype_that_the_files_cannot_hold_is_named(tmp_path):
    with pytest.raises(WeightsError):
        write(WeightStore(tmp_path), 1, {"w": torch.zeros(2, dtype=torch.complex64)})


def test_the_manifest_lists_every_tensor(tmp_path):
    write(WeightStore(tmp_path), 1)
    manifest = json.loads((tmp_path / "v000001" / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["tensors"]["half"] == [[4, 4], "torch.bfloat16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_copied_through_a_smaller_buffer(dtype):
    tensor = torch.randn(7, 11).to(dtype).T
    buffer = torch.empty(16, dtype=torch.uint8)
    found = b"".join(bytes(piece) for piece in pieces(tensor, buffer))
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=dtype).reshape(11, 7), tensor)

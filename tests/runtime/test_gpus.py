"""What a process sees of the GPUs of its machine, and how it uses their memory."""

import os
from types import SimpleNamespace

import pytest
import torch

from rl4llm.compose import setup
from rl4llm.compose.setup import Machine, Setup
from rl4llm.compose.trainer import batching_of
from rl4llm.config import load_config
from rl4llm.runtime.gpus import visible_gpus


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("4,5", ["4", "5"]),
        (" 5 ,4", ["5", "4"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),  # Slurm's for a job without GPUs
        ("0,-1,1", ["0"]),
        ("GPU-8932f937,MIG-GPU-8932f937/1/2,MIG-94f1", ["GPU-8932f937", "MIG-GPU-8932f937/1/2", "MIG-94f1"]),
    ],
)
def test_visible_gpus_end_at_the_first_invalid_entry(value, names):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names
    assert visible_gpus({}) is None


@pytest.mark.parametrize(
    ("keys", "given", "told"),
    [
        ([], {}, ["expandable_segments:True"]),
        ([], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, []),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, []),
        (["model.device=cpu"], {}, []),
    ],
)
def test_only_a_trainer_on_a_gpu_grows_its_segments(monkeypatch, keys, given, told):
    found = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(setup, "demand_device", lambda name: None)
    before = dict(os.environ)
    config = load_config(overrides=["model.path=m", "model.device=cuda", *keys])
    setup.set_up_torch(config, Machine.of(config))
    assert found == told
    assert {name: value for name, value in os.environ.items() if "ALLOC" in name} == {
        name: value for name, value in before.items() if "ALLOC" in name
    }


@pytest.mark.parametrize(("device", "index"), [("cuda", None), ("cuda:1", 1)])
def test_a_numbered_gpu_is_used_like_the_first(monkeypatch, device, index):
    chosen = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: None)
    monkeypatch.setattr(setup, "demand_device", lambda name: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda found: chosen.append(found.index))
    config = load_config(overrides=["model.path=m", f"model.device={device}"])
    setup.set_up_torch(config, Machine.of(config))
    assert chosen == ([] if index is None else [index])
    tokenizer = SimpleNamespace(pad_token_id=0)
    assert batching_of(Setup.of(config, tokenizer=tokenizer)).usual_tokens_per_batch == 16384


def test_torch_knows_the_setting_by_its_name():
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    with pytest.raises(ValueError, match="True"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:Perhaps")

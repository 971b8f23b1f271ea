"""What the library asks torch about a device, which may have another name than CUDA's and lack what CUDA has."""

import ast
from pathlib import Path

import pretended_gpu
import psutil
import pytest
import torch
from pretended_gpu import GIB, on_pretended_gpu

import rl4llm
from rl4llm.compose.setup import Machine, demand_device
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.runtime import devices

PACKAGE = Path(rl4llm.__file__).parent
MAY_NAME_CUDA = {
    "runtime/devices.py",
    "runtime/gpus.py",
    "inference/embedded/static_decode.py",  # its graphs
    "extensions/launch/modal_app.py",  # an image for containers
}


def answers(whole):
    """Return all answers about the pretended device; with `whole`, its module has what that of CUDA has."""
    kind = pretended_gpu.GPU.type
    if whole:
        for name, value in pretended_gpu.cuda_module().items():
            setattr(torch.get_device_module(kind), name, value)
    config = load_config(overrides={"model.path": "M", "model.device": kind})
    demand_device(kind)
    return {
        "accelerator": devices.accelerator(),
        "default": devices.default(),
        "names": devices.names(),
        "properties": devices.properties(kind),
        "autocast": Machine.of(config).autocast,
        "cuda": devices.has_graphs(pretended_gpu.GPU),
        "backend": devices.collective_backend(),
        "memory": devices.memory(),
    }


def calls(names):
    """Return which of these functions the device's module was called for; it lacks the others."""
    gpu, done = pretended_gpu.GPU, []
    module = torch.get_device_module(gpu)
    for name in names:
        setattr(module, name, lambda *args, name=name: done.append((name, *map(str, args))))
    assert [devices.call(gpu, name, gpu) for name in ("set_device", "empty_cache")] == [None, None]
    with devices.current():
        return done


def names_in(path):
    """Yield what a file names: identifiers, modules, and strings that are no documentation."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        fields = {} if id(node) in texts else dict(ast.iter_fields(node))
        yield from (value for value in fields.values() if isinstance(value, str))


def test_only_what_asks_about_devices_names_cuda():
    places = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any("cuda" in name or "CUDA_" in name for name in names_in(path))
    }
    assert places == MAY_NAME_CUDA


def test_what_a_device_lacks_is_turned_off():
    assert on_pretended_gpu(answers, False, kind="other") == {
        "accelerator": "other",
        "default": "cpu",
        "names": ["other:0"],
        "properties": ("other", psutil.virtual_memory().total),
        "autocast": "none",
        "cuda": False,
        "backend": "cpu:gloo,other:gloo",
        "memory": None,
    }


def test_what_a_device_of_another_name_has_is_used():
    assert on_pretended_gpu(answers, True, kind="other") == {
        "accelerator": "other",
        "default": "cpu",
        "names": ["other:0"],
        "properties": ("pretended GPU", 80 * GIB),
        "autocast": "bfloat16",
        "cuda": False,
        "backend": "cpu:gloo,other:gloo",
        "memory": (GIB, 2 * GIB, 3 * GIB),
    }


def test_a_gpu_of_cuda_has_everything():
    found = on_pretended_gpu(answers, False)
    assert (found["accelerator"], found["default"], found["cuda"]) == ("cuda", "cuda", True)
    assert found["backend"] == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("names", [("empty_cache",), ("set_device", "empty_cache")])
def test_a_device_does_what_its_module_can(names):
    assert on_pretended_gpu(calls, names, kind="other") == [(name, "other:0") for name in names]


@pytest.mark.parametrize("name", ["gpu", "meta", "hip", "cuda:99"])
def test_a_device_that_torch_does_not_find_is_refused(name):
    with pytest.raises(ConfigError):
        demand_device(name)


def test_this_cpu_is_the_default_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert (devices.accelerator(), devices.default(), devices.names()) == ("cpu", "cpu", [])
    assert devices.collective_backend() == "gloo" and devices.memory() is None
    assert devices.call("cpu", "empty_cache") is None
    with devices.current():
        assert not devices.has_graphs(torch.device("cpu"))

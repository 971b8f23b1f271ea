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
    memory = devices.memory()
    return {
        "accelerator": devices.accelerator(),
        "default": devices.default(),
        "tried": devices.tried(kind),
        "names": devices.names(),
        "model_name": devices.model_name(f"{kind}:0"),
        "total_memory": devices.total_memory(kind),
        "autocast": Machine.of(config).autocast,
        "graphs": devices.captures_graphs(pretended_gpu.GPU),
        "flash": devices.has_flash(pretended_gpu.GPU),
        "backend": devices.collective_backend(),
        "memory": memory and (memory.allocated, memory.peak, memory.reserved),
    }


def calls(named):
    """Return what happened on the pretended device while each function was called that does something with it."""
    gpu, done = pretended_gpu.GPU, []
    module = torch.get_device_module(gpu)
    for name in ("set_device", "empty_cache", "set_rng_state", "reset_peak_memory_stats", *named):
        if name in named or hasattr(module, name):
            setattr(module, name, lambda *args, name=name: done.append((name, *map(str, args))))
    devices.set_current(gpu)
    devices.empty_cache(gpu)
    with pretended_gpu.counted() as tally:
        devices.synchronize()
        devices.synchronize(gpu)
    before = torch.get_rng_state()
    with devices.forked_generators(gpu):
        torch.rand(3)
    same = bool((torch.get_rng_state() == before).all())
    for kind, states in devices.random_states().items():
        devices.set_random_state(f"{kind}:0", *states)
    with devices.inside(devices.current()):
        done.append(("inside", str(devices.current())))
    return [name for name, *_ in done], tally.total("wait"), same


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
        "tried": False,
        "names": ["cpu", "other:0"],
        "model_name": "other",
        "total_memory": psutil.virtual_memory().total,
        "autocast": "none",
        "graphs": False,
        "flash": False,
        "backend": "cpu:gloo,other:gloo",
        "memory": None,
    }


def test_what_a_device_of_another_name_has_is_used():
    assert on_pretended_gpu(answers, True, kind="other") == {
        "accelerator": "other",
        "default": "cpu",
        "tried": False,
        "names": ["cpu", "other:0"],
        "model_name": "pretended GPU",
        "total_memory": 80 * GIB,
        "autocast": "bfloat16",
        "graphs": False,
        "flash": False,
        "backend": "cpu:gloo,other:gloo",
        "memory": (GIB, 2 * GIB, 3 * GIB),
    }


def test_a_gpu_of_cuda_has_everything():
    found = on_pretended_gpu(answers, False)
    assert (found["accelerator"], found["default"], found["tried"]) == ("cuda", "cuda", True)
    assert found["graphs"] and found["flash"] and found["backend"] == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("named", [(), ("set_device",)])
def test_a_device_does_what_its_module_can(named):
    done, waits, same = on_pretended_gpu(calls, named, kind="other")
    assert done == [*named, "empty_cache", "set_rng_state", "set_rng_state", "inside"]
    assert waits == 2 and same


@pytest.mark.parametrize("name", ["gpu", "meta", "hip", "cuda:99"])
def test_a_device_that_torch_does_not_find_is_refused(name):
    with pytest.raises(ConfigError):
        demand_device(name)


def test_this_cpu_is_the_default_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert (devices.accelerator(), devices.default(), devices.names()) == ("cpu", "cpu", ["cpu"])
    assert devices.collective_backend() == "gloo"
    assert devices.memory() is None and devices.current() == -1 and not devices.pins("cpu")
    devices.synchronize()
    devices.empty_cache(torch.device("cpu"))
    with devices.inside(-1), devices.forked_generators(torch.device("cpu")):
        torch.rand(1)

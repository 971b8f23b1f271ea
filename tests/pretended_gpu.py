"""Pretend that this CPU is a GPU: tensors have the device `cuda:0`, and the CPU computes them under the rules of a GPU.

    on_pretended_gpu(function, kind="other")              # the device has another name, and its module no more than it must
    result = on_pretended_gpu(function, argument)         # calls a function of a test file in a separate process
    python tests/pretended_gpu.py SCRIPT [ARGUMENT ...]   # runs a program and prints what `TALLIES` counted

`install` changes torch in the whole process. Like a GPU it refuses operands on two devices, numpy of its tensors, operations
without a deterministic kernel, and copies to or from the host while a graph is captured. A capture computes nothing, and a
replay repeats the captured operations on the same memory. Memory is -1 until a replay or an awaited copy has written it.

Some things are still those of a CPU: the parts of composite operations, what autocast casts, and rounding. An operation of
aten counts as one kernel, and so does a compiled function. Streams run in the order of the calls. Sizes of memory are
constants.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from forked_python import ROOT, forks
from torch import Tensor
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rl4llm.backends.varlen import plain_varlen

GPU, GIB = torch.device("cuda", 0), 1 << 30
WHOLE = {"rms_norm", "_fused_rms_norm"}  # composite operations that are one kernel on a GPU
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_", "_local_scalar_dense",
}  # fmt: skip
LEAST = {
    "is_available", "device_count", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "get_rng_state",
    "set_rng_state",
}  # fmt: skip
"""What the module of every accelerator has."""
NOT_DETERMINISTIC = {"put_", "histc", "kthvalue", "median"}
READ_BACK = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "bincount",
}  # fmt: skip


class Tally(Counter[tuple[str, str]]):
    """How often each event happened: a "wait" of the host, "upload", "graph" or "replay" at a place, a "kernel" by name."""

    def total(self, event: str, where: str = "") -> int:
        return sum(count for (kind, key), count in self.items() if kind == event and where in key)


TALLIES = [Tally()]


@contextlib.contextmanager
def counted() -> Iterator[Tally]:
    """Count what happens inside."""
    TALLIES.append(Tally())
    try:
        yield TALLIES[-1]
    finally:
        TALLIES.pop()


def note(event: str, key: str) -> None:
    for tally in TALLIES:
        tally[event, key] += 1


def place() -> str:
    """Return the innermost line of the checkout that is running."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame, file = frame.f_back, frame.f_back.f_code.co_filename
        if file.startswith(str(ROOT)) and file != __file__ and "site-packages" not in file:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
    return "outside"


def upload() -> None:
    """Count a copy from the host."""
    Capture.refuse("copy from the host")
    note("upload", place())


def wait(kind: str) -> None:
    """Count that the host waits until the GPU has done all its work."""
    Capture.refuse(kind)
    note("wait", f"{kind} {place()}")
    arrive()


PENDING: list[tuple[Tensor, Tensor]] = []
"""Copies to the host that nobody awaited: the target, and what it will hold."""


def arrive() -> None:
    while PENDING:
        target, data = PENDING.pop(0)
        target.copy_(data)


def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return run(func, args, kwargs or {})


class Gpu(Tensor):
    """A tensor of the pretended GPU, in the CPU's memory. torch calls `run` for all its operations."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: GPU.type == "cuda")
    is_cpu = property(lambda self: False)

    __torch_dispatch__ = classmethod(dispatched)


class Making(TorchDispatchMode):
    """Inside, functions that make tensors make those of the pretended GPU."""

    __torch_dispatch__ = dispatched


def is_gpu(x: Any) -> bool:
    return isinstance(x, Gpu)


def on_gpu(x: Tensor) -> Tensor:
    """Return the same memory as a tensor of the pretended GPU."""
    return x if is_gpu(x) or x.is_meta else Tensor._make_subclass(Gpu, x)


def on_host(x: Tensor) -> Tensor:
    """Return the same memory as a tensor of the CPU."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())


def marked(x: Any) -> Any:
    return on_gpu(x) if isinstance(x, Tensor) else tree_map_only(Tensor, on_gpu, x)


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def tensors(x: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dictionaries."""
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@functools.cache
def decomposes(func: Any) -> bool:
    return func.overloadpacket.__name__ not in WHOLE and func._can_decompose()


@functools.cache
def written(func: Any) -> list[int]:
    """Return which arguments an operation changes."""
    arguments = enumerate(func._schema.arguments)
    return [number for number, each in arguments if each.alias_info and each.alias_info.is_write]


@functools.cache
def is_kernel(func: Any) -> bool:
    views = any(each.alias_info for each in func._schema.arguments) and not written(func)
    return not views and func.overloadpacket.__name__ not in NO_KERNEL


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation of aten on the pretended GPU."""
    if decomposes(func) and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
        return result
    name, capture = func.overloadpacket.__name__, Capture.here()
    demand_determinism(name, args, kwargs)
    if reads_back(name, args):
        wait(name)
    if capture is not None:
        capture.keep([args[number] for number in written(func) if number < len(args)], kwargs.get("out"))
    with torch._C._DisableTorchDispatch():
        result = REPLACED.get(func, func)(*args, **kwargs)
        result = result if written(func) else marked(result)
    if is_kernel(func):
        launch(name)
    if capture is not None:
        capture.record(func, args, kwargs, result)
    return result


def launch(name: str) -> None:
    """Count a kernel, unless it is a part of a fused one."""
    if not Fused.running:
        note("kernel", name)
        if (capture := Capture.here()) is not None:
            capture.kernels += 1


def reads_back(name: str, args: Any) -> bool:
    """Return whether the host waits for an operation, to know a number or a shape."""
    if name in ("index", "index_put", "index_put_"):
        masked = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return masked and (name == "index" or args[2].numel() > 1)  # a single number fills a mask
    return name in READ_BACK or (name == "repeat_interleave" and len(args) == 1)


def demand_determinism(name: str, args: Any, kwargs: Any) -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    floats = name == "cumsum" and (kwargs.get("dtype") or args[0].dtype).is_floating_point
    if floats or name in NOT_DETERMINISTIC:
        raise RuntimeError(f"{name} does not have a deterministic implementation ({place()})")


class Capture:
    """The operations of a thread's graph while torch captures it. `end` undoes what they did."""

    current: Capture | None = None

    def __init__(self, mode: str) -> None:
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.kernels = 0
        self._of_all, self._thread = mode == "global", threading.get_ident()
        self.broken = False
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Any, Any]] = {}

    @staticmethod
    def here() -> Capture | None:
        """Return the capture of this thread."""
        capture = Capture.current
        return capture if capture is not None and capture._thread == threading.get_ident() else None

    @staticmethod
    def refuse(what: str) -> None:
        """Fail in the thread that captures; in the mode "global" in every other one too, and the capture with it."""
        capture = Capture.current
        if capture is not None and (capture._of_all or capture is Capture.here()):
            capture.broken = True
            raise RuntimeError(f"operation not permitted when stream is capturing ({what}, {place()})")

    def keep(self, *values: Any) -> None:
        """Keep the content of memory that is older than the capture."""
        for value in tensors(values):
            if memory(value) not in self._made and memory(value) not in self._before:
                self._before[memory(value)] = value.untyped_storage(), value.untyped_storage().clone()

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation, unless it only made a view."""
        inputs = {memory(x) for x in tensors((args, kwargs))}
        made = [] if written(func) else [x for x in tensors(result) if memory(x) not in inputs]
        self._made |= {memory(x): x for x in made}
        if made or written(func):
            self.operations.append((func, args, kwargs, made))

    def end(self) -> None:
        for storage, content in self._before.values():
            storage.copy_(content)
        for x in self._made.values():
            on_host(x).fill_(-1)


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`, and as a context for `torch.cuda.graph`."""

    made: list[Graph] = []  # noqa: RUF012 - of the process

    def __init__(self, *args: Any, **options: Any) -> None:
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.kernels = 0

    @contextlib.contextmanager
    def capturing(self, *args: Any, capture_error_mode: str = "global", **options: Any) -> Iterator[None]:
        Capture.refuse("another capture")
        capture = Capture.current = Capture(capture_error_mode)
        try:
            yield
            beside()
        finally:
            Capture.current = None
            capture.end()
        if capture.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.operations, self.kernels = capture.operations, capture.kernels
        Graph.made.append(self)
        note("graph", place())

    @torch.inference_mode()
    def replay(self) -> None:
        note("replay", place())
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for func, args, kwargs, made in self.operations:
                result = REPLACED.get(func, func)(*args, **kwargs)
                for target, new in zip(made, tensors(result) if made else (), strict=True):
                    target.copy_(new)


def beside() -> None:
    """Let another thread use the GPU, as a tracker's may at any time."""

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # a capture in the mode "global"
            torch.ones(1, device=GPU).tolist()

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


def always(result: Any, *args: Any, **kwargs: Any) -> Any:
    return result


class Order:
    """Stands in for `torch.cuda.Stream` and `torch.cuda.Event`: all work is done in the order of the calls."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.wait_stream = self.wait_event = self.wait = self.record = functools.partial(always, None)

    def query(self) -> bool:
        arrive()
        return True

    def synchronize(self) -> None:
        wait("synchronize")

    def is_capturing(self) -> bool:
        return Capture.here() is not None


class Carry(torch.autograd.Function):
    """Copy a tensor to the other device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return on_host(x).clone() if is_gpu(x) else on_gpu(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Carry.forward(ctx, grad)


def carried(x: Tensor, non_blocking: bool = False) -> Tensor:
    """Return a copy on the other device."""
    found = Carry.apply(x)
    if is_gpu(x):
        bring(found.detach(), found.detach().clone(), non_blocking)
    elif x.numel():
        upload()
    return found


def bring(target: Tensor, data: Tensor, non_blocking: bool) -> None:
    """Copy data of the GPU to the CPU. The target is wrong until the host waits."""
    if non_blocking:
        Capture.refuse("copy to the host")
        target.copy_(~data if data.dtype == torch.bool else torch.full_like(data, -1))
        PENDING.append((target, data))
    else:
        wait("copy to the host")
        target.copy_(data)


HANDLERS: dict[Any, Any] = {torch._has_compatible_shallow_copy_type: torch._has_compatible_shallow_copy_type}
"""What replaces functions that accept tensors of two devices."""


def handles(*functions: Any) -> Callable[[Any], Any]:
    def register(handler: Any) -> Any:
        HANDLERS.update((each, functools.partial(handler, each)) for each in functions)
        return handler

    return register


@handles(Tensor.to)
def _to(to: Any, x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return to(x, device, dtype)
    crosses = device is not None and (device.type == GPU.type) != is_gpu(x)
    if dtype or layout or (copy and not crosses):
        x = to(x, dtype=dtype or x.dtype, copy=copy, memory_format=layout or torch.preserve_format)
    return carried(x, non_blocking) if crosses else x


@handles(Tensor.cpu, Tensor.tolist, Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__)
def _read(function: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(carried(x) if is_gpu(x) else x, *args, **kwargs)


@handles(Tensor.cuda, Tensor.pin_memory)
def _send(function: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x if is_gpu(x) or function is Tensor.pin_memory else carried(x)


@handles(Tensor.numpy, Tensor.__array__)
def _numpy(numpy: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if is_gpu(x):
        raise TypeError(
            f"can't convert {GPU} device type tensor to numpy. Use Tensor.cpu() first ({place()})"
        )
    return numpy(x, *args, **kwargs)


@handles(Tensor.copy_)
def _copy(copy_: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if is_gpu(target) == is_gpu(source):
        return copy_(target, source)
    if is_gpu(target):
        upload()
        return copy_(target, on_gpu(source))
    bring(target, on_host(source).to(target.dtype).expand_as(target).clone(), non_blocking)
    return target


@handles(torch.tensor, torch.as_tensor, torch.asarray)
def _from_data(make: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    if device is None or torch.device(device).type != GPU.type:
        return make(*args, device=device, **kwargs)
    made = make(*args, **kwargs)
    return made if is_gpu(made) else carried(made)


@handles(Tensor.__getitem__, Tensor.__setitem__)
def _index(function: Any, x: Tensor, index: Any, *value: Any) -> Any:
    places = index if isinstance(index, tuple) else (index,)
    if is_gpu(x):
        for each in (*places, *value):
            if isinstance(each, list) or (isinstance(each, Tensor) and each.dim() and not is_gpu(each)):
                upload()
    elif any(map(is_gpu, places)):
        raise RuntimeError(f"indices should be on the same device as the indexed tensor ({place()})")
    elif any(map(is_gpu, value)):
        value = (carried(value[0]),)
    return function(x, index, *value)


class Pretended(TorchFunctionMode):
    """Redirects functions of torch to the pretended GPU, in the thread that entered it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in HANDLERS:
            return HANDLERS[func](*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        args, kwargs = on_one_device(args, kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "meta":
            return func(*args, **kwargs)
        if torch.device(device).type == "cpu":
            return tree_map_only(Gpu, on_host, func(*args, **kwargs))
        with Making():
            return marked(func(*args, **kwargs | {"device": "cpu"}))


def on_one_device(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Raise RuntimeError for operands on two devices; single numbers may be the CPU's.

    In a backward pass, torch makes zeros for the gradients of unused outputs. These are moved.
    """
    operands = tensors((args, kwargs))
    hosts = [x for x in operands if not is_gpu(x) and x.dim()]
    if not hosts or not any(map(is_gpu, operands)):
        return args, kwargs
    if torch._C._current_graph_task_id() == -1 or any(x.any() for x in hosts):
        raise RuntimeError(f"Expected all tensors to be on the same device, not {GPU} and cpu ({place()})")
    return marked((args, kwargs))


def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sees the pretended GPU in every thread."""

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        entered = any(isinstance(mode, Pretended) for mode in _get_current_function_mode_stack())
        with contextlib.nullcontext() if entered else Pretended():
            return function(*args, **kwargs)

    return inside


class Autocast(torch.amp.autocast_mode.autocast):
    """Casts on the pretended GPU what autocast of the CPU casts."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type.replace(GPU.type, "cpu"), *args, **kwargs)


class Whole(torch.autograd.Function):
    """A function as one kernel, and one for its gradients."""

    @staticmethod
    def forward(ctx: Any, name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        launch(name)
        ctx.name, ctx.function = name, function
        ctx.save_for_backward(*inputs)
        return on_gpu(function(*map(on_host, inputs)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        launch(f"{ctx.name}_backward")
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            inputs = [on_host(x).requires_grad_() for x in ctx.saved_tensors]
            grads = torch.autograd.grad(ctx.function(*inputs), inputs, on_host(grad))
            return None, None, *map(on_gpu, grads)


@handles(torch.nn.functional.rms_norm)
def _rms_norm(
    norm: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if not is_gpu(x) or weight is None or torch.is_inference_mode_enabled():  # where `WHOLE` has it
        return norm(x, shape, weight, eps)
    return Whole.apply("rms_norm", lambda x, weight: norm(x, shape, weight, eps), x, weight)


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Stand in for torch's function of this name."""
    if query.dtype not in (torch.bfloat16, torch.float16) or cu_seq_q.dtype != torch.int32:
        raise RuntimeError(f"varlen_attn accepts 16-bit numbers and ends in int32 ({place()})")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads. Try enable_gqa=True.")
    attend = functools.partial(
        plain_varlen, ends_q=on_host(cu_seq_q), ends_k=on_host(cu_seq_k), longest_q=max_q, longest_k=max_k,
        scale=scale or query.shape[2] ** -0.5, window_size=window_size,
    )  # fmt: skip
    return Whole.apply("varlen_attn", attend, query, key, value)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, begins_k: Tensor, longest_q: int, longest_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float, seqused_k: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Attend from one query to the first `seqused_k` keys behind each begin."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    query, key, value, ends_q, begins_k, used = map(on_host, (query, key, value, ends_q, begins_k, seqused_k))
    places = [
        torch.arange(begin, begin + count)
        for begin, count in zip(begins_k.tolist(), used.tolist(), strict=False)
    ]
    ends_k, places_M = torch.cat([used.new_zeros(1), used.cumsum(0)]), torch.cat(places)
    found = plain_varlen(
        query, key[places_M], value[places_M], ends_q, ends_k, longest_q, longest_k, scale=scale
    )
    return found, *(query.new_zeros(0) for _ in range(4))


REPLACED = {torch.ops.aten._flash_attention_forward.default: flash_attention}
"""Operations that a CPU has no kernel for."""


class Fused:
    """Stands in for a function that `torch.compile` made. It counts as one kernel."""

    running = False

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function, self._compiled = function, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._compiled:
            Capture.refuse("compilation")
            self._compiled = True
        launch(self._function.__name__)
        Fused.running = True
        try:
            return self._function(*args, **kwargs)
        finally:
            Fused.running = False


def older_varlen_attn(*args: Any, **options: Any) -> Tensor:
    """Stand in for `varlen_attn` of torch 2.11, which has no `enable_gqa` and accepts fewer key heads."""
    return varlen_attn(*args, enable_gqa=True, **options)


def install(enable_gqa: bool = True, kind: str = "cuda") -> None:
    """Change torch in this process. `enable_gqa` is whether `varlen_attn` has this argument; `kind` is the device's type."""
    global GPU
    if kind != "cuda":
        register(kind)
    GPU = torch.device(kind, 0)
    for name, value in cuda_module().items():
        if kind == "cuda" or name in LEAST:
            setattr(torch.get_device_module(kind), name, value)
    torch.accelerator.current_accelerator = functools.partial(always, GPU)
    torch.accelerator.current_stream = Order
    torch._C._accelerator_setAllocatorSettings = lambda settings: None
    torch.compile = Fused
    torch.autocast = torch.amp.autocast = Autocast
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda device="cpu": enabled(device.replace(GPU.type, "cpu"))
    torch.get_autocast_dtype = lambda device: dtype(device.replace(GPU.type, "cpu"))
    varlen.varlen_attn = varlen_attn if enable_gqa else older_varlen_attn
    torch.__future__.set_swap_module_params_on_conversion(True)  # a moved parameter has another class
    torch.autograd._engine_run_backward = redirected(torch.autograd._engine_run_backward)
    threading.Thread.run = redirected(threading.Thread.run)
    Pretended().__enter__()


def register(kind: str) -> None:
    """Register an accelerator of another type, whose module lacks what that of Apple's GPUs lacks."""
    torch.utils.rename_privateuse1_backend(kind)
    module = types.ModuleType(f"torch.{kind}")
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined] # torch seeds what has it
    torch._register_device_module(kind, module)


def cuda_module() -> dict[str, Any]:
    """Return what replaces functions and classes of `torch.cuda`."""
    card = types.SimpleNamespace(
        name="pretended GPU", total_memory=80 * GIB, major=9, minor=0, multi_processor_count=132, uuid="0"
    )
    nothing = "init _lazy_init empty_cache reset_peak_memory_stats set_device set_rng_state manual_seed manual_seed_all"
    results = {
        **dict.fromkeys(nothing.split()), "is_available": True, "is_initialized": True, "is_bf16_supported": True,
        "device_count": 1, "current_device": 0, "get_device_properties": card, "get_device_name": card.name,
        "get_device_capability": (9, 0), "memory_allocated": GIB, "max_memory_allocated": 2 * GIB, "memory_stats": {},
        "memory_reserved": 3 * GIB, "max_memory_reserved": 3 * GIB, "mem_get_info": (79 * GIB, 80 * GIB),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "get_rng_state_all": [torch.zeros(16, dtype=torch.uint8)],
        "current_stream": Order(), "default_stream": Order(), "graph_pool_handle": (0, 1),
        "stream": contextlib.nullcontext(), "device": contextlib.nullcontext(),
    }  # fmt: skip
    return {name: functools.partial(always, result) for name, result in results.items()} | {
        "Stream": Order, "Event": Order, "CUDAGraph": Graph, "graph": Graph.capturing,
        "synchronize": lambda device=None: wait("synchronize"),
        "is_current_stream_capturing": lambda: Capture.here() is not None,
    }  # fmt: skip


def on_pretended_gpu(
    function: Callable[..., Any], *args: Any, enable_gqa: bool = True, kind: str = "cuda"
) -> Any:
    """Return what a function of a test file returns in a separate process that has a pretended GPU."""
    ours, theirs = forks().Pipe()
    named = function.__code__.co_filename, function.__name__
    process = forks().Process(target=serve, args=(theirs, *named, args, enable_gqa, kind))
    process.start()
    theirs.close()
    try:
        failure, result = ours.recv()
    except EOFError:
        failure, result = "the process died", None
    process.join()
    assert not failure, failure
    return result


def serve(connection: Any, file: str, name: str, args: Any, enable_gqa: bool, kind: str) -> None:
    torch.set_num_threads(1)
    try:
        functions = runpy.run_path(file)
        install(enable_gqa, kind)
        torch.manual_seed(0)
        connection.send(("", functions[name](*args)))
    except BaseException:  # noqa: BLE001 - the test shows it
        connection.send((traceback.format_exc(), None))


def main() -> None:
    sys.modules["pretended_gpu"] = sys.modules["__main__"]
    sys.argv = sys.argv[1:]
    sys.path[:0] = [str(Path(sys.argv[0]).resolve().parent), str(ROOT)]
    install()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        for (event, key), count in sorted(TALLIES[0].items()):
            print(f"{count:8d}  {event}  {key}")  # noqa: T201


if __name__ == "__main__":
    main()

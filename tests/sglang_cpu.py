"""SGLang's server on a machine without a GPU, for tests and small models.

scripts/install_sglang_cpu.sh copies this into the server's environment: ``python -m sglang_cpu <SGLang's flags>``.

SGLang's wheel expects the CUDA packages that accompany torch. Three of them are missing with a CPU build of torch. This
file replaces each by the minimum that lets SGLang start; none of them computes anything for a text model.

The server's processes are spawned, and each imports this file again, so the statements at its top run in all of them.
"""

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch

TORCHVISION_OPS = ("nms", "qnms")
IMAGE_OPS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
FACTORIES = frozenset(("arange", "empty", "full", "ones", "tensor", "zeros"))


class MissingKernels(types.ModuleType):
    """Replaces `sgl_kernel` if it is not installed: SGLang imports names from it and calls none of them on a CPU."""

    __path__: list[str] = []  # noqa: RUF012 - makes it a package, so that submodules can be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this server runs on a CPU.")

        return missing


class PageableTorch:
    """`torch` for a module that requests page-locked memory, which only a GPU's driver can allocate."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in FACTORIES:
            return value
        return lambda *args, pin_memory=False, **kwargs: value(*args, **kwargs)


def stand_in_for_sgl_kernel() -> None:
    """Make ``import sgl_kernel`` succeed without its wheel."""
    if importlib.util.find_spec("sgl_kernel") is None:
        module = MissingKernels("sgl_kernel")
        module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
        sys.modules["sgl_kernel"] = module


def declare_torchvision_ops() -> torch.library.Library | None:
    """Declare the operators that a torchvision built for CUDA does not define, since its import extends them."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        for file in Path(spec.origin).parent.glob("_C*.so"):
            ctypes.CDLL(str(file))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in TORCHVISION_OPS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


def declare_image_ops() -> torch.library.Library:
    """Declare the operators of `sgl_kernel` that vision-language models name, and do not call on a CPU."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in IMAGE_OPS:
        library.define(f"{name}() -> ()")
    return library


def use_pageable_memory_for_lora() -> None:
    """Replace `torch` in SGLang's adapter modules, which request page-locked memory unconditionally.

    Only in these modules: elsewhere transformers fills its position tables through the same factories, and leaves them
    zero if those are not torch's.
    """
    import sglang.srt.lora.backend.torch_backend as backend
    import sglang.srt.lora.layers as layers

    backend.torch = layers.torch = PageableTorch()
    setattr(torch.Tensor, "pin_memory", lambda self, *_args, **_kwargs: self)  # noqa: B010 - has another type, but works


def serve(flags: list[str]) -> None:
    """Run the server until it is stopped, and end all of its processes."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(flags))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


stand_in_for_sgl_kernel()
DECLARED = declare_torchvision_ops(), declare_image_ops()  # the operators exist as long as these objects
if any(flag.startswith(("--enable-lora", "--lora-paths")) for flag in sys.argv):
    use_pageable_memory_for_lora()
if __name__ == "__main__":
    serve(sys.argv[1:])

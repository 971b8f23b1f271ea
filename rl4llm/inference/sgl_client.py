"""A second import path of `SGLangClient`, for code that imports `rl4llm.inference.sgl_client`."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {"SGLangClient": "rl4llm.extensions.servers.clients.sglang"})

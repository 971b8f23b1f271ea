"""The seed's import path of the client: ``from rl4llm.inference.sgl_client import SGLangClient``."""

from rl4llm.inference.sglang import SGLangClient as SGLangClient

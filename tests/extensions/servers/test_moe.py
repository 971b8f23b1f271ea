"""A mixture of experts through the real servers: experts arrive one by one, and one that is left out is noticed."""

import asyncio

import pytest
import torch
from fault_server import change
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EngineError, StaleWeightsError
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.clients.vllm import VLLMClient
from rl4llm.extensions.servers.sync.distributed import BroadcastPublisher
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.sync.verify import Canary

EXPERT = "model.layers.1.mlp.experts.2."
SERVERS = [  # each starts for these tests alone; SGLang takes experts in two ways, vLLM in one of them
    pytest.param("sglang", marks=pytest.mark.sglang, id="sglang"),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.sweep], id="vllm"),
]
CLIENTS = {"sglang": SGLangClient, "vllm": VLLMClient}
WAYS = {"sglang": ["filesystem", "distributed"], "vllm": ["filesystem"]}
FLAGS = {
    "sglang": ["--model-path", "{version}", "--port", "0"],
    "vllm": ["{version}", "--max-model-len", "512", "--max-num-seqs", "64", "--port", "0"],
}


class OneLeftOut:
    """A backend as a publisher sees it that leaves out an expert."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def weights(self):
        return ((name, tensor) for name, tensor in self._backend.weights() if not name.startswith(EXPERT))

    def weight_specs(self):
        return [spec for spec in self._backend.weight_specs() if not spec.name.startswith(EXPERT)]


@pytest.fixture(scope="module")
def experts(tokenizer):
    """Heads of 32 and layers in multiples of 32, which vLLM's kernels for CPUs need."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.05,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


@pytest.fixture(scope="module", params=SERVERS)
def served(request, experts, tokenizer, tmp_path_factory, python_of):
    """Start a real server from a published version, as users start it; return its name, its URL and that version."""
    from rl4llm.extensions.servers.launch import launch

    name, root = request.param, tmp_path_factory.mktemp("experts")
    publisher = FilesystemPublisher(None, WeightStore(root), tokenizer.save_pretrained)
    version = publisher.write(TorchBackend(load_model(experts), lr=0.0), 0)
    flags = [flag.format(version=version.path) for flag in FLAGS[name]]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)  # which has short_start
        server = launch(name, flags, python=python_of(name), cpu=True, ready_within_s=300)
    with server:
        yield name, server.url, version


def test_a_server_starts_from_a_version_and_takes_every_expert(served, tokenizer, tmp_path):
    name, url, version = served

    async def story():
        client = CLIENTS[name](url, tokenizer, vocab_size=len(tokenizer), context_length=512)
        canary = Canary(client.vocab_size, dtype="float32", tolerance=1e-4)
        try:
            backend = TorchBackend(load_model(version.path), lr=0.0)
            asked, lengths = canary.token_ids_BT.tolist(), canary.expected(backend)
            # as it started, before any publish
            for token_ids, expected_T in zip(asked, lengths, strict=True):
                assert await client.score(token_ids) == pytest.approx(expected_T.tolist(), abs=1e-4)
            for number, way in enumerate(WAYS[name], 1):
                change(backend.model, number)
                publisher = (
                    FilesystemPublisher(client, WeightStore(tmp_path / way))
                    if way == "filesystem"
                    else BroadcastPublisher(client)
                )
                assert await canary.verify(backend, client, await publisher.publish(backend, number)) < 1e-4
                change(backend.model, 10 + number)
                with pytest.raises((EngineError, StaleWeightsError)):
                    weight_ref = await publisher.publish(OneLeftOut(backend), 10 + number)
                    await canary.verify(backend, client, weight_ref)
        finally:
            await client.close()

    asyncio.run(story())

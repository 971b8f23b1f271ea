"""Tiny random models of the families of docs/families.md, and what is measured of them.

Each model samples a group of two-turn conversations in the embedded engine, takes one GRPO step on them, and samples again.
Its tokens and log-probs are compared with `model.generate`, with the model's own forward, and with the trainer.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from rl4llm.algorithms import GRPO
from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.types import Group, SamplingParams, TokenSpan, Trajectory
from rl4llm.core.weights import WeightRef
from rl4llm.data.pack import Batching
from rl4llm.inference.embedded.model_decode import Layers
from rl4llm.inference.local import LocalClient
from rl4llm.trainers.prepare import Preparation

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

WORDS = ["".join(chr(97 + int(digit)) for digit in str(7919 * number)) for number in range(300)]
"""Texts with enough pairs of letters that each id of the tokenizer has a token."""
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.1, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
HEADS = {"head_dim": 8}
WINDOW = {"sliding_window": 6}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "topk_method": "greedy",
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
PER_LAYER = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8}
FAMILIES = {
    "Llama": ("Llama", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", HEADS),
    "Qwen3-MoE": ("Qwen3Moe", HEADS | EXPERTS),
    "Qwen3-Next": ("Qwen3Next", HEADS | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16}),
    "Qwen3.5 text": ("Qwen3_5", HEADS | LINEAR),
    "gpt-oss": ("GptOss", HEADS | WINDOW | MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma 2": ("Gemma2", HEADS | WINDOW | MIXED),
    "Gemma 3 text": ("Gemma3", HEADS | WINDOW | MIXED),
    "Gemma 4 text": ("Gemma4", HEADS | WINDOW | MIXED | PER_LAYER | {"num_kv_shared_layers": 2}),
    "Olmo 3": ("Olmo3", WINDOW | MIXED),
    "Mistral": ("Mistral", HEADS | WINDOW),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "Granite": ("Granite", {}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "Granite 4 dense": ("GraniteMoeHybrid", MAMBA | {
        "num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
    }),
    "Llama 4 text": ("Llama4", HEADS | {
        "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2, "floor_scale": 4,
        "attn_scale": 0.5, "no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 8,
    }),
    "Phi-3.5-MoE": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
SAMPLE = list(FAMILIES)
FAMILIES |= {
    "Llama 3.1": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}),
    "Qwen2 with windows": ("Qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "Gemma 3n text": ("Gemma3n", HEADS | WINDOW | MIXED | PER_LAYER | {"num_kv_shared_layers": 2, "laurel_rank": 4}),
    "Qwen3.5-MoE text": ("Qwen3_5Moe", HEADS | ROUTED | LINEAR), "OLMo hybrid": ("OlmoHybrid", HEADS | LINEAR),
    "LFM2-MoE": ("Lfm2Moe", ROUTED | {"layer_types": ["conv", "full_attention"] * 2}),
    "Granite 4 hybrid": ("GraniteMoeHybrid", ROUTED | MAMBA | {"layer_types": ["mamba", "attention"] * 2}),
    "Bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1, 3]}),
    "OPT": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "GPT-J": ("GPTJ", {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 96}),
    "DBRX": ("Dbrx", {
        "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 96,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    }),
    "CWM": ("Cwm", HEADS | WINDOW | MIXED | {"bos_token_id": 1, "eos_token_id": [2]}),
    "MiniMax-M2": ("MiniMaxM2", HEADS | ROUTED | {"rotary_dim": 8}),
}  # fmt: skip
for options, kinds in (
    ({}, "Phi OLMo=Olmo OLMo2=Olmo2 Cohere Apertus GPT-NeoX=GPTNeoX StarCoder2=Starcoder2 StableLM=StableLm Nemotron BitNet "
         "DiffLlama MPT=Mpt Phi-3=Phi3"),
    (HEADS, "Gemma Ministral3 GLM=Glm GLM4=Glm4 HunYuan=HunYuanDenseV1 ERNIE4.5=Ernie4_5 Seed-OSS=SeedOss Arcee Helium "
            "Jais2"),
    (HEADS | WINDOW | MIXED, "Ministral VaultGemma"),
    (WINDOW | MIXED, "Cohere2 EXAONE4=Exaone4"),
    (ROUTED, "Qwen2-MoE=Qwen2Moe Granite-MoE=GraniteMoe Granite-MoE-shared=GraniteMoeShared OLMoE=Olmoe FlexOlmo "
             "ERNIE4.5-MoE=Ernie4_5_Moe"),
    (HEADS | ROUTED, "Mixtral GLM4.5=Glm4Moe HunYuan-MoE=HunYuanMoEV1 dots1=Dots1 Solar-Open=SolarOpen"),
    (HEADS | ROUTED | WINDOW | MIXED, "AFMoE=Afmoe"),
    (ROUTED | LATENT, "GLM4.7-Flash=Glm4MoeLite DeepSeek-V2=DeepseekV2 DeepSeek-V3=DeepseekV3"),
):  # fmt: skip
    FAMILIES |= {name.partition("=")[0]: (name.rpartition("=")[2], options) for name in kinds.split()}
"""The class in transformers and the options of each family; windows are shorter than the conversations."""

PROMPT, OTHERS, ANSWER = (
    [5, 9, 40, 33, 7, 61, 8, 100, 12, 13],
    [[200, 4, 90], [31, 77, 2, 6, 5]],
    [70, 71, 72],
)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
SAMPLES = 4


@dataclass(frozen=True)
class Row:
    """What was measured of a family; differences are the largest of any token, or of a gradient relative to its norm."""

    family: str
    layers: str
    path: str
    prompts: str
    turns: str
    training: str
    greedy_tokens_equal: bool
    engine_difference: float
    trainer_difference: float
    gradient_difference: float
    step_difference: float

    @property
    def facts(self) -> tuple[str, ...]:
        """Return what the page has beside the names of families."""
        return self.layers, self.path, self.training


def listed(name):
    """Return the row that the page has of a family: layers, path, and how batches train."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    [row] = [tuple(facts) for names, *facts in rows if name in names.split(", ")]
    return row


def build(name):
    """Return a family's model, loaded."""
    return load_model(plain(name), device="cpu").eval()


def plain(name):
    """Return the model of transformers with random weights, the same each time."""
    kind, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**{**SIZES, **options}))
    with torch.no_grad():  # norms, sinks and biases too, which begin as constants
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def measure(name):
    """Return the row of a family."""
    model = build(name)
    tokenizer = build_tokenizer(WORDS, SIZES["vocab_size"])
    client = LocalClient(model, tokenizer)
    asyncio.run(client.load(WeightRef(0)))
    equal = greedy_tokens(client, [PROMPT, *OTHERS]) == [generated(model, ids) for ids in (PROMPT, *OTHERS)]
    before = facts_of(client)
    turns = asyncio.run(conversations(client))
    after = facts_of(client)
    computed, reused = (after[key] - before[key] for key in ("prefill_tokens", "reused_tokens"))
    # all tokens except the last of each turn, which decoding computes
    once = len(PROMPT) - 1 + SAMPLES * len(ANSWER)
    equal &= cut_conversation(client, model)
    trajectories = [trajectory_of(number, spans) for number, spans in enumerate(turns)]
    engine = max(difference(own_logprobs(model, item), item) for item in trajectories)
    backend = TorchBackend(model, lr=1e-3)
    trainer, gradient = training(backend, trajectories)
    asyncio.run(client.load(WeightRef(1)))
    later = [trajectory_of(number, spans) for number, spans in enumerate(asyncio.run(conversations(client)))]
    layers = Layers(model)
    return Row(
        name,
        ", ".join(
            kind.replace("_", " ") + (f" {size}" if size else "") for kind, size in layers.windows.items()
        ),
        before["path"],
        "once" if computed == once else f"{computed} tokens",
        "appended" if reused else "computed again",
        backend.info()["batches as"],
        equal,
        engine,
        trainer,
        gradient,
        max(difference(own_logprobs(model, item), item) for item in later),
    )


def facts_of(client):
    """Return the path and the counters of the engine."""
    return asyncio.run(client.health())


def greedy_tokens(client, prompts):
    """Return the engine's most probable continuations, computed together."""
    found = client.generate_batch(prompts, [GREEDY] * len(prompts))
    return [list(item.token_ids) for item in found]


def generated(model, token_ids):
    """Return the model's own greedy continuation."""
    with torch.inference_mode():
        found = model.generate(torch.tensor([token_ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False)
    return found[0, len(token_ids) :].tolist()


async def conversations(client):
    """Sample a group of conversations of two turns; return the spans of each."""

    async def one(number):
        params = SamplingParams(max_tokens=5 + number, seed=number, ignore_eos=True)
        spans, ids = [TokenSpan.context(PROMPT)], list(PROMPT)
        for turn in range(2):
            found = await client.generate(ids, params, session=f"s{number}")
            spans.append(TokenSpan(found.token_ids, "policy", found.logprobs, found.version))
            spans.extend([TokenSpan.context(ANSWER)] * (turn == 0))
            ids += [*found.token_ids, *ANSWER]
        await client.release(f"s{number}")
        return tuple(spans)

    return await asyncio.gather(*map(one, range(SAMPLES)))


def cut_conversation(client, model):
    """Return whether a session that drops its last tokens and continues with others gets the model's own tokens."""

    async def play():
        first = await client.generate(PROMPT, GREEDY, session="cut")
        return [*PROMPT, *first.token_ids[:-3], *ANSWER]

    async def continue_from(ids):
        return list((await client.generate(ids, GREEDY, session="cut")).token_ids)

    async def both():
        ids = await play()
        return ids, await continue_from(ids)

    ids, found = asyncio.run(both())
    return found == generated(model, ids)


def trajectory_of(number, spans):
    """Return a conversation with a reward."""
    return Trajectory("p", spans, (), {"reward": float(number % 3)}, float(number % 3), "length")


def own_logprobs(model, trajectory):
    """Return the log-probs of all tokens after the first, by the model's own forward over all of them."""
    ids = torch.tensor([trajectory.token_ids])
    logprobs_TV = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs_TV.gather(1, ids[0, 1:, None])[:, 0]


def policy_tokens(trajectory):
    """Return the places, counted from the second token, and the sampled log-probs of the policy's tokens."""
    flat = [
        (span.author, span.logprobs[i] if span.logprobs else 0.0)
        for span in trajectory.spans
        for i in range(len(span.token_ids))
    ]
    places = [place for place, (author, _) in enumerate(flat) if author == "policy"]
    return torch.tensor(places) - 1, torch.tensor([flat[place][1] for place in places])


def difference(logprobs_T, trajectory):
    """Return how far the sampled log-probs are from these."""
    places, sampled = policy_tokens(trajectory)
    return (logprobs_T[places] - sampled).abs().max().item()


def training(backend, trajectories):
    """Take one GRPO step; return how far log-probs and gradient are from the engine's and from the plain model's."""
    algorithm, group = GRPO(), Group("p", tuple(trajectories))
    batching = Batching(aggregation=algorithm.aggregation, pad_token_id=0)
    expected = plain_gradient(backend.model, algorithm, group)
    update = (
        Preparation(algorithm=algorithm, policy=backend, batching=batching).prepare([group], 0).updates[0]
    )
    apart = 0.0
    for batch in update.batches:
        off_BT = (backend.forward(batch) - batch.sampled_logprobs_BT) * batch.mask_BT
        apart = max(apart, off_BT.abs().max().item())
        backend.forward_backward(batch, algorithm.token_losses)
    found = gradient_of(backend.model)
    backend.optim_step()
    return apart, ((found - expected).norm() / expected.norm()).item()


def plain_gradient(model, algorithm, group):
    """Return the gradient of GRPO's loss, each conversation alone through the plain model."""
    rewards = torch.tensor([trajectory.reward for trajectory in group.trajectories])
    advantages = (rewards - rewards.mean()) / rewards.std()
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        places, sampled = policy_tokens(trajectory)
        ratio = (own_logprobs(model, trajectory)[places] - sampled).exp()
        (-(ratio * advantage).mean() / len(rewards)).backward()
    found = gradient_of(model)
    model.zero_grad()
    return found


def gradient_of(model):
    """Return all gradients as one vector."""
    grads = [torch.zeros_like(item) if item.grad is None else item.grad for item in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads]).double()

"""What `rl4llm plan` says is what runs do and take."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.token_numbers import TokenNumbers
from rl4llm.build import build_algorithm
from rl4llm.cli import main
from rl4llm.config import load_config
from rl4llm.core.ranks import Ranks
from rl4llm.core.types import TrainBatch
from rl4llm.plan import make_plan
from rl4llm.plan.advice import changes
from rl4llm.plan.memory import Numbers, activations, cache_bytes, layer_activations, model_memory, phases, sharing_of
from rl4llm.plan.shape import shape_of
from rl4llm.plan.show import parse_size

GIB, WITHIN = 2**30, 0.2
QUIET = {"tracking.tensorboard": False, "tracking.episodes_every": 0, "eval.every": 0, "threads": 1, "max_steps": 2}


def saved_model(directory, tokenizer, hidden, layers):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def small(model_dir):
    """config(**overrides): a small configuration."""

    def config(overrides=None):
        own = {"model.path": str(model_dir), "data.path": "arithmetic", "data.limit": 8, "eval.every": 0}
        own |= {"rollout.prompts": 4, "rollout.group_size": 4, "rollout.max_tokens": 16}
        return load_config(None, own | (overrides or {}))

    return config


@pytest.fixture(scope="module")
def runs(tokenizer, tmp_path_factory):
    """Three configurations of different kinds, and the memory that they took."""
    root = tmp_path_factory.mktemp("measured")
    model, tiny = saved_model(root / "model", tokenizer, 320, 5), saved_model(root / "tiny", tokenizer, 32, 1)
    said = [{"role": "user", "content": "Say it. " * 10}, {"role": "assistant", "content": "word " * 90}]
    (root / "chats").mkdir()
    (root / "chats" / "train.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(8)))
    episodes = {
        "data.path": "arithmetic",
        "data.limit": 8,
        "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 400}],
        "rollout.prompts": 4,
        "rollout.group_size": 4,
        "rollout.max_tokens": 32,
        "training.lr": 1e-3,
    }
    chats = {"algorithm.name": "sft", "data.path": str(root / "chats"), "rollout.prompts": 4, "training.lr": 1e-3}
    kinds = {
        "warm": {**episodes, "model.lora.rank": 8, "model.path": tiny},
        "grpo": {**episodes, "model.path": model},
        "lora": {**episodes, "model.lora.rank": 8, "model.path": model},
        "checkpointing": {**chats, "model.path": model, "model.gradient_checkpointing": True},
    }
    kinds = {name: {**QUIET, **kind, "output.dir": str(root / name)} for name, kind in kinds.items()}
    command = [sys.executable, Path(__file__).with_name("measured_runs.py"), json.dumps(kinds), root / "took.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    took = json.loads((root / "took.json").read_text())
    return {name: (load_config(None, kind), max(took[name].values())) for name, kind in kinds.items() if name != "warm"}


@pytest.mark.parametrize("kind", ["grpo", "lora", "checkpointing"])
def test_the_peak_of_a_plan_is_that_of_the_run(runs, kind):
    config, took = runs[kind]
    planned = make_plan(config).peak.total
    assert abs(planned - took) <= WITHIN * took, f"planned {planned / 2**20:.0f} MiB, took {took / 2**20:.0f} MiB"


def test_a_plan_of_another_run_would_be_wrong(runs):
    """So the test above can fail: neither checkpointing nor the size of micro-batches can be left out of a plan."""
    config, took = runs["checkpointing"]
    plain = replace(config, model=replace(config.model, gradient_checkpointing=False))
    assert make_plan(plain).peak.total > (1 + WITHIN) * took
    config, took = runs["grpo"]
    smaller = replace(config, training=replace(config.training, max_tokens_per_batch=make_plan(config).counts.longest))
    assert make_plan(smaller).peak.total < (1 - WITHIN) * took


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_saves(tokenizer, tmp_path, checkpointing):
    path = saved_model(tmp_path, tokenizer, 64, 3)
    module = TokenNumbers(load_model(path, gradient_checkpointing=checkpointing), None, None, Ranks())
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    zeros = torch.zeros(8, 65)
    mask = zeros.bool()
    mask[:, -1] = True  # one token is asked for: the head keeps next to nothing
    batch = TrainBatch(
        token_ids_BT=torch.ones(8, 65, dtype=torch.long),
        position_ids_BT=torch.arange(65).expand(8, 65),
        segment_ids_BT=torch.ones(8, 65, dtype=torch.long),
        mask_BT=mask,
        sampled_logprobs_BT=zeros,
        credits_BT=zeros,
        weights_BT=zeros,
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(batch, 1.0, False)
    shape, numbers, tokens = shape_of(module.model), Numbers(4, 4, 4, False), 8 * 64
    planned = activations(shape, numbers, tokens, tokens, checkpointing=checkpointing)
    planned -= tokens * shape.hidden * 4  # what the last norm gives is there, but not for the backward pass
    if checkpointing:  # the layer that is computed again is not there yet
        planned -= layer_activations(shape, numbers, tokens, tokens)
    assert sum(saved.values()) == pytest.approx(planned, rel=0.05)


def test_an_adapter_has_as_many_numbers_as_the_real_one(model):
    planned = shape_of(model, lora_rank=8).adapter
    adapter = add_adapter(model, rank=8)
    assert planned == sum(tensor.numel() for _, tensor in adapter.parameters())


def test_ranks_share_what_their_stage_says(model):
    """Rajbhandari et al. 2020, figure 1: bf16 takes 2 + 2 + 12 bytes of a number; here gradients are summed in fp32."""
    shape, ranks = shape_of(model), 4
    numbers = shape.parameters
    expected = {1: (2, 4, 12 / 4), 2: (2, 4 / 4, 12 / 4), 3: (2 / 4, 4 / 4, 12 / 4)}
    for stage, (weights, gradients, optimizer) in expected.items():
        sharing = sharing_of({"name": "deepspeed", "zero_stage": stage}, ranks, 2)
        found = model_memory(shape, sharing, ranks, weight_bytes=2, trains=True, autocast=False)
        assert found.weights == pytest.approx(weights * numbers, abs=ranks)
        assert found.gradients == pytest.approx(gradients * numbers, abs=ranks)
        assert found.optimizer == pytest.approx(optimizer * numbers, abs=ranks)
    plain = model_memory(shape, sharing_of({"name": "torch"}, ranks, 4), ranks, weight_bytes=4, trains=True, autocast=False)
    assert (plain.weights, plain.gradients, plain.optimizer) == (4 * numbers, 4 * numbers, 8 * numbers)
    fsdp = sharing_of({"name": "torch", "shard": "fsdp2"}, ranks, 4)
    sharded = model_memory(shape, fsdp, ranks, weight_bytes=4, trains=True, autocast=False)
    assert sharded.weights + sharded.gradients + sharded.optimizer == pytest.approx(16 * numbers / 4, abs=12)
    assert sharded.gathered > 0 and plain.gathered == 0
    offloaded = sharing_of({"name": "deepspeed", "zero_stage": 2, "offload_optimizer": True}, ranks, 2)
    assert model_memory(shape, offloaded, ranks, weight_bytes=2, trains=True, autocast=False).optimizer == 0


def test_each_model_of_a_run_counts_once_and_only_where_it_is(small):
    def of(overrides):
        plan = make_plan(small(overrides))
        return {phase.name: phase.parts for phase in plan.phases}

    plain, whole = of({}), of({})["update"]["weights"]
    assert "reference" not in plain["update"] and "critic" not in plain
    assert of({"algorithm": {"name": "grpo", "kl_coef": 0.1}})["update"]["reference"] == whole
    assert "reference" not in of({"algorithm": {"name": "grpo", "kl_coef": 0.1}, "model.lora.rank": 4})["update"]
    critic = of({"algorithm": {"name": "ppo"}})
    assert critic["update"]["critic"] == critic["critic"]["critic"] == pytest.approx(3 * whole)  # weights and two moments
    elsewhere = of({"inference": {"name": "sglang"}})
    assert "KV cache" in plain["rollout"] and "KV cache" not in elsewhere["rollout"]
    cohosted = of({"inference": {"name": "sglang", "cohost": True}})["rollout"]
    assert set(cohosted) == {"server's weights", "server's KV cache"}  # the trainer has left the device


def test_the_cache_is_no_smaller_than_the_engine_makes_it(model, tokenizer):
    from rl4llm.core.types import SamplingParams
    from rl4llm.inference.engine import Engine

    engine = Engine(model, tokenizer, 16, None, "auto")
    engine.waiting = [engine.request([5] * 40, SamplingParams(max_tokens=8, ignore_eos=True), f"s{i}") for i in range(6)]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.describe()["cache_bytes"])
    planned = cache_bytes(shape_of(model), 6, 192, 4)  # 48 tokens and 128 ahead, in steps of 64
    assert 0.3 * planned <= most <= planned


def test_counts_multiply_and_ranks_bring_prompts_of_their_own(small):
    plan = make_plan(small({"training.updates_per_rollout": 2, "training.epochs": 3}), devices=2)
    counts = plan.counts
    assert (counts.prompts, counts.samples, counts.trajectories, counts.updates) == (4, 4, 16, 6)
    assert counts.longest == counts.prompt_tokens + 16
    smaller = make_plan(small({"training.max_tokens_per_batch": counts.longest})).counts
    assert smaller.micro_batches == 16 and smaller.padded == counts.longest


def test_a_model_that_ranks_share_out_is_never_whole_on_a_device(small):
    shared = {"backend": {"name": "torch", "shard": "fsdp2"}, "model.device": "cuda"}
    plans = [make_plan(small(shared), devices=2, memory=GIB), make_plan(small(shared | {"model.device": "cpu"}), devices=2)]
    start, on_cpu = (plan.phases[0].total for plan in plans)
    whole = plans[0].models.policy.parameters * 4
    assert whole / 2 < start < whole <= on_cpu


def test_nothing_of_the_weights_is_read(small, model_dir, tmp_path):
    for file in model_dir.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text((model_dir / "chat_template.jinja").read_text())
    assert make_plan(small({"model.path": str(tmp_path)})).peak == make_plan(small()).peak


def test_what_does_not_fit_comes_with_keys_that_make_it_fit(small):
    peak = make_plan(small()).peak.total
    plan = make_plan(small(), memory=int(0.7 * peak))
    assert not plan.fits
    best = changes(plan)[0]
    assert best.fits
    changed = make_plan(load_config(None, [*_words(small()), *best.overrides]), memory=int(0.7 * peak))
    assert changed.fits and changed.peak.total == best.peak


def _words(config):
    keys = {"model.path": config.model.path, "data.path": "arithmetic", "data.limit": 8, "eval.every": 0}
    keys |= {"rollout.prompts": 4, "rollout.group_size": 4, "rollout.max_tokens": 16}
    return [f"{key}={value}" for key, value in keys.items()]


def test_a_dataset_is_counted_as_it_will_be_packed(model_dir, tmp_path):
    row = {"prompt": "How many?", "chosen": "Answer: 85", "rejected": "I do not know, sorry."}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    overrides = {"model.path": str(model_dir), "data.path": str(tmp_path), "eval.every": 0, "rollout.prompts": 4}
    config = load_config(None, overrides | {"algorithm.name": "dpo"})
    counts = make_plan(config).counts
    assert (counts.rows, counts.prompts, counts.samples, counts.micro_batches) == (8, 4, 2, 1)
    assert counts.keys > counts.tokens > counts.trains > 0
    names = [phase.name for phase in phases(config, build_algorithm(config), counts, make_plan(config).models, 1)]
    assert names == ["start", "log-probs", "update"]  # nothing is sampled, and the reference has a pass of its own


def test_sizes_are_read_as_people_write_them():
    assert parse_size("24GiB") == parse_size("24 gib") == 24 * GIB
    assert parse_size("1.5GB") == 1_500_000_000


def test_the_command_exits_with_1_when_it_does_not_fit_and_says_what_is_wrong_with_bad_input(small, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("{}")
    words = ["plan", str(file), *_words(small())]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["phases"][told["peak"]["phase"]]["total"] == told["peak"]["bytes"]
    assert main([*words, "--device-memory", "1MiB"]) == 1
    said = capsys.readouterr().out
    assert "does NOT fit" in said and "max_tokens_per_batch" in said
    wrong_words = {"--device-memory=24": "24GiB", "training.rl=1": "training.lr", "--devices=0": "1 or above"}
    refused_in_training = {"rollout.ahead=true": "inference.name='local'", "backend.name=torhc": "'torch'"}
    for wrong, hint in (wrong_words | refused_in_training).items():
        assert main([*words, wrong]) == 2
        assert hint in capsys.readouterr().err
    for wrong, hint in (("model.path=/nowhere/model", "/nowhere/model"), ("inference.context_length=8", "holds 8")):
        assert main([*words, wrong]) == 1
        assert hint in capsys.readouterr().err

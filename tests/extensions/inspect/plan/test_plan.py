"""What `rl4llm plan` says is what runs do and take."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from forked_python import python
from sweeps import sampled
from transformers import Gemma4TextConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config

import rl4llm
from rl4llm.cli import main
from rl4llm.compose.setup import Setup
from rl4llm.config import load_config
from rl4llm.core.errors import RL4LLMError
from rl4llm.core.model_memory import ONE_SEQUENCE, EngineLoad, Precision
from rl4llm.extensions.inspect.plan.advice import _candidates, changes
from rl4llm.extensions.inspect.plan.command import GPUS, size
from rl4llm.extensions.inspect.plan.memory import VERSIONS, Memory
from rl4llm.extensions.inspect.plan.plan import make_plan, on_target
from rl4llm.extensions.inspect.plan.shape import read_shape
from rl4llm.extensions.inspect.plan.show import verdict
from rl4llm.inference.local import GRAPHS, LocalClient

GIB, WITHIN = 2**30, 0.2
QUIET = {
    "model.autocast": "none", "tracking.tensorboard": False, "tracking.episodes_every": 0, "eval.every": 0,
    "threads": 1, "max_steps": 2,
}  # fmt: skip


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
def runs(tokenizer, tmp_path_factory, sweep):
    """Configurations of different kinds, and the memory that they took."""
    root = tmp_path_factory.mktemp("measured")
    model = saved_model(root / "model", tokenizer, 320, 5)
    said = [{"role": "user", "content": "Say it. " * 10}, {"role": "assistant", "content": "word " * 90}]
    (root / "chats").mkdir()
    (root / "chats" / "train.jsonl").write_text(
        "".join(json.dumps({"messages": said}) + "\n" for _ in range(8))
    )
    episodes = {
        "data.path": "arithmetic",
        "data.limit": 8,
        "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 400}],
        "rollout.prompts": 4,
        "rollout.group_size": 4,
        "rollout.max_tokens": 32,
        "training.lr": 1e-3,
    }
    chats = {
        "algorithm.name": "sft", "data.path": str(root / "chats"), "rollout.prompts": 4, "training.lr": 1e-3,
    }  # fmt: skip
    kinds = {
        "warm": {**episodes, "model.path": model, "max_steps": 1},
        "grpo": {**episodes, "model.path": model},
        "lora": {**episodes, "model.lora.rank": 8, "model.path": model},
        "checkpointing": {**chats, "model.path": model, "model.gradient_checkpointing": True},
    }
    if not sweep:
        del kinds["lora"]
    kinds = {name: {**QUIET, **kind, "output.dir": str(root / name)} for name, kind in kinds.items()}
    return measured(kinds, root / "took.json")


def measured(kinds, file):
    """Return the configuration of each run but the first, and the memory that it took."""
    configs = {name: load_config(None, kind) for name, kind in kinds.items()}
    given = {name: [kind, make_plan(configs[name]).peak.total] for name, kind in kinds.items()}
    done = python(Path(__file__).with_name("measured_runs.py"), json.dumps(given), file, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: (configs[name], max(took.values())) for name, took in json.loads(file.read_text()).items()}


@pytest.mark.parametrize("kind", sampled(["grpo", "lora", "checkpointing"], ["grpo", "checkpointing"]))
def test_the_peak_of_a_plan_is_that_of_the_run(runs, kind):
    config, took = runs[kind]
    planned = make_plan(config).peak.total
    assert abs(planned - took) <= WITHIN * took, (
        f"planned {planned / 2**20:.0f} MiB, took {took / 2**20:.0f} MiB"
    )


def test_a_plan_of_another_run_would_be_wrong(runs):
    """So the test above can fail: neither checkpointing nor the size of micro-batches can be left out of a plan."""
    config, took = runs["checkpointing"]
    plain = replace(config, model=replace(config.model, gradient_checkpointing=False))
    assert make_plan(plain).peak.total > (1 + WITHIN) * took
    config, took = runs["grpo"]
    smaller = replace(
        config, training=replace(config.training, max_tokens_per_batch=make_plan(config).counts.longest)
    )
    assert make_plan(smaller).peak.total < (1 - WITHIN) * took


def test_each_model_of_a_run_counts_once_and_only_where_it_is(small, model_dir):
    def of(overrides):
        plan = make_plan(small(overrides))
        return {phase.name: phase.parts for phase in plan.phases}

    plain, whole = of({}), of({})["update"]["weights"]
    assert "reference" not in plain["update"] and "critic" not in plain
    assert of({"algorithm": {"name": "grpo", "kl_coef": 0.1}})["update"]["reference"] == whole
    assert (
        "reference" not in of({"algorithm": {"name": "grpo", "kl_coef": 0.1}, "model.lora.rank": 4})["update"]
    )
    sides = {name: {"data": {"path": "arithmetic", "limit": 8}} for name in "ab"}
    teachers = {"algorithm": {"name": "distill", "teachers": dict.fromkeys("ab", str(model_dir))}}
    assert of({**teachers, "parts": sides, "data.path": None})["update"]["reference"] == 2 * whole
    critic = of({"algorithm": {"name": "ppo"}})
    # weights and two moments
    assert critic["update"]["critic"] == critic["critic"]["critic"] == pytest.approx(3 * whole)
    elsewhere = of({"inference": {"name": "sglang"}})
    assert "KV cache" in plain["rollout"] and "KV cache" not in elsewhere["rollout"]
    cohosted = of({"inference": {"name": "sglang", "cohost": True}})["rollout"]
    assert set(cohosted) == {"server's weights", ONE_SEQUENCE}  # the trainer has left the device


def test_reward_models_stay_on_the_device_of_a_server(small, model_dir):
    def others(**keys):
        item = {"name": "reward_model", "path": str(model_dir), **keys}
        inference = {"name": "sglang", "cohost": True}
        config = small({"rewards": [item], "inference": inference, "model.device": "cuda"})
        plan = make_plan(config, memory=GIB)
        assert [phase.name for phase in plan.phases] == ["start", "rollout", "update"]
        return [phase.parts.get(f"reward_model {model_dir}", 0) for phase in plan.phases[1:]]

    size = read_shape(str(model_dir)).parameters
    assert others() == [4 * size] * 2
    assert others(dtype="bfloat16") == [2 * size] * 2
    assert others(device="cpu") == [0] * 2


def test_counts_multiply_and_each_rank_adds_its_own_prompts(small):
    plan = make_plan(small({"training.updates_per_rollout": 2, "training.passes_per_rollout": 3}), devices=2)
    counts = plan.counts
    assert (counts.prompts, counts.samples, counts.trajectories, counts.updates) == (4, 4, 16, 6)
    assert counts.longest == counts.prompt_tokens + 16
    smaller = make_plan(small({"training.max_tokens_per_batch": counts.longest})).counts
    assert smaller.micro_batches == 16 and smaller.padded == counts.longest


def test_a_model_that_ranks_share_out_is_never_whole_on_a_device(small):
    shared = {"backend": {"name": "torch", "shard": "fsdp2"}, "model.device": "cuda"}
    plans = [
        make_plan(small(shared), devices=2, memory=GIB),
        make_plan(small(shared | {"model.device": "cpu"}), devices=2),
    ]
    start, on_cpu = (plan.phases[0].total for plan in plans)
    whole = plans[0].models.policy.parameters * 4
    assert whole / 2 < start < whole <= on_cpu


def test_nothing_of_the_weights_is_read(small, model_dir, tmp_path):
    for file in model_dir.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text((model_dir / "chat_template.jinja").read_text())
    assert make_plan(small({"model.path": str(tmp_path)})).peak == make_plan(small()).peak


def test_prompt_tokens_replace_tokenizer_and_rows(small, model_dir, tmp_path):
    shutil.copy(model_dir / "config.json", tmp_path)
    few = {"rollout.prompts": 1, "eval.every": 1, "eval.limit": 8}
    read = make_plan(small(few))
    keys = few | {"model.path": str(tmp_path), "data.path": "absent"}
    shape = make_plan(small(keys), prompt_tokens=read.counts.prompt_tokens)
    assert shape.phases == read.phases and "evaluation" in [phase.name for phase in shape.phases]
    assert make_plan(small(keys), prompt_tokens=500).peak.total > read.peak.total
    tight = make_plan(
        small(keys), memory=int(0.7 * shape.peak.total), prompt_tokens=read.counts.prompt_tokens
    )
    assert not tight.fits and changes(tight)[0].fits
    for mistake in ({"algorithm.name": "sft"}, {"rollout.max_tokens": 4}):
        with pytest.raises(RL4LLMError):
            make_plan(small(keys | mistake), prompt_tokens=10**6)


def test_what_does_not_fit_comes_with_keys_that_make_it_fit(small):
    peak = make_plan(small()).peak.total
    plan = make_plan(small(), memory=int(0.7 * peak))
    assert not plan.fits
    best = changes(plan)[0]
    assert best.fits
    changed = make_plan(load_config(None, [*_words(small()), *best.overrides]), memory=int(0.7 * peak))
    assert changed.fits and changed.peak.total == best.peak


def test_a_plan_names_a_warm_up_beyond_the_run(small, capsys):
    words = ["plan", "configs/quickstart.yaml", *_words(small()), "training.lr=1e-4", "max_steps=10"]
    told = [
        (main([*words, f"training.warmup_steps={steps}"]), capsys.readouterr().out)[1] for steps in (5, 20)
    ]
    assert ["training.warmup_steps=20" in text for text in told] == [False, True]


def _words(config):
    keys = {"model.path": config.model.path, "data.path": "arithmetic", "data.limit": 8, "eval.every": 0}
    keys |= {"rollout.prompts": 4, "rollout.group_size": 4, "rollout.max_tokens": 16}
    return [f"{key}={value}" for key, value in keys.items()]


def test_a_dataset_is_counted_as_it_will_be_packed(model_dir, tmp_path):
    row = {"prompt": "How many?", "chosen": "Answer: 85", "rejected": "I do not know, sorry."}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    overrides = {
        "model.path": str(model_dir), "data.path": str(tmp_path), "eval.every": 0, "rollout.prompts": 4,
    }  # fmt: skip
    config = load_config(None, overrides | {"algorithm.name": "dpo"})
    counts = make_plan(config).counts
    assert (counts.rows, counts.prompts, counts.samples, counts.micro_batches) == (8, 4, 2, 1)
    assert counts.keys > counts.tokens > counts.trains > 0
    names = [phase.name for phase in Memory(Setup.of(config), counts, make_plan(config).models, 1).phases()]
    assert names == ["start", "log-probs", "update"]  # nothing is sampled; the reference has a pass


QWEN = {  # hidden, MLP, layers, heads, heads of keys, vocabulary, whether embeddings and output layer are one
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}


@pytest.fixture(scope="module")
def qwen(tokenizer, tmp_path_factory):
    """qwen(size, devices, memory, **overrides): the plan of Qwen2.5, from its config alone."""

    def plan(size, devices, memory, overrides):
        directory = tmp_path_factory.mktemp(size)
        hidden, mlp, layers, heads, kv_heads, vocabulary, tied = QWEN[size]
        Qwen2Config(
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
            architectures=["Qwen2ForCausalLM"],
        ).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        keys = {"model.path": str(directory), "data.path": "arithmetic", "data.limit": 8, "eval.every": 0}
        keys |= {"rollout.max_tokens": 1024, "model.gradient_checkpointing": True}
        return make_plan(on_target(load_config(None, keys | overrides), memory), devices, memory)

    return plan


ON_EIGHT = {  # bytes of weights, gradients and optimizer for each parameter, and GiB of the whole update
    "fsdp2": ({"backend.shard": "fsdp2", "model.autocast": "bfloat16"}, 16 / 8, 36.5),
    "zero2": (
        {"backend": {"name": "deepspeed", "zero_stage": 2}, "model.dtype": "bfloat16"},
        2 + 16 / 8,
        39.5,
    ),
    "zero3": ({"backend": {"name": "deepspeed", "zero_stage": 3}, "model.dtype": "bfloat16"}, 18 / 8, 32.9),
}


@pytest.mark.parametrize("way", ON_EIGHT)
def test_seven_billion_parameters_fit_eight_gpus(qwen, way):
    keys, states, total = ON_EIGHT[way]
    keys = keys | {"inference.name": "sglang", "training.max_tokens_per_batch": 13_000}
    plan = qwen("7B", 8, 80 * GIB, keys)
    update = plan.phases[-1]
    held = sum(update.parts[part] for part in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(states * plan.models.policy.parameters, rel=0.01)
    assert plan.fits and update.total == pytest.approx(total * GIB, rel=0.1)


COHOST = {"inference": {"name": "sglang", "cohost": True}, "model.dtype": "bfloat16"}


def test_a_known_run_of_all_weights_fits_24_gb(qwen):
    """Qwen2.5-1.5B on MATH, 64 prompts x 8 answers, took turns with its server on one GPU of 24 GB."""
    keys = {"rollout.prompts": 64, "rollout.group_size": 8}
    keys |= {"backend": {"name": "deepspeed", "zero_stage": 2, "offload_optimizer": True}}
    plan = qwen("1.5B", 1, 24 * GIB, COHOST | keys)
    assert plan.fits and plan.counts.trajectories == 512
    assert 8 < plan.peak.total / GIB < 20
    assert 100 < plan.served < 512  # the others wait, as in the known run
    assert plan.phases[-1].parts["sleeping server"] == 2 * GIB
    plain = qwen("1.5B", 1, 24 * GIB, COHOST | keys | {"backend": {"name": "torch"}})
    assert not plain.fits  # with the optimizer on the device


@pytest.mark.parametrize("size", ["1.5B", "3B"])
def test_an_adapter_fits_24_gb(qwen, size):
    plan = qwen(size, 1, 24 * GIB, COHOST | {"model.lora.rank": 32})
    whole = qwen(size, 1, 24 * GIB, COHOST)
    assert plan.fits and plan.peak.total < whole.peak.total


def test_captured_steps_keep_memory_in_a_plan(qwen):
    """Rows are padded to a power of two, with a spare one. Each graph has logits, the largest one in fp32 also scores."""

    def rollout(dtype, **inference):
        keys = {"model.dtype": dtype, "model.autocast": "none", "inference": {"max_rows": 20, **inference}}
        return qwen("1.5B", 1, 80 * GIB, keys).phases[1].parts

    for dtype, number in (("bfloat16", 2), ("float32", 4)):
        plain, graph = rollout(dtype, path="fast"), rollout(dtype)
        assert graph == rollout(dtype, path="graph")
        assert graph["KV cache"] * 20 == plain["KV cache"] * 33
        length = graph["KV cache"] // (33 * 28 * 2 * 2 * 128 * number)
        logits = (32 + 16 + 8 + 4 + 2 + 1) * 151_936 * number
        scores = 32 * 12 * length * (4 + 4) if dtype == "float32" else 0
        assert logits + scores < graph[GRAPHS] < 1.2 * (logits + scores)
        assert GRAPHS not in plain
    on_cpu = qwen("1.5B", 1, 80 * GIB, {"model.device": "cpu", "inference": {"path": "graph"}})
    assert GRAPHS not in on_cpu.phases[1].parts  # nothing is captured there


def test_a_model_of_another_family_has_no_captured_steps(qwen):
    shape = qwen("1.5B", 1, 80 * GIB, {}).models.policy
    load, precision = EngineLoad(64, 100, 1000), Precision.of("bfloat16", gpu=True)
    assert GRAPHS in LocalClient.memory(shape, precision, {}, load)
    assert GRAPHS not in LocalClient.memory(replace(shape, name="GPT2LMHeadModel"), precision, {}, load)


@pytest.mark.parametrize(("dtype", "weight", "buckets"), [("float32", 4, 4), ("bfloat16", 2, 0)])
def test_buckets_of_ddp_stay_on_the_device(qwen, dtype, weight, buckets):
    """Gradients are views of the buckets. bf16 weights have none: their masters have the gradients, in fp32."""
    plan = qwen("1.5B", 2, 80 * GIB, COHOST | {"model.dtype": dtype})
    parameters = plan.models.policy.parameters
    for phase in plan.phases[1:]:
        assert phase.parts.get("gradient buckets", 0) == buckets * parameters
    assert plan.phases[-1].parts.get("gradients", 0) == (4 - buckets) * parameters
    assert plan.phases[0].parts["weights of all models"] == (weight + buckets) * parameters
    for devices, shard in ((1, None), (2, "fsdp2")):
        keys = COHOST | {"model.dtype": dtype, "backend.shard": shard}
        sharded = qwen("1.5B", devices, 80 * GIB, keys)
        assert not any("gradient buckets" in phase.parts for phase in sharded.phases)


def test_a_server_without_room_for_a_sequence_does_not_fit(qwen):
    keys = COHOST | {"model.lora.rank": 2, "training.max_tokens_per_batch": 2048}
    small, large = (qwen("7B", 1, size * GIB, keys) for size in (20, 24))
    assert small.peak.total <= small.room and small.served == 0
    assert not small.fits
    assert large.fits and large.served > 0


def test_offload_counts_in_the_memory_of_the_machine(qwen):
    zero = {"name": "deepspeed", "zero_stage": 2}
    plan = qwen("1.5B", 1, 24 * GIB, COHOST | {"backend": zero})
    waiting = plan.host.parts["models while the server has the device"]
    assert waiting == 14 * plan.models.policy.parameters  # bf16 weights, fp32 masters and two moments
    assert plan.host.total == waiting + plan.host.parts[VERSIONS]
    away = qwen("1.5B", 1, 24 * GIB, COHOST | {"backend": {**zero, "offload_optimizer": True}})
    assert away.host.parts["offloaded"] == 16 * away.models.policy.parameters  # and gradients
    shared = {"backend": {"name": "torch", "shard": "fsdp2", "cpu_offload": True}}
    sharded = qwen("1.5B", 2, 24 * GIB, shared)
    assert sharded.host.total == 16 * sharded.models.policy.parameters / 2
    assert not qwen("1.5B", 1, 24 * GIB, {}).host.total
    assert not qwen("1.5B", 1, 24 * GIB, COHOST | {"model.device": "cpu"}).host.total


@pytest.mark.parametrize(("keys", "versions"), [
    ({}, 3),
    ({"sync.keep": 3}, 4),
    ({"sync.dir": "weights"}, 0),
    ({"inference": {"name": "sglang", "url": "http://10.0.0.7:30000"}}, 0),
    ({"inference": {"name": "sglang"}, "sync.name": "distributed"}, 0),
    ({"inference": {"name": "local"}}, 0),
])  # fmt: skip
def test_versions_of_the_weights_take_shared_memory(qwen, keys, versions):
    plan = qwen("1.5B", 2, 24 * GIB, COHOST | keys)
    assert 2 * plan.host.parts.get(VERSIONS, 0) == versions * 2 * plan.models.policy.parameters


def test_configurations_name_the_planned_memory_of_the_machine(qwen):
    configs = Path(rl4llm.__file__).parents[1] / "configs"
    keys = yaml.safe_load((configs / "math_24gb_full.yaml").read_text())
    planned = qwen("1.5B", 1, 24 * GIB, {name: keys[name] for name in ("backend", "inference")} | COHOST)
    needed = round((planned.host.total - planned.host.parts[VERSIONS]) / GIB)
    for page in ("math_24gb_full.yaml", "README.md"):
        found = re.findall(r"holds about (\d+) GiB", (configs / page).read_text())
        assert found == [str(needed)], page


def test_a_plan_warns_if_this_machine_lacks_memory_for_offload(qwen):
    plan = qwen("1.5B", 4, 24 * GIB, COHOST)
    assert plan.host_memory is None  # of another machine
    forced = 4 * (plan.host.total - plan.host.parts[VERSIONS])
    for memory, warns in ((forced - 1, True), (forced, False), (5 * plan.host.total, False)):
        assert ("warning: " in " ".join(verdict(replace(plan, host_memory=memory), []))) is warns


@pytest.fixture
def plan(small, tmp_path, capsys):
    """plan(*words): the exit code of the command, and what it printed."""

    def run(*words):
        (tmp_path / "run.yaml").write_text("{}")
        code = main(["plan", str(tmp_path / "run.yaml"), *_words(small()), *words])
        return code, capsys.readouterr().out

    return run


def test_a_plan_for_another_machine_is_for_its_gpu(plan):
    for device, kind, room in (("auto", "cuda", 0.9), ("cuda:0", "cuda:0", 0.9), ("cpu", "cpu", 1)):
        code, printed = plan("--device-memory", "24GiB", "--json", f"model.device={device}")
        report = json.loads(printed)
        assert code == 0 and report["device"]["kind"] == kind and report["room"] == int(room * 24 * GIB)


def test_a_gpu_by_name_has_the_memory_that_it_reports(plan):
    code, printed = plan("--gpu", "T4", "--json")
    assert code == 0 and json.loads(printed)["device"]["bytes"] == 15 * GIB
    for words in (("t5",), ("t4", "--device-memory", "24GiB")):
        with pytest.raises(SystemExit):
            plan("--gpu", *words)


ONE_CARD = {
    "gsm8k_grpo": Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ),
    "qwen3_8b_24gb": Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    ),
    "llama31_8b_16gb": LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131_072, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ),
    "qwen25_1_5b_24gb": Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_CARD)
def test_configurations_for_one_card_fit_as_the_page_says(tmp_path, name):
    """The page has the peak of each for prompts of 200 tokens, and the cards that it fits, in order of their memory."""
    ONE_CARD[name].save_pretrained(tmp_path)
    root = Path(rl4llm.__file__).parents[1]
    (file,) = (root / "configs").rglob(f"{name}.yaml")
    config = load_config(file, {"model.path": str(tmp_path)})
    plans = {gpu: make_plan(on_target(config, 1), 1, size * 2**20, 200) for gpu, size in GPUS.items()}
    smallest = min((gpu for gpu in plans if plans[gpu].fits), key=GPUS.__getitem__)
    peak = plans[smallest].peak
    row = re.search(rf"^\| \[`{name}.yaml`\].*", (root / "docs" / "one_card.md").read_text(), re.MULTILINE)[0]
    assert row.endswith(f"| {peak.total / GIB:.1f} GiB, {peak.name} | `{smallest}` |")


def test_an_evaluation_that_needs_more_than_a_rollout_is_a_phase(small):
    def names(overrides):
        return [phase.name for phase in make_plan(small(overrides)).phases]

    few = {"rollout.prompts": 1, "eval.every": 1}
    assert "evaluation" in names(few | {"eval.limit": 8})
    assert "evaluation" not in names(few | {"eval.limit": 4})


def test_an_adapter_is_proposed_with_a_learning_rate_that_learns(small):
    plan = make_plan(small({"training.lr": 1e-6}))
    proposed = [keys for keys in _candidates(plan) if "model.lora.rank" in keys]
    assert [keys["training.lr"] for keys in proposed] == [1e-5]


@pytest.mark.parametrize(("heads_of_full_layers", "widest"), [
    ({"global_head_dim": 64}, (4, 2, 64)),
    ({"global_head_dim": 16, "num_global_key_value_heads": 1}, (4, 2, 32)),
])  # fmt: skip
def test_a_model_whose_layers_differ_is_planned_with_its_widest(tmp_path, heads_of_full_layers, widest):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Gemma4TextConfig(
        **sizes, num_key_value_heads=2, head_dim=32, layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
        attention_k_eq_v=True, architectures=["Gemma4ForCausalLM"], **heads_of_full_layers,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == widest


def test_sizes_are_read_as_people_write_them():
    assert size("24GiB") == size("24 gib") == 24 * GIB
    assert size("1.5GB") == 1_500_000_000
    for text in ("24", "GiB", "1.2.3GB", "-1GiB"):
        with pytest.raises(ValueError):
            size(text)


def test_plan_exits_with_1_if_the_run_does_not_fit(plan):
    code, printed = plan("--json")
    report = json.loads(printed)
    assert code == 0 and report["fits"]
    assert report["phases"][report["peak"]["phase"]]["total"] == report["peak"]["bytes"]
    code, printed = plan("--device-memory", "1MiB", "model.device=cpu")
    assert code == 1 and "max_tokens_per_batch" in printed
    for mistake in ("--devices=0", "rollout.max_staleness=1"):
        assert plan(mistake)[0] == 2

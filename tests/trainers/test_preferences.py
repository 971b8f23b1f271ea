"""Training on pairs, labels and worlds: it learns what it is shown, however batches are cut, and one run follows another."""

import math
import os
import random
import signal

import pytest
import torch
from ended_runs import metrics
from sweeps import sampled
from vowels import Vowels, prompts

from rl4llm import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from rl4llm.api import PolicyTrainer
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.backends.tiny import build_model, build_tokenizer, save_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.config import load_config
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, DataError, ModelError
from rl4llm.core.types import ChatMessage
from rl4llm.data.demonstrations import demonstration
from rl4llm.data.render import Renderer
from rl4llm.data.template import decode
from rl4llm.extensions.judges.reward_model import LearnedReward
from rl4llm.rewards import RewardFailure, weighted_sum
from rl4llm.rewards.scoring import score

QUIET = {"checkpoint": {"every": 0}, "tracking": {"tensorboard": False}, "deterministic": True}
LETTERS = "aeioubcdfghjklmnpqrstvwxyz ,.?!"


def vowels(text):
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def text(choose):
    share = choose.random()
    letters = (
        choose.choice("aeiou") if choose.random() < share else choose.choice(LETTERS) for _ in range(99)
    )
    return "".join(letter for letter, _ in zip(letters, range(choose.randint(3, 8)), strict=False))


def pairs(count, seed, apart=0.25):
    """Return two strings; the one with more vowels is preferred."""
    choose, found = random.Random(seed), []
    while len(found) < count:
        rejected, chosen = sorted((text(choose), text(choose)), key=vowels)
        if vowels(chosen) - vowels(rejected) > apart and rejected.strip():
            found.append({"prompt": f"Say {choose.randint(0, 9)}.", "chosen": chosen, "rejected": rejected})
    return found


def labels(count, seed):
    """Return strings; those with many vowels are good."""
    sides = [("chosen", "rejected")[number % 2] for number in range(count)]
    rows = zip(pairs(count, seed), sides, strict=True)
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"} for row, side in rows
    ]


def conversations(count, seed=0):
    choose = random.Random(seed)
    roles = ("user", "assistant", "user", "assistant")
    return [{"messages": [{"role": role, "content": text(choose)} for role in roles]} for _ in range(count)]


class OnlineDPOTrainer(PolicyTrainer):
    algorithm = "online_dpo"


def make(kind, model, dataset, directory, **overrides):
    options = {**QUIET, "max_steps": 1, "training": {"lr": 1e-3}, **overrides}
    return kind(str(model), dataset, output={"dir": str(directory)}, **options)


def column(directory, key, name="metrics.jsonl"):
    return [row[key] for row in metrics(directory, name) if key in row]


KINDS = {
    "sft": (SFTTrainer, conversations(8), {}),
    "world": (SFTTrainer, conversations(8), {"algorithm": {"learn": "context"}}),
    "dpo": (DPOTrainer, pairs(8, 0), {"algorithm": {"nll_coef": 0.1}}),
    "ipo": (DPOTrainer, pairs(8, 0), {"algorithm": {"loss": "ipo", "length_normalized": True, "beta": 1.0}}),
    "kto": (KTOTrainer, labels(8, 0), {}),
    "reward_model": (RewardTrainer, [row | {"margin": 0.5} for row in pairs(8, 0)], {}),
    "online_dpo": (OnlineDPOTrainer, prompts(4), {"reward_functions": [Vowels()]}),
}


def parameters(backend):
    own = dict(backend.model.named_parameters())
    if backend.value_head is not None:
        own |= {f"value_head.{name}": tensor for name, tensor in backend.value_head.named_parameters()}
    return own


@torch.no_grad()
def move(backend, size):
    for number, tensor in enumerate(parameters(backend).values()):
        tensor += size * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))


def gradient(model, directory, name, **overrides):
    """Return the gradient of one step's loss, of a policy that differs from its reference."""
    kind, dataset, options = KINDS[name]
    options = options | {
        "rollout": {"prompts": 8 if name != "online_dpo" else 4, "group_size": 4, "max_tokens": 6}
    }
    run = make(kind, model, overrides.pop("dataset", dataset), directory, **(options | overrides))
    loop = run.trainer
    move(loop.backend, 0.02)
    # further off, so that KTO's estimate of the divergence is not below 0
    if loop.preparation.reference is not None:
        move(loop.preparation.reference, 0.06)
    loop.publish()
    parts = [
        loop.backend.forward_backward(batch, **loop.objective(update))
        for update in loop.prepare(loop.collect())
        for batch in update.batches
    ]
    loop.close()
    return {
        name: tensor.grad.clone()
        for name, tensor in parameters(loop.backend).items()
        if tensor.grad is not None
    }, parts


def assert_same(found, expected):
    assert any(tensor.abs().max() > 1e-4 for tensor in expected.values())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-4, msg=name)


# IPO has the pairs of DPO, and a world model reads what SFT reads
@pytest.mark.parametrize("name", sampled(KINDS, lambda name: name not in ("ipo", "world")))
def test_packing_does_not_change_the_gradient_or_the_metrics(name, model_dir, tmp_path, sweep):
    def computed(layout, budget):
        training = {"lr": 1e-3, "layout": layout, "max_tokens_per_batch": budget}
        return gradient(model_dir, tmp_path / f"{layout}{budget}", name, training=training)

    def means(parts):
        named = [key for key in parts[0] if key.endswith("/weighted")]
        return {key: sum(part[key] for part in parts) for key in ("loss", *named)}

    expected, whole = computed("sorted", 4096)
    assert len(whole) == 1
    for layout, budget in (
        ("sorted", 64),
        ("packed", 64),
        ("shared", 64),
        *((("packed", 4096), ("shared", 4096)) if sweep else ()),
    ):
        found, parts = computed(layout, budget)
        assert_same(found, expected)
        assert means(parts) == pytest.approx(means(whole), abs=1e-5)
        assert len(parts) > 1 or budget > 64


@pytest.mark.parametrize(
    "name",
    sampled(["sft", "world", "dpo", "ipo", "kto", "reward_model"], ["sft", "dpo", "kto", "reward_model"]),
)
def test_neither_order_nor_repetition_changes_the_gradient(name, model_dir, tmp_path):
    rows = KINDS[name][1]
    order = {"data.shuffle": False}
    expected, parts = gradient(model_dir, tmp_path / "a", name, **order)
    assert name != "kto" or parts[0]["kto/kl"] > 0
    found, _ = gradient(model_dir, tmp_path / "b", name, dataset=rows[::-1], **order)
    assert_same(found, expected)
    once, _ = gradient(model_dir, tmp_path / "c", name, dataset=rows[:4], rollout={"prompts": 4}, **order)
    twice, _ = gradient(model_dir, tmp_path / "d", name, dataset=rows[:4], rollout={"prompts": 8}, **order)
    assert_same(twice, once)


def test_the_online_loss_is_a_mean_over_pairs(model_dir, tmp_path):
    _, _, options = KINDS["online_dpo"]
    rollout = {"prompts": 4, "group_size": 6, "max_tokens": 6}
    loop = make(OnlineDPOTrainer, model_dir, prompts(4), tmp_path, rollout=rollout, **options).trainer
    loop.publish()
    (update,) = loop.prepare(loop.collect())
    weights = torch.cat([batch.weights_BT[batch.mask_BT] for batch in update.batches])
    credits = torch.cat([batch.credits_BT[batch.mask_BT] for batch in update.batches])
    assert weights.sum() == pytest.approx(1)
    assert weights[credits > 0].sum() == pytest.approx(0.5)
    assert credits.unique().tolist() == [-1.0, 1.0]
    loop.close()


def test_held_out_rows_are_measured_and_train_nothing(model_dir, tmp_path):
    def nll(name, dataset, held_out, every=1):
        options = {"eval": {"every": every}, "eval_dataset": held_out, "max_steps": 2}
        run = make(SFTTrainer, model_dir, dataset, tmp_path / name, **options).train()
        weights[name] = torch.cat([tensor.flatten() for _, tensor in run.trainer.backend.weights()])
        return column(tmp_path / name, "nll", "eval.jsonl")[0] if every else None

    weights, rows = {}, [conversations(4, seed) for seed in range(3)]
    first = nll("first", rows[0], rows[1])
    assert nll("other rows", rows[2], rows[1]) == first != nll("other held-out rows", rows[0], rows[2])
    nll("unmeasured", rows[0], None, every=0)
    assert torch.equal(weights["first"], weights["other held-out rows"])
    assert torch.equal(weights["first"], weights["unmeasured"])
    assert not torch.equal(weights["first"], weights["other rows"])


@pytest.mark.parametrize("name", ["sft", "dpo", "ipo", "reward_model"])
def test_held_out_loss_is_the_mean_of_single_rows(name, model_dir, tmp_path):
    kind, rows, options = KINDS[name]
    if name == "sft":
        options = {"algorithm": {"aggregation": "sequence"}}
    options = options | {
        "training": {"max_tokens_per_batch": 128},
        "eval_dataset": rows,
        "eval": {"every": 1},
    }
    run = make(kind, model_dir, rows, tmp_path, **options)
    with run.trainer as loop:
        move(loop.backend, 0.06)
        held_out, found = loop.held_out, []
        loop.tracker.measured = lambda step, metrics: found.append(metrics["loss"])
        for measured in (held_out, *([row] for row in held_out)):
            loop.held_out = measured
            loop.evaluate()
    assert found[0] == pytest.approx(sum(found[1:]) / len(held_out), rel=1e-5)
    assert max(found) - min(found) > 1e-3


def test_dpo_prefers_the_chosen_answers_of_pairs_it_has_not_seen(model_dir, tmp_path):
    options = {
        "rollout": {"prompts": 16},
        "max_steps": 30,
        "eval": {"every": 30},
        "eval_dataset": pairs(64, 1),
    }
    make(DPOTrainer, model_dir, pairs(480, 0), tmp_path, **options).train()
    accuracy, margin = (column(tmp_path, f"dpo/{key}", "eval.jsonl") for key in ("accuracy", "margin"))
    assert (accuracy[0], margin[0]) == (0.0, 0.0)
    assert accuracy[-1] > 0.85
    assert margin[-1] > 0.3
    assert column(tmp_path, "eval/dpo/accuracy") == accuracy
    assert column(tmp_path, "dpo/margin")[-1] > 0.3


@pytest.mark.parametrize("moved", ["policy", "reference"])
def test_ktos_divergence_is_never_below_zero(moved, model_dir, tmp_path):
    """The estimate of one side moved alone is the other's with the opposite sign."""
    loop = make(KTOTrainer, model_dir, labels(8, 0), tmp_path, rollout={"prompts": 8}).trainer
    move({"policy": loop.backend, "reference": loop.preparation.reference}[moved], 0.06)
    parts = [
        loop.backend.forward_backward(batch, **loop.objective(update))
        for update in loop.prepare(loop.collect())
        for batch in update.batches
    ]
    loop.close()
    divergence = parts[0]["kto/kl"]
    assert divergence == 0 if moved == "policy" else divergence > 0.1


def test_kto_tells_good_answers_it_has_not_seen_from_bad_ones(model_dir, tmp_path):
    options = {
        "rollout": {"prompts": 16},
        "max_steps": 30,
        "eval": {"every": 30},
        "eval_dataset": labels(64, 1),
    }
    make(KTOTrainer, model_dir, labels(480, 0), tmp_path, **options).train()
    assert column(tmp_path, "loss", "eval.jsonl")[0] == pytest.approx(0.5)
    assert column(tmp_path, "loss", "eval.jsonl")[-1] < 0.45
    assert column(tmp_path, "kto/margin", "eval.jsonl")[-1] > 0.2
    assert max(column(tmp_path, "kto/kl")) > 0


def test_online_dpo_raises_the_reward_of_an_environment(model_dir, tmp_path):
    rollout = {"prompts": 4, "group_size": 16, "max_tokens": 8}
    options = {"rollout": rollout, "max_steps": 25, "training": {"lr": 5e-3}, "reward_functions": [Vowels()]}
    make(OnlineDPOTrainer, model_dir, prompts(8), tmp_path, **options).train()
    rewards = column(tmp_path, "reward/mean")
    assert sum(rewards[-3:]) / 3 > 0.5 > 0.2 > rewards[0]


def test_a_reward_model_ranks_new_pairs_and_teaches_a_policy(model_dir, tmp_path):
    options = {"rollout": {"prompts": 16}, "training": {"lr": 5e-3}, "max_steps": 30}
    options |= {"eval": {"every": 30}, "eval_dataset": pairs(128, 1)}
    make(RewardTrainer, model_dir, pairs(480, 0), tmp_path / "rm", **options).train()
    assert column(tmp_path / "rm", "rm/accuracy", "eval.jsonl")[-1] > 0.9

    rewards = [{"name": "reward_model", "path": str(tmp_path / "rm")}, Vowels()]  # the second is only watched
    transform = weighted_sum({"reward_model": 1.0, "vowels": 0.0})
    rollout = {"prompts": 4, "group_size": 16, "max_tokens": 8}
    options = {"rollout": rollout, "max_steps": 14, "training": {"lr": 8e-3}}
    options |= {"reward_functions": rewards, "reward_transform_fn": transform}
    make(GRPOTrainer, model_dir, prompts(8), tmp_path / "grpo", **options).train()
    learned, seen = (column(tmp_path / "grpo", f"reward/{name}") for name in ("reward_model", "vowels"))
    assert learned[-1] > learned[0] + 1
    assert sum(seen[-3:]) / 3 > 0.4 > 0.2 > seen[0]


def test_a_reward_model_learns_the_margin_of_a_row(model_dir, tmp_path):
    def loss(margin):
        rows = [row | {"margin": margin} for row in pairs(1, 0)]
        make(RewardTrainer, model_dir, rows, tmp_path / f"{margin}", rollout={"prompts": 1}).train()
        return column(tmp_path / f"{margin}", "loss")[0]

    difference = -math.log(math.expm1(loss(0.0)))
    assert loss(2.0) == pytest.approx(math.log1p(math.exp(2.0 - difference)), rel=1e-5)


def test_a_reward_model_gives_the_scores_of_its_training(model_dir, tmp_path):
    rows = pairs(8, 0)
    run = make(
        RewardTrainer, model_dir, rows, tmp_path, max_steps=5, rollout={"prompts": 8}, training={"lr": 3e-3}
    ).train()
    loop = run.trainer
    groups = [loop.read(row, row["prompt_id"]) for row in loop.dataset]
    trained = []
    for update in loop.measuring.prepare(groups, 0).updates:
        for batch in update.batches:
            values_BT, mask_BT = loop.backend.forward(batch), batch.mask_BT
            trained += sorted(values_BT[mask_BT].tolist())
    reward = LearnedReward(str(tmp_path), max_tokens_per_batch=64)
    samples = []
    for row in loop.dataset:
        prompt = [ChatMessage.from_dict(message) for message in row["messages"]]
        for side in ("chosen", "rejected"):
            sample = SampleState(row["prompt_id"], 0, list(prompt), None)
            sample.messages += [ChatMessage.from_dict(message) for message in row[side]]
            samples.append(sample)
    scored = reward.score_batch(samples)
    assert sorted(scored) == pytest.approx(sorted(trained), abs=1e-5)
    assert max(scored) - min(scored) > 0.1
    thanks = [ChatMessage("user", "Thanks.")]  # what follows on the last answer is not judged
    alone = [reward([*sample.messages, *thanks], None) for sample in samples]
    assert alone == pytest.approx(scored, abs=1e-5)


def test_a_reward_model_of_padded_rows_reads_them(model_dir, tmp_path, monkeypatch):
    make(RewardTrainer, model_dir, pairs(4, 0), tmp_path, rollout={"prompts": 4}).train()
    segments, forward = [], TorchBackend.forward

    def watched(self, batch, **options):
        segments.append(int(batch.segment_ids_BT.max()))
        return forward(self, batch, **options)

    monkeypatch.setattr(TorchBackend, "layout", lambda self, layout: "sorted")
    monkeypatch.setattr(TorchBackend, "forward", watched)
    prompt = ChatMessage("user", "Say 1.")
    samples = [SampleState("p", number, [prompt], None) for number in range(4)]
    for sample in samples:
        sample.messages.append(ChatMessage("assistant", "a e"))
    LearnedReward(str(tmp_path)).score_batch(samples)
    assert segments == [1]


def test_a_conversation_too_long_for_a_reward_model_is_skipped(model_dir, tmp_path):
    make(RewardTrainer, model_dir, pairs(4, 0), tmp_path, rollout={"prompts": 4}).train()
    reward = LearnedReward(str(tmp_path))
    conversation = [ChatMessage("user", "Say 1."), ChatMessage("assistant", "a e " * 600)]
    long, short = (SampleState(name, 0, conversation[:1], None) for name in ("long", "short"))
    long.messages, short.messages = conversation, [conversation[0], ChatMessage("assistant", "a")]
    scores = score([long, short], [reward])
    assert "tokens for the reward model, whose context is 512" in long.failure
    assert short.failure is None
    assert scores.reward.isnan().tolist() == [True, False]
    with pytest.raises(RewardFailure):
        reward(conversation, None)


def test_a_reward_model_renders_as_in_its_training(model_dir, tmp_path):
    make(RewardTrainer, model_dir, pairs(4, 0), tmp_path, rollout={"prompts": 4}).train()
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{ opening }}" + template.read_text())
    tokenizer = load_tokenizer(tmp_path)
    special, args = tokenizer.eos_token, {"opening": "Shown."}
    asked = [ChatMessage("user", f"Say {special} 1."), ChatMessage("assistant", "a")]
    reward = LearnedReward(str(tmp_path), template_args=args, special_tokens="allow")
    expected = Renderer(tokenizer, roles=(), template_args=args, special_tokens="allow")
    whole = demonstration(expected, asked, "")
    read = reward._read("", asked, 0, {})
    assert read.spans[0].token_ids == whole.spans[0].token_ids
    plain = LearnedReward(str(tmp_path))._read("", asked, 0, {})
    stop = tokenizer.eos_token_id
    assert read.spans[0].token_ids.count(stop) == plain.spans[0].token_ids.count(stop) + 1
    assert decode(tokenizer, read.spans[0].token_ids).startswith("Shown.")
    with_tools = reward._read("", asked, 0, {"tools": [{"function": {"name": "weather"}}]})
    assert "weather" in decode(tokenizer, with_tools.spans[0].token_ids)


def test_a_reward_model_needs_a_score(model_dir):
    with pytest.raises(ModelError):
        LearnedReward(str(model_dir))
    with pytest.raises(ModelError, match=r"rewards\.judge\.path='/nowhere'"):
        LearnedReward("/nowhere", "judge")


def test_a_world_model_predicts_the_environment_better(model_dir, tmp_path):
    """The environment echoes the assistant's message, which is random."""

    def echoes(count, seed):
        choose, found = random.Random(seed), []
        for _ in range(count):
            said = choose.choice("abcdef")
            messages = [("user", "Go."), ("assistant", said), ("user", f"{said}{said}!"), ("assistant", said)]
            found.append({"messages": [{"role": role, "content": content} for role, content in messages]})
        return found

    options = {"rollout": {"prompts": 16}, "max_steps": 72, "training": {"lr": 5e-3}, "eval": {"every": 72}}
    options |= {"eval_dataset": echoes(32, 1), "algorithm": {"learn": "context"}}
    make(SFTTrainer, model_dir, echoes(1152, 0), tmp_path, **options).train()
    before, after = column(tmp_path, "nll", "eval.jsonl")
    assert before > 5
    assert after < 0.1  # a guess at the echo would cost 0.15 a token


def test_one_method_continues_from_the_model_of_another(model_dir, tmp_path):
    """Train SFT, DPO and GRPO, each from the run directory of the one before."""
    answers = [{"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}
               for row in pairs(240, 0)]  # fmt: skip
    options = {"max_steps": 30, "training": {"lr": 4e-3}, "rollout": {"prompts": 8}}
    make(SFTTrainer, model_dir, answers, tmp_path / "sft", **options).train()
    make(
        DPOTrainer, tmp_path / "sft", pairs(160, 1), tmp_path / "dpo", max_steps=10, rollout={"prompts": 8}
    ).train()
    rollout = {"prompts": 4, "group_size": 8, "max_tokens": 8}
    options = {"rollout": rollout, "max_steps": 5, "reward_functions": [Vowels()]}
    make(GRPOTrainer, tmp_path / "dpo", prompts(8), tmp_path / "grpo", **options).train()
    make(GRPOTrainer, model_dir, prompts(8), tmp_path / "fresh", **options).train()
    assert column(tmp_path / "sft", "nll")[-1] < column(tmp_path / "sft", "nll")[0] - 1
    # its reference is SFT's model
    assert column(tmp_path / "dpo", "loss")[0] == pytest.approx(math.log(2), abs=1e-4)
    assert column(tmp_path / "grpo", "reward/mean")[0] > column(tmp_path / "fresh", "reward/mean")[0] + 0.1


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward_model"])
def test_epochs_are_passes_over_the_rows_and_resume(name, model_dir, tmp_path):
    kind, rows, options = KINDS[name]
    training = {"lr": 1e-3, "schedule": "linear", "epochs": 2}

    def run(directory, stop=None, **limit):
        fixed = {
            "rollout": {"prompts": 4},
            "training": training,
            "output": {"dir": str(tmp_path / directory)},
        }
        run = kind(str(model_dir), rows, **QUIET, **options, **fixed, **limit)
        collect = run.trainer.collect

        def seen():
            if run.trainer.step + 1 == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            step = collect()
            draws.extend(group.prompt_id for group in step.groups)
            return step

        run.trainer.collect = seen
        return run.train().trainer.backend

    draws = []
    whole = run("whole")
    first, second = draws[:8], draws[8:]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 8
    assert column(tmp_path / "whole", "lr") == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    draws.clear()
    run("parts", stop=3)
    assert len(draws) == 12  # in the second pass
    parts = run("parts")
    assert draws == first + second
    for (tensor, one), (_, other) in zip(whole.weights(), parts.weights(), strict=True):
        assert torch.equal(one, other), tensor
    assert column(tmp_path / "whole", "loss") == column(tmp_path / "parts", "loss")
    assert load_config(tmp_path / "parts" / "config.yaml").max_steps == 4
    run("short", max_steps=1)
    assert len(column(tmp_path / "short", "loss")) == 1


def distill(model, teacher, directory, **overrides):
    options = {
        "rollout": {"prompts": 8, "group_size": 4, "max_tokens": 8},
        "reward_functions": [Vowels()],
        **overrides,
    }
    options["algorithm"] = {"name": "distill", "teacher_path": str(teacher), **options.pop("distill", {})}
    return make(GRPOTrainer, model, prompts(8), directory, **options)


DIVERGENCES = [
    {},
    {"divergence": "forward", "top_k": 8},
    {"divergence": "reverse"},
    {"divergence": "jensen_shannon"},
]


@pytest.mark.parametrize("how", DIVERGENCES, ids=lambda case: case.get("divergence", "sampled"))
def test_distillation_brings_the_student_closer_to_its_teacher(how, model_dir, tmp_path):
    """Measured on what the student itself says: the reverse divergence, in nats per token."""
    answers = [
        {"messages": [*row["messages"], {"role": "assistant", "content": "aeiou"}]} for row in prompts(8)
    ]
    options = {"training": {"lr": 5e-3}}
    make(
        SFTTrainer, model_dir, answers, tmp_path / "teacher", rollout={"prompts": 8}, max_steps=15, **options
    ).train()
    student = tmp_path / "student"
    distill(model_dir, tmp_path / "teacher", student, max_steps=20, distill=how, **options).train()
    kl = column(tmp_path / "student", "teacher_kl")
    assert kl[0] > 1
    assert sum(kl[-3:]) / 3 < 0.75 * kl[0]


def test_padding_of_a_teacher_is_not_among_its_top_tokens(model_dir, tmp_path):
    model = load_model(model_dir)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8)
    model.save_pretrained(tmp_path / "padded")
    load_tokenizer(model_dir).save_pretrained(tmp_path / "padded")
    options = {"distill": {"divergence": "forward", "top_k": size}, "max_steps": 1}
    distill(model_dir, tmp_path / "padded", tmp_path / "run", **options).train()
    (mass,) = column(tmp_path / "run", "teacher_mass")
    assert mass == pytest.approx(1)


def test_a_teacher_with_other_tokens_is_refused_before_the_run(model_dir, tmp_path):
    tokenizer = build_tokenizer(["some other words, so other tokens"] * 9, vocab_size=300)
    save_model(build_model(tokenizer, seed=1, hidden_size=32, num_layers=1), tokenizer, tmp_path / "other")
    with pytest.raises(ConfigError):
        distill(model_dir, tmp_path / "other", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unusable_pairs_are_refused_before_anything_is_written(model_dir, tmp_path):
    rows, mixed = pairs(4, 0), labels(4, 0)
    cases = [
        (DPOTrainer, [{"prompt": "p", "chosen": "a"}], {}, DataError),
        (DPOTrainer, rows, {"reward_functions": [Vowels()]}, ConfigError),
        (DPOTrainer, rows, {"algorithm": {"aggregation": "token"}}, ConfigError),
        (DPOTrainer, [rows[0] | {"chosen": "a e " * 600}], {}, DataError),
        (RewardTrainer, [rows[0] | {"margin": -2.0}], {}, DataError),
        (KTOTrainer, mixed, {"rollout": {"prompts": 1}}, ConfigError),
        (KTOTrainer, [{"prompt": "p", "completion": "a"}], {}, DataError),
        (KTOTrainer, [row | {"label": True} for row in mixed], {}, DataError),
        (KTOTrainer, mixed, {"data": {"limit": 1}}, DataError),
        (SFTTrainer, rows, {}, DataError),
    ]
    for number, (kind, dataset, overrides, error) in enumerate(cases):
        with pytest.raises(error):
            make(kind, model_dir, dataset, tmp_path / str(number), **overrides)
        assert not (tmp_path / str(number)).exists(), number

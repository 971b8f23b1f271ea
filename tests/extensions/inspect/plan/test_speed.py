"""What `rl4llm plan` estimates of a rollout on a GPU."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config

from rl4llm.cli import main
from rl4llm.config import load_config
from rl4llm.extensions.inspect.plan.plan import make_plan, on_target
from rl4llm.extensions.inspect.plan.speed import (
    CAPTURED,
    CARDS,
    CLEARLY,
    LAUNCHED,
    SERVER,
    NotEstimated,
    RolloutTime,
    estimate,
    find_card,
    step_s,
)

ROUND = {"parameters": 1_500_000_000, "vocabulary": 150_000, "layers": 28, "kv_heads": 2, "head_dim": 128}


@pytest.fixture(scope="module")
def words(tokenizer, tmp_path_factory):
    """Return the arguments of a plan for a model of 1.5B. Only its config exists."""
    directory = tmp_path_factory.mktemp("qwen")
    Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(directory)  # fmt: skip
    tokenizer.save_pretrained(directory)
    keys = {"model.path": directory, "data.path": "arithmetic", "data.limit": 8, "eval.every": 0}
    keys |= {"model.dtype": "bfloat16", "model.gradient_checkpointing": "true", "rollout.max_tokens": 1000}
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="module")
def planned(words):
    """planned(*keys): a plan for 64 prompts x 8 answers of 1,000 tokens on one H100, with a model of round sizes."""

    def plan(*keys):
        config = load_config(None, [*words, *keys])
        made = make_plan(on_target(config, CARDS["H100"].memory), 1, CARDS["H100"].memory)
        counts = replace(made.counts, prompts=64, samples=8, prompt_tokens=100, new_tokens=1000)
        policy = replace(made.models.policy, **ROUND)
        return replace(made, counts=counts, models=replace(made.models, policy=policy))

    return plan


@pytest.mark.parametrize(
    ("kernels", "rows", "milliseconds"),
    [  # products, cache of 600 tokens a row, kernels, logits, the host
        (CAPTURED, 1, 1.0 + 0.0057344 + 0.932 + 0.0008 + 0.3),
        (LAUNCHED, 1, 1.0 + 0.0057344 + 5.616 + 0.0008),
        (SERVER, 1, 1.0 + 0.0057344 + 0.616 + 0.0008),
        (CAPTURED, 400, 2.0 + 2.29376 + 0.932 + 0.32 + 0.3),
        (SERVER, 400, 2.0 + 2.29376 + 0.616 + 0.32),
    ],
)
def test_a_step_takes_the_sum_computed_by_hand(planned, kernels, rows, milliseconds):
    """3 GB of weights and 3 GFLOP a row; 28,672 bytes of cache a token; 466, 936 or 308 kernels; 2.4 MB of logits a row."""
    card = CARDS["H100"]._replace(bandwidth=3e12, flops=600e12, kernel_s=2e-6, launch_s=6e-6)
    assert 1e3 * step_s(planned(), card, kernels, rows) == pytest.approx(milliseconds)


def test_a_rollout_takes_all_waves_of_its_longest_answer(planned):
    found = estimate(planned("inference.max_rows=200"), "H100", here=False)
    assert found.embedded[:3] == (200, 3, 1000)  # 512 sequences
    assert found.server[:3] == (512, 1, 1000)
    for decoding in (found.embedded, found.server):
        assert decoding.total_s == pytest.approx(decoding.waves * 1000 * decoding.step_s)


def test_the_memory_of_the_device_limits_the_rows_of_a_server(planned):
    plan = planned()
    sequence = 1100 * 28_672
    small = replace(plan, memory=int((3e9 + 100.5 * sequence) / 0.7))
    assert estimate(small, "H100", here=False).server[:2] == (100, 6)
    none = estimate(replace(plan, memory=int(3e9 / 0.7)), "H100", here=False)
    assert none == NotEstimated("H100", "a server has no room for one sequence beside its weights")


def test_a_server_is_advised_only_if_it_is_clearly_better(planned):
    quick, few = estimate(planned("inference.max_rows=512"), "H100", here=False), "inference.max_rows=64"
    assert quick.embedded.total_s < CLEARLY * quick.server.total_s
    assert len(list(quick.lines())) == 2
    slow = estimate(planned(few), "H100", here=False)
    first, _, advice = slow.lines()
    assert first.startswith("A rollout on H100 decodes for ") and "(8 x 64 rows, " in first
    ratio = slow.embedded.total_s / slow.server.total_s
    assert ratio > CLEARLY
    assert f"inference.name=local: a server would decode {ratio:.1f} times as fast" in advice
    assert "set inference.name=sglang" in advice and advice.endswith("or try inference.max_rows=512.")
    served = estimate(planned("inference.name=sglang"), "H100", here=False)
    assert len(list(served._replace(embedded=slow.embedded).lines())) == 2  # has one already
    assert "max_rows" not in list(slow._replace(embedded=slow.embedded._replace(waves=1)).lines())[-1]


def test_steps_that_are_not_captured_are_launched_by_the_host(planned):
    def embedded(path):
        return estimate(planned(f"inference.path={path}"), "H100", here=False).embedded.step_s

    assert embedded("auto") == embedded("graph")
    assert embedded("fast") == pytest.approx(embedded("graph") + 936 * 10.8e-6 - 466 * 3e-6 - 3e-4)


def test_a_plan_says_why_it_estimates_no_rollout(planned):
    plan = planned()
    other = replace(
        plan, models=replace(plan.models, policy=replace(plan.models.policy, name="GPT2LMHeadModel"))
    )
    exact = planned("model.dtype=float32", "model.autocast=none")
    for case, reason in (
        (exact, "products are in float32"),
        (other, "runs GPT2LMHeadModel with its own forward"),
        (planned("inference.path=model"), "runs Qwen2ForCausalLM with its own forward"),
    ):
        [line] = estimate(case, "H100", here=False).lines()
        assert line.startswith("How long a rollout decodes on H100 is not estimated: ") and reason in line


def test_nothing_is_estimated_without_rollouts_or_a_known_card(planned):
    plan = planned()
    trained = [phase for phase in plan.phases if phase.name != "rollout"]
    assert isinstance(estimate(plan, "H100", here=False), RolloutTime)
    assert estimate(replace(plan, phases=trained), "H100", here=False) is None
    assert estimate(plan, None, here=False) is None
    assert estimate(planned("model.device=cpu"), None, here=True) is None


@pytest.mark.parametrize(("words", "card"), [
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H200", "H200"),
    ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
    ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ("rtx-3090", "RTX-3090"),
    ("NVIDIA H100 PCIe", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("NVIDIA L40", None),
    ("", None),
])  # fmt: skip
def test_a_card_is_found_by_the_name_that_torch_gives(words, card):
    assert find_card(words) == card


def test_a_plan_for_this_machine_takes_the_card_in_sight(planned, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: asked.append(device.type) or "NVIDIA H200"
    )
    assert estimate(planned(), None, here=True).card == "H200"
    assert estimate(planned(), None, here=False) is None
    assert asked == ["cuda"]


def test_plan_prints_the_rollout_of_a_named_card(words, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("{}")
    assert main(["plan", str(file), *words, "--gpu", "H100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["device"]["bytes"] == CARDS["H100"].memory
    assert told["rollout"]["gpu"] == "H100" and told["rollout"]["server"]["total_s"] > 0
    assert main(["plan", str(file), *words, "--gpu", "H100", "--device-memory", "60GiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "60.00 GiB of each device" in said and "A rollout on H100 decodes for" in said
    main(["plan", str(file), *words, "--gpu", "H100", "model.dtype=float32", "model.autocast=none"])
    assert "on H100 is not estimated: products are in float32" in " ".join(capsys.readouterr().out.split())
    main(["plan", str(file), *words, "--device-memory", "80GiB"])
    assert "decodes for" not in capsys.readouterr().out
    for wrong, hint in (
        (["--gpu", "H10"], "Did you mean 'H100'?"),
        (["--gpu", "H100", "--time"], "not accepted with --gpu"),
        (["--gpu", "H100", "model.device=cpu"], "model.device='cpu'"),
    ):
        assert main(["plan", str(file), *words, *wrong]) == 2
        assert hint in capsys.readouterr().err

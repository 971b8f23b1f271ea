"""SmolLM2-135M-Instruct, a pretrained model: it is checked, evaluated, trained, killed, resumed and exported."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from downloads import smollm2
from forked_python import python, started
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import StaleWeightsError
from rl4llm.core.weights import WeightRef
from rl4llm.inference.local import LocalClient
from rl4llm.sync.verify import Canary

ROOT = Path(__file__).parent.parent
QUICK = (
    "eval.every=0", "rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=16", "training.warmup_steps=0",
    "checkpoint.every=0", "max_steps=2", "tracking.tensorboard=false",
    "rewards=[{name: length, unit: chars, max_length: 1, margin: 100}]",
)  # fmt: skip


def run(*arguments):
    done = python("-m", "rl4llm", *arguments, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def model():
    return smollm2()


@pytest.fixture(scope="module")
def sums(model, tmp_path_factory):
    """Return the arguments that name the shipped configuration, the model and the data."""
    data = tmp_path_factory.mktemp("sums")
    subprocess.run([sys.executable, ROOT / "examples" / "sums.py", data], check=True, capture_output=True)
    return [ROOT / "configs" / "recipes" / "sums" / "train.yaml", f"model.path={model}", f"data.path={data}"]


@pytest.fixture(scope="module")
def whole(sums, tmp_path_factory, sweep):
    """Return the directory of a run that nobody killed, with a second step in a sweep, which kills one after the first."""
    directory = tmp_path_factory.mktemp("whole")
    run("train", *sums, *QUICK, f"max_steps={1 + sweep}", "deterministic=true", f"output.dir={directory}")
    return directory


def mismatches(directory):
    """Return the mean mismatch of each step."""
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["mismatch/mean"] for row in rows if "mismatch/mean" in row]


def weights(directory):
    return load_file(directory / "model" / "model.safetensors")


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.sweep  # tests/extensions/inspect/check checks small models, the test of bf16 below the canary of this one
def test_every_check_passes_under_autocast(sums, tmp_path):
    sizes = ("rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=8")
    said = run("check", *sums, *sizes, "model.autocast=bfloat16", f"output.dir={tmp_path}")
    assert "All checks passed" in said


def test_it_solves_some_sums_before_training(sums, tmp_path):
    run("eval", *sums, "eval.limit=16", f"output.dir={tmp_path}", "--out", tmp_path / "answers.json")
    scores = json.loads((tmp_path / "answers.json").read_text())["scores"]
    assert 0 < scores["pass@1"]["value"] < 0.6


def test_engine_and_trainer_agree_in_float32(whole):
    assert 0 < max(mismatches(whole)) < 3e-5  # measured: 1.1e-5 and less


def test_bf16_rounding_is_no_stale_engine_swapped_layers_are(model):
    """Two forwards may agree on the first weights, where their kernels are the same, and round apart later."""
    loaded, tokenizer = load_model(model), load_tokenizer(model)
    backend = TorchBackend(loaded, lr=0.0, autocast="bfloat16")
    engine = LocalClient(loaded, tokenizer, path="fast", autocast="bfloat16")
    canary = Canary(engine.vocab_size, dtype="bfloat16")

    async def compare():
        await engine.load(WeightRef(0))
        canary.token_ids_BT = await canary.sample(engine)
        expected_BT, scores = canary.expected(backend), engine.score
        agreed = dict(zip(map(tuple, canary.token_ids_BT.tolist()), expected_BT.tolist(), strict=True))
        engine.score = lambda token_ids: asyncio.sleep(0, agreed[tuple(token_ids)])
        assert await canary.compare(expected_BT, engine, WeightRef(0)) == 0.0
        engine.score = scores
        assert 0.02 < await canary.compare(expected_BT, engine, WeightRef(0)) < 0.06
        layers = loaded.model.layers
        layers[10], layers[11] = layers[11], layers[10]
        await engine.load(WeightRef(0))
        with pytest.raises(StaleWeightsError, match="does not hold version 0"):
            await canary.compare(expected_BT, engine, WeightRef(0))

    asyncio.run(compare())


@pytest.mark.sweep  # tests/trainers/test_training.py resumes small models after each step
def test_a_run_killed_after_one_step_resumes_bit_for_bit(whole, sums, tmp_path):
    arguments = [*sums, *QUICK, "checkpoint.every=1", "deterministic=true", f"output.dir={tmp_path}"]
    with started("-m", "rl4llm", "train", *arguments) as killed:
        while not (tmp_path / "checkpoints" / "latest").exists():
            assert killed.process.is_alive()
            time.sleep(0.02)
    run("train", *arguments)
    assert_same(weights(tmp_path), weights(whole))


def test_an_exported_model_loads_in_plain_transformers(whole, model, tmp_path):
    run("export", whole, "--out", tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert_same(dict(exported.named_parameters()), {**dict(exported.named_parameters()), **weights(whole)})
    assert not torch.equal(
        next(exported.parameters()), load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    asked = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    ids = tokenizer.apply_chat_template(
        asked, continue_final_message=True, return_tensors="pt", return_dict=True
    )
    likeliest = exported(**ids).logits[0, -1].argmax()  # by far, so on every processor
    assert tokenizer.decode(likeliest) == " Paris"


@pytest.mark.sweep  # tests/extensions/servers/test_sglang.py trains small models through it
@pytest.mark.sglang
def test_two_steps_through_a_real_sglang_agree(sglang_python, model, sums, tmp_path, monkeypatch):
    from rl4llm.extensions.servers.launch import launch

    monkeypatch.delenv("PYTHONPATH")  # which has short_start: this server starts as it does for users
    flags = ["--model-path", str(model), "--port", "0", "--dtype", "float32"]
    with launch("sglang", flags, python=sglang_python, cpu=True, ready_within_s=600) as server:
        through = ("inference.name=sglang", f"inference.url={server.url}")
        run("train", *sums, *QUICK, *through, f"output.dir={tmp_path / 'run'}")
    assert max(mismatches(tmp_path / "run")) < 3e-5  # measured: 1.2e-5 and less

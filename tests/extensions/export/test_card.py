"""The model card: what hub and people read in it, and that its commands build the prompt of training."""

import json
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from rl4llm.backends.models import load_model
from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.extensions.export.card import model_card
from rl4llm.extensions.export.export import export
from rl4llm.tracking.tracker import read_jsonl

BASE_CARD = """---
license: other
license_name: small-1.0
license_link: LICENSE
base_model: someone/larger
---
# A model
"""
SYSTEM = 'It\'s "short":\n```\nAnswer: 4\n```'


@pytest.fixture
def base(model_dir, tmp_path):
    """Return a model directory whose card names a license and a base model."""
    directory = tmp_path / "base"
    shutil.copytree(model_dir, directory)
    (directory / "README.md").write_text(BASE_CARD)
    return directory


def trained(base, tmp_path, **keys):
    """Return the run and the exported directory after one step."""
    row = {"prompt": "QUESTION", "ground_truth": "4"} | keys.pop("row", {})
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    config = {
        "model": {"path": str(base), "autocast": "none"},
        "data": {"path": str(tmp_path / "rows.jsonl")} | keys.pop("data", {}),
        "rewards": [{"name": "length", "max_length": 9}],
        "eval": {"every": 0},
        "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 4, "stop": ["."]},
        "output": {"dir": str(tmp_path / "run")},
        "max_steps": 1,
    } | keys
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with build_trainer(load_config(tmp_path / "run.yaml")) as trainer:
        trainer.train()
    export(tmp_path / "run", tmp_path / "out")
    return tmp_path / "run", tmp_path / "out"


def blocks(card, language):
    return [
        text for _, text in re.findall(rf"^(`{{3,}}){language}\n(.*?)\n\1$", card, re.DOTALL | re.MULTILINE)
    ]


KEYS = {
    "system prompt": {"data": {"system_prompt": SYSTEM, "prompt_template": "Solve:\n{prompt}"}},
    "no system prompt": {},
    "system prompt of rows": {"row": {"system": SYSTEM}},
    "described tools": {"env": {"name": "tool"}, "data": {"system_prompt": SYSTEM}},
    "hidden tools": {"env": {"name": "tool", "describe_tools": False}},
    "template arguments": {"env": {"name": "chat", "template_args": {"enable_thinking": False}}},
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_commands_of_the_card_build_the_prompt_of_training(keys, base, tmp_path, monkeypatch):
    run, out = trained(base, tmp_path, **keys)
    card = (out / "README.md").read_text()
    monkeypatch.chdir(out)
    request = json.loads(blocks(card, "json")[0])
    scope = {"request": request}
    exec(blocks(card, "python")[0], scope)
    episode = next(iter(read_jsonl(run / "episodes" / "step-000001.jsonl")))
    assert scope["inputs"]["input_ids"][0].tolist() == episode["spans"][0]["token_ids"]
    assert (
        request["chat_template_kwargs"]
        if "template_args" in str(keys)
        else "chat_template_kwargs" not in request
    )
    assert bool(request.get("tools")) == (keys.get("env") == {"name": "tool"})
    assert (request["max_tokens"], request["temperature"], request["stop"]) == (4, 0.0, ["."])


def test_card_has_the_license_and_base_of_the_base_models_card(base, tmp_path):
    _, out = trained(base, tmp_path)
    metadata = ModelCard.load(out / "README.md").data.to_dict()
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rl4llm", "grpo"],
        "license": "other",
        "license_name": "small-1.0",  # the link is a file of another directory
        "base_model": "someone/larger",
    }


@pytest.mark.parametrize(
    "found", ["", "no front matter", "---\n- a list\n---\n", "---\na: [\n---\n", "---\nlicense: 3\n---\n"]
)
def test_a_license_that_is_not_stated_is_unknown(found, base, tmp_path):
    (base / "README.md").write_text(found)
    _, out = trained(base, tmp_path)
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "unknown" and "license is unknown" in card.text


def test_license_link_of_a_hub_model_leads_to_its_file():
    config = load_config(overrides={"model.path": "someone/model", "data.path": "arithmetic"})
    card = model_card(config, 1, base_card=yaml.safe_load(BASE_CARD.split("---")[1]))
    assert card.data.to_dict()["license_link"] == "https://huggingface.co/someone/model/blob/main/LICENSE"
    assert card.data.base_model == "someone/model"


def test_a_secret_in_a_prompt_stays_a_reference(base, tmp_path, monkeypatch):
    monkeypatch.setenv("DOOR_TOKEN", "sesame")
    run, out = trained(base, tmp_path, data={"system_prompt": "Say ${oc.env:DOOR_TOKEN}. password=sesame2"})
    assert "sesame" in (run / "episodes" / "step-000001.jsonl").read_text()  # the policy has read it
    card = (out / "README.md").read_text()
    assert "sesame" not in card and "Say ${oc.env:DOOR_TOKEN}." in card


def test_card_of_a_mixture_has_the_prompt_of_each_part(base, tmp_path):
    parts = {
        "one": {"data": {"path": str(tmp_path / "rows.jsonl"), "system_prompt": "First."}},
        "two": {"data": {"path": str(tmp_path / "rows.jsonl"), "system_prompt": "Second."}},
    }
    _, out = trained(base, tmp_path, parts=parts)
    card = (out / "README.md").read_text()
    assert card.index("### one") < card.index("First.") < card.index("### two") < card.index("Second.")


@pytest.mark.parametrize(("architecture", "pipeline", "loader"), [
    ("GPT2LMHeadModel", "text-generation", "AutoModelForCausalLM"),
    ("Qwen3_5ForConditionalGeneration", "image-text-to-text", "AutoModelForImageTextToText"),
    ("LlamaForSequenceClassification", "text-classification", "AutoModelForSequenceClassification"),
])  # fmt: skip
def test_card_loads_the_model_as_what_it_is(architecture, pipeline, loader):
    config = load_config(overrides={"model.path": "m", "data.path": "arithmetic"})
    card = model_card(config, 1, architecture=architecture)
    assert card.data.pipeline_tag == pipeline and f"import AutoTokenizer, {loader}\n" in card.text
    assert ("vllm serve" in card.text) == ("## Prompt" in card.text) == (pipeline != "text-classification")


def test_an_adapter_over_4_bits_is_exported_alone_or_merged(base, tmp_path):
    pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: pip install 'rl4llm[bitsandbytes]'"
    )
    model = {"path": str(base), "dtype": "bfloat16", "quantize": "nf4", "lora": {"rank": 2}}
    run, out = trained(base, tmp_path, model=model, training={"lr": 0.1, "optimizer": "adamw8bit"})
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {
        file.name for file in out.iterdir()
    }
    assert not (out / "model.safetensors").exists() and "--enable-lora" in (out / "README.md").read_text()
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["base_model_name_or_path"]) == (2, str(base))
    notes = []
    export(run, tmp_path / "merged", merge=True, note=notes.append)
    assert len(notes) == 1 and "bfloat16" in notes[0]
    assert load_model(tmp_path / "merged", dtype="bfloat16", device="cpu").dtype == torch.bfloat16

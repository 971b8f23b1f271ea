"""Model directories that cannot train: each is refused, and no code of it runs."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaForSequenceClassification, ViTConfig

from rl4llm.api import GRPOTrainer, RewardTrainer, SFTTrainer
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.core.errors import ModelError


@pytest.fixture
def directory(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def quantized(directory):
    edit(directory / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def adapter_beside(directory):
    adapted = get_peft_model(load_model(directory), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(directory)


def adapter_alone(directory):
    adapter_beside(directory)
    (directory / "config.json").unlink()


def pickled(directory):
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def cut(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def encoder(directory):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=320, **sizes)).save_pretrained(directory)


def vision(directory):
    ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(directory)


def classifier(directory):
    config = load_model(directory).config
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(directory)


@pytest.mark.parametrize(
    "harm", [quantized, adapter_beside, adapter_alone, pickled, cut, encoder, vision, classifier]
)
def test_files_that_cannot_train_are_refused(directory, harm):
    load_model(directory)
    harm(directory)
    with pytest.raises(ModelError) as error:
        load_model(directory)
    assert "\n" not in str(error.value)


def test_an_adapter_is_seen_without_peft(directory, monkeypatch):
    adapter_beside(directory)
    for module in ("models.auto.auto_factory", "integrations.peft"):
        monkeypatch.setattr(f"transformers.{module}.is_peft_available", lambda: False)
    with pytest.raises(ModelError):
        load_model(directory)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_number_that_is_not_finite_is_found_in_its_tensor(directory, model, name, value):
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load_model(directory)
    model.get_parameter(name).data.view(-1)[3] = value
    with pytest.raises(ModelError):
        load_model(model)


def test_code_of_a_directory_never_runs_and_nobody_is_asked(directory, monkeypatch):
    ran = directory / "ran"
    for file, classes in (
        ("config.json", {"AutoConfig": "code.Made", "AutoModelForCausalLM": "code.Made"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["code.Made", None]}),
    ):
        edit(directory / file, auto_map=classes, model_type="made", tokenizer_class="Made")
    (directory / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Made: pass\n")
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("a question"))
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError):
            load(directory)
    assert not ran.exists()


def test_an_object_with_an_adapter_is_refused(model):
    options = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ModelError):
        load_model(get_peft_model(copy.deepcopy(model), options))
    with pytest.raises(ModelError, match="merge_and_unload"):
        SFTTrainer(get_peft_model(copy.deepcopy(model), options), [])
    model.add_adapter(options)
    with pytest.raises(ModelError):
        load_model(model)


@pytest.mark.parametrize("kind", [GRPOTrainer, SFTTrainer])
def test_a_run_in_which_nothing_trains_does_not_start(model, tokenizer, tmp_path, kind):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    rows = (
        [{**rows[0], "messages": rows[0]["messages"][:1], "ground_truth": "b"}]
        if kind is GRPOTrainer
        else rows
    )
    rewards = {"reward_functions": ["math"]} if kind is GRPOTrainer else {}
    options = {"tokenizer": tokenizer, "output": {"dir": str(tmp_path / "run")}, "model.device": "cpu"}
    with pytest.raises(ModelError):
        kind(model.requires_grad_(False), rows, **rewards, **options)
    assert not (tmp_path / "run").exists()


def test_a_reward_model_on_a_frozen_base_trains_its_head(model, tokenizer, tmp_path):
    talk = [{"role": "user", "content": "a"}]
    rows = [
        {"prompt": talk, **{key: [{"role": "assistant", "content": key}] for key in ("chosen", "rejected")}}
    ]
    made = RewardTrainer(
        model.requires_grad_(False), rows, tokenizer=tokenizer, output={"dir": str(tmp_path)}
    )
    assert made.trainer.backend.info()["trainable"] == 64

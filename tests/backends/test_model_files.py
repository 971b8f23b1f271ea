"""Model directories that cannot train: each is refused in one line, before anything is loaded, and no code of it runs."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaForSequenceClassification, ViTConfig

from rl4llm.api import GRPOTrainer, RewardTrainer, SFTTrainer
from rl4llm.backends.model_files import check_model_path, check_weights
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.core.errors import ModelError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def indexed(directory, name):
    (directory / "model.safetensors").rename(directory / "one.safetensors")
    tensors = load_file(directory / "one.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}))


def doubled(directory):
    indexed(directory, "one.safetensors")
    shutil.copy(directory / "one.safetensors", directory / "model.safetensors")


def quantized(directory):
    edit(
        directory / "config.json", quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}
    )


def quantized_text(directory):
    edit(directory / "config.json", text_config={"quantization_config": {"quant_method": "awq"}})


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
    file.write_bytes(file.read_bytes()[:-1])


REFUSED = {
    quantized: r"is quantized \(quantization_config, method fp8\)",
    quantized_text: "method awq",
    adapter_beside: r"PEFT adapter .* or remove adapter_config\.json",
    adapter_alone: r"PEFT adapter .*merge_and_unload",
    pickled: r"only pytorch_model\.bin, a pickle",
    doubled: r"has model\.safetensors and an index of other files",
    cut: "damaged or incomplete",
    lambda directory: indexed(directory, "gone.safetensors"): r"names 'gone\.safetensors'",
    lambda directory: indexed(directory, "../../etc/passwd"): r"names '\.\./\.\./etc/passwd'",
    lambda directory: indexed(directory, 1): "names 1",
    lambda directory: (directory / INDEX).write_text("[]"): "holds a list, not an object",
    lambda directory: (directory / "model.safetensors").unlink(): r"has no model\.safetensors\. Save",
}


@pytest.mark.parametrize("harm", REFUSED, ids=lambda harm: REFUSED[harm][:30])
def test_files_that_cannot_train_are_refused_before_loading(directory, harm):
    check_weights(directory)
    harm(directory)
    with pytest.raises(ModelError, match=REFUSED[harm]) as error:
        check_weights(directory)
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match=REFUSED[harm]):
        SFTTrainer(directory, [], output={"dir": str(directory.parent / "run")})


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_number_that_is_not_finite_is_found_in_its_tensor(directory, model, name, value):
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"infinity in {name}"):
        load_model(directory)
    model.get_parameter(name).data.view(-1)[3] = value
    with pytest.raises(ModelError, match=f"infinity in {name}"):
        load_model(model)


def encoder(directory):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=320, **sizes)).save_pretrained(directory)


def vision(directory):
    config = ViTConfig(architectures=["ViTForImageClassification"])
    config.save_pretrained(directory)


def classifier(directory):
    config = load_model(directory).config
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(directory)


@pytest.mark.parametrize(
    ("save", "found"),
    [
        (encoder, "a BertForMaskedLM, not a causal language model"),
        (vision, "a ViTForImageClassification, not a causal language model"),
        (classifier, r"a reward model \(LlamaForSequenceClassification\), which cannot generate"),
    ],
)
def test_only_a_causal_language_model_is_one(directory, save, found):
    save(directory)
    with pytest.raises(ModelError, match=f"is {found}"):
        load_model(directory)


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
        with pytest.raises(ModelError, match=r"needs custom code \(auto_map\)"):
            load(directory)
    assert check_model_path(directory) and not ran.exists()


@pytest.mark.parametrize("peft_model", [True, False])
def test_an_object_with_an_adapter_is_refused_by_name(model, tokenizer, tmp_path, peft_model):
    options = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = get_peft_model(model, options) if peft_model else model
    if not peft_model:
        model.add_adapter(options)
    with pytest.raises(
        ModelError, match=r"model\.lora\.rank=2 to train a new adapter, or .*merge_and_unload"
    ):
        SFTTrainer(adapted, [], tokenizer=tokenizer, output={"dir": str(tmp_path)})


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
    with pytest.raises(ModelError, match=r"None of the parameters .* trains"):
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

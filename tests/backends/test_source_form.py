"""What is exported and published has the form of what was read, so that programs of that time can read it."""

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from warm_python import warm_of

from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.backends.source_form import save_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore

TEXT = "How many coins are 37 and 48?<|im_end|>\n<tool_call>é 12</tool_call>"
CONVERSATION = [{"role": "user", "content": "Hi 1"}, {"role": "assistant", "content": "Ho 2"}]
WRITE = """
import sys, json, torch, transformers as t
place, kind, options = sys.argv[1:]
torch.manual_seed(0)
config = getattr(t, kind.replace("Gemma3", "Gemma3Text") + "Config")(**json.loads(options))
getattr(t, kind + "ForCausalLM")(config).save_pretrained(place)
tokenizer = t.PreTrainedTokenizerFast(
    tokenizer_file=place + "/given.json", eos_token="<|im_end|>", pad_token="<|endoftext|>",
    additional_special_tokens=["<tool_call>"], chat_template=open(place + "/given.jinja").read())
tokenizer.save_pretrained(place)
"""
READ = """
import sys, json, torch, transformers as t
model, info = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
tokenizer = t.AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    logprobs = model.float()(torch.arange(5, 45)[None]).logits.log_softmax(-1)
chat = tokenizer.apply_chat_template(json.loads(sys.argv[3]), tokenize=False)
print(json.dumps([logprobs[0, :, ::17].tolist(), tokenizer(sys.argv[2]).input_ids, chat, tokenizer.pad_token]))
"""
SIZES = {
    "vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "rope_theta": 500.0,
}  # fmt: skip
SCALED = {"rope_type": "linear", "factor": 4.0}
KINDS = {
    "Llama": {"rope_scaling": SCALED, "attention_dropout": 0.1},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Gemma3": {"rope_local_base_freq": 50.0, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.fixture
def old(model_dir, tmp_path):
    """Return a model directory in the form of transformers 4."""
    source = shutil.copytree(model_dir, tmp_path / "old")
    config = config_of(source)
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"torch_dtype": config.pop("dtype"), "rope_theta": theta, "rope_scaling": None}
    config |= {"transformers_version": "4.46.0", "a_key_of_others": [1]}
    (source / "config.json").write_text(json.dumps(config))
    template = (source / "chat_template.jinja").read_text()
    (source / "chat_template.jinja").unlink()
    named = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>", "special": True}}
    (source / "special_tokens_map.json").write_text(json.dumps(named))
    old = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": template, "pad_token": "<|endoftext|>"}
    old |= {"eos_token": "<|im_end|>", "added_tokens_decoder": {}}
    (source / "tokenizer_config.json").write_text(json.dumps(old))
    return source


def written(backend, tokenizer, directory):
    """Return the directories of an export and of a published version."""
    exported = directory / "exported"
    exported.mkdir()
    save_tokenizer(tokenizer, exported)
    backend.export(exported)
    publisher = FilesystemPublisher(
        None, WeightStore(directory / "store"), partial(save_tokenizer, tokenizer)
    )
    return exported, Path(publisher.write(backend, 0).path)


def test_old_config_changes_only_where_the_model_does(old, tmp_path):
    model = load_model(old, dtype="bfloat16")
    for directory in written(TorchBackend(model), load_tokenizer(old), tmp_path):
        assert config_of(directory) == config_of(old) | {"torch_dtype": "bfloat16"}
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    TorchBackend(model).write_config(tmp_path)
    found = config_of(tmp_path)
    assert (found["rope_theta"], found["rope_scaling"]) == (7.0, {"rope_type": "linear", "factor": 2.0})
    assert "rope_parameters" not in found


def test_new_config_stays_as_it_came(model_dir, tmp_path):
    for directory in written(TorchBackend(load_model(model_dir)), load_tokenizer(model_dir), tmp_path):
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert json.loads((directory / name).read_text()) == json.loads((model_dir / name).read_text())


def test_tokenizer_files_change_only_where_the_tokenizer_does(old, tmp_path):
    before = {file.name: file.read_bytes() for file in old.iterdir() if "token" in file.name}

    def files(tokenizer):
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        (tmp_path / "saved").mkdir()
        save_tokenizer(tokenizer, tmp_path / "saved")
        return {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}

    padded = load_tokenizer(old)
    padded(["a", "b b b"], padding=True)  # which the tokenizer remembers
    assert files(padded) == before
    found = files(load_tokenizer(old, pad_token="<|im_start|>"))
    assert found["tokenizer.json"] == before["tokenizer.json"]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        assert json.loads(found[name]) == json.loads(before[name]) | {"pad_token": "<|im_start|>"}
    other = load_tokenizer(old)
    other.chat_template = "{{ messages }}"
    other.add_tokens(["<new>"])
    found = files(other)
    assert set(found) == {"tokenizer.json", "tokenizer_config.json"}
    assert b"<new>" in found["tokenizer.json"]
    template = json.loads(found["tokenizer_config.json"])["chat_template"]
    assert (template, json.loads(found["tokenizer_config.json"])["tokenizer_class"]) == (
        "{{ messages }}",
        "Qwen2Tokenizer",
    )
    assert load_tokenizer(tmp_path / "saved").convert_tokens_to_ids("<new>") == len(other) - 1


@pytest.fixture(scope="module")
def transformers4(python_of, tmp_path_factory):
    """Return transformers4(code, *words): what a program prints there."""
    directory = tmp_path_factory.mktemp("warm")
    imported = "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"
    with warm_of(python_of("transformers4"), directory, *imported) as python:

        def run(code, *words):
            (directory / "program.py").write_text(code)
            command = [python, directory / "program.py", *map(str, words)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield run


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_4_reads_what_became_of_its_model(kind, tokenizer, tmp_path, transformers4):
    source = tmp_path / "source"
    source.mkdir()
    tokenizer.backend_tokenizer.save(str(source / "given.json"))
    (source / "given.jinja").write_text(tokenizer.chat_template)

    transformers4(WRITE, source, kind, json.dumps(SIZES | KINDS[kind]))
    model, own = load_model(source, device="cpu"), load_tokenizer(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(torch.arange(5, 45)[None]).logits.log_softmax(-1)[0, :, ::17]
    for directory in written(TorchBackend(model), own, tmp_path):
        logprobs, token_ids, chat, pad = json.loads(
            transformers4(READ, directory, TEXT, json.dumps(CONVERSATION))
        )
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
        assert token_ids == own(TEXT).input_ids
        assert (chat, pad) == (own.apply_chat_template(CONVERSATION, tokenize=False), own.pad_token)

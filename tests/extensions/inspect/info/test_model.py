"""`rl4llm info model` tells without weights what a run finds out with them."""

import copy
import json
from pathlib import Path

import pytest
import sweeps
from families import FAMILIES, SAMPLE, build, listed

from rl4llm.backends.tiny import CHAT_TEMPLATE
from rl4llm.cli import main

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"


@pytest.fixture
def told(tmp_path, capsys):
    """told(): the answers of the command about the model in `tmp_path`."""

    def run():
        capsys.readouterr()
        assert main(["info", "model", str(tmp_path), "--json"]) == 0
        return {row["what"]: row["answer"] for row in json.loads(capsys.readouterr().out)["model"]}

    return run


@pytest.mark.parametrize("name", sweeps.sampled(FAMILIES, SAMPLE))
def test_path_is_the_one_that_a_run_measures(name, tmp_path, told):
    build(name).config.save_pretrained(tmp_path)
    found = told()
    assert found["engine"].startswith(f"{listed(name)[1]}: ")
    assert found["context"] == "96 tokens (max_position_embeddings)"
    assert found["servers take its weights"].startswith("yes: ")


def test_the_template_of_a_model_is_described(tmp_path, told, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)

    def with_template(text):
        build("Llama").config.save_pretrained(tmp_path)
        tokenizer.chat_template = text
        tokenizer.save_pretrained(tmp_path)
        return told()

    own = with_template(CHAT_TEMPLATE)
    assert own["end of turn"] == "<|im_end|>"
    thinks = with_template((TEMPLATES / "thinking_chatml.jinja").read_text())
    assert "enable_thinking" in thinks["thinking"] and "no switch" in own["thinking"]
    refused = with_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert "chat template" in refused and "end of turn" not in refused


def test_layers_that_no_engine_of_ours_caches_are_named(tmp_path, told):
    from transformers import FalconH1Config

    small = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
    FalconH1Config(**small, num_attention_heads=2, num_key_value_heads=2).save_pretrained(tmp_path)
    assert "hybrid" in told()["engine"]


@pytest.mark.parametrize("words", [["model"], ["rewards", "path"]])
def test_a_topic_and_a_path_belong_together(words):
    assert main(["info", *words]) == 2

"""Models with a longrope, whose factors change for a whole pass: rows that would change their neighbours are refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from rl4llm.api import SFTTrainer
from rl4llm.config import Config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.tables import ENGINES
from rl4llm.data.lengths import context_limits
from rl4llm.extensions.servers.fleet.build import build_fleet

ORIGINAL = 64
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
}


@pytest.fixture
def phi3(tokenizer):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=len(tokenizer), max_position_embeddings=512, rope_parameters=ROPE,
        original_max_position_embeddings=ORIGINAL, initializer_range=0.2, **sizes, **ends,
    )  # fmt: skip
    return Phi3ForCausalLM(config)


def rows(*lengths):
    answers = [" ".join(str(place % 10) for place in range(length)) for length in lengths]
    return [
        {"messages": [{"role": "user", "content": "How many"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]


def test_a_row_behind_the_original_length_does_not_train(phi3, tokenizer, tmp_path):
    def trainer(**data):
        options = {"tokenizer": tokenizer, "output": {"dir": str(tmp_path)}, "model.device": "cpu"}
        return SFTTrainer(phi3, rows(3, 60, 5), data=data, **options).trainer

    with pytest.raises(DataError):
        trainer()
    assert len(trainer(bad_rows="skip").dataset) == 2


def test_a_server_may_not_sample_behind_the_original_length(phi3, tokenizer):
    def fleet(**options):
        inference = {"name": "sglang", "url": "http://127.0.0.1:1", **options}
        config = replace(Config(), inference=inference)
        return build_fleet(config, ENGINES["sglang"], phi3, tokenizer)

    assert fleet().context_length == ORIGINAL
    assert fleet(context_length=32).context_length == 32
    with pytest.raises(ConfigError):
        fleet(context_length=65)


@pytest.mark.parametrize(
    "rope", [ROPE, {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}]
)
def test_a_longrope_of_any_layers_limits_the_context(rope):
    config = SimpleNamespace(max_position_embeddings=512, rope_parameters=rope)
    config.get_text_config = lambda: config
    assert min(context_limits(config)) == (ORIGINAL, "original_max_position_embeddings")
    config.rope_parameters = {"rope_type": "default"}
    assert min(context_limits(config)) == (512, "max_position_embeddings")

"""Text models of vision-language checkpoints without a causal class in transformers."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend


@pytest.fixture
def whole(vision_directory):
    return AutoModelForImageTextToText.from_pretrained(vision_directory).eval()


@torch.no_grad()
def test_text_part_computes_what_the_whole_model_does(vision_directory, whole):
    model = load_model(vision_directory, device="cpu")
    token_ids = torch.arange(24).view(2, 12) * 7 % 290
    assert torch.allclose(model(token_ids).logits, whole(token_ids).logits, atol=1e-5)
    assert torch.allclose(
        model(token_ids, logits_to_keep=1).logits, whole(token_ids).logits[:, -1:], atol=1e-5
    )
    assert TorchBackend(model, lr=1e-3).warnings() == []  # batches are one row


def test_text_part_is_exported_as_the_whole_checkpoint(vision_directory, whole, tmp_path):
    backend = TorchBackend(load_model(vision_directory, device="cpu"), lr=1e-3)
    with torch.no_grad():
        backend.model.lm_head.weight.add_(0.5)
    backend.export(tmp_path / "out")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    before, after = whole.state_dict(), exported.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {"lm_head.weight", "model.language_model.embed_tokens.weight"}  # which are tied
    config = (vision_directory / "config.json").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == config
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()

"""Reward models come in and go out as classifiers of transformers, which give the same scores."""

import json

import pytest
import torch
import transformers
from families import FAMILIES, build
from transformers import (
    AutoModelForSequenceClassification,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rl4llm import RewardTrainer
from rl4llm.backends.classifier import load_value_head
from rl4llm.backends.heads import ValueHead
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ConfigError, ModelError
from rl4llm.core.types import ChatMessage, TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.extensions.judges.reward_model import LearnedReward

WITH_CLASS = [
    name
    for name, (kind, _) in FAMILIES.items()
    if any(hasattr(transformers, f"{kind}{text}ForSequenceClassification") for text in ("", "Text"))
]
TALKS = [
    [{"role": "user", "content": "How many coins?"}, {"role": "assistant", "content": answer}]
    for answer in ("85", "a much longer answer than that", "no")
]
PAIRS = [{"prompt": talk[:1], "chosen": talk[1:], "rejected": TALKS[2][1:]} for talk in TALKS[:2]]
RUN = {"rollout": {"prompts": 2}, "max_steps": 2, "training": {"lr": 1e-2}, "eval": {"every": 0}}


def classifier(path):
    """Return what transformers reads, all of it from the files."""
    model, info = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_labels == 1
    return model.eval()


def scores_of(path, tokenizer):
    """Return the scores that transformers gives a padded batch of conversations."""
    batch = tokenizer.apply_chat_template(TALKS, padding=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        return classifier(path)(**batch).logits[:, 0].tolist()


def own_scores(path):
    reward = LearnedReward(str(path), device="cpu")
    return [reward([ChatMessage.from_dict(message) for message in talk], None) for talk in TALKS]


def trained(model, directory, **options):
    RewardTrainer(str(model), PAIRS, output={"dir": str(directory)}, **RUN, **options).train()
    return directory / "model"


@pytest.fixture
def foreign(tokenizer, tmp_path):
    """Return a reward model that someone else has trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_labels=1, pad_token_id=tokenizer.pad_token_id, initializer_range=0.2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "foreign")
    tokenizer.save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


def test_own_reward_model_scores_the_same_in_transformers(model_dir, tmp_path):
    directory = trained(model_dir, tmp_path / "run")
    scores = own_scores(directory)
    assert scores_of(directory, load_tokenizer(directory)) == pytest.approx(scores, abs=1e-5)
    assert max(scores) - min(scores) > 1e-2


def test_foreign_reward_model_scores_and_trains_on(foreign, tmp_path):
    expected = scores_of(foreign, load_tokenizer(foreign))
    assert own_scores(foreign) == pytest.approx(expected, abs=1e-5)
    directory = trained(foreign, tmp_path / "same")
    assert own_scores(directory) != pytest.approx(expected, abs=1e-5)


def test_foreign_reward_model_starts_a_reward_model_and_a_critic(foreign):
    score = classifier(foreign).score.weight
    head = load_value_head(foreign, load_model(foreign, values=True))
    assert torch.equal(head.linear.weight, score)


@pytest.mark.parametrize("name", WITH_CLASS)
def test_a_family_has_the_values_of_its_classifier(name, tmp_path):
    model, head = build(name), ValueHead(32)
    torch.nn.init.normal_(head.linear.weight)
    backend = TorchBackend(model, value_head=head, lr=0.0)
    backend.export(tmp_path)
    token_ids = tuple(range(5, 45))
    spans = TokenSpan.context(token_ids), TokenSpan((3,), "policy", (0.0,), 0)
    trajectories = [Trajectory("p", spans, (), {}, 0.0, "done")]
    batching = Batching(aggregation="token", pad_token_id=0)
    [batch] = batching.pack(trajectories, [1.0])
    with torch.no_grad():
        expected = classifier(tmp_path)(torch.tensor([token_ids])).logits[0]
    assert backend.forward(batch)[batch.mask_BT].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_model_that_others_could_not_score_is_refused(model_dir, foreign, tmp_path):
    with pytest.raises(ModelError):
        load_model(foreign)
    config = json.loads((foreign / "config.json").read_text())
    model = LlamaForSequenceClassification(LlamaConfig.from_pretrained(foreign, num_labels=3))
    model.save_pretrained(foreign)
    with pytest.raises(RuntimeError):  # three labels
        LearnedReward(str(foreign))
    granite = GraniteConfig(
        vocab_size=config["vocab_size"], hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, pad_token_id=0, max_position_embeddings=256,
    )  # fmt: skip
    GraniteForCausalLM(granite).save_pretrained(tmp_path / "granite")
    load_tokenizer(model_dir).save_pretrained(tmp_path / "granite")
    with pytest.raises(ConfigError):
        trained(tmp_path / "granite", tmp_path / "run")
    tokenizer = load_tokenizer(model_dir)
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|im_end|>\\n'", "'<|im_end|>'")
    tokenizer.pad_token = "<|im_end|>"
    with pytest.raises(ConfigError):
        trained(model_dir, tmp_path / "pad", tokenizer=tokenizer)

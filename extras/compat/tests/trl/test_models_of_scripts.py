"""Models that scripts of TRL pass: classifiers as rewards, and PeftModels."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl4llm.core.errors import ConfigError
from rl4llm.rewards import RewardFailure
from rl4llm_compat.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from rl4llm_compat.trl.classifier import as_function
from rl4llm_compat.trl.rewards import reward_functions

SMALL = {
    "per_device_train_batch_size": 2,
    "max_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
}
ASKED = [{"role": "user", "content": "How many"}]


@pytest.fixture(scope="module")
def classifier_dir(model_dir, tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "a.classifier"
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def alone(directory, token_ids):
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    model.config.pad_token_id = None
    return model(input_ids=torch.tensor([token_ids])).logits[0, 0].item()


@pytest.mark.parametrize("as_object", [True, False], ids=["object", "directory"])
def test_classifier_scores_what_trl_shows_it(classifier_dir, tokenizer, as_object):
    model = AutoModelForSequenceClassification.from_pretrained(classifier_dir)
    item = model if as_object else str(classifier_dir)
    # what the text ends with; the classifier of transformers would take it for padding
    ends = tokenizer.eos_token
    said = [[{"role": "assistant", "content": text}] for text in ("coins", "a lot of coins, and more")]
    judge = as_function(item, plain=False)
    found = judge(prompts=[ASKED] * 2, completions=said, other=[1, 2])
    for answer, score in zip(said, found, strict=True):
        token_ids = tokenizer.apply_chat_template([*ASKED, *answer]).input_ids
        assert score == pytest.approx(alone(classifier_dir, token_ids), abs=1e-5)
    joined = as_function(item, plain=True)
    texts = joined(prompts=["How many"] * 2, completions=[" coins", " a lot of coins"])
    assert texts[0] == pytest.approx(alone(classifier_dir, tokenizer("How many coins").input_ids), abs=1e-5)
    assert joined(["How many"], [" coins"])[0] == pytest.approx(texts[0], abs=1e-5)
    assert joined(["How many"], [f" coins{ends}"]) != pytest.approx(texts[:1], abs=1e-5)
    (too_long,) = joined(["a" * 4000], [""])
    assert isinstance(too_long, RewardFailure)
    (reward,), _ = reward_functions(item, None, plain=True)
    assert reward.name == "a_classifier"


def test_classifier_rewards_a_run(classifier_dir, model_dir, tmp_path):
    args = GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=4, **SMALL)
    rows = [{"prompt": ASKED}] * 2
    trainer = GRPOTrainer(
        model=str(model_dir), reward_funcs=str(classifier_dir), args=args, train_dataset=rows
    )
    trainer.train()
    assert trainer.state.log_history[0]["rewards/a_classifier/mean"] != 0


@pytest.mark.parametrize(("form", "options", "why"), [
    (AutoModelForSequenceClassification, {"num_labels": 2}, "has 2 labels. Accepted: .* num_labels=1"),
    (AutoModelForCausalLM, {}, "a LlamaForCausalLM is not a classifier"),
])  # fmt: skip
def test_other_model_as_reward_is_refused(form, options, why, model_dir):
    with pytest.raises(ConfigError, match=why):
        reward_functions(form.from_pretrained(model_dir, **options), None, plain=True)


def wrapped(model_dir, config=None):
    config = config or LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), config)


def sft(model, tokenizer, directory, **options):
    rows = [{"prompt": "How many", "completion": " coins"}] * 2
    args = SFTConfig(str(directory), **SMALL)
    return SFTTrainer(model=model, processing_class=tokenizer, args=args, train_dataset=rows, **options)


def test_new_adapter_of_a_peft_model_is_trained(model_dir, tokenizer, tmp_path):
    trainer = sft(wrapped(model_dir), tokenizer, tmp_path)
    assert (trainer.config.model.lora.rank, trainer.config.model.lora.targets) == (4, ["q_proj"])
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, now in trainer.model.named_parameters() if not torch.equal(before[name], now)}
    assert changed
    assert all("lora_B" in name or "lora_A" in name for name in changed)


def test_peft_model_that_would_lose_something_is_refused(model_dir, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"is a PeftModel already. Remove peft_config"):
        sft(wrapped(model_dir), tokenizer, tmp_path, peft_config=LoraConfig())
    trained = wrapped(model_dir)
    for name, tensor in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(tensor)
            break
    with pytest.raises(ConfigError, match="a trained one"):
        sft(trained, tokenizer, tmp_path)
    with pytest.raises(ConfigError, match="peft_config=PrefixTuningConfig has no counterpart"):
        sft(
            wrapped(model_dir, PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
            tokenizer,
            tmp_path,
        )
    with pytest.raises(ConfigError, match=r"peft_config.rank_pattern=.* has no counterpart"):
        sft(str(model_dir), tokenizer, tmp_path, peft_config=LoraConfig(rank_pattern={"q_proj": 2}))

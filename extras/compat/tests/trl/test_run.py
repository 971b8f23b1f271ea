"""Scripts of TRL's run: what their reward functions get, what None means, and what texts are made of."""

import pytest
import torch

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import ChatMessage
from rl4llm.rewards.scoring import score
from rl4llm_compat.trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from rl4llm_compat.trl.rewards import reward_functions

SMALL = {
    "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 1,
    "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
}  # fmt: skip


def samples(count=3):
    made = []
    for number in range(count):
        prompt, answer = ChatMessage("user", f"q{number}"), ChatMessage("assistant", f"a{number}")
        made.append(SampleState(f"p{number}", 0, [prompt], "", {"task": f"t{number}"}))
        made[-1].messages.append(answer)
    return made


def test_a_function_gets_what_trl_gives_it():
    seen = {}

    def judge(prompts, completions, completion_ids, task, **columns):
        seen.update(prompts=prompts, completions=completions, task=task, ids=completion_ids)
        return [1.0] * len(completions)

    (reward,), _ = reward_functions(judge, None, plain=False)
    score(samples(), [reward])
    assert seen["prompts"][1] == [{"role": "user", "content": "q1"}]
    assert seen["completions"][1] == [{"role": "assistant", "content": "a1"}]
    assert seen["task"] == ["t0", "t1", "t2"]
    assert len(seen["ids"]) == 3
    (reward,), _ = reward_functions(judge, None, plain=True)
    score(samples(), [reward])
    assert seen["prompts"] == ["q0", "q1", "q2"]
    assert seen["completions"] == ["a0", "a1", "a2"]


def test_reward_may_return_none():
    def first(completions, **columns):
        return [1.0, None, None]

    async def second(completions, **columns):
        return [None, 4.0, None]

    functions, total = reward_functions([first, second], [2.0, 0.5], plain=True)
    for _ in range(2):  # nothing is remembered
        played = samples()
        scores = score(played, functions, total)
        torch.testing.assert_close(scores.reward[:2], torch.tensor([2.0, 2.0], dtype=torch.float64))
        assert [sample.failure is None for sample in played] == [True, True, False]


def test_function_that_raises_for_a_completion_fails_only_it():
    def picky(completions, **columns):
        return [1.0 / (text != "a1") for text in completions]

    def other(completions, **columns):
        return [1.0] * len(completions)

    functions, total = reward_functions([picky, other], None, plain=True)
    played = samples()
    assert score(played, functions, total).reward[0] == 2
    assert [sample.failure is None for sample in played] == [True, False, True]


def test_sandbox_reward_uses_the_sandbox_of_the_run():
    assert reward_functions("sandbox", None, plain=True) == (["code"], None)
    made, total = reward_functions(
        ["sandbox", lambda completions, **columns: [1.0] * len(completions)], None, plain=True
    )
    assert made[0] == "code"
    assert float(total({"code": torch.tensor([0.5]), made[1].name: torch.tensor([0.25])})) == 0.75
    with pytest.raises(ConfigError, match="two have the same name"):
        reward_functions(["sandbox", "code"], None, plain=True)


@pytest.mark.parametrize("plain", [True, False], ids=["texts", "messages"])
def test_a_script_trains_on_the_tokens_that_trl_would_ask_with(plain, model_dir, tokenizer, tmp_path):
    prompt = "How many coins" if plain else [{"role": "user", "content": "How many coins"}]
    rows = [{"prompt": prompt, "answer": str(number)} for number in range(4)]
    seen = []

    def shorter(prompts, completions, answer, **columns):
        seen.extend(zip(prompts, completions, answer, strict=True))
        return [-float(len(str(said))) for said in completions]

    args = GRPOConfig(str(tmp_path / "run"), **SMALL)
    trainer = GRPOTrainer(model=str(model_dir), reward_funcs=shorter, args=args, train_dataset=rows)
    asked = trainer.trainer.rollout._renderer.first([ChatMessage("user", "How many coins")])
    wanted = tokenizer("How many coins").input_ids
    if not plain:
        wanted = tokenizer.apply_chat_template(prompt, add_generation_prompt=True).input_ids
    assert asked == wanted
    trainer.train(resume_from_checkpoint=True).save_model(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert len(seen) == 4
    assert {answer for _, _, answer in seen} <= {"0", "1", "2", "3"}
    assert all(asked == prompt and isinstance(said, str) is plain for asked, said, _ in seen)


def test_plain_pairs_and_demonstrations_need_no_chat_template(model_dir, tokenizer, tmp_path):
    pair = {"prompt": "How many coins", "chosen": " Answer", "rejected": " coins"}
    small = {"max_steps": 1, "per_device_train_batch_size": 2, "bf16": False, "gradient_checkpointing": False}
    dpo = DPOTrainer(
        model=str(model_dir),
        train_dataset=[pair] * 2,
        args=DPOConfig(str(tmp_path / "dpo"), beta=0.2, **small),
    )
    assert dpo.config.algorithm["beta"] == 0.2
    chosen = dpo.trainer.read(dpo.trainer.dataset[0], "p").trajectories[0]
    wanted = tokenizer("How many coins").input_ids + tokenizer(" Answer").input_ids + [tokenizer.eos_token_id]
    assert list(chosen.token_ids) == wanted
    row = {"prompt": "How many coins", "completion": " Answer"}
    sft = SFTTrainer(
        model=str(model_dir), train_dataset=[row] * 2, args=SFTConfig(str(tmp_path / "sft"), **small)
    )
    learned = sft.trainer.read(sft.trainer.dataset[0], "p").trajectories[0]
    assert list(learned.token_ids) == wanted
    assert learned.num_policy_tokens == len(wanted) - len(tokenizer("How many coins").input_ids)
    for trainer in (dpo, sft):
        trainer.trainer.close()

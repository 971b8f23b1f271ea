"""Thoughts of earlier turns: a policy that drops them reads and trains on the prompts that a server gives it."""

import json
import shutil

import pytest
from packed import pack
from transformers import AutoTokenizer

from rl4llm import GRPOTrainer
from rl4llm.algorithms.returns import turn_returns
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError, TemplateError
from rl4llm.core.types import ChatMessage, Group, SamplingParams
from rl4llm.data.pack import totals_of
from rl4llm.data.render import Renderer
from rl4llm.data.template import decode
from rl4llm.envs.rollout import Rollout
from rl4llm.rewards import as_reward_function
from rl4llm.testing import ScriptedClient
from tests.data.test_render import ASK, EACH, SPECIALS, TEMPLATES, TOOLS, chatml, complete, train_tokenizer

THOUGHT = "<think>\nSeven of {} are a secret.\n</think>\n\n"
REPLIES = [THOUGHT.format(number) + f"Answer {number}" for number in range(4)]
PARAMS = SamplingParams(max_tokens=200)


class Asks(BaseMDPEnv):
    """A tool answers the first turn, the user all others; each turn is rewarded."""

    reply_roles = ("user", "tool")

    def respond(self, sample):
        sample.reward_turn(float(sample.current_step))
        role = "tool" if sample.current_step == 1 else "user"
        return [ChatMessage(role, f"Next {sample.current_step}")]


def thinking(name="thinking_chatml"):
    return train_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), **SPECIALS[name])


def rollout(tokenizer, thoughts, replies=REPLIES, samples=1, tools=None):
    rows = [{"messages": [{"role": "user", "content": "Begin"}], "ground_truth": ""}]
    reward = as_reward_function(lambda completions, **columns: [1.0 for _ in completions])
    env = Asks(rows, tokenizer, [reward], max_steps=4, group_size=samples, tool_schemas=tools)
    env.thoughts = thoughts
    return Rollout(env, ScriptedClient(tokenizer, {"": replies}))


def play(tokenizer, thoughts, **how):
    played = rollout(tokenizer, thoughts, **how)
    return played._client, played.play([0], step=0, sampling_params=PARAMS).groups[0].trajectories


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_each_prompt_is_what_a_server_would_render(tools):
    tokenizer = thinking()
    client, (one,) = play(tokenizer, "drop", tools=tools)
    answers = [i for i, message in enumerate(one.messages) if message.role == "assistant"]
    rendered = [
        tokenizer.apply_chat_template(
            [m.to_dict() for m in one.messages[:i]], tools=tools, add_generation_prompt=True
        )["input_ids"]
        for i in answers
    ]
    assert [list(call.prompt_ids) for call in client.calls] == rendered
    assert ["secret" in decode(tokenizer, ids) for ids in rendered] == [False, True, False, False]


def test_kept_thoughts_stay_in_one_record_and_are_counted():
    tokenizer = thinking()
    client, (one,) = play(tokenizer, "keep")
    assert one.forks == ()
    prompt, rendered = (
        client.calls[-1].prompt_ids,
        Renderer(tokenizer, roles=("user", "tool")).prompt(one.messages[:-1]),
    )
    assert one.extras["metrics"] == {"kept_thoughts": len(prompt) - len(rendered)}
    assert decode(tokenizer, prompt).count("secret") == 3


def test_every_sampled_turn_trains_once_with_its_credit():
    tokenizer = thinking()
    _, (one,) = play(tokenizer, "drop")
    assert [len([s for s in record if s.author == "policy"]) for record in one.records] == [2, 1, 1]
    assert (one.num_turns, one.turn_rewards) == (4, (1.0, 2.0, 3.0, 4.0))
    batches = pack(
        [one],
        [one.turn_rewards],
        max_tokens_per_batch=4000,
        layout="sorted",
        aggregation="token",
        totals=totals_of([one]),
        pad_token_id=tokenizer.pad_token_id,
    )
    trained = {
        float(credit): decode(tokenizer, batch.token_ids_BT[batch.credits_BT == credit].tolist())
        for batch in batches
        for credit in batch.credits_BT[batch.mask_BT].unique()
    }
    assert trained == {float(turn): f"{REPLIES[turn - 1]}<|im_end|>" for turn in (1, 2, 3, 4)}
    assert sum(float(batch.weights_BT.sum()) for batch in batches) == pytest.approx(1.0)


def test_a_turn_earns_what_follows_where_thoughts_are_dropped():
    groups = [Group("0", play(thinking(), thoughts)[1]) for thoughts in ("keep", "drop")]
    kept, dropped = (turn_returns(group, 0.5) for group in groups)
    assert len(groups[1].trajectories[0].forks) == 2 and kept.equal(dropped)


def test_draws_differ_in_each_record():
    for thoughts in ("keep", "drop"):
        client, _ = play(thinking(), thoughts, samples=2)
        assert len({call.params.seed for call in client.calls}) == len(client.calls) == 8


def test_samples_of_a_prompt_share_its_first_tokens():
    _, group = play(thinking(), "drop", samples=3)
    assert len({one.spans[0] for one in group}) == 1
    assert [len(one.forks) for one in group] == [2, 2, 2]


def test_turns_without_thoughts_stay_in_one_record():
    _, (one,) = play(thinking(), "drop", replies=["Yes"])
    assert one.forks == () and one.num_turns == 4


def test_drop_changes_nothing_where_thoughts_are_kept():
    tokenizer = chatml(EACH + ASK)
    kept, dropped = (play(tokenizer, thoughts)[1] for thoughts in ("keep", "drop"))
    assert kept == dropped
    assert "metrics" not in kept[0].extras
    assert Renderer(tokenizer, roles=("user",)).notes == []


def test_template_that_drops_thoughts_is_noted_or_refused():
    tokenizer = thinking()
    assert "env.thoughts=drop" in Renderer(tokenizer, roles=("user",)).notes[0]
    assert Renderer(tokenizer, roles=("user",), thoughts="drop").notes == []
    assert Renderer(tokenizer, roles=()).notes == []  # a single turn
    assert Renderer(tokenizer, TOOLS, roles=("tool",)).dropping == frozenset()
    with pytest.raises(TemplateError):
        Renderer(tokenizer, roles=("user",), thoughts="refuse")
    with pytest.raises(ConfigError):
        Renderer(tokenizer, roles=("user",), thoughts="hide")


def test_template_that_always_drops_thoughts_forks_at_tools_too():
    tokenizer = thinking("reasoner")
    replies = [reply.removeprefix("<think>\n") for reply in REPLIES]
    client, (one,) = play(tokenizer, "drop", replies=replies)
    assert all("secret" not in decode(tokenizer, call.prompt_ids) for call in client.calls)
    assert one.num_turns == 4


@pytest.mark.parametrize(
    ("opened", "said", "answer", "thought"),
    [
        ("", "[THINK]Seven[/THINK]Eight", "Eight", "Seven"),
        ("", "[THINK]Seven", "", "Seven"),
        ("", "Eight", "Eight", ""),
        ("[THINK]", "Seven[/THINK]Eight", "Eight", "Seven"),
        ("[THINK]", "Seven", "", "Seven"),
        ("", "<think>Seven</think>Eight", "<think>Seven</think>Eight", ""),
    ],
)
def test_thought_between_special_tokens_is_no_content(opened, said, answer, thought):
    specials = ["<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]"]
    asks = ASK.replace("assistant\n", f"assistant\n{opened}")
    tokenizer = train_tokenizer(EACH + asks, specials, eos="<|im_end|>", plain=["<think>", "</think>"])
    ids = tokenizer.encode(f"{said}<|im_end|>")
    message = Renderer(tokenizer).reply(complete(ids, tokenizer.decode(ids, skip_special_tokens=True)))
    assert (message.content, message.reasoning) == (answer, thought)


FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if '<think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] if '</think>' in m.content else '' }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def letters(completions, **columns):
    return [float(len(set(str(completion)))) for completion in completions]


class Insists(BaseMDPEnv):
    """Asks again after each turn."""

    continue_truncated = True

    def respond(self, sample):
        return [ChatMessage("user", f"And {sample.current_step}?")]


@pytest.fixture
def forgetful(model_dir, tmp_path):
    """Return train(name, steps, thoughts): trains a model whose template drops earlier thoughts; returns its metrics."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = FORGETS
    tokenizer.save_pretrained(model)
    rows = [{"messages": [{"role": "user", "content": f"Say {i}"}], "ground_truth": ""} for i in range(4)]

    def train(name, steps, thoughts):
        options = {"rollout": {"prompts": 2, "group_size": 2, "max_tokens": 6}, "training": {"lr": 1e-3}}
        quiet = {"deterministic": True, "tracking.tensorboard": False, "checkpoint.every": 1, "eval.every": 0}
        own = {"env.max_steps": 3, "env.thoughts": thoughts, "output": {"dir": str(tmp_path / name)}}
        trainer = GRPOTrainer(
            str(model), rows, [letters], env=Insists, max_steps=steps, **options, **quiet, **own
        )
        trainer.train()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "trajectories" in row]

    return train


def test_run_that_keeps_thoughts_names_and_counts_them_once(forgetful, capsys):
    (row,) = forgetful("run", 1, "keep")
    assert capsys.readouterr().out.count("env.thoughts=drop avoids it") == 1
    assert row["env/kept_thoughts"] > 0


def test_run_that_drops_thoughts_trains_and_resumes(forgetful, tmp_path):
    metrics = forgetful("whole", 2, "drop")
    forgetful("parts", 1, "drop")
    forgetful("parts", 2, "drop")
    ends = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    lines = (tmp_path / "whole" / "episodes" / "step-000001.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert [len(episode["forks"]) for episode in episodes] == [2, 2, 2, 2]
    trained = [
        [
            len(span.get("advantages", ()))
            for record in (episode["spans"], *episode["forks"])
            for span in record[1:]
        ]
        for episode in episodes
    ]
    assert {all(counts) for counts in trained if any(counts)} == {True}  # each turn, or none of an episode
    (row,) = [row for row in metrics if row["step"] == 1]
    assert "env/kept_thoughts" not in row
    assert row["turns"] == 3 and row["update/tokens"] == sum(map(sum, trained)) > 0
    assert row["mismatch/max"] < 1e-4

"""What answers a line of `rl4llm chat`, and what stays of a conversation."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from small_run import CONFIG

from rl4llm.api import GRPOTrainer, SFTTrainer
from rl4llm.cli import main
from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseMDPEnv, ChatMessage
from rl4llm.core.errors import ConfigError
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.extensions.evaluate.chat import ChatError, conversation
from rl4llm.tracking.tracker import read_jsonl

TOOL = {"name": "tool", "tools": ["calculator"], "describe_tools": False}
ENDED = []


class Ended(ToolMDPEnv):
    """Notes which samples ended, and breaks at the line "fail"."""

    continue_truncated = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, tools=[], describe_tools=False, **kwargs)

    async def respond(self, sample):
        if sample.messages[-2].content == "fail":
            raise ValueError("broken")
        return []

    def end_episode(self, sample):
        ENDED.append(len(sample.messages))


class OwnLoop(BaseMDPEnv):
    """Answers in its own loop, as a level-3 environment does."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample, message in zip(
            env_state.sample_states, llm.chat(env_state.sample_states, sampling_params), strict=True
        ):
            sample.messages.append(message)
            sample.done = True
        return env_state


def trained(directory, model_dir, **keys):
    """A run of two steps, and its configuration's file."""
    keys = CONFIG | {"tracking": {"tensorboard": False, "episodes_every": 1}} | keys
    config = load_config(None, keys | {"model.path": str(model_dir), "output.dir": str(directory)})
    with build_trainer(config) as trainer:
        trainer.train()
    return str(directory)


@pytest.fixture(scope="module")
def run(model_dir, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("chat") / "run", model_dir, env=TOOL)


def sample(talk):
    return talk._state.sample_states[0]


def test_a_line_has_the_tokens_of_the_same_question_in_training(run):
    row = read_jsonl(next(iter(sorted((Path(run) / "episodes").iterdir()))))[0]
    question = next(item["content"] for item in row["messages"] if item["role"] == "user")
    with conversation(run) as talk:
        talk.ask(question)
        assert list(sample(talk).spans[0].token_ids) == row["spans"][0]["token_ids"]


def test_lines_append_tokens_until_the_reset(run):
    with conversation(run) as talk:
        talk.ask("Ann has 2 books?")
        before, first = sample(talk).token_ids, sample(talk).spans[0].token_ids
        talk.ask("And then?")
        after = sample(talk).token_ids
        assert after[: len(before)] == before and len(after) > len(before)
        assert [item.role for item in sample(talk).messages].count("user") == 2
        talk.reset()
        talk.ask("Ann has 2 books?")
        assert len(sample(talk).spans) == 2 and sample(talk).spans[0].token_ids == first


def test_pieces_of_an_answer_are_the_answer(run):
    pieces = []
    with conversation(run, ["rollout.max_tokens=40"]) as talk:
        said = talk.ask("Ann has 2 books?", lambda role, text: pieces.append((role, text)))
    assert "".join(text for _, text in pieces) == "".join(item.content for item in said)
    assert [role for role, _ in pieces if role] == [item.role for item in said]


def test_an_episode_lasts_as_long_as_the_conversation(model_dir, tmp_path):
    directory = trained(tmp_path / "run", model_dir, env={"name": f"{__name__}:Ended", "max_steps": 2})
    ENDED.clear()
    with conversation(directory) as talk:
        talk.ask("one")
        talk.ask("two")
        assert ENDED == []
        talk.reset()
        assert len(ENDED) == 1
        with pytest.raises(ChatError, match=r"test_chat\.py:\d+"):
            talk.ask("fail")
        talk.ask("three")
        assert [item.content for item in sample(talk).messages[-2:-1]] == ["three"]
        assert len(ENDED) == 2


def test_an_interaction_loop_begins_again_with_each_line(model_dir, tmp_path):
    directory = trained(tmp_path / "run", model_dir, env={"name": f"{__name__}:OwnLoop"})
    with conversation(directory) as talk:
        for line in ("one", "two"):
            assert [item.role for item in talk.ask(line)] == ["assistant"]
            assert sample(talk).messages[-2] == ChatMessage("user", line)


def test_a_run_over_objects_takes_the_prompt_of_its_episodes(model_dir, tmp_path):
    rows = [
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
            "ground_truth": "1",
        }
        for text in ("one", "two", "three")
    ]
    keys = {key: CONFIG[key] for key in ("rollout", "training", "checkpoint", "max_steps")}
    GRPOTrainer(str(model_dir), rows, ["math"], **keys, **{"output.dir": str(tmp_path / "run")}).train()
    with conversation(str(tmp_path / "run")) as talk:
        talk.ask("four")
        first, second, _ = sample(talk).messages
        assert (first.content, second.content) == ("Be brief.", "four")


def test_an_imitating_run_has_the_system_prompt_of_its_rows(model_dir, tmp_path):
    talk_of = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": talk_of}) + "\n")
    keys = {"training": CONFIG["training"], "max_steps": 1, "output.dir": str(tmp_path / "run")}
    SFTTrainer(str(model_dir), str(data), **keys).train()
    with conversation(str(tmp_path / "run")) as talk:
        talk.ask("hello")
        assert [item.content for item in sample(talk).messages[:2]] == ["system", "hello"]


def test_a_run_over_4_bits_answers_when_finished_and_before(model_dir, tmp_path):
    model = {"autocast": "none", "quantize": "nf4", "lora": {"rank": 2}}
    run = trained(tmp_path / "run", model_dir, model=model)
    with conversation(run) as finished, conversation(run, ["max_steps=9"]) as unfinished:
        assert finished.ask("Ann has 2 books?") and unfinished.ask("Ann has 2 books?")
        assert (finished._client._engine.version, unfinished._client._engine.version) == (0, 2)


def test_an_unfinished_run_answers_with_its_last_checkpoint(run):
    with conversation(run) as finished, conversation(run, ["max_steps=9"]) as unfinished:
        assert finished.ask("Ann has 2 books?") == unfinished.ask("Ann has 2 books?")
        assert (finished._client._engine.version, unfinished._client._engine.version) == (0, 2)


def test_a_checkpoint_answers_whatever_its_optimizer(model_dir, tmp_path):
    training = CONFIG["training"] | {"optimizer": "adamw8bit"}
    run = trained(tmp_path / "run", model_dir, env=TOOL, training=training)
    with conversation(run, ["max_steps=9"]) as talk:
        assert talk.ask("Ann has 2 books?") and talk._client._engine.version == 2


def test_a_model_answers_without_a_run(model_dir):
    with conversation(str(model_dir), ["rollout.max_tokens=8"]) as talk:
        assert [item.role for item in talk.ask("hello")] == ["assistant"]


def test_a_full_context_ends_the_conversation(model_dir):
    with conversation(str(model_dir), ["rollout.max_tokens=8"]) as talk:
        with pytest.raises(ChatError):
            for _ in range(99):
                talk.ask("hello " * 40)
        assert talk._state is None


def test_a_directory_above_runs_is_not_a_model(run):
    for directory in (Path(run).parent, Path(run) / "checkpoints"):
        with pytest.raises(ConfigError, match=re.escape(run)), conversation(str(directory)):
            pass


def test_any_error_of_an_answer_ends_the_conversation(run):
    with conversation(run) as talk:
        talk.ask("Ann has 2 books?")
        with pytest.raises(TypeError):  # of the tokenizer
            talk.ask("half of a pair: \ud800")
        assert talk._state is None
        talk.ask("Ann has 2 books?")
        assert [item.role for item in sample(talk).messages].count("user") == 1


def test_an_unknown_part_is_refused(run):
    with pytest.raises(ConfigError), conversation(run, part="other"):
        pass


def test_a_pipe_is_answered_line_by_line(run, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("Ann has 2 books?\n\n/reset\nAnn has 2 books?\n/quit\nmore\n")
    )
    assert main(["chat", run]) == 0
    printed = capsys.readouterr().out
    with conversation(run) as talk:
        one = talk.ask("Ann has 2 books?")[0].content
    assert printed.count(one) == 2 and printed.count("\n") == 2 + 2 * one.count("\n")


def test_a_byte_that_is_not_utf_8_costs_no_line(run, monkeypatch, capsys):
    lines = io.BytesIO(b"caf\xe9?\n/reset\nAnn has 2 books?\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines, "utf-8"))
    assert main(["chat", run]) == 0
    with conversation(run) as talk:
        answers = [talk.ask(line)[0].content for line in ("caf\ufffd?",)]
        talk.reset()
        answers += [talk.ask("Ann has 2 books?")[0].content]
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_a_question_of_eval_is_answered_as_in_a_chat(run, capsys):
    assert main(["eval", f"{run}/config.yaml", "--ask", "Ann has 2 books?", "--json"]) == 0
    with conversation(run) as talk:
        said = [item.to_dict() for item in talk.ask("Ann has 2 books?")]
    assert json.loads(capsys.readouterr().out) == said


def test_a_question_has_no_options_of_measurements(run, tmp_path, capsys):
    about = ["eval", f"{run}/config.yaml", "--ask", "Ann has 2 books?"]
    options = [["--out", tmp_path / "out.json"], ["--compare", "x"], ["--fail-if-worse"], ["--samples", 2]]
    for words in [*options, ["--k", 1], ["--limit", 3], ["--data", "a=b"]]:
        assert main([*about, *map(str, words)]) == 2, words
    assert not capsys.readouterr().out and not any(tmp_path.iterdir())
    assert main([*about, "--debug", "rollout.max_tokens=2"]) == 0


def test_a_line_is_answered_before_the_next_is_read(run, monkeypatch, capsys):
    printed = []

    def line(prompt=""):
        printed.append(capsys.readouterr().out)
        if len(printed) == 3:
            raise EOFError
        return "Ann has 2 books?"

    monkeypatch.setattr("builtins.input", line)
    assert main(["chat", run]) == 0
    assert all(printed[1:])

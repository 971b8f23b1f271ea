"""Pairs and labelled answers: read in every form that TRL reads, refused with file and line, written as a rollout would."""

import pytest

from rl4llm.core.errors import ConfigError, DataError
from rl4llm.data.demonstrations import demonstration_group, label_group, pair_group, valued_at_the_end
from rl4llm.data.load import load_rows
from rl4llm.data.render import Renderer


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = [user("What is 1+1?")]
WHOLE = {"chosen": [*QUESTION, said("2")], "rejected": [*QUESTION, said("3")]}
FORMS = {
    "texts": {"prompt": "What is 1+1?", "chosen": "2", "rejected": "3"},
    "messages beside a prompt": {"prompt": QUESTION, "chosen": [said("2")], "rejected": [said("3")]},
    "beside messages": {"messages": QUESTION, "chosen": "2", "rejected": [said("3")]},
    "whole conversations": WHOLE,
    "whole conversations and their prompt": {"prompt": "What is 1+1?", "messages": WHOLE["chosen"], **WHOLE},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_pair_is_the_same_pair(form):
    (row,) = load_rows([FORMS[form]], learns_from="pairs")
    assert row["messages"] == [user("What is 1+1?")]
    assert (row["chosen"], row["rejected"], row["margin"]) == ([said("2")], [said("3")], 0.0)
    assert row["prompt_id"] == load_rows([FORMS["texts"]], learns_from="pairs")[0]["prompt_id"]


def test_the_prompt_of_a_pair_is_its_shared_conversation():
    start = [SYSTEM, user("1+1?"), said("2"), user("2+2?")]
    chosen, rejected = [*start, said("4")], [*start, said("5"), user("Sure?"), said("5")]
    (row,) = load_rows([{"chosen": chosen, "rejected": rejected, "margin": 2}], learns_from="pairs")
    assert [row[key] for key in ("messages", "chosen", "rejected", "margin")] == [
        start,
        chosen[4:],
        rejected[4:],
        2.0,
    ]
    # one goes on
    (row,) = load_rows([{"chosen": start[:3], "rejected": [*start, said("4")]}], learns_from="pairs")
    assert (row["messages"], row["chosen"]) == (start[:2], start[2:3])


def test_an_empty_reply_may_be_the_bad_answer():
    asked, empty = [user("p")], [said("b"), user("Sure?"), said("")]
    (row,) = load_rows([{"chosen": [*asked, said("a")], "rejected": [*asked, said("")]}], learns_from="pairs")
    assert row["rejected"] == [said("")]
    rows = [{"prompt": asked, "completion": empty, "label": label} for label in (False, True)]
    assert load_rows(rows[:1], learns_from="labels")[0]["completion"] == empty
    with pytest.raises(DataError):
        load_rows(rows, learns_from="labels")


def test_a_pairs_prompt_gets_system_prompt_and_template():
    options = {"system_prompt": "Be brief.", "prompt_template": "Q: {prompt}", "prompt_column": "question"}
    rows = load_rows([{"question": "1+1?", "chosen": "2", "rejected": "3"}], learns_from="pairs", **options)
    assert rows[0]["messages"] == [SYSTEM, user("Q: 1+1?")]


def test_margins_and_labels_of_a_csv_file_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected,margin\np,a,b,0.5\np,c,d,\np,e,f,2\n")
    rows = load_rows(tmp_path / "a.csv", learns_from="pairs")
    assert [row["margin"] for row in rows] == [0.5, 0.0, 2.0]
    (tmp_path / "b.csv").write_text("prompt,completion,label\np,a,True\np,b,0\np,c,false\np,d,1\n")
    rows = load_rows(tmp_path / "b.csv", learns_from="labels")
    assert [row["label"] for row in rows] == [True, False, False, True]


def test_labelled_answers_are_read_as_texts_or_messages():
    rows = [
        {"prompt": "1+1?", "completion": "2", "label": True},
        {"prompt": [user("1+1?")], "completion": [said("3")], "label": 0},
    ]
    good, bad = load_rows(rows, learns_from="labels")
    assert (good["messages"], good["completion"], good["label"]) == ([user("1+1?")], [said("2")], True)
    assert (bad["messages"], bad["completion"], bad["label"]) == ([user("1+1?")], [said("3")], False)


def test_a_generated_task_for_episodes_holds_no_pairs(model_dir, tmp_path):
    from rl4llm import DPOTrainer

    with pytest.raises(ConfigError, match="'chosen'"):
        DPOTrainer(str(model_dir), "arithmetic", output={"dir": str(tmp_path / "run")})


def texts(tokenizer, trajectory):
    return [(span.author, tokenizer.decode(span.token_ids)) for span in trajectory.spans]


def test_both_answers_of_a_pair_share_one_prompts_tokens(tokenizer):
    renderer = Renderer(tokenizer)
    prompt = [user("1+1?"), said("2"), user("2+2?")]  # the assistant's turn in it is no answer of the pair
    (row,) = load_rows(
        [{"prompt": prompt, "chosen": "4", "rejected": [said("5"), user("Sure?"), said("no")]}],
        learns_from="pairs",
    )
    chosen, rejected = pair_group(renderer, row, "a").trajectories
    start = ("context", tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    assert texts(tokenizer, chosen) == [start, ("policy", "4<|im_end|>")]
    between = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    answers = [("policy", "5<|im_end|>"), ("context", between), ("policy", "no<|im_end|>")]
    assert texts(tokenizer, rejected) == [start, *answers]
    assert (chosen.reward, rejected.reward) == (1.0, -1.0)


def test_a_labelled_answer_is_worth_1_or_minus_1(tokenizer):
    rows = load_rows(
        [{"prompt": "p", "completion": "a", "label": bool(i)} for i in range(2)], learns_from="labels"
    )
    groups = [label_group(Renderer(tokenizer), row, "a") for row in rows]
    assert [group.trajectories[0].reward for group in groups] == [-1.0, 1.0]


def test_a_valued_conversation_ends_with_one_policy_token(tokenizer):
    renderer = Renderer(tokenizer)
    (row,) = load_rows([FORMS["texts"]], learns_from="pairs")
    for plain in pair_group(renderer, row, "a").trajectories:
        valued = valued_at_the_end(plain, renderer)
        assert renderer.decode(valued.token_ids) == renderer.decode(plain.token_ids) + "\n<|im_end|>"
        assert [span.author for span in valued.spans] == ["context", "context", "context", "policy"]
        assert (valued.reward, valued.spans[0], valued.num_policy_tokens) == (plain.reward, plain.spans[0], 1)


TOOL = {"role": "tool", "content": "2"}
CONVERSATION = [user("1+1?"), said("<call>"), TOOL, said("It is 2."), user("Thanks.")]


@pytest.mark.parametrize("learned", ["assistant", "context", "all"])
def test_who_wrote_the_tokens_that_are_learned_is_a_choice(learned, tokenizer):
    renderer = Renderer(tokenizer, roles=("tool", "user"))
    (trajectory,) = demonstration_group(
        renderer, {"messages": CONVERSATION}, "a", learned=learned
    ).trajectories
    found = texts(tokenizer, trajectory)
    tail = "<|im_start|>assistant\n"
    assert "".join(text for _, text in found).removesuffix(tail) == tokenizer.apply_chat_template(
        CONVERSATION if learned != "assistant" else CONVERSATION[:4], tokenize=False
    ).removesuffix("" if learned != "assistant" else "\n")
    assert found[0][0] == "context"
    learnt = "".join(text for author, text in found if author == "policy")
    authors = {"<call>": "assistant", "It is 2.": "assistant", "tool\n2": "context", "Thanks.": "context"}
    assert all((text in learnt) == (learned in (by, "all")) for text, by in authors.items())

"""Rows with the schemas of published data sets are read with the keys that docs/rows.md names; the rows are made up."""

import json
import re
from pathlib import Path

import datasets
import pytest

from rl4llm.data.load import load_rows

PAGE = Path(__file__).parents[2] / "docs" / "rows.md"
KINDS = {
    "sft": "demonstrations",
    "dpo": "pairs",
    "reward_model": "comparisons",
    "kto": "labels",
    "grpo": "episodes",
}


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def turns(*texts, human="human", gpt="gpt"):
    return [{"from": (human, gpt)[number % 2], "value": text} for number, text in enumerate(texts)]


PARAMETERS = {"city": {"description": "The city.", "type": "str", "default": ""}}
TOOL = {"name": "weather", "description": "Weather.", "parameters": PARAMETERS}
SCHEMA = {
    "type": "function",
    "function": {**TOOL, "parameters": {"type": "object", "properties": PARAMETERS}},
}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
PAIR = [[user("2+2?"), said(answer)] for answer in ("4", "5")]
QA = [user("2+2?"), said("4")]

ROWS = {
    "HuggingFaceH4/ultrachat_200k": ({"prompt": "2+2?", "prompt_id": "f0e", "messages": QA}, {"messages": QA}),
    "allenai/tulu-3-sft-mixture": ({"id": "a_1", "messages": QA, "source": "x"}, {"messages": QA, "prompt_id": "a_1"}),
    "HuggingFaceTB/smoltalk2": (
        {"messages": QA, "source": "x", "chat_template_kwargs": {
            "custom_instructions": "", "enable_thinking": False, "python_tools": [], "xml_tools": None}},
        {"messages": QA, "chat_template_kwargs": {"custom_instructions": "", "enable_thinking": False, "python_tools": []}},
    ),
    "teknium/OpenHermes-2.5": (
        {"conversations": [{**turn, "weight": None} for turn in turns("2+2?", "4")], "source": "x", "system_prompt": None,
         "language": None, "id": None, "category": "math"},
        {"messages": QA},
    ),
    "open-thoughts/OpenThoughts-114k": (
        {"system": "Think.", "conversations": turns("2+2?", "4", human="user", gpt="assistant")},
        {"messages": [system("Think."), *QA]},
    ),
    "databricks/databricks-dolly-15k": (
        {"instruction": "Who?", "context": "A text.", "response": "I.", "category": "closed_qa"},
        {"messages": [user("Who?\n\nA text."), said("I.")]},
    ),
    "tatsu-lab/alpaca": (
        {"instruction": "2+2?", "input": "", "output": "4", "text": "Below is ...### Response:\n4"}, {"messages": QA},
    ),
    "HuggingFaceFW/fineweb-edu": (
        {"text": "A text.", "id": "<urn:1>", "dump": "CC", "url": "https://example.com", "score": 2.7, "token_count": 3},
        {"messages": [], "text": "A text.", "prompt_id": "<urn:1>"},
    ),
    "roneneldan/TinyStories": ({"text": "Once."}, {"messages": [], "text": "Once."}),
    "Salesforce/xlam-function-calling-60k": (
        {"id": 0, "query": "Rain?", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])},
        {"messages": [user("Rain?"), {**said(""), "tool_calls": [{"type": "function", "function": CALL}]}],
         "tools": [SCHEMA], "prompt_id": "0"},
    ),
    "Team-ACE/ToolACE": (
        {"system": "You can call [...]", "conversations": [
            *turns("Rain?", "[weather(city='Paris')]", human="user", gpt="assistant"), {"from": "tool", "value": "no"},
            {"from": "assistant", "value": "No."}]},
        {"messages": [system("You can call [...]"), user("Rain?"), said("[weather(city='Paris')]"),
                      {"role": "tool", "content": "no"}, said("No.")]},
    ),
    "Salesforce/APIGen-MT-5k": (
        {"conversations": [*turns("Rain?"), {"from": "function_call", "value": json.dumps(CALL)},
                           {"from": "observation", "value": "no"}, {"from": "gpt", "value": "No."}],
         "tools": json.dumps([TOOL]), "system": "Help."},
        {"messages": [system("Help."), user("Rain?"),
                      {**said(""), "tool_calls": [{"type": "function", "function": CALL}]},
                      {"role": "tool", "content": "no"}, said("No.")], "tools": [SCHEMA]},
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {"prompt": "2+2?", "prompt_id": "c7", "chosen": PAIR[0], "rejected": PAIR[1], "messages": PAIR[0],
         "score_chosen": 8.0, "score_rejected": 2.0},
        {"messages": [user("2+2?")], "chosen": [said("4")], "rejected": [said("5")], "prompt_id": "c7"},
    ),
    "Anthropic/hh-rlhf": (
        {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"},
        {"messages": [user("2+2?")], "chosen": [said("4")], "rejected": [said("5")]},
    ),
    "Intel/orca_dpo_pairs": (
        {"system": "Help.", "question": "2+2?", "chosen": "4", "rejected": "5"},
        {"messages": [system("Help."), user("2+2?")], "chosen": [said("4")], "rejected": [said("5")]},
    ),
    "Skywork/Skywork-Reward-Preference-80K-v0.2": (
        {"chosen": PAIR[0], "rejected": PAIR[1], "source": "x"},
        {"messages": [user("2+2?")], "chosen": [said("4")], "rejected": [said("5")]},
    ),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        {"id": "p1", "source": "x", "prompt": "2+2?", "chosen": PAIR[0], "rejected": PAIR[1], "models": ["a"]},
        {"messages": [user("2+2?")], "chosen": [said("4")], "rejected": [said("5")]},
    ),
    "trl-lib/kto-mix-14k": (
        {"prompt": [user("2+2?")], "completion": [said("4")], "label": True},
        {"messages": [user("2+2?")], "completion": [said("4")], "label": True},
    ),
    "openai/gsm8k": (
        {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, {"messages": [user("2+2?")], "ground_truth": "4"},
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        {"data_source": "math_dapo", "prompt": [user("2+2?")], "ability": "MATH",
         "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": "9a"}},
        {"messages": [user("2+2?")], "ground_truth": "4"},
    ),
    "zwhe99/DeepMath-103K": (
        {"question": "2+2?", "final_answer": "4", "difficulty": 1.0, "topic": "Sums", "r1_solution_1": "..."},
        {"messages": [user("2+2?")], "ground_truth": "4"},
    ),
    "open-r1/OpenR1-Math-220k": (
        {"problem": "2+2?", "solution": "...", "answer": "4", "problem_type": "Algebra", "uuid": "u", "messages": QA},
        {"messages": [user("2+2?")], "ground_truth": "4"},
    ),
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": (
        {"messages": [user("2+2?")], "ground_truth": "4", "dataset": "gsm8k", "constraint_type": None, "constraint": None},
        {"messages": [user("2+2?")], "ground_truth": "4"},
    ),
    "KodCode/KodCode-V1": (
        {"version": "v1", "style": "instruct", "question_id": "q", "question": "Add.", "solution": "def add(): ...",
         "test": "def test_add(): ..."},
        {"messages": [user("Add.")], "ground_truth": "def test_add(): ..."},
    ),
    "BAAI/TACO": (
        {"question": "Add.", "solutions": "[]", "starter_code": "", "input_output": '{"inputs": ["1"], "outputs": ["1"]}'},
        {"messages": [user("Add.")], "ground_truth": '{"inputs": ["1"], "outputs": ["1"]}'},
    ),
}  # fmt: skip


def listed():
    """Return the run and the keys of each data set on the page, by its name."""
    section = PAGE.read_text().split("## Published datasets")[1]
    found = {}
    for name, run, keys in re.findall(r"^\| (\S+/\S+) \| `(\w+)` \|(.*)\|$", section, re.MULTILINE):
        pairs = (key.partition("=") for key in re.findall(r"`data\.([^`]+)`", keys))
        found[name] = run, {key: value for key, _, value in pairs}
    return found


def test_the_page_lists_the_data_sets_that_are_tested():
    assert set(listed()) == set(ROWS)
    assert len(ROWS) == 25


@pytest.mark.parametrize("table", [False, True], ids=["json", "arrow"])
@pytest.mark.parametrize("name", ROWS)
def test_a_published_schema_is_read_with_the_keys_of_the_page(name, table):
    row, wanted = ROWS[name]
    run, keys = listed()[name]
    keys = {key: value for key, value in keys.items() if key != "split"}
    source = datasets.Dataset.from_list([row]) if table else [json.loads(json.dumps(row))]
    (read,) = load_rows(source, learns_from=KINDS[run], **keys)
    if not table and "chat_template_kwargs" in wanted:  # a null that someone wrote
        wanted = {**wanted, "chat_template_kwargs": row["chat_template_kwargs"]}
    assert {key: read[key] for key in wanted} == wanted

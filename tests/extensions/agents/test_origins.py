"""Where a conversation of an agent comes from: compacted, rewritten, or begun by a call of another one."""

import json
import time

import pytest
from later import later

from rl4llm.core.types import ChatMessage, Completion, Origin
from rl4llm.data.render import Renderer
from rl4llm.extensions.agents.history import Entry, History, Transcript
from rl4llm.extensions.agents.origins import source_of
from rl4llm.tracking.episodes import EpisodeLog

SYSTEM, QUESTION, RESULT = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "How many files are there?"),
    ChatMessage("tool", "85 files were listed"),
)
SUMMARIZE = ChatMessage("user", "Summarise what you did.")
SUMMARY = "I listed the directory and found 85 files.\nWhat remains is to sort them by size."


def said(text, **arguments):
    call = {"id": "a", "type": "function", "function": {"name": "task", "arguments": arguments}}
    return ChatMessage("assistant", text, (call,) if arguments else None)


def asked(text):
    return ChatMessage("user", text)


@pytest.fixture
def talk(tokenizer):
    """talk(messages, answer=message): a request and its answer; `talk.origins()` are those of the forks."""
    renderer, history = Renderer(tokenizer, roles=()), History()

    def ask(*messages, answer, tools="[]"):
        place = history.place(tools, messages, renderer)
        ids = (*tokenizer.encode(answer.content or "x", add_special_tokens=False), tokenizer.eos_token_id)
        completion = Completion(answer.content, ids, (-0.5,) * len(ids), "stop", 3)
        return history.add(place, completion, answer)

    ask.history, ask.origins = history, lambda: history.origins
    return ask


@pytest.fixture
def worked(talk):
    """A conversation of two turns, and then its summary."""
    talk(SYSTEM, QUESTION, answer=said("I will list the files now."))
    long = [SYSTEM, QUESTION, said("I will list the files now."), RESULT]
    talk(*long, answer=said("There are 85 files, as I can see."))
    talk(*long, said("There are 85 files, as I can see."), SUMMARIZE, answer=said(SUMMARY))
    return talk


@pytest.mark.parametrize("begins", [
    (SYSTEM, asked(f"How many files are there?\nThis session continues another:\n{SUMMARY}")),
    (SYSTEM, QUESTION, said(SUMMARY), asked("Go on.")),
    (SYSTEM, QUESTION, said("I will list the files now."), RESULT, asked(f"Before: {SUMMARY}")),  # keeps a turn
    (asked(f"Summary: {SUMMARY.splitlines()[1]}"),),  # only a part of it
])  # fmt: skip
def test_conversation_with_the_summary_continues_its_turn(worked, begins):
    worked(*begins, answer=said("Sorted."))
    assert worked.origins() == [Origin("continues", 0, 3)]
    assert len(worked.history.records) == 2


def test_summary_asked_with_other_tools_is_continued_there(worked):
    long = [SYSTEM, QUESTION, said("I will list the files now."), RESULT]
    worked(*long, SUMMARIZE, answer=said("The work so far was to list all files."), tools="none")
    worked(SYSTEM, asked("Before: The work so far was to list all files."), answer=said("Sorted."))
    assert worked.origins() == [Origin("rewrites", 0, 1), Origin("continues", 1, 1)]


@pytest.mark.parametrize(("begins", "turn"), [
    ((SYSTEM, QUESTION, said("I will list the files now."), asked("Do it again.")), 1),
    ((SYSTEM, QUESTION, said("I will list the files now."), asked('Not "I will list the files now."')), 1),  # quotes
    ((SYSTEM, QUESTION, asked("Do it again.")), 0),
    ((SYSTEM, asked("In short: 85 files. And now?")), 0),
    ((SYSTEM, QUESTION, said("I will list the files now."), ChatMessage("tool", SUMMARY)), 1),  # a tool's text
])  # fmt: skip
def test_other_history_that_begins_alike_is_rewritten(worked, begins, turn):
    worked(*begins, answer=said("Sorted."))
    assert worked.origins() == [Origin("rewrites", 0, turn)]


def test_conversation_that_shares_nothing_comes_from_nowhere(worked):
    worked(asked("What is the topic of this text?"), answer=said("Files."))
    assert worked.origins() == [None]


def test_conversation_during_a_call_was_called_by_it(talk):
    first = said("Two helpers.", prompt="Count the files in the first directory.")
    talk(SYSTEM, QUESTION, answer=said("I think about it first."))
    begun = [SYSTEM, QUESTION, said("I think about it first."), asked("Go on.")]
    talk(*begun, answer=first)
    task = asked("Count the files in the first directory.")
    nested = said("", prompt="Look for hidden files there, please.")
    talk(ChatMessage("system", "You are a helper."), task, answer=nested)
    talk(
        ChatMessage("system", "You help."), asked("Something else."), answer=said("Yes.")
    )  # of the newest call
    talk(asked("Look for hidden files there, please."), answer=said("None."))
    talk(ChatMessage("system", "Helps."), task, answer=said("Seven."))
    assert talk.origins() == [Origin("called", 0, 2), *[Origin("called", 1, 1)] * 2, Origin("called", 0, 2)]
    talk(ChatMessage("system", "You are a helper."), task, nested, RESULT, answer=said("85."))
    talk(*begun, first, RESULT, answer=said("85."))  # all calls were answered
    talk(asked("Is this a greeting?"), answer=said("No."))
    assert talk.origins()[-1] is None


def test_same_question_during_a_call_is_asked_again(talk):
    talk(SYSTEM, QUESTION, answer=said("", prompt="Count the files."))
    talk(SYSTEM, QUESTION, answer=said("85."))
    assert talk.origins() == [Origin("rewrites", 0, 0)]


def test_origin_in_an_answer_that_was_taken_back_is_unknown(talk):
    lost = talk(SYSTEM, QUESTION, answer=said(SUMMARY))
    talk(asked("What is the topic of this text?"), answer=said("Files."))
    talk(asked(f"Before: {SUMMARY}"), answer=said("Sorted."))
    assert talk.origins() == [None, Origin("continues", 0, 1)]
    talk.history.take_back(lost)
    assert talk.origins() == [None]


def test_origin_in_a_long_prompt_costs_one_pass():
    lines = [f"Line {number} of the work before." for number in range(45_000)]
    prompt, answers = [asked("\n".join(lines[32_000:]))], []
    for one in range(32):
        messages = (asked(f"Part {one}?"), said("\n".join(lines[one * 1000 : one * 1000 + 1000])))
        answers.append(Entry(Transcript("[]", messages=[*messages]), messages, (0, 0)))
    text = prompt[0].content
    start = time.thread_time()
    assert "" not in {text[at : at + 16] for at in range(len(text))}
    one_pass = time.thread_time() - start
    start = time.thread_time()
    assert source_of(prompt, answers) is None
    assert time.thread_time() - start < 8 * one_pass


async def compacts(task, base_url, api_key):
    """Works, asks for a summary and continues from it."""
    client = later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def ask(*messages):
        answer = await client.chat.completions.create(model="m", messages=messages)
        return answer.choices[0].message.model_dump(exclude_none=True)

    def user(text):
        return {"role": "user", "content": text}

    history = [*task["messages"]]
    history += [await ask(*history), user("Summarise.")]
    summary = await ask(*history)
    return (await ask(*task["messages"][:-1], user(f"Before:\n{summary['content']}")))["content"]


def test_episode_of_an_agent_that_compacts_is_stored_so(play, tmp_path):
    turns = ["I counted some of them.", SUMMARY, "Answer: 85"]
    result, _ = play(compacts, turns)
    (one,) = result.trajectories
    assert one.origins == (Origin("continues", 0, 2),) and one.extras["metrics"]["compactions"] == 1
    EpisodeLog(tmp_path).log(0, result.groups)
    row = json.loads((tmp_path / "step-000000.jsonl").read_text())
    assert row["origins"] == [{"relation": "continues", "record": 0, "turn": 2}]

"""The grammar of an answer that a request forces: JSON of a schema, or a call of a tool in the model's own format."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from rl4llm.core.errors import RefusedError
from rl4llm.core.message import opened_thought
from rl4llm.core.registry import load
from rl4llm.core.types import SamplingParams
from rl4llm.data.template import decode
from rl4llm.envs.dialects import Dialect
from rl4llm.envs.tools.formats import CallFormat
from rl4llm.envs.wire import Asked, RequestError, unforced
from rl4llm.runtime.threads import in_own_thread

COMPILE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from llguidance import LLMatcher
print(end=LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(sys.stdin.read())))
"""
TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")|<\[\d+\]>')
"""A token of a grammar, or a string, in which the same characters are text."""
REMEMBERED = 1024  # grammars
_PROBLEMS: dict[bytes, str] = {}  # by digest, those used last at the end
_COMPILING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
THOUGHT = 16  # tokens at the end of a prompt that may open one
MATCHER = "rl4llm.data.grammars:Matcher"
ARGUMENTS = '{"x": "1"}'  # of a call in `CallFormat.example`
SPACE = {"whitespace_pattern": "[ \\n\\t]{0,24}"}  # a model that is not sure writes it without end
ANY = r"/(.|\n)*"
THINKS = ("<think>", "</think>")


async def constrained(
    dialect: Dialect, asked: Asked, params: SamplingParams, prompt_ids: Sequence[int], constrains: bool
) -> SamplingParams:
    """Return the sampling parameters of a request in a dialect, with the grammar of what it forces.

    Raises RequestError.
    """
    prompt = decode(dialect.tokenizer, prompt_ids[-THOUGHT:])
    ends, params = dialect.renderer.stop_token_ids, dialect.params(asked, params)
    grammar = grammar_of(asked, dialect.calls, dialect.tokenizer, ends, prompt, constrains)
    if grammar and (problem := await _problem(dialect.tokenizer, grammar)):
        raise RequestError(f"The format or the tools cannot be enforced: {problem}", param="schema")
    return params.replace(grammar=grammar)


async def _problem(tokenizer: Any, grammar: str) -> str:
    """Return why a grammar cannot be enforced, or ""; one is compiled at a time, and remembered."""
    digest = sha256(grammar.encode()).digest()
    if (problem := _PROBLEMS.pop(digest, None)) is None:
        async with _COMPILING.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if (problem := _PROBLEMS.get(digest)) is None:
                problem = await _compiled(tokenizer, grammar)
    _PROBLEMS[digest] = problem  # the last one to be forgotten
    if len(_PROBLEMS) > REMEMBERED:
        _PROBLEMS.pop(next(iter(_PROBLEMS)))
    return problem


async def _compiled(tokenizer: Any, grammar: str) -> str:
    """Compile a grammar; return why it cannot be, or "".

    A small schema can take hours, which no limit of llguidance ends, so that is first done in a process with limits.
    """
    plain = TOKEN.sub(lambda match: match[1] or '"."', grammar)  # tokens need a tokenizer
    process = await create_subprocess_exec(
        sys.executable, "-c", COMPILE, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        said, _ = await process.communicate(plain.encode())
    finally:
        if process.returncode is None:  # the request was cancelled
            process.kill()
    if said or process.returncode:
        return said.decode()[:300] or "it takes too much time or memory"
    try:
        await in_own_thread("rl4llm-grammar", partial(load(MATCHER), tokenizer, grammar))
    except RefusedError as error:
        return str(error)
    return ""


def grammar_of(
    asked: Asked,
    calls: CallFormat | None,
    tokenizer: Any,
    ends: Sequence[int],
    prompt: str,
    constrains: bool = True,
) -> str:
    """Return the grammar of the answer to a request after a prompt, which may have opened a thought; "" for any answer.

    Raises RequestError where that needs an engine that `constrains`, or a grammar of the model's format of calls.
    """
    if asked.forced is None and asked.schema is None:
        return ""
    may_call = asked.forced is not None or (asked.tools and asked.may_call)
    rules = [*_calls(asked, calls, tokenizer)] if may_call else []
    if not constrains or (may_call and not rules):
        why = "the tools have no grammar in the model's format" if constrains else "the engine samples freely"
        if asked.forced is None and asked.schema:
            raise unforced("response_format", asked.schema[0], why)
        raise unforced("tool_choice", "tool_choice", why)
    if asked.forced is None and asked.schema:
        rules.append(_json(asked.schema[1]))
    end, answers = " | ".join(f"<[{token}]>" for token in ends), "\n    | ".join(rules)
    thought, rule = _thought(tokenizer, prompt)
    return f"start: {thought} answer ({end})\nanswer: {answers}\n{rule}"


def _calls(asked: Asked, calls: CallFormat | None, tokenizer: Any) -> Iterator[str]:
    """Yield a rule for each tool that may be called, as far as the format reads it back."""
    head, found, tail = (calls.example if calls else "").partition(ARGUMENTS)
    closed = len(tail) - len(tail.lstrip("}]"))
    for function in (tool["function"] for tool in asked.tools if found):
        name = function["name"]
        text = name.join(re.split(r"\bf\b", head, maxsplit=1))
        read = [call.name for call in calls.parse(f"{text}{{}}{tail}") if not call.problem] if calls else []
        if read != [name] or (asked.forced and name not in asked.forced):
            continue
        at = next((text.find(begin) for begin in ('[{"', '{"') if begin in text), len(text))
        space = "/\\n?/" if at < len(text) else ""
        schema = _json({"type": "object", **(function.get("parameters") or {})})
        parts = [_text(part, tokenizer) for part in (text[:at], text[at:], tail[:closed], tail[closed:])]
        yield " ".join(filter(None, (parts[0], space, parts[1], schema, parts[2], space, parts[3])))


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': SPACE}, ensure_ascii=False)}"


def _text(text: str, tokenizer: Any) -> str:
    """Return a text as its tokens where they are added ones, as llguidance matches those by their ids alone."""
    added = {str(item.content): token for token, item in tokenizer.added_tokens_decoder.items()}
    marks = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    parts = filter(None, re.split(f"({marks})", text) if marks else [text])
    return " ".join(
        f"<[{added[part]}]>" if part in added else json.dumps(part, ensure_ascii=False) for part in parts
    )


def _thought(tokenizer: Any, prompt: str) -> tuple[str, str]:
    """Return what precedes an answer, and its rule: a thought that the prompt opened, or any that has tokens."""
    opened, added = opened_thought(prompt).strip(), tokenizer.get_added_vocab()
    begin, end = (opened, opened.replace("<", "</", 1).replace("[", "[/", 1)) if opened else THINKS
    if not opened and not {begin, end} <= added.keys():
        return "", ""
    last = re.escape(end).replace("/", r"\/")
    rule = f"thought: {ANY}/ <[{added[end]}]>" if end in added else f"thought[lazy]: {ANY}{last}/"
    return ("thought /\\n*/" if opened else f"(<[{added[begin]}]> thought /\\n*/)?"), rule

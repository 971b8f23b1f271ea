"""Every chat template of many model families works token for token, or is refused with a reason.

Without --sweep, some of the templates are tried.
"""

import json
from contextlib import suppress

import jinja2
import pytest
from chat_templates import BEGIN, END, PAGE, counts, named_row, shown, tokenizer_of
from downloads import templates
from packed import pack
from template_rows import follow_ups, play, template_row, turn

from rl4llm.core.errors import ConfigError, TemplateError
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.data.pack import totals_of
from rl4llm.data.render import Renderer
from rl4llm.envs import chat_completions
from rl4llm.envs.dialects import Dialects
from rl4llm.extensions.agents import messages as anthropic
from rl4llm.extensions.agents import responses
from tests.data.test_render import ASK, EACH, chatml
from tests.hostile import what_text_controls

MOST_DIFFERENT, MOST_LOST = 0, 2
LEAST = {
    "templates": 70, "usable in several turns": 66, "usable with tools": 63, "whose calls auto reads": 62,
    "whose calls ran": 54, "with demonstrations": 55,
}  # fmt: skip
ASKED = ChatMessage("user", "What is 37 + 48?")
FUNCTION = {"name": "calculator", "description": "Sums.", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = {"expression": "37 + 48"}
TEXT = json.dumps(ARGUMENTS)
CALL = {"id": "call00001", "type": "function", "function": {"name": "calculator", "arguments": TEXT}}
CALLING = [
    ASKED.to_dict(),
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "85", "tool_call_id": "call00001"},
]


@pytest.fixture(scope="module")
def files(sweep):
    found = sorted(templates().glob("*.jinja"))
    return found if sweep else found[3::9]


def test_template_works_exactly_or_is_refused(files, sweep):
    rows = dict(map(named_row, files))
    for name, row in rows.items():
        refused = {
            "user": row.user, "tools": row.tools, "demonstrations": row.demonstrations, "format": row.format,
        }  # fmt: skip
        for column, cell in refused.items():
            assert cell != "refused" or row.reasons[column], f"{name}: {column}"
    assert sum(row.demonstrations == "differs" for row in rows.values()) <= MOST_DIFFERENT
    assert sum(row.call == "lost" for row in rows.values()) <= MOST_LOST
    if sweep:
        assert_enough(counts(rows))
        assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == shown(rows)


def assert_enough(counted):
    for what, least in LEAST.items():
        assert counted[what] >= least, what


def test_sampled_turns_are_recorded_and_trained(files):
    for file in files[::2]:
        tokenizer = tokenizer_of(file)
        env = follow_ups(tokenizer, ASKED)
        try:
            renderer = Renderer.of(env, tokenizer)
        except TemplateError:
            continue
        for turns in odd_turns(renderer, tokenizer):
            trajectory = play(env, renderer, turns)
            assert_trained(trajectory, turns)


def test_no_text_writes_control_tokens(files):
    tried = 0
    for file in files:
        tokenizer = tokenizer_of(file)
        try:
            Renderer(tokenizer, roles=())
        except TemplateError:
            continue
        assert what_text_controls(tokenizer) == [], file.name
        tried += 1
    assert tried > 0.8 * len(files)


@pytest.mark.parametrize("tools", [[], [FUNCTION]])
def test_every_wire_gives_the_prompt_of_apply_chat_template(tools, files):
    compared, listed = 0, [{"type": "function", "function": tool} for tool in tools]
    for file in files:
        try:
            renderer = Dialects(tokenizer_of(file)).of(listed).renderer
        except (TemplateError, ConfigError):
            continue
        expected = own_prompts(renderer._template, listed or None)
        for messages in wires() if expected and not renderer._template.described else ():
            assert renderer.prompt(messages) in expected, file.name
            compared += 1
    assert compared > 1.8 * len(files)


def own_prompts(template, tools):
    """Return the template's prompts of CALLING; some templates read the arguments of calls as text."""
    found, given = [], {"chat_template": template._source, "add_generation_prompt": True}
    for rows in (CALLING, json.loads(json.dumps(CALLING).replace(json.dumps(TEXT), json.dumps(ARGUMENTS)))):
        with suppress(jinja2.TemplateError, TypeError):
            found.append(template.tokenizer.apply_chat_template(rows, tools=tools, **given)["input_ids"])
    return found


def wires():
    """Yield the messages of CALLING as requests of each wire have them."""
    params, (asked, said, result) = SamplingParams(), CALLING
    yield chat_completions.read_request({"messages": CALLING}, params).messages
    items = [{"type": "function_call", "call_id": "call00001", "name": "calculator", "arguments": TEXT}]
    items += [{"type": "function_call_output", "call_id": "call00001", "output": "85"}]
    request = {"input": [asked, {"role": "assistant", "content": said["content"]}, *items]}
    yield responses.read_request(request, params, {}).messages
    blocks = [{"type": "tool_use", "id": "call00001", "name": "calculator", "input": ARGUMENTS}]
    blocks = [{"type": "text", "text": said["content"]}, *blocks]
    answer = {"type": "tool_result", "tool_use_id": "call00001", "content": result["content"]}
    turns = [asked, {"role": "assistant", "content": blocks}, {"role": "user", "content": [answer]}]
    yield anthropic.read_request({"max_tokens": 9, "messages": turns}, params, {}).messages


def test_row_uses_the_template_arguments():
    tokenizer = chatml("{% if not allowed %}{{ raise_exception('not allowed') }}{% endif %}" + EACH + ASK)
    refused, row = template_row(tokenizer), template_row(tokenizer, {"allowed": True})
    assert (refused.user, refused.tools, refused.demonstrations, refused.thoughts) == (*["refused"] * 3, "-")
    assert row.cells() == ["+", "+ d", "=", "kept", "hermes", "ran"]


def test_row_tells_that_tools_are_described():
    shown = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    assert [template_row(chatml(source)).tools for source in (EACH + ASK, shown + EACH + ASK)] == ["+ d", "+"]


def odd_turns(renderer, tokenizer):
    """Return what engines may sample and no tokenizer would give: spaces, thoughts, special tokens, other ends."""
    said = [
        " \n It is 85. \n", "<think>\nSum.\n</think>\n\n85", "<think>It never closes", "", "Zwölf 🙂 {{ 85 }}",
    ]  # fmt: skip
    plain = turn(renderer, "It is 85.")
    yield [turn(renderer, said[0]), turn(renderer, said[1]), plain]
    yield [turn(renderer, said[2]), turn(renderer, said[3]), turn(renderer, said[4])]
    stop, others = plain[-1], [i for i in range(0, len(tokenizer), 7) if i not in renderer.stop_token_ids]
    yield [(*others[::-1][:40], stop), (*others[:40], tokenizer.eos_token_id), (*others[20:60], stop)]


def assert_trained(trajectory, turns):
    (batch,) = pack(
        [trajectory],
        [1.0],
        max_tokens_per_batch=100_000,
        totals=totals_of([trajectory]),
        pad_token_id=0,
        layout="packed",
        aggregation="token",
    )
    trained = batch.token_ids_BT[batch.mask_BT.bool()].tolist()
    assert trained == [token for said in turns for token in said]
    expected = [
        -0.5 - number - 0.001 * place for number, said in enumerate(turns) for place in range(len(said))
    ]
    assert batch.sampled_logprobs_BT[batch.mask_BT.bool()].tolist() == pytest.approx(expected, abs=1e-5)

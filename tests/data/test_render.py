"""Turns are appended token for token, whatever the template does to the past."""

import copy
import itertools
import random
from pathlib import Path

import jinja2
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from rl4llm.core.errors import ConfigError, DataError, EnvError, ModelError, TemplateError
from rl4llm.core.types import ChatMessage, Completion, TokenSpan
from rl4llm.data.render import Renderer
from rl4llm.data.template import ChatTemplate, decode

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Sums.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
CORPUS = [
    "user assistant system tool model ipython What is 37 plus 48? The answer is 85.",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "37 + 48"}}</tool_call>',
    "Let me think step by step, then answer. You are a helpful assistant.\n\n# Tools\n",
] * 3


def train_tokenizer(template, specials, *, eos, bos=None, plain=(), metaspace=False):
    """Train a small BPE tokenizer; `plain` tokens are added but not special, like <think> in many models."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=metaspace))
    alphabet = [f"<0x{i:02X}>" for i in range(256)] if metaspace else []
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        show_progress=False,
        vocab_size=700,
        initial_alphabet=[] if metaspace else alphabet,
        special_tokens=alphabet if metaspace else [],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [s if isinstance(s, AddedToken) else AddedToken(s, special=True) for s in specials]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    names = {"eos_token": eos, "pad_token": eos} | ({"bos_token": bos} if bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
REASONER_NAMES = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"]
OUTPUT_NAMES = ["tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"]
REASONER = [f"<\uff5c{name}\uff5c>" for name in (*REASONER_NAMES, *OUTPUT_NAMES)]
SWALLOWING = [
    AddedToken(t, special=True, rstrip=True) for t in ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
]
THINK = ["<think>", "</think>"]
SPECIALS = {
    "chatml_tools": {"specials": CHATML, "eos": "<|im_end|>", "plain": ["<tool_call>", "</tool_call>"]},
    "thinking_chatml": {"specials": CHATML, "eos": "<|im_end|>", "plain": THINK},
    "headers_bos": {"specials": HEADERS, "eos": "<|eot_id|>", "bos": "<|begin_of_text|>"},
    "inst": {"specials": ["<s>", "</s>", "[INST]", "[/INST]"], "eos": "</s>", "bos": "<s>"},
    "inst_spaced": {"specials": ["<s>", "</s>"], "eos": "</s>", "bos": "<s>", "metaspace": True},
    "start_of_turn": {
        "specials": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "eos": "<eos>",
        "bos": "<bos>",
    },
    "reasoner": {"specials": REASONER, "eos": REASONER[1], "bos": REASONER[0], "plain": THINK},
    "swallowed_newline": {"specials": ["<|endoftext|>", *SWALLOWING], "eos": "<|endoftext|>"},
    "channels": {
        "specials": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"],
        "eos": "<|return|>",
    },
    "counted_turns": {"specials": CHATML, "eos": "<|im_end|>"},
}


TOOL_TEMPLATES = ["chatml_tools", "thinking_chatml", "headers_bos", "reasoner", "counted_turns"]
SHOWING = ["chatml_tools", "thinking_chatml", "headers_bos"]
SYSTEM_REFUSED = ["inst_spaced", "start_of_turn"]


@pytest.fixture(scope="module")
def tokenizers():
    return {
        name: train_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), **kind)
        for name, kind in SPECIALS.items()
    }


def chatml(template, **kind):
    return train_tokenizer(template, **{"specials": CHATML, "eos": "<|im_end|>", **kind})


def complete(token_ids, text=""):
    return Completion(text, tuple(token_ids), (-1.0,) * len(token_ids), "stop", 0)


def play(renderer, messages, answers, replies):
    """Return the spans and messages of an episode; `answers` are (text, sampled ids), `replies` what follows each."""
    messages = list(messages)
    spans = [TokenSpan.context(renderer.first(messages))]
    for (text, token_ids), new in zip(answers, replies, strict=True):
        spans.extend(TokenSpan.policy(complete(token_ids, text)))
        messages.append(ChatMessage("assistant", renderer.content(text)))
        spans.append(
            TokenSpan.context(renderer.following(new, ended=renderer.ends_turn(token_ids), messages=messages))
        )
        messages += new
    return spans, messages


def ids_of(spans):
    return [token for span in spans for token in span.token_ids]


def in_place(renderer, text, stop=True):
    """Return the tokens of an answer as the tokenizer cuts them behind a special token, end of turn included."""
    stops = [renderer.stop_token_ids[0]]
    stop_text = renderer._template.tokenizer.convert_ids_to_tokens(stops)[0]
    return renderer.encode(stop_text + text)[1:] + (stops if stop else [])


def asked(system):
    return [ChatMessage("system", "Be brief.")] * system + [ChatMessage("user", "What is 37 + 48?")]


def weird(tokenizer, rng, length=12):
    """Sampled ids in an order no tokenizer would give: parts of characters, words cut anywhere."""
    plain = [i for i in range(len(tokenizer)) if i not in set(tokenizer.added_tokens_decoder)]
    return [rng.choice(plain) for _ in range(length)]


def replies_for(name):
    if name in TOOL_TEMPLATES:
        return [
            [ChatMessage("tool", "85"), ChatMessage("tool", "é 🙂")],
            [ChatMessage("user", "Go on.")],
            [ChatMessage("tool", "x")],
        ]
    return [
        [ChatMessage("user", "And then?")],
        [ChatMessage("user", "é 🙂 go on.")],
        [ChatMessage("user", "x")],
    ]


@pytest.mark.parametrize(
    ("name", "system"),
    [
        (name, system)
        for name in SPECIALS
        for system in (False, True)
        if name not in ("reasoner", "channels") and not (system and name in SYSTEM_REFUSED)
    ],
)
def test_appended_turns_equal_the_tokens_of_the_template(name, system, tokenizers):
    renderer = Renderer(tokenizers[name])
    texts = {"inst": " It is 85.", "inst_spaced": " It is 85. "}  # these models sample white space first
    text = texts.get(name, "It is 85.")
    answer = (text.strip(), in_place(renderer, text))
    spans, messages = play(renderer, asked(system), [answer] * 3, replies_for(name))
    assert ids_of(spans) == renderer.first(messages)


class Shout(str):
    """A string with its own method, which a template must not call."""

    def upper(self):
        raise AssertionError("a template called a method of the caller's")


CALL = {
    "id": "c1",
    "type": "function",
    "function": {
        "name": Shout("calculator"),
        "arguments": {"expression": "37 + 48 < é", "digits": None, "n": np.int64(2)},
    },
}
CONVERSATIONS = [
    [ChatMessage("user", "Hi")],
    [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", Shout("  é 🙂 <|im_end|>\n{{ 1 }} <think>x</think> ")),
    ],
    [
        ChatMessage("user", "What is 37 + 48?"),
        ChatMessage("assistant", "<think>\nhm\n</think>\n\nSo", (CALL, CALL)),
        ChatMessage("tool", '{"85": [1, 2]}', tool_call_id="c1"),
        ChatMessage("tool", ""),
        ChatMessage("assistant", "85"),
        ChatMessage("user", "Sure?"),
    ],
    [ChatMessage("tool", "x"), ChatMessage("system", "y"), ChatMessage("assistant", "")],
]


@pytest.mark.skipif(
    not hasattr(chat_template_utils, "_plain_template_data"),
    reason="before 5.22 it refuses what is no plain data",
)
@pytest.mark.parametrize("name", SPECIALS)
@pytest.mark.parametrize("args", [{}, {"enable_thinking": False, "documents": [{"title": "a", "text": "b"}]}])
def test_the_compiled_template_equals_apply_chat_template(name, args, tokenizers):
    rendered = 0
    for tools in (None, TOOLS, [{**TOOLS[0], "odd": (1, np.float32(0.5))}]):
        template = ChatTemplate(tokenizers[name], tools, args)
        for messages, prompt in itertools.product(CONVERSATIONS, (False, True)):
            rows = [message.to_dict() for message in messages]
            given = {
                "chat_template": template._source,
                "tools": tools,
                "add_generation_prompt": prompt,
                **args,
            }
            try:
                text = tokenizers[name].apply_chat_template(rows, tokenize=False, **given)
            except (jinja2.TemplateError, TypeError, ValueError):
                with pytest.raises(TemplateError):
                    template.text(messages, prompt=prompt)
            else:
                assert template.special.plain(template.text(messages, prompt=prompt)) == text
                rendered += 1
    assert rendered


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, None) for name in TOOL_TEMPLATES), *((name, TOOLS) for name in SHOWING)]
)
def test_a_whole_prompt_equals_apply_chat_template(name, tools, tokenizers):
    tokenizer, messages = tokenizers[name], CONVERSATIONS[2]
    given = {"tools": tools, "chat_template": ChatTemplate(tokenizer)._source, "add_generation_prompt": True}
    for renderer in (Renderer(tokenizer, tools), Renderer(tokenizer).of_row({"tools": tools})):
        for end in (1, 3, 4, 6):  # asked, answered by one tool, by two, and asked again
            rows = [message.to_dict() for message in messages[:end]]
            expected = tokenizer.apply_chat_template(rows, **given)["input_ids"]
            assert renderer.prompt(messages[:end]) == expected


@pytest.mark.parametrize("name", SPECIALS)
def test_tokens_are_decoded_without_cleaning_up_spaces(name, tokenizers):
    tokenizer, rng = tokenizers[name], random.Random(name)
    tokenizer = copy.copy(tokenizer)
    tokenizer.clean_up_tokenization_spaces = True
    texts = [
        "",
        " Hello , world . it 's  é 🙂",
        f"a{tokenizer.eos_token} b",
        tokenizer.decode(weird(tokenizer, rng)),
    ]
    for text in texts:
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        exactly = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert decode(tokenizer, token_ids) == exactly


def test_a_template_cannot_reach_the_methods_of_what_it_is_shown(tokenizers):
    template = ChatTemplate(chatml("{% for m in messages %}{{ m.content.upper() }}{% endfor %}"))
    assert template.text([ChatMessage("user", Shout("loud"))]) == "LOUD"


@pytest.mark.parametrize(
    "name", ["tokenize", "tools", "messages", "add_generation_prompt", "continue_final_message"]
)
def test_unknown_template_arguments_are_refused_by_name(name, tokenizers):
    with pytest.raises(ConfigError):
        Renderer(tokenizers["chatml_tools"], template_args={name: True})


def test_a_template_variable_without_effect_is_named():
    tokenizer = chatml("{% if enable_thinking %}{{ messages[0].content }}{% endif %}{{ mode == 'off' }}")
    read = ChatTemplate(tokenizer, template_args={"enable_thinking": False, "mode": "off"})
    assert read.notes == set()
    (note,) = ChatTemplate(tokenizer, template_args={"enable_thinkin": False}).notes
    assert "does not read 'enable_thinkin'" in note and "Did you mean 'enable_thinking'?" in note
    with pytest.raises(ConfigError):
        ChatTemplate(tokenizer, template_args={"enable_thinking": "No"})
    ChatTemplate(
        chatml("Thinking is {{ thinking }}{{ 1 if mode|lower == 'on' }}"),
        template_args={"thinking": "off", "mode": "On"},
    )


def test_every_turn_gets_the_prompt_that_opens_a_thought(tokenizers):
    tokenizer = tokenizers["reasoner"]
    renderer = Renderer(tokenizer)
    text = "Sum them.</think>85"
    spans, messages = play(
        renderer, asked(True), [(text, in_place(renderer, text))], [[ChatMessage("user", "Sure?")]]
    )
    bos, eos, user, assistant = REASONER[:4]
    assert tokenizer.decode(ids_of(spans)) == (
        f"{bos}Be brief.{user}What is 37 + 48?{assistant}<think>\nSum them.</think>85{eos}{user}Sure?{assistant}<think>\n"
    )
    assert messages[-2].content == "<think>\nSum them.</think>85"


def test_a_sampled_end_of_turn_stays_in_the_history(tokenizers):
    tokenizer = tokenizers["channels"]
    renderer = Renderer(tokenizer)
    sampled = renderer.encode("<|channel|>final<|message|>85<|return|>")
    spans, _ = play(renderer, asked(False), [("final85", sampled)], [[ChatMessage("user", "Sure?")]])
    assert renderer.ends_turn(sampled)
    assert tokenizer.decode(ids_of(spans)) == (
        "<|start|>system<|message|>Knowledge cutoff: 2024-06\nCurrent date: 2025-01-01<|end|>"
        "<|start|>user<|message|>What is 37 + 48?<|end|><|start|>assistant"
        "<|channel|>final<|message|>85<|return|><|start|>user<|message|>Sure?<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("name", SPECIALS)
def test_the_loss_mask_is_exactly_the_sampled_tokens(name, tokenizers):
    tokenizer = tokenizers[name]
    renderer = Renderer(tokenizer)
    rng = random.Random(name)
    stop = renderer.stop_token_ids[0]
    answers = [[*weird(tokenizer, rng), stop] for _ in range(3)]
    assert any(renderer.encode(tokenizer.decode(answer)) != answer for answer in answers)
    spans, _ = play(
        renderer, asked(False), [(tokenizer.decode(ids), ids) for ids in answers], replies_for(name)
    )
    assert [list(span.token_ids) for span in spans if span.author == "policy"] == answers
    plain, _ = play(renderer, asked(False), [("ok", in_place(renderer, "ok"))] * 3, replies_for(name))
    contexts = [[span for span in episode if span.author == "context"] for episode in (spans, plain)]
    assert contexts[0] == contexts[1]


@pytest.mark.parametrize("name", SPECIALS)
def test_a_later_prompt_extends_the_earlier_one_token_for_token(name, tokenizers):
    tokenizer = tokenizers[name]
    renderer = Renderer(tokenizer)
    answers = [("<think>\nhm\n</think>\n\n85", in_place(renderer, "<think>\nhm\n</think>\n\n85"))] * 3
    prompts, sampled = [], []
    for turns in range(4):
        spans, _ = play(renderer, asked(False), answers[:turns], replies_for(name)[:turns])
        prompts.append(ids_of(spans))
        sampled.append(answers[0][1])
    for earlier, answer, later in zip(prompts, sampled, prompts[1:], strict=False):
        assert later[: len(earlier) + len(answer)] == earlier + answer
        assert len(later) > len(earlier) + len(answer)


def test_sampled_thoughts_stay_though_the_template_strips_them(tokenizers):
    tokenizer = tokenizers["thinking_chatml"]
    renderer = Renderer(tokenizer)
    texts = [f"<think>\n{thought}\n</think>\n\n85" for thought in ("first", "second")]
    answers = [(text, in_place(renderer, text)) for text in texts]
    replies = [[ChatMessage("user", "Next?")], [ChatMessage("user", "Last?")]]
    spans, messages = play(renderer, asked(False), answers, replies)
    assert "first" not in tokenizer.decode(renderer.first(messages))
    text = tokenizer.decode(ids_of(spans))
    assert text.index("first") < text.index("second") < text.index("Last?")


@pytest.mark.parametrize("name", SPECIALS)
def test_a_turn_is_closed_exactly_once_even_if_truncated(name, tokenizers):
    renderer = Renderer(tokenizers[name])
    new = replies_for(name)[0]
    messages = [*asked(False), ChatMessage("assistant", "It is 85.")]
    cut_off, ended = (in_place(renderer, "It is 85.", stop=stop) for stop in (False, True))
    assert (renderer.ends_turn(cut_off), renderer.ends_turn(ended)) == (False, True)
    after_cut = renderer.following(new, ended=False, messages=messages)
    after_end = renderer.following(new, ended=True, messages=messages)
    assert after_cut[1:] == after_end
    assert after_cut[0] in tokenizers[name].added_tokens_decoder
    if name != "channels":  # where the past shows another end than the one that is sampled
        assert cut_off + after_cut == ended + after_end


def test_a_stop_string_does_not_end_the_turn(tokenizers):
    renderer = Renderer(tokenizers["chatml_tools"])
    assert not renderer.ends_turn(renderer.encode("<tool_call>{}</tool_call>"))
    assert not renderer.ends_turn([])


def test_tool_messages_share_one_turn_and_tools_come_first(tokenizers):
    tokenizer = tokenizers["chatml_tools"]
    renderer = Renderer(tokenizer, tools=TOOLS)
    assert '"name": "calculator"' in tokenizer.decode(renderer.first(asked(True)))
    delta = renderer.following([ChatMessage("tool", "1"), ChatMessage("tool", "2")], ended=True)
    assert tokenizer.decode(delta) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_rendered_again_only_if_they_change_a_turn(tokenizers):
    indifferent = Renderer(tokenizers["chatml_tools"], tools=TOOLS)
    said = "m.content + (' (one of ' ~ tools | length ~ ')' if tools and m.role == 'tool' else '')"
    told = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + EACH.replace(
        "m.content", said
    )
    telling = Renderer(chatml(told + ASK), tools=TOOLS)
    new = [ChatMessage("tool", "85")]
    for renderer, text in ((indifferent, "85\n</tool_response>"), (telling, f"85 (one of {len(TOOLS)})")):
        delta = renderer.encode("<|im_end|>")[0], *renderer.following(new, ended=True)
        assert text in renderer._template.tokenizer.decode(delta)
        assert ids_of([TokenSpan.context(delta)]) == renderer.encode(
            renderer._template.after_reply([*asked(True), ChatMessage("assistant", "so")], new)
        )
    assert [renderer._way(("tool",)).template.tools is None for renderer in (indifferent, telling)] == [
        True,
        False,
    ]


def test_template_arguments_apply_to_every_generation_prompt(tokenizers):
    tokenizer = tokenizers["thinking_chatml"]
    renderer = Renderer(tokenizer, template_args={"enable_thinking": False})
    empty_thought = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(renderer.first(asked(False))).endswith(empty_thought)
    assert tokenizer.decode(renderer.following([ChatMessage("user", "x")], ended=True)).endswith(
        empty_thought
    )
    assert renderer.content("85") == "85"


def test_equal_follow_ups_are_rendered_once_and_never_aliased(tokenizers, monkeypatch):
    renderer, rendered = Renderer(tokenizers["chatml_tools"], tools=TOOLS), []
    after_reply = ChatTemplate.after_reply

    def watched(template, history, new, **how):
        rendered.append(tuple(new))
        return after_reply(template, history, new, **how)

    monkeypatch.setattr(ChatTemplate, "after_reply", watched)
    first = renderer.following([ChatMessage("tool", "85")], ended=False)
    kept = list(first)
    first.clear()
    assert renderer.following([ChatMessage("tool", "85")], ended=False) == kept
    assert renderer.following([ChatMessage("tool", "85")], ended=True) == kept[1:]
    others = [ChatMessage("tool", "86")], [ChatMessage("user", "85")], [ChatMessage("tool", "85")] * 2
    found = {tuple(renderer.following(new, ended=False)) for new in others} | {tuple(kept)}
    assert len(found) == 4
    real = [new for new in rendered if new and "Probe" not in new[0].content]
    assert real == [(ChatMessage("tool", "85"),), *map(tuple, others)]


def test_messages_that_differ_only_in_calls_are_distinguished(tokenizers):
    renderer = Renderer(tokenizers["chatml_tools"], tools=TOOLS)
    called = [
        ChatMessage("assistant", "", (call,))
        for call in (CALL, {"function": {"name": "other", "arguments": {}}})
    ]
    found = [
        renderer.following([ChatMessage("user", "x"), call, ChatMessage("tool", "85")], ended=False)
        for call in called
    ]
    assert found[0] != found[1] and hash(called[0]) == hash(called[1])


def test_special_tokens_strip_white_space_between_turns_too(tokenizers):
    tokenizer = tokenizers["swallowed_newline"]
    delta = Renderer(tokenizer).following([ChatMessage("user", "x")], ended=True)
    assert tokenizer.convert_ids_to_tokens(delta) == ["<|user|>", "x", "<|end|>", "<|assistant|>"]


@pytest.mark.parametrize("name", ["headers_bos", "inst", "start_of_turn", "reasoner"])
def test_a_conversation_begins_once(name, tokenizers):
    tokenizer = tokenizers[name]
    renderer = Renderer(tokenizer)
    spans, _ = play(renderer, asked(False), [("85", in_place(renderer, "85"))], [[ChatMessage("user", "x")]])
    assert ids_of(spans).count(tokenizer.bos_token_id) == 1
    assert ids_of(spans)[0] == tokenizer.bos_token_id


def test_messages_that_depend_on_the_past_are_rendered_behind_it(tokenizers):
    tokenizer = tokenizers["reasoner"]
    renderer = Renderer(tokenizer, roles=["user", "tool"])
    new, called = [ChatMessage("tool", "85")], ChatMessage("assistant", "calculate")
    first = renderer.following(new, ended=True, messages=[*asked(False), called])
    later = [*asked(False), called, ChatMessage("tool", "84"), called]
    second = renderer.following(new, ended=True, messages=later)
    assert tokenizer.decode(first).startswith(REASONER[4] + REASONER[6])
    assert tokenizer.decode(second).startswith("\n" + REASONER[6] + "85")
    with pytest.raises(EnvError):
        renderer.following(new, ended=True)


def test_a_generation_prompt_may_depend_on_the_history():
    late = "{% if add_generation_prompt and messages | length > 4 %}<think>\n{% endif %}"
    renderer = Renderer(chatml(EACH + ASK + late))
    answer, new = ChatMessage("assistant", "85"), [ChatMessage("user", "x")]
    prompts = [
        renderer.encode(f"\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{end}")
        for end in ("", "<think>\n")
    ]
    assert renderer.following(new, ended=True, messages=[*asked(False), answer]) == prompts[0]
    longer = [*asked(False), answer, ChatMessage("user", "y"), answer]
    assert renderer.following(new, ended=True, messages=longer) == prompts[1]


def test_a_turn_that_waits_for_a_tool_is_closed_only_once():
    template = (TEMPLATES / "headers_bos.jinja").read_text() + "{# <|eom_id|> #}"
    tokenizer = train_tokenizer(template, [*HEADERS, "<|eom_id|>"], eos="<|eot_id|>", bos="<|begin_of_text|>")
    renderer, waiting = Renderer(tokenizer, roles=("tool",)), tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert waiting in renderer.stop_token_ids and renderer.ends_turn([5, waiting])
    follows = renderer.following([ChatMessage("tool", "85")], ended=True)
    assert tokenizer.decode(follows).startswith("<|start_header_id|>ipython")
    assert len(Renderer(chatml(EACH + ASK, specials=[*CHATML, "<|eom_id|>"])).stop_token_ids) == 1


def test_the_longest_token_is_the_end_of_turn():
    tokenizer = chatml(EACH + ASK, specials=["<|im_end", *CHATML])
    assert Renderer(tokenizer).stop_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_a_prompt_is_the_same_tokens_on_every_day(tokenizers):
    tokenizer = tokenizers["headers_bos"]
    assert "Today Date: 01 Jan 2025\n" in tokenizer.decode(Renderer(tokenizer).first(asked(False)))


@pytest.mark.parametrize("name", ["inst", "inst_spaced", "start_of_turn", "swallowed_newline", "channels"])
def test_a_template_without_tool_messages_serves_only_users(name, tokenizers):
    renderer = Renderer(tokenizers[name])
    assert renderer.following([ChatMessage("user", "x")], ended=True)
    with pytest.raises(TemplateError):
        renderer.following([ChatMessage("tool", "85")], ended=True)
    with pytest.raises(TemplateError):
        Renderer(tokenizers[name], roles=["user", "tool"])
    with pytest.raises(TemplateError):
        Renderer(tokenizers[name], tools=TOOLS)


@pytest.mark.parametrize("name", SYSTEM_REFUSED)
def test_a_template_without_system_prompts_refuses_one(name, tokenizers):
    renderer = Renderer(tokenizers[name])
    assert renderer.first(asked(False))
    with pytest.raises(TemplateError):
        renderer.first(asked(True))
    with pytest.raises(TemplateError):
        renderer.prompt_too_long(asked(True), 1000)
    if name == "start_of_turn":  # whose roles must alternate
        with pytest.raises(TemplateError):
            renderer.following([ChatMessage("user", "x"), ChatMessage("user", "y")], ended=True)


ASKED = ChatMessage("user", "What is 37 + 48?")
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 37}}}
CALLED = [ASKED, ChatMessage("assistant", "", (CALL,)), ChatMessage("tool", "85", tool_call_id="call00000")]
LOST = {
    "a call": ("thinking_chatml", CALLED),
    "a tool's answer": ("swallowed_newline", [CALLED[0], CALLED[2]]),
    "a second system prompt": ("channels", [*asked(True)[:1], *asked(True)]),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_prompt_that_a_template_shows_only_in_part_is_refused(lost, tokenizers):
    name, messages = LOST[lost]
    with pytest.raises(TemplateError):
        Renderer(tokenizers[name], roles=()).first(messages)
    assert Renderer(tokenizers["chatml_tools"], roles=()).first(messages)


START, END = "'<|im_start|>' + m.role + '\\n'", "'<|im_end|>\\n'"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for m in messages %}{{ " + START + " + m.content + " + END + " }}{% endfor %}"
ONE_BLOCK = "<|im_start|>user\n{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}<|im_end|>\n"
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
UNSAFE = {
    "all messages in one block": ONE_BLOCK + ASK,
    "newest first": EACH.replace("in messages", "in messages[::-1]") + ASK,
    "number of messages": "{{ messages | length }} messages\n" + EACH + ASK,
    "date in each message": EACH.replace("m.content", "strftime_now('%H:%M ') + m.content") + ASK,
    "answers left out": EACH.replace(" %}{{", " if m.role != 'assistant' %}{{") + ASK,
    "users cut short": EACH.replace("m.content", "(m.content | truncate(9, true))") + ASK,
    "no token ends a turn": NO_END + "{% if add_generation_prompt %}assistant: {% endif %}",
    "asked for in another way": EACH + ASK.replace("assistant", "bot"),
    "asked for in front": ASK + EACH,
    "words behind the answer": EACH.replace("m.content +", "m.content + ' (' + m.role + ')' +") + ASK,
    "does not compile": "{% for m in messages %}",
    "does not compute": "{{ range(1000000) }}" + EACH + ASK,
    "missing": None,
}


@pytest.mark.parametrize("kind", UNSAFE)
def test_a_template_that_cannot_be_extended_is_refused(kind):
    with pytest.raises(TemplateError):
        Renderer(chatml(UNSAFE[kind]))


def test_a_system_prompt_that_moves_is_refused():
    last = START + " + (messages[0].content if loop.last and messages[0].role == 'system' else '')"
    each = EACH.replace(" %}{{", " if m.role != 'system' %}{{", 1).replace(START, last)
    renderer = Renderer(chatml(each + ASK))
    assert renderer.first(asked(False))
    with pytest.raises(TemplateError):
        renderer.first(asked(True))


def test_an_end_of_turn_that_merges_with_text_is_refused():
    tokenizer = chatml(
        EACH + ASK, specials=[*CHATML[::2], AddedToken("<|im_end|>", special=True, single_word=True)]
    )
    with pytest.raises(TemplateError):
        Renderer(tokenizer)
    tokenizer.pad_token = None
    with pytest.raises(ModelError):
        Renderer(tokenizer)


def test_one_turn_needs_no_extension():
    renderer = Renderer(chatml(UNSAFE["number of messages"]), roles=())
    assert renderer.first(asked(False))
    assert renderer.stop_token_ids
    with pytest.raises(TemplateError):
        renderer.following([ChatMessage("user", "x")], ended=True)


def test_conversations_without_anything_to_answer_are_refused(tokenizers):
    renderer = Renderer(tokenizers["chatml_tools"])
    answer = ChatMessage("assistant", "85")
    for messages in ([], [*asked(False), answer]):
        with pytest.raises(DataError):
            renderer.first(messages)
    for new in ([], [ChatMessage("user", "x"), answer]):
        with pytest.raises(EnvError):
            renderer.following(new, ended=True)


@pytest.mark.parametrize("name", ["chatml_tools", "inst_spaced", "headers_bos"])
def test_no_prompt_that_is_too_long_is_called_short(name, tokenizers):
    renderer = Renderer(tokenizers[name])
    rng = random.Random(7)
    for _ in range(60):
        content = "".join(rng.choices("ab é🙂\u0344ﷺ\n<|im_end|>85", k=rng.randrange(1, 60)))
        messages = [ChatMessage("user", content)]
        count = len(renderer.first(messages))
        assert renderer.prompt_too_long(messages, count - 1) == count
        assert renderer.prompt_too_long(messages, count) is None


def test_a_prompt_short_enough_by_its_bytes_is_not_tokenised(tokenizers):
    renderer = Renderer(tokenizers["chatml_tools"])
    assert renderer.prompt_too_long([ChatMessage("user", "a" * 50)], 400) is None
    renderer.encode = None  # would raise if it were asked
    assert renderer.prompt_too_long([ChatMessage("user", "b" * 60)], 400) is None
    with pytest.raises(TypeError):
        renderer.prompt_too_long([ChatMessage("user", "b" * 600)], 400)

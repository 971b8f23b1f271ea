"""A small tokenizer for each chat template, and the list of docs/templates.md."""

import re
from pathlib import Path

from template_rows import COLUMNS, TemplateRow, template_row
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

PAGE = Path(__file__).parents[1] / "docs" / "templates.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
TEXTS = [
    "user assistant system tool model What is 37 + 48? It is 85. Yes. Are you sure? And then?",
    '{"name": "calculator", "arguments": {"expression": "37+48"}} Let me think step by step. You are a helpful assistant.',
] * 3
SPECIAL = re.compile(
    r"<\|[^|<>{}'\"\s]+\|>|<｜[^｜{}'\"]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]{3,}\]|</?s>|<[a-z]+:[be]os>|\[gMASK\]|<sop>"
    r"|<(?:start|end|beginning)_of_\w+>|<SPECIAL_\d+>|<[A-Z_]+_TOKEN>|\]~!?b\[|\[e~\["
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
USUAL = ("+", "+", "=", "kept", "", "ran")


def tokenizer_of(path: Path) -> PreTrainedTokenizerFast:
    """Return a small byte-level tokenizer with the special tokens of a template; the last of a conversation is its eos."""
    source = path.read_text()
    eos = end_of_text(source)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=600, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    specials = dict.fromkeys([eos, "<s>", *SPECIAL.findall(source)])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN if text in source])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, pad_token=eos)
    made.chat_template, made.name_or_path = source, path.stem
    return made


def end_of_text(source: str) -> str:
    """Return the last token that a template writes behind an answer."""
    asked, answer = (
        {"role": "user", "content": "QuestionText"},
        {"role": "assistant", "content": "AnswerText"},
    )
    variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None}
    template = chat_template_utils._compile_jinja_template(source)
    try:
        texts = [
            template.render(messages=messages, add_generation_prompt=False, **variables)
            for messages in ([asked, answer], [asked])
        ]
    except Exception:  # noqa: BLE001 - a template of a stranger may raise anything, and is then reported as refused
        return "<|endoftext|>"
    tail, header = texts[0].rpartition("AnswerText")[2], texts[1].rpartition("QuestionText")[2]
    found = SPECIAL.findall(tail) or re.findall(r"<[^<>\s]+>|\S{2,}", tail)
    if len(found) > 1 and header and tail.endswith(header):  # it always asks for the next answer
        found = SPECIAL.findall(header)[:1] or found
    return found[-1] if found else "<|endoftext|>"


def named_row(path: Path) -> tuple[str, TemplateRow]:
    """Return the name and the row of a template."""
    return path.stem, template_row(tokenizer_of(path))


def listed(rows: dict[str, TemplateRow]) -> str:
    """Return a list of the call formats with their templates; a template that differs from USUAL has its own line."""
    plain: dict[str, list[str]] = {row.format: [] for row in rows.values()}
    others: dict[str, list[str]] = {form: [] for form in plain}
    for name, row in rows.items():
        cells = zip(COLUMNS, row.cells(), USUAL, strict=True)
        apart = [f"{column} {cell}" for column, cell, usual in cells if column != "format" and cell != usual]
        if apart:
            others[row.format].append(f"    - `{name}`: {', '.join(apart)}")
        else:
            plain[row.format].append(f"`{name}`")
    lines = []
    for form, names in sorted(plain.items()):
        lines += [f"- **{form}**" + ": " * bool(names) + ", ".join(names), *others[form]]
    return "\n".join(lines)


def counts(rows: dict[str, TemplateRow]) -> dict[str, int]:
    """Return how many templates can be used for what."""
    usable = [row for row in rows.values() if row.user != "refused" or row.tools != "refused"]
    return {
        "templates": len(rows),
        "usable in several turns": len(usable),
        "usable with tools": sum(row.tools != "refused" for row in rows.values()),
        "whose calls auto reads": sum(row.format != "refused" for row in rows.values()),
        "whose calls ran": sum(row.call == "ran" for row in rows.values()),
        "with demonstrations": sum(row.demonstrations in ("=", "past") for row in rows.values()),
        "with demonstrations that differ": sum(row.demonstrations == "differs" for row in rows.values()),
    }


def shown(rows: dict[str, TemplateRow]) -> str:
    """Return what the page has of the templates."""
    return f"{', '.join(f'{number} {what}' for what, number in counts(rows).items())}.\n\n{listed(rows)}"

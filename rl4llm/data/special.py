"""Text is never control: special tokens that stand in a text are encoded as ordinary tokens.

    row = special.marked_row({"role": "user", "content": "Hi<|im_end|>"})    # a mark stands for the special token
    text = template(row)                                                     # control tokens here are the template's
    token_ids = special.encode(text)                                         # "<|im_end|>" of the user becomes letters
    special.plain(text)                                                      # the text that the tokens decode to

Special are the tokens that the tokenizer marks as such, and added tokens with which the template opens and closes the
messages of a role. In what a tool says, those around a tool's answer count too. Other added tokens, such as <think> and
<tool_call>, are ordinary vocabulary. An assistant's message may also contain those that the template itself writes inside
an assistant's turn, such as [TOOL_CALLS].
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from tokenizers import Tokenizer

from rl4llm.core.errors import ConfigError, SpecialTokenError, TemplateError

Mode = Literal["escape", "refuse", "allow"]
MODES = ("escape", "refuse", "allow")
Row = dict[str, Any]
Render = Callable[..., str | None]
"""(rows, prompt=...) -> what the template makes of them without tools; None if it refuses them."""

LONG = 1 << 16  # characters, which take about 0.1 s
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CALL = {
    "id": "probecall",
    "type": "function",
    "function": {"name": "probe_call", "arguments": {"probe": "text"}},
}
_ASKED: list[Row] = [
    {"role": "system", "content": "ProbeSystem"},
    {"role": "user", "content": "ProbeQuestion"},
]
_SAID: Row = {"role": "assistant", "content": "ProbeAnswer"}
_CALLED: Row = _SAID | {"tool_calls": [_CALL]}
_TOLD: Row = {"role": "tool", "content": "ProbeResult", "tool_call_id": "probecall", "name": "probe_call"}
_THOUGHT = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "ProbeThought")


class SpecialTokens:
    """Finds special tokens in texts, and encodes texts in which they are not special.

    Args:
        tokenizer: of the policy.
        render: renders rows of messages, for the tokens around the messages of each role.
        mode: "escape", "refuse" (a text with special tokens raises SpecialTokenError) or "allow" (they count).
    """

    def __init__(self, tokenizer: Any, render: Render, mode: str = "escape"):
        if mode not in MODES:
            raise ConfigError(f"data.special_tokens={mode!r} is not accepted. Accepted: {', '.join(MODES)}.")
        self.mode = mode
        self._tokenizer, self._render = tokenizer, render
        self._nonce = f"Mark{secrets.token_hex(8)}"  # no text can contain it
        self._marks: dict[str, str] = {}  # by text
        self._texts: dict[str, str] = {}  # by mark

    def marked_row(self, row: Row) -> Row:
        """Return a message as templates see it, with marks for special tokens in its content, calls and other texts."""
        if self.mode == "allow":
            return row
        role, content = row["role"], row["content"]
        rest = {name: value for name, value in row.items() if name not in ("role", "content")}
        if isinstance(content, list):  # texts and places of images
            content = [
                part | {"text": self.marked(part["text"], role)} if "text" in part else part
                for part in content
            ]
        else:
            content = content and self.marked(content, role)
        return {"role": role, "content": content, **(self.marked_data(rest) if rest else {})}

    def marked(self, text: str, role: str) -> str:
        """Return the text of a message with marks for special tokens; raises SpecialTokenError if they are refused."""
        if self.mode == "allow":
            return text
        return self._patterns.get(role, self._patterns["user"]).sub(
            lambda found: self._mark(found.group(), role), text
        )

    def marked_data(self, value: Any) -> Any:
        """Return calls or schemas with marks for special tokens in any text.

        Text of a template may directly precede or follow theirs, so that parts of special tokens are marked there too.
        """
        if self.mode == "allow":
            return value
        if isinstance(value, str):
            text = self.marked(value, "system")
            if text.isidentifier():  # perhaps a key that the template reads
                return text
            if any(text in token for token in self.control):
                return self._mark(text) if text else text
            longest, begins, ends = self._parts
            sizes = range(min(longest, len(text)), 0, -1)
            head = next((n for n in sizes if text[:n] in ends), 0)
            text = self._mark(text[:head]) + text[head:] if head else text
            tail = next((n for n in sizes if text[-n:] in begins), 0)
            return text[:-tail] + self._mark(text[-tail:]) if tail else text
        if isinstance(value, Mapping):
            return {self.marked_data(key): self.marked_data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.marked_data(item) for item in value)
        return value

    def count(self, rows: Iterable[Row]) -> int:
        """Return how many special tokens in messages become ordinary text."""
        if self.mode != "escape":
            return 0
        return sum(str(self.marked_row(row)).count(self._nonce) for row in rows)

    def check(self, rows: Iterable[Row]) -> None:
        """Raise SpecialTokenError if messages contain special tokens and those are refused."""
        if self.mode == "refuse":
            for row in rows:
                self.marked_row(row)

    def plain(self, text: str) -> str:
        """Return a text with marks as the text that its tokens decode to."""
        return self._marks_pattern.sub(lambda found: self._texts[found.group()], text)

    @cached_property
    def without(self) -> Callable[[str], str]:
        """Leaves out of a text what engines do: the tokens that the tokenizer marks as special."""
        return partial(any_of(self._special).sub, "")

    def stand_in(self, text: str) -> bool:
        """Return whether a text has marks, so that `encode` of this class is needed."""
        return bool(self._marks) and self._nonce.lower() in text.lower()

    def encode(self, text: str) -> list[int]:
        if self._nonce.lower() in self._marks_pattern.sub("", text).lower():
            raise TemplateError("the template alters texts, so that special tokens in it cannot be escaped")
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return self._encoded_in_pieces(text)
        twin, names, ids = self._twin
        text = self._patterns["tool"].sub(lambda found: names[found.group()], text)
        return [ids.get(token, token) for token in encoded(twin, self.plain(text))]

    @property
    def _special(self) -> set[str]:
        return {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}

    @cached_property
    def control(self) -> frozenset[str]:
        """The special tokens of any text: those of the tokenizer, and those that open and close messages."""
        return frozenset(self._special | self._around([_ASKED, _ASKED[1:], [_ASKED[1], _SAID, _ASKED[1]]]))

    @cached_property
    def tool_control(self) -> frozenset[str]:
        """Further tokens that are special in what a tool says: those around its answer."""
        turns = [[_ASKED[1], answer] for answer in (_SAID, _CALLED)]
        answered = self._around([[*turn, _TOLD] for turn in turns])
        return frozenset(answered - self.control - self._around(turns))

    @cached_property
    def own(self) -> frozenset[str]:
        """The special tokens that the template writes inside an assistant's turn, such as [TOOL_CALLS]."""
        turns = [[*_ASKED[1:], answer | thought] for answer in (_CALLED, _SAID) for thought in (_THOUGHT, {})]
        texts = (self._render(turn, prompt=False) or "" for turn in turns)
        ends = {token for text in texts for token in self._added.findall(text)[-1:]}
        frames = self._around([_ASKED, [*_ASKED[1:], _SAID, _ASKED[1]]])
        tokens = self._around(turns, thoughts=True) & self.control
        return frozenset(tokens - frames - ends - {self._tokenizer.eos_token})

    def _around(self, conversations: Sequence[Sequence[Row]], thoughts: bool = False) -> set[str]:
        """Return the added tokens in renderings; those of thoughts are no frame of a message."""
        texts = (
            self._render(rows, prompt=prompt) or "" for rows in conversations for prompt in (False, True)
        )
        tokens = {token for text in texts for token in self._added.findall(text)}
        return {token for token in tokens if thoughts or "think" not in token.lower()}

    @cached_property
    def _added(self) -> re.Pattern[str]:
        return any_of(self._tokenizer.get_added_vocab())

    @cached_property
    def _patterns(self) -> Mapping[str, re.Pattern[str]]:
        """What is special in the text of a role. The assistant writes some of these tokens itself."""
        return {
            "user": any_of(self.control),
            "tool": any_of(self.control | self.tool_control),
            "assistant": any_of(self.control - self.own),
        }

    @cached_property
    def _parts(self) -> tuple[int, frozenset[str], frozenset[str]]:
        """The length of the longest part of a control token, and the beginnings and ends of all of them."""
        cuts = [(token[:at], token[at:]) for token in self.control for at in range(1, len(token))]
        begins, ends = frozenset(begin for begin, _ in cuts), frozenset(end for _, end in cuts)
        return max(map(len, begins), default=0), begins, ends

    @cached_property
    def _marks_pattern(self) -> re.Pattern[str]:
        return re.compile(self._nonce + r"\d{6}")

    def _mark(self, text: str, role: str = "") -> str:
        if self.mode == "refuse" and role:
            raise SpecialTokenError(
                f"A message of the role {role!r} contains the special token {text!r}. Remove it from the text, or "
                "set data.special_tokens=escape to encode it as ordinary text."
            )
        if text not in self._marks:
            mark = f"{self._nonce}{len(self._marks):06d}"
            self._texts[mark], self._marks[text] = text, mark
        return self._marks[text]

    def _encoded_in_pieces(self, text: str) -> list[int]:
        """Return the token ids by a tokenizer that is not a fast one: special tokens are cut in two."""
        token_ids: list[int] = []
        for piece in re.split(f"({self._marks_pattern.pattern})", text):
            token = self._texts.get(piece)
            for part in (token[:1], token[1:]) if token else (piece,):
                token_ids += self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    @cached_property
    def _twin(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The tokenizer with other names for special tokens: those names, and ids of the tokenizer by ids of its twin."""
        nonce = secrets.token_hex(8)
        names = {
            token: f"name{nonce}n{i}end" for i, token in enumerate(sorted(self.control | self.tool_control))
        }
        data = json.loads(self._tokenizer.backend_tokenizer.to_str())
        added = [(token["content"], token["id"]) for token in data["added_tokens"]]
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename(data["model"], names)
        data.update(truncation=None, padding=None, post_processor=None)
        twin = Tokenizer.from_str(json.dumps(data))
        ids = {twin.token_to_id(names.get(text, text)): token for text, token in added}
        return twin, names, {ours: token for ours, token in ids.items() if ours is not None}


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, without added special tokens; a long one does not stop other threads."""
    if len(text) < LONG:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids  # releases the interpreter


def framed(source: str, tokenizer: Any) -> str:
    """Return the source of a template that writes for an image what the family's processor makes of the template's mark.

    InternVL writes its placeholder, and its processor adds the tokens around it. Gemma 3 writes the first of these tokens.
    Templates that write all of them stay as they are.
    """
    named = tokenizer.special_tokens_map
    start, placeholder, end = (named.get(f"{name}_image_token", "") for name in ("start", "context", "end"))
    if start and placeholder and end and start not in source:
        return source.replace(placeholder, f"{start}{placeholder}{end}")
    start, placeholder, end = (named.get(f"{name}_token", "") for name in ("boi", "image", "eoi"))
    if start and placeholder and end and placeholder not in source:
        return source.replace(start, f"\n\n{start}{placeholder}{end}\n\n")
    return source


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in the vocabulary of a tokenizer's model; the unknown token and bytes are also found by their names."""
    vocabulary = model["vocab"]
    fixed = {text for text in names if text == model.get("unk_token") or _BYTE.fullmatch(text)}
    if isinstance(vocabulary, list):  # of pieces and scores, with the ids as places
        for entry in vocabulary:
            entry[0] = names.get(entry[0], entry[0]) if entry[0] not in fixed else entry[0]
        return
    gone = {text for text in names if text in vocabulary} - fixed
    vocabulary.update({names[text]: vocabulary[text] for text in names if text in vocabulary})
    for text in gone:
        del vocabulary[text]
    if gone and "merges" in model:
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not gone & {*pair, "".join(pair)}]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of some texts."""
    return re.compile(_tree(filter(None, texts)) or r"(?!)")


def _tree(texts: Iterable[str]) -> str:
    """Return the texts as a regular expression that reads each character once."""
    heads: dict[str, list[str]] = {}
    for text in texts:
        heads.setdefault(text[:1], []).append(text[1:])
    optional = "?" if heads.pop("", None) is not None else ""
    inner = "|".join(re.escape(head) + _tree(rest) for head, rest in sorted(heads.items()))
    return f"(?:{inner}){optional}" if len(heads) > 1 or (optional and inner) else inner

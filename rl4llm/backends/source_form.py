"""What is written has the form of what was read, so that every program that could read a model can read what became of it.

transformers 5 writes other keys than transformers 4 (`rope_parameters` for `rope_theta`, `dtype` for `torch_dtype`), other
tokenizer classes and fewer tokenizer files. Here the files of the source stay as they are, except for what has changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from rl4llm.backends.model_files import whole_checkpoint
from rl4llm.backends.models import stored_tokenizer, without_progress_bars

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENS, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
TOKENIZER_FILES = (
    TOKENS, TOKENIZER_CONFIG, TEMPLATE, SPECIAL_TOKENS, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
OLD_KEYS = {"dtype": "torch_dtype", "extra_special_tokens": "additional_special_tokens"}
"""Keys of transformers 5, and those of earlier versions, which all versions read."""


def save_pretrained(model: PreTrainedModel, directory: Path, **options: Any) -> None:
    """Call the model's `save_pretrained` without progress bars, and without the import of DeepSpeed, which takes seconds.

    accelerate imports it to see whether it wraps the model. Without a DeepSpeed that is imported already, it does not.
    """
    modules: dict[str, Any] = sys.modules
    unused = modules.setdefault("deepspeed", None) is None  # None makes it a package that is not installed
    try:
        with without_progress_bars():
            model.save_pretrained(directory, **options)
        for file in directory.glob("*.safetensors"):  # safetensors lets only their owner read them
            file.chmod(directory.stat().st_mode & 0o644)
    finally:
        if unused:
            del modules["deepspeed"]


class SourceForm:
    """The configs that a model was read from, each with what transformers writes for it; none of a model made in memory."""

    def __init__(self, model: PreTrainedModel):
        self._files: dict[str, tuple[Any, Any]] = {}
        whole = whole_checkpoint(model)
        config = model.config if whole is None else whole.config
        for name, reader in ((CONFIG, type(config)), (GENERATION, GenerationConfig)):
            source = source_file(model.name_or_path, name)
            if source is not None:
                loaded = reader.from_pretrained(model.name_or_path, local_files_only=True)
                self._files[name] = json.loads(source), json.loads(loaded.to_json_string())

    def keep(self, directory: Path) -> None:
        """Give the configs that transformers has written into `directory` the form of their source."""
        for name, (source, unchanged) in self._files.items():
            file = directory / name
            if not file.is_file():
                continue
            written = json.loads(file.read_text(encoding="utf-8"))
            # not one of a part
            if len({item.get("model_type") for item in (source, unchanged, written)}) == 1:
                file.write_bytes(_json(_changed(source, unchanged, written)))


_FILES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, bytes]] = WeakKeyDictionary()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a tokenizer's files in the form of its source's, into a directory that exists.

    They are made once for each tokenizer, which must not change any more.
    """
    if tokenizer not in _FILES:
        _FILES[tokenizer] = _tokenizer_files(tokenizer)
    for name, content in _FILES[tokenizer].items():
        (directory / name).write_bytes(content)


def _tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the source's files, changed where the tokenizer differs from one that was read from them just now."""
    written, path = _written(tokenizer), tokenizer.name_or_path
    contents = {name: source_file(path, name) for name in TOKENIZER_FILES}
    source = {name: content for name, content in contents.items() if content is not None}
    if TOKENIZER_CONFIG not in source:
        return written
    unchanged = _written(stored_tokenizer(path))
    changed = {name: written[name] for name in written if not _same(name, written[name], unchanged.get(name))}
    if TOKENS in changed:  # it holds all tokens; the other files would hold those of the source
        source = {TOKENIZER_CONFIG: source[TOKENIZER_CONFIG]}
    config, before, after = (json.loads(files[TOKENIZER_CONFIG]) for files in (source, unchanged, written))
    if TEMPLATE in changed and "chat_template" in config:
        after["chat_template"] = changed.pop(TEMPLATE).decode()
    if after != before:
        changed[TOKENIZER_CONFIG] = _json(_changed(config, before, after))
        if SPECIAL_TOKENS in source:
            special = json.loads(source[SPECIAL_TOKENS])
            names = {name for name in (*special, "pad_token") if after.get(name) != before.get(name)}
            changed[SPECIAL_TOKENS] = _json(special | {name: after.get(name) for name in names})
    return source | changed


def _changed(
    source: Mapping[str, Any], unchanged: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Any]:
    config = dict(source)
    for key in {**unchanged, **written}:
        before: Any = unchanged.get(key)
        after: Any = written.get(key)
        old = OLD_KEYS.get(key, key) if key not in source else key
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict) and isinstance(source.get(key), dict):
            config[key] = _changed(source[key], before, after)
        elif key == "rope_parameters" and key not in source and "rope_type" in after:
            scaling = {name: value for name, value in after.items() if name != "rope_theta"}
            config["rope_theta"] = after["rope_theta"]
            config["rope_scaling"] = None if after["rope_type"] == "default" else scaling
        elif key in written:
            config[old] = after
        else:
            config.pop(old, None)
    return config


def _same(name: str, one: bytes, other: bytes | None) -> bool:
    """Whether two files of a tokenizer hold the same; how the last texts were padded and cut is left out."""
    if one == other or other is None or name != TOKENS:
        return one == other
    content_now, stored = (
        json.loads(content) | {"padding": None, "truncation": None} for content in (one, other)
    )
    return bool(content_now == stored)


def _written(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="rl4llm-tokenizer-") as directory:
        tokenizer.save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir() if file.is_file()}


def source_file(path: str, name: str) -> bytes | None:
    """Return a file of a model directory, or of a model on the hub if it was downloaded before; None without one."""
    file = path and cached_file(
        path,
        name,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(file).read_bytes() if file else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()

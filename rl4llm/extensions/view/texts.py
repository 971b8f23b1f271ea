"""Token ids as text, using only the tokenizer's file, since the training libraries take seconds to import."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The text of each token. The tokenizer is from the run's model, from `model.path`, or from the hub's cache.

    Incomplete characters are shown as escapes, such as ``\\xe2``. Without a tokenizer, ids stay ids.
    """

    def __init__(self, run: Path, model_path: Callable[[], str | None]):
        self._run = run
        self._model_path = model_path
        self._tokenizer: Any = None
        self._pieces: dict[int, str | None] = {}

    def of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of these ids that the tokenizer knows."""
        tokens = {token for token in token_ids if isinstance(token, int)}
        if self.loaded() is not None:
            self._pieces |= {token: self._piece(token) for token in tokens - self._pieces.keys()}
        return {token: piece for token in tokens if (piece := self._pieces.get(token)) is not None}

    def joined(self, token_ids: Iterable[int]) -> str:
        """Return the text of these tokens together, "" without a tokenizer."""
        ids = [token for token in token_ids if isinstance(token, int) and 0 <= token < 2**32]
        return str(tokenizer.decode(ids, skip_special_tokens=False)) if (tokenizer := self.loaded()) else ""

    def loaded(self) -> Any:
        """Return the tokenizer; each call looks again for one that is missing, since a run may save its model later."""
        self._tokenizer = self._tokenizer or self._load()
        return self._tokenizer

    def _load(self) -> Any:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only for looking at tokens

        for file in self._places():
            if file.is_file():
                try:
                    return Tokenizer.from_file(str(file))
                except Exception:  # noqa: BLE001 - the library has no error class for a damaged file
                    continue
        return None

    def _places(self) -> Iterator[Path]:
        yield self._run / "model" / FILE
        path = self._model_path()
        if path is None:
            return
        yield Path(path).expanduser() / FILE
        yield Path(path).expanduser() / "model" / FILE
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

            cached = try_to_load_from_cache(path, FILE)
            if isinstance(cached, str):
                yield Path(cached)

    def _piece(self, token: int) -> str | None:
        from tokenizers import decoders  # noqa: PLC0415

        raw = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if raw is None:
            return None
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return _shown(bytes(map(BYTES.__getitem__, raw))) if BYTES.keys() >= set(raw) else raw
        byte = BYTE.fullmatch(raw)
        return _shown(bytes([int(byte[1], 16)])) if byte else raw.replace("\u2581", " ")


def _shown(data: bytes) -> str:
    return data.decode("utf-8", errors="backslashreplace")


VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTES = {chr(byte): byte for byte in VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}
"""The byte of each character of byte-level tokenizers: visible bytes are themselves, others start at 256."""

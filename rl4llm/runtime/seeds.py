"""Seeds: every random choice derives from what it is for, never from when it happens."""

from __future__ import annotations

import hashlib


def derive_seed(*identity: int | str) -> int:
    """Return a 63-bit seed for what `identity` names, e.g. ``derive_seed(seed, step, prompt_id, sample, turn)``.

    Equal identities give equal seeds on every machine and Python version; different ones are unrelated.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in identity)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

"""Whether grammars can constrain sampling, and the tokens that they allow, as bits of int32 words."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def can_constrain(tokenizer: Any) -> bool:
    """Return whether sampling with this tokenizer can be constrained, see `rl4llm.data.grammars`."""
    return find_spec("llguidance") is not None and bool(getattr(tokenizer, "is_fast", False))


def bits(words_NW: Tensor, columns: slice) -> Tensor:
    """Return which tokens from `columns.start` to `columns.stop` are in each of N sets, bool (N, columns).

    A word begins with its least significant bit. None has tokens beyond the words.
    """
    missing = -(-columns.stop // 32) - words_NW.shape[1]
    words_NW = F.pad(words_NW, (0, max(0, missing)))
    columns_V = torch.arange(columns.start, columns.stop, device=words_NW.device)
    return (words_NW[:, columns_V // 32] >> (columns_V % 32).int() & 1).bool()

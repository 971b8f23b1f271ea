"""Prompts with answers to other prompts, on which KTO estimates how far the policy is from its reference.

The pairs depend only on the prompts and answers of the step, not on their order or on the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.runtime.ranks import Ranks


def mismatched(own: Sequence[Trajectory], ranks: Ranks) -> list[Trajectory]:
    """Pair each prompt of this rank with the answer to another prompt, which may be on another rank.

    If no prompt makes up more than half of the step, each answer is used once. Otherwise prompts without an answer to
    another prompt are left out. Every rank must call this. Each receives all answers of the step, at 4 bytes per token.
    """
    answers = [trajectory.policy_spans[0].token_ids for trajectory in own]
    keys = [
        (_digest(trajectory.spans[0].token_ids), _digest(ids), len(ids))
        for trajectory, ids in zip(own, answers, strict=True)
    ]
    rows_N3, offset = _everyone(torch.tensor(keys, dtype=torch.int64).view(len(own), 3), ranks)
    tokens_N, _ = _everyone(
        torch.tensor([token for ids in answers for token in ids], dtype=torch.int32), ranks
    )
    every_answer = tokens_N.split(rows_N3[:, 2].tolist())
    partners = _partners([(prompt, answer) for prompt, answer, _ in rows_N3.tolist()])
    swapped = []
    for row, trajectory in enumerate(own, offset):
        if row in partners:
            token_ids = tuple(every_answer[partners[row]].tolist())
            answer = TokenSpan(token_ids, "policy", (0.0,) * len(token_ids), 0)
            swapped.append(replace(trajectory, spans=(trajectory.spans[0], answer), forks=()))
    return swapped


def _partners(rows: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the row whose answer each row gets, by digests of prompts and answers, without those that get none.

    Rows of a prompt are sorted together, so a shift by the size of the largest prompt reaches another prompt.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shift = max(Counter(prompt for prompt, _ in rows).values(), default=0)
    pairs = zip(order, order[shift:] + order[:shift], strict=True)
    return {row: partner for row, partner in pairs if rows[row][0] != rows[partner][0]}


def _everyone(own: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """Return the rows of all ranks in the order of ranks, and where those of this rank begin."""
    counts_R = torch.zeros(ranks.size, dtype=torch.int64)
    counts_R[ranks.rank] = len(own)
    counts_R = ranks.total(counts_R)
    offset = int(counts_R[: ranks.rank].sum())
    everyone = own.new_zeros(int(counts_R.sum()), *own.shape[1:])
    everyone[offset : offset + len(own)] = own
    return ranks.total(everyone), offset


def _digest(token_ids: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(torch.tensor(token_ids, dtype=torch.int64).numpy().tobytes()) >> 1

"""Pack trajectories as a trainer does, and a loss for them."""

import random
from itertools import groupby

from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.data.pack import Batching, totals_of


def pack(trajectories, credits, *, totals, **options):
    return Batching(**options).pack(trajectories, credits, totals)


def micro_batches(trajectories, layout="shared", budget=64, aggregation="sequence", credits=None):
    """Return batches of at most `budget` tokens; without `credits`, each trajectory is worth less than the one before."""
    credits = credits or [1.0 - 0.3 * number for number in range(len(trajectories))]
    batching = Batching(layout, aggregation, pad_token_id=0, max_tokens_per_batch=budget)
    return batching.pack(trajectories, credits, totals_of(trajectories))


def policy_gradient(batch, numbers_BT, entropy_BT):
    return -batch.credits_BT * numbers_BT, {}


def predecessor(batch, row, column):
    """Return the column of the token before: the one to the left, or for the first of a segment that before its twin."""
    if column and batch.segment_ids_BT[row, column - 1] == batch.segment_ids_BT[row, column]:
        return column - 1
    if batch.position_ids_BT[row, column] == 0:
        return None
    return predecessor(batch, row, int(batch.computed_BT[row, column]))


def tries(seed=0, groups=2):
    """Return trajectories that part from each other anywhere, among them two equal ones and the beginning of another.

    Authors, log-probs and versions differ: what one sampled is context in another, or was sampled again.
    """
    draw, found = random.Random(seed), []
    for group in range(groups):
        prompt = [draw.randrange(2, 61) for _ in range(draw.randrange(2, 6))]
        records = [prompt + [draw.randrange(2, 5) for _ in range(9)]]
        for _ in range(4):
            other = draw.choice(records)
            cut = draw.randrange(len(prompt), len(other))
            records.append(other[:cut] + [draw.randrange(2, 61) for _ in range(draw.randrange(1, 9))])
        records += [records[0], records[0][:-3]]
        found += [
            _sampled(f"t{group}", tokens, len(prompt), draw) for tokens in draw.sample(records, len(records))
        ]
    return found


def _sampled(name, tokens, prompt, draw):
    """Return a trajectory of these tokens in which the policy wrote some of those after the prompt."""
    rest = tokens[prompt:]
    wrote = [draw.random() < 0.6 for _ in rest[1:]] + [True]
    spans = [TokenSpan.context(tokens[:prompt])]
    for by_policy, run in groupby(zip(wrote, rest, strict=True), key=lambda item: item[0]):
        ids = tuple(token for _, token in run)
        logprobs = tuple(-3 * draw.random() for _ in ids)
        sampled = TokenSpan(ids, "policy", logprobs, draw.randrange(3))
        spans.append(sampled if by_policy else TokenSpan.context(ids))
    return Trajectory(name, tuple(spans), (), {}, draw.gauss(0, 1), "stop")

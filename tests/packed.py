"""Pack trajectories as a trainer does, and a loss for them."""

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

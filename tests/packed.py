"""Pack trajectories as a trainer does, with the totals given."""

from rl4llm.data.pack import Batching


def pack(trajectories, credits, *, totals, **options):
    return Batching(**options).pack(trajectories, credits, totals)

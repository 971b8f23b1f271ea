"""The token records of a sample whose history is rewritten: those before the current one are its `special.forks`."""

from __future__ import annotations

from dataclasses import replace

from rl4llm.core.sample import SampleState
from rl4llm.core.types import Origin, Relation, count_turns


def end_record(sample: SampleState, relation: Relation) -> None:
    """End the current token record, unless the policy never spoke in it; the next one continues or rewrites it."""
    special = sample.special
    if turns := count_turns(sample.spans):
        origin = Origin(relation, len(special.forks), turns)
        forks, origins = (*special.forks, sample.spans[:]), (*special.origins, origin)
        sample.special = replace(special, forks=forks, origins=origins)
    sample.spans.clear()


def order_records(sample: SampleState) -> None:
    """Put the first token record into the spans, and the others in which the policy spoke into the forks."""
    special = sample.special
    records = [list(record) for record in (*special.forks, sample.spans) if count_turns(record)]
    sample.spans[:], forks = records[0], records[1:]
    sample.special = replace(special, forks=forks, origins=special.origins[: len(forks)])

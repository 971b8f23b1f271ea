"""Token records for a reference that knows more: another prompt before the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from rl4llm.core.base_algorithm import Prompt
from rl4llm.core.errors import SpecialTokenError
from rl4llm.core.sample import SampleState
from rl4llm.core.types import Group, TokenSpan, Trajectory, images_of
from rl4llm.envs.rollout import Episodes, Rollout, RolloutResult

Record = tuple[TokenSpan, ...]


class PrivilegedRollout(Rollout):
    """Give each trajectory the records that the reference reads, `Trajectory.privileged`.

    `prompts_of` is `BaseAlgorithm.privileged_prompts`. The mean ``env/privileged`` is the share of trajectories with one.
    """

    def __init__(self, prompts_of: Callable[..., Sequence[Prompt | None]], *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._prompts_of = prompts_of

    def scored(self, played: Sequence[Episodes]) -> RolloutResult:
        result = super().scored(played)
        samples = {(one.prompt_id, one.role, one.index): one for unit in played for one in unit.samples}
        return replace(result, groups=tuple(self._read(group, samples) for group in result.groups))

    def _read(self, group: Group, samples: Mapping[tuple[str, str, int], SampleState]) -> Group:
        seats = [samples[one.prompt_id, one.role, one.extras["sample"]] for one in group.trajectories]
        prompts, members = self._prompts_of(seats, group), []
        for sample, member, prompt in zip(seats, group.trajectories, prompts, strict=True):
            records = self._records(sample, member, prompt) if prompt is not None else ()
            counts = {**member.extras.get("metrics", {}), "privileged": float(any(records))}
            members.append(replace(member, privileged=records, extras={**member.extras, "metrics": counts}))
        return replace(group, trajectories=tuple(members))

    def _records(self, sample: SampleState, member: Trajectory, prompt: Prompt) -> tuple[Record | None, ...]:
        renderer, messages = self._renderer.of_row(sample.columns), sample.messages[: sample.init_msg_size]
        if sample.special.own_prompt:
            return ()
        try:
            before, after = (renderer.context(renderer.first(item), item) for item in (messages, prompt))
        except SpecialTokenError:  # what the policy or the environment wrote does not stop a run
            return ()
        return tuple(_behind(after, before, record, self._client.context_length) for record in member.records)


def _behind(after: TokenSpan, before: TokenSpan, record: Record, room: int) -> Record | None:
    """Return a record with `after` in place of `before`; None if it does not begin with that, or has no room for this.

    A record whose history was rewritten may begin with something else.
    """
    context = tuple(takewhile(lambda span: span.author == "context", record))
    opening = TokenSpan.context([token for span in context for token in span.token_ids], images_of(context))
    same, rest = opening.cut(len(before.token_ids))
    spans = (after, *([rest] if rest.token_ids else ()), *record[len(context) :])
    fits = sum(len(span.token_ids) for span in spans) <= room
    return spans if fits and same.token_ids == before.token_ids else None

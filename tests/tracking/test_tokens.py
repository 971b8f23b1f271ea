import pytest
import torch
from packed import pack

from rl4llm.core.types import ChatMessage, Completion, TokenSpan, Trajectory
from rl4llm.data.layouts import LAYOUTS
from rl4llm.data.pack import totals_of
from rl4llm.tracking.episodes import TrainedTokens

PROMPT = TokenSpan.context([1, 2, 3])


def spoken(*token_ids):
    return TokenSpan.policy(Completion("", token_ids, (-0.5,) * len(token_ids), "stop", version=3))


def episode(prompt_id, *spans, forks=()):
    messages = (ChatMessage("user", "?"),)
    return Trajectory(prompt_id, spans, messages, {}, 1.0, "done", forks=tuple(forks))


TRAJECTORIES = [
    episode("a", PROMPT, *spoken(10, 11), TokenSpan.context([4]), *spoken(12)),
    episode("a", PROMPT, *spoken(20)),
    episode(
        "b", TokenSpan.context([5]), *spoken(30, 31, 32), forks=[(TokenSpan.context([6, 7]), *spoken(33, 34))]
    ),
    episode("b", TokenSpan.context([5]), *spoken(40)),
]


def of_token(ids_BT, scale):
    """Return a number that identifies its token."""
    return ids_BT.float() / scale


def noted(layout, budget, passes=1):
    trained, records = TrainedTokens(), [record for one in TRAJECTORIES for record in one.records]
    for number in range(passes):
        for batch in pack(
            TRAJECTORIES,
            [0.5, 1.5, None, -2.0] if budget == 7 else [0.5, 1.5, 1.0, -2.0],
            max_tokens_per_batch=budget,
            layout=layout,
            aggregation="sequence",
            totals=totals_of(TRAJECTORIES),
            pad_token_id=0,
        ):
            batch.advantages_BT = batch.credits_BT
            ids_BT = batch.token_ids_BT
            trained.add(
                records, batch, -of_token(ids_BT, 100) - number, (ids_BT == 31 + number) | (ids_BT == 12)
            )
    return trained.by_span()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [7, 8, 100])
def test_each_span_gets_its_numbers_in_every_packing(layout, budget):
    notes = noted(layout, budget)
    for trajectory, advantage in zip(TRAJECTORIES, [0.5, 1.5, 1.0, -2.0], strict=True):
        for span in trajectory.policy_spans:
            if budget == 7 and advantage == 1.0:  # nothing to learn, so it was not packed
                assert id(span) not in notes
                continue
            note = notes[id(span)]
            assert note.logprobs == [round(-token / 100, 6) for token in span.token_ids]
            assert note.advantages == [advantage] * len(span.token_ids)
            assert note.weight == pytest.approx(1 / (4 * trajectory.num_policy_tokens))
            assert note.clipped == [i for i, token in enumerate(span.token_ids) if token in (31, 12)]


def test_a_retrained_token_keeps_first_numbers_and_every_clip():
    note = noted("shared", 100, passes=2)[id(TRAJECTORIES[2].spans[1])]
    assert note.logprobs == [-0.3, -0.31, -0.32]
    assert note.clipped == [1, 2]


def test_batches_that_only_keep_ranks_in_step_are_passed_over():
    from rl4llm.data.pack import filler

    trained = TrainedTokens()
    trained.add([], filler(0), torch.zeros(1, 2))
    assert trained.by_span() == {}

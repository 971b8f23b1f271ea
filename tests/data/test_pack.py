"""Packing: every token of the policy stands somewhere exactly once, with its weight, under the budget."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from packed import pack, predecessor, tries

from rl4llm.backends.attention import stream_of
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.data import layouts
from rl4llm.data.layouts import LAYOUTS
from rl4llm.data.pack import Batching, StepTotals, totals_of
from rl4llm.data.plan import is_computed, plan_batches

LAYOUT_NAMES = ["sorted", "packed", "shared"]


def trajectory(prompt_id, *spans):
    """Build a trajectory whose spans alternate between context and policy; its log-probs are derived from the ids."""
    found = []
    for number, ids in enumerate(spans):
        if number % 2:
            found.append(TokenSpan(tuple(ids), "policy", tuple(-0.01 * token for token in ids), 0))
        else:
            found.append(TokenSpan.context(tuple(ids)))
    return Trajectory(prompt_id, tuple(found), (), {}, 0.0, "stop")


def random_trajectories(groups, samples, seed=0):
    rng = np.random.default_rng(seed)
    fresh = iter(range(10, 10**9))  # every token is another one, so tokens can be told apart

    def take(low, high):
        return [next(fresh) for _ in range(rng.integers(low, high))]

    found = []
    for group in range(groups):
        prompt = take(2, 12)
        for _ in range(samples):
            spans = [prompt, take(1, 30)]
            if rng.random() < 0.4:
                spans += [take(1, 6), take(1, 10)]
            found.append(trajectory(f"p{group}", *spans))
    return found


def packed(trajectories, credits=None, layout="sorted", budget=100, aggregation="token", totals=None):
    return pack(
        trajectories,
        [1.0] * len(trajectories) if credits is None else credits,
        max_tokens_per_batch=budget,
        layout=layout,
        aggregation=aggregation,
        totals=totals,
        pad_token_id=0,
        constant_length=10,
    )


def added(*totals):
    """Return the totals of all ranks."""
    return StepTotals(*map(sum, zip(*totals, strict=True)))


def tokens_in(batch):
    return int(is_computed(batch).sum())


def read_back(batch):
    """Return the records of a batch, each as a list of (token, position, sampled, log-prob, credit, weight)."""
    columns = (
        batch.token_ids_BT, batch.position_ids_BT, batch.mask_BT,
        batch.sampled_logprobs_BT, batch.credits_BT, batch.weights_BT,
    )  # fmt: skip
    found = []
    for row, segments in enumerate(batch.segment_ids_BT.tolist()):
        for segment in dict.fromkeys(filter(None, segments)):
            column, chain = len(segments) - 1 - segments[::-1].index(segment), []
            while column is not None:
                token, position, *numbers = (x[row, column].item() for x in columns)
                # what stands in the place of another record is not trained in this one
                chain.insert(
                    0, (token, position, *(numbers if segments[column] == segment else [False, 0, 0, 0]))
                )
                column = predecessor(batch, row, column)
            found.append(chain)
    return found


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_every_trajectory_is_in_exactly_one_batch_as_recorded(layout):
    trajectories = random_trajectories(groups=6, samples=4)
    credits = [0.1 * number - 1 for number in range(len(trajectories))]
    batches = packed(trajectories, credits, layout)
    seen = {tuple(item[0] for item in chain): chain for batch in batches for chain in read_back(batch)}
    assert sum(len(read_back(batch)) for batch in batches) == len(seen) == len(trajectories)
    totals = totals_of(trajectories)
    for one, credit in zip(trajectories, credits, strict=True):
        chain = seen[tuple(one.token_ids)]
        sampled = [span.author == "policy" for span in one.spans for _ in span.token_ids]
        logprobs = [value for span in one.spans for value in span.logprobs or [0.0] * len(span.token_ids)]
        assert [item[1] for item in chain] == list(range(one.num_tokens))
        assert [item[2] for item in chain] == sampled
        assert [item[3] for item in chain] == pytest.approx(logprobs)
        assert [item[4] for item in chain] == pytest.approx([credit * flag for flag in sampled])
        assert [item[5] for item in chain] == pytest.approx([flag / totals.tokens for flag in sampled])


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("budget", [60, 100, 1000])
def test_no_batch_exceeds_the_budget(layout, budget):
    batches = packed(random_trajectories(groups=8, samples=5), layout=layout, budget=budget)
    padding = [int((batch.segment_ids_BT == 0).sum()) for batch in batches]
    assert max(map(sum, zip(map(tokens_in, batches), padding, strict=True))) <= budget


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_filled_rows_have_no_padding(layout):
    for batch in packed(random_trajectories(groups=6, samples=4), layout=layout):
        assert (batch.segment_ids_BT > 0).all()


def test_padding_counts_nothing():
    for batch in packed(random_trajectories(groups=6, samples=4)):
        padding_BT = batch.segment_ids_BT == 0
        assert not batch.mask_BT[padding_BT].any()
        assert not batch.weights_BT[padding_BT].any()
        assert not batch.token_ids_BT[padding_BT].any()


def test_a_shared_prompt_comes_once_before_its_trajectories():
    prompt = [11, 12, 13]
    one = [trajectory("a", prompt, [21, 22]), trajectory("a", prompt, [31]), trajectory("b", [11, 12], [41])]
    (batch,) = packed(one, layout="shared")
    assert batch.token_ids_BT.tolist() == [[11, 12, 13, 21, 22, 13, 31, 11, 12, 41]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2]]
    assert batch.computed_BT.tolist() == [[0, 1, 2, 3, 4, 2, 6, 7, 8, 9]]
    assert batch.segment_ids_BT.tolist() == [[1, 1, 1, 1, 1, 2, 2, 3, 3, 3]]


@pytest.fixture(params=[1, 4])
def shortest(request, monkeypatch):
    """Share runs of this many tokens, which the tries of tests have."""
    monkeypatch.setattr("rl4llm.data.layouts.SHORTEST", request.param)
    return request.param


def recorded(one, credit, weight):
    """Return what a batch holds of a record, as `read_back` gives it."""
    chain = []
    for span in one.spans:
        sampled = span.author == "policy"
        for number, token in enumerate(span.token_ids):
            numbers = (span.logprobs[number], credit, weight) if sampled else (0.0, 0.0, 0.0)
            chain.append((token, len(chain), sampled, *numbers))
    return chain


def in_order(chains):
    """Return chains in an order, with the numbers of float32."""
    return sorted([tuple(np.float32(x).item() for x in item) for item in chain] for chain in chains)


@pytest.mark.parametrize("budget", [20, 45, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_records_of_a_trie_stay_what_they_are_under_the_budget(seed, budget, shortest):
    trajectories = tries(seed)
    credits = [0.5 - 0.1 * number for number in range(len(trajectories))]
    batches = packed(trajectories, credits, "shared", budget)
    weight = 1 / totals_of(trajectories).tokens
    expected = [recorded(one, credit, weight) for one, credit in zip(trajectories, credits, strict=True)]
    assert in_order(chain for batch in batches for chain in read_back(batch)) == in_order(expected)
    assert max(map(tokens_in, batches)) <= max(budget, *(one.num_tokens for one in trajectories))


@pytest.mark.parametrize(
    "thought", [2, 9]
)  # before and after the tokens of answers, in the order of the trie
def test_copied_keys_count_in_the_budget(thought):
    history, records = [5] * 10, []
    for turn in range(24):  # thoughts of earlier turns are not in the next prompt
        answer = [6 + turn % 2] * 40
        records.append(trajectory("a", history, [thought] * 40 + answer))
        history = history + answer + [8] * 33
    batches = packed(records, layout="shared", budget=3072)
    for batch in batches:
        blocks = stream_of(batch).blocks
        keys = sum(block.count * (block.length + sum(length for _, length in block.path)) for block in blocks)
        of_prompt = 10 * (len(records) + 1)
        assert tokens_in(batch) + layouts.KEY * (keys - tokens_in(batch) - of_prompt) <= 3072
    assert len(batches) <= 4 < len(packed(records, layout="packed", budget=3072))


def test_copies_of_a_prompt_alone_cost_nothing(monkeypatch):
    plain = [trajectory(name, [5] * 300, [10 + number] * 50) for name in "ab" for number in range(9)]
    sizes = []
    for key in (0.0, 1.0):
        monkeypatch.setattr(layouts, "KEY", key)
        sizes.append([tokens_in(batch) for batch in packed(plain, layout="shared", budget=800)])
    assert sizes[0] == sizes[1] == [750, 750]


@pytest.mark.parametrize("seed", range(4))
def test_each_prefix_of_a_trie_is_computed_once(seed, monkeypatch):
    monkeypatch.setattr("rl4llm.data.layouts.SHORTEST", 1)
    trajectories = tries(seed)
    (batch,) = packed(trajectories, layout="shared", budget=1000)
    prefixes = {
        (one.prompt_id, *one.token_ids[: number + 1])
        for one in trajectories
        for number in range(one.num_tokens)
    }
    assert tokens_in(batch) == len(prefixes) < 0.6 * sum(one.num_tokens for one in trajectories)


@pytest.mark.parametrize("seed", range(4))
def test_a_token_is_computed_in_the_place_of_the_same_history(seed, shortest):
    (batch,) = packed(tries(seed), layout="shared", budget=1000)

    def history(column):
        while column is not None:
            yield int(batch.token_ids_BT[0, column])
            column = predecessor(batch, 0, column)

    shared = (~is_computed(batch)[0]).nonzero().flatten().tolist()
    assert len(shared) > 20
    for column in shared:
        twin = int(batch.computed_BT[0, column])
        assert is_computed(batch)[0, twin] and twin < column
        assert [*history(column)] == [*history(twin)]


def test_equal_trajectories_without_a_prompt_are_computed_once():
    alone = Trajectory("a", (TokenSpan((5, 6), "policy", (-1.0, -2.0), 0),), (), {}, 0.0, "stop")
    (batch,) = packed([alone, alone], layout="shared")
    assert batch.token_ids_BT.tolist() == [[5, 6, 5, 6]]
    assert batch.position_ids_BT.tolist() == batch.computed_BT.tolist() == [[0, 1, 0, 1]]


def test_groups_share_nothing_with_each_other():
    one = [trajectory("a", [1, 2], [3, 4]), trajectory("b", [1, 2], [3, 4])]
    (batch,) = packed(one, layout="shared")
    assert batch.computed_BT is None


def test_a_group_over_the_budget_is_split_with_its_prompt():
    prompt = list(range(10, 20))
    one = [trajectory("a", prompt, range(100 * number, 100 * number + 10)) for number in range(1, 6)]
    batches = packed(one, layout="shared", budget=30)
    assert [tokens_in(batch) for batch in batches] == [30, 30, 20]
    assert all(batch.token_ids_BT[0, :10].tolist() == prompt for batch in batches)


def test_shared_prompts_save_the_tokens_of_the_copies():
    one = [trajectory(f"p{g}", range(64), [100 + n, *range(63)]) for g in range(16) for n in range(8)]
    assert sum(tokens_in(batch) for batch in packed(one, layout="shared", budget=4096)) == 16 * 64 + 128 * 64


@pytest.mark.parametrize(
    ("aggregation", "sums"),
    [("token", [0.25, 0.75]), ("sequence", [0.5, 0.5]), ("constant", [2 / 20, 6 / 20])],
)
def test_weights_of_a_trajectory_sum_to_its_share(aggregation, sums):
    one = [trajectory("a", [1], [2, 3]), trajectory("b", [1], [4, 5, 6], [7], [8, 9, 10])]
    assert totals_of(one) == StepTotals(tokens=8, sequences=2, prompts=2)
    (batch,) = packed(one, aggregation=aggregation)
    order = batch.mask_BT.sum(1).argsort()
    assert batch.weights_BT.sum(1)[order].tolist() == pytest.approx(sums)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_weights_of_a_step_sum_to_one_however_it_is_cut(layout, aggregation):
    one = random_trajectories(groups=6, samples=4)
    batches = packed(one, layout=layout, budget=80, aggregation=aggregation)
    assert sum(batch.weights_BT.double().sum().item() for batch in batches) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt"])
def test_totals_of_ranks_add_up_so_that_their_weights_do(aggregation):
    one = random_trajectories(2, 3)
    other = [replace(item, prompt_id=f"other {item.prompt_id}") for item in random_trajectories(3, 2, seed=1)]
    totals = added(totals_of(one), totals_of(other))
    assert totals == totals_of(one + other)
    batches = [
        batch for part in (one, other) for batch in packed(part, totals=totals, aggregation=aggregation)
    ]
    assert sum(batch.weights_BT.double().sum().item() for batch in batches) == pytest.approx(1.0, abs=1e-6)


def test_aggregation_prompt_weighs_all_prompts_equally():
    one = [trajectory("a", [1], [2, 3]), trajectory("a", [1], [4]), trajectory("b", [5], [6])]
    (batch,) = packed(one, aggregation="prompt")
    tokens = [token for chain in read_back(batch) for token in chain]
    weights = {token: weight for token, _, sampled, _, _, weight in tokens if sampled}
    assert weights == pytest.approx({2: 1 / 6, 3: 1 / 6, 4: 1 / 6, 6: 1 / 2})


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_each_role_of_a_prompt_is_a_separate_group(layout):
    plain = [trajectory("a", [1], [2, 3]), trajectory("a", [1], [4]), trajectory("a", [1], [6])]
    roles = [replace(one, role=role) for one, role in zip(plain, ("pro", "pro", "con"), strict=True)]
    assert totals_of(plain).prompts == 1
    assert totals_of(roles).prompts == 2
    (batch,) = packed(roles, aggregation="prompt", layout=layout)
    groups = dict(
        zip(
            batch.token_ids_BT[batch.mask_BT].tolist(),
            batch.group_ids_BT[batch.mask_BT].tolist(),
            strict=True,
        )
    )
    assert groups == {2: 0, 3: 0, 4: 0, 6: 1}
    weights = dict(
        zip(batch.token_ids_BT[batch.mask_BT].tolist(), batch.weights_BT[batch.mask_BT].tolist(), strict=True)
    )
    assert weights == pytest.approx({2: 1 / 6, 3: 1 / 6, 4: 1 / 6, 6: 1 / 2})


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_two_draws_of_a_prompt_are_two_groups(layout):
    one, other = trajectory("a", [1], [2]), replace(trajectory("a", [1], [3, 4, 5]), draw=1)
    totals = added(totals_of([one]), totals_of([other]))
    assert totals == totals_of([one, other])
    (batch,) = packed([one, other], aggregation="prompt", layout=layout)
    apart = [packed([each], aggregation="prompt", layout=layout, totals=totals)[0] for each in (one, other)]
    found, expected = (
        [part.weights_BT[part.mask_BT].tolist() for part in parts] for parts in ([batch], apart)
    )
    assert sorted(found[0]) == sorted(expected[0] + expected[1]) == pytest.approx([1 / 6] * 3 + [1 / 2])
    assert len(batch.group_ids_BT[batch.mask_BT].unique()) == 2


def test_credits_per_turn_ignore_changes_of_weights_in_a_turn():
    spans = (
        TokenSpan.context((1,)),
        TokenSpan((2,), "policy", (0.0,), 0), TokenSpan((3,), "policy", (0.0,), 1),  # one turn of two versions
        TokenSpan.context((4,)), TokenSpan((5,), "policy", (0.0,), 1),
    )  # fmt: skip
    (batch,) = packed([Trajectory("a", spans, (), {}, 0.0, "stop")], credits=[(0.5, -2.0)])
    assert batch.credits_BT.tolist() == [[0.0, 0.5, 0.5, 0.0, -2.0]]


def forked(prompt_id, first, *others):
    """Return an episode with several token records."""
    return replace(
        trajectory(prompt_id, *first), forks=tuple(trajectory(prompt_id, *spans).spans for spans in others)
    )


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_each_record_is_a_sequence_with_its_episodes_credit(layout):
    one = forked("a", [[1], [2, 3]], [[1, 2, 3, 4], [5]], [[1, 6], [7], [8], [9, 10]])
    batches = packed([one, trajectory("a", [1], [11])], [0.5, -1.0], layout, budget=8)
    chains = {tuple(item[0] for item in chain): chain for batch in batches for chain in read_back(batch)}
    credits = {
        (1, 2, 3): [0, 0.5, 0.5], (1, 2, 3, 4, 5): [0, 0, 0, 0, 0.5],
        (1, 6, 7, 8, 9, 10): [0, 0, 0.5, 0, 0.5, 0.5], (1, 11): [0, -1],
    }  # fmt: skip
    assert {tokens: [item[4] for item in chain] for tokens, chain in chains.items()} == credits


def test_turn_credits_follow_the_records_in_order():
    one = forked("a", [[1], [2], [3], [4]], [[1, 2, 5], [6]])
    (batch,) = packed([one], [(0.5, -2.0, 3.0)])
    assert batch.token_ids_BT.tolist() == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert batch.credits_BT.tolist() == [[0.0, 0.5, 0.0, -2.0], [0.0, 0.0, 0.0, 3.0]]


@pytest.mark.parametrize(("aggregation", "share"), [("sequence", 1 / 2), ("prompt", 1 / 2), ("token", 4 / 6)])
def test_rewriting_its_history_gives_an_episode_no_more_weight(aggregation, share):
    trajectories = [forked("a", [[1], [2, 3]], [[4], [5]], [[6], [7]]), trajectory("b", [8], [9, 10])]
    (batch,) = packed(trajectories, aggregation=aggregation)
    weights = dict(
        zip(batch.token_ids_BT.flatten().tolist(), batch.weights_BT.flatten().tolist(), strict=True)
    )
    assert [weights[token] for token in (2, 3, 5, 7)] == pytest.approx([share / 4] * 4)
    assert batch.weights_BT.sum().item() == pytest.approx(1.0)


def test_trajectories_without_credit_count_only_in_totals():
    one = [trajectory("a", [1], [2, 3]), trajectory("a", [1], [4])]
    (batch,) = packed(one, credits=[1.0, None], aggregation="prompt")
    assert batch.token_ids_BT.tolist() == [[1, 2, 3]]
    assert batch.weights_BT.sum().item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_whole_groups_stand_together(layout):
    trajectories = random_trajectories(groups=6, samples=2)
    options = {"max_tokens_per_batch": 150, "layout": layout, "aggregation": "token", "pad_token_id": 0}
    totals = totals_of(trajectories)
    batches = pack(trajectories, [1.0] * 12, totals=totals, whole_groups=True, **options)
    seen = [set(batch.group_ids_BT[batch.mask_BT].tolist()) for batch in batches]
    assert len(seen) > 1
    assert sorted(group for groups in seen for group in groups) == list(range(6))
    assert sum(batch.weights_BT.double().sum().item() for batch in batches) == pytest.approx(1.0, abs=1e-6)
    options["max_tokens_per_batch"] = 20  # less than a group, which cannot be cut
    batches = pack(trajectories, [1.0] * 12, totals=totals, whole_groups=True, **options)
    seen = [set(batch.group_ids_BT[batch.mask_BT].tolist()) for batch in batches]
    assert sorted(group for groups in seen for group in groups) == list(range(6))


def test_trajectories_without_policy_tokens_count_in_totals():
    silent = Trajectory("a", (TokenSpan.context([1, 2]),), (), {}, 0.0, "error")
    spoke = trajectory("a", [1, 2], [3])
    (batch,) = packed([silent, spoke], aggregation="sequence")
    assert batch.token_ids_BT.tolist() == [[1, 2, 3]]
    assert batch.weights_BT.sum().item() == pytest.approx(0.5)
    assert packed([silent]) == []


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_trajectory_over_the_budget_is_packed_whole(layout):
    long, short = trajectory("a", range(4), range(5)), trajectory("b", [1], [2])
    assert sorted(map(tokens_in, packed([long, short], layout=layout, budget=8))) in ([2, 9], [11])


def test_an_unknown_layout_or_aggregation_is_refused():
    one = [trajectory("a", [1], [2])]
    with pytest.raises(ConfigError):
        packed(one, layout="sort")
    with pytest.raises(ConfigError):
        packed(one, aggregation="tokens")
    with pytest.raises(ConfigError):
        Batching(aggregation="constant")


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_the_plan_covers_the_longest_trajectories(layout):
    one = [trajectory(f"p{g}", range(20), [50 + n, *range(29)]) for g in range(6) for n in range(4)]
    batches = packed(one, layout=layout, budget=230)
    planned = plan_batches(
        prompts=6, samples=4, max_prompt_tokens=20, max_new_tokens=30, max_tokens_per_batch=230, layout=layout
    )
    plan = {row["what"]: row["value"] for row in planned.table()}
    assert plan["trajectories per rollout"] == 24
    assert plan["micro-batches per optimizer step, at most"] == len(batches)
    assert plan["tokens per micro-batch, at most"] == max(tokens_in(batch) for batch in batches)
    assert plan["tokens computed per optimizer step, at most"] == sum(tokens_in(batch) for batch in batches)
    policy_tokens = sorted(int(batch.mask_BT.sum()) for batch in batches)
    assert sorted(30 * sequences for sequences in planned.sequences) == policy_tokens


def test_dtypes_are_those_the_model_and_the_losses_want():
    (batch,) = packed([trajectory("a", [1], [2]), trajectory("a", [1], [3])], layout="shared")
    for name in ("token_ids_BT", "position_ids_BT", "segment_ids_BT", "computed_BT"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("sampled_logprobs_BT", "credits_BT", "weights_BT"):
        assert getattr(batch, name).dtype == torch.float32, name
    assert batch.mask_BT.dtype == torch.bool
    assert set(LAYOUTS) == set(LAYOUT_NAMES)

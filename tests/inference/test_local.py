import asyncio
import random

import pytest
import torch
from safetensors.torch import load_file
from sweeps import sampled

from rl4llm.core.errors import EngineError
from rl4llm.core.model_memory import EngineLoad, Precision
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.inspect.plan.shape import shape_of
from rl4llm.inference.embedded import kv_cache, rows
from rl4llm.inference.embedded.engine import Engine
from rl4llm.inference.embedded.kv_cache import similar
from rl4llm.inference.embedded.stops import StopRules
from rl4llm.inference.local import LocalClient
from rl4llm.testing import check_client

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 9, 40, 33, 7], [8, 100], [61], [12, 12, 13, 200, 4, 4, 90, 31, 77, 2, 6], [5, 9, 40, 33, 8]]
BOTH_PATHS = [
    ("qwen2", "fast"),
    ("qwen3", "fast"),
    ("llama", "fast"),
    ("llama3", "fast"),
    ("mistral", "fast"),
    ("qwen3", "graph"),
    ("llama3", "graph"),
] + [(name, "model") for name in ("qwen2", "qwen3", "mistral", "gpt_neox", "gpt2", "gemma2", "llama_dynamic")]
WAYS = [
    ("fast", 1),
    ("fast", 10**9),
    ("graph", 1),
    ("model", 1),
]  # prompts read in place, prompts copied, steps in a fixed shape, the model's own forward


@pytest.fixture
def make(build, tokenizer):
    """Build a client and name the model that it serves."""

    def make_client(name="qwen3", **options):
        client = LocalClient(build(name), tokenizer, **options)
        asyncio.run(client.load(WeightRef(0)))
        return client

    return make_client


def health(client):
    return asyncio.run(client.health())


def generate(client, prompts, params, sessions=None):
    async def run():
        names = sessions or [""] * len(prompts)
        requests = zip(prompts, params, names, strict=True)
        return await asyncio.gather(
            *(client.generate(ids, item, session=name) for ids, item, name in requests)
        )

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["fast", "graph", "model"])
def test_any_eos_id_ends_and_padding_is_never_sampled(build, tokenizer, path):
    model = build("qwen3")
    model.resize_token_embeddings(len(tokenizer) + 64)
    model.lm_head.weight.data.zero_()  # all tokens are equally likely
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 140)]
    client = LocalClient(model, tokenizer, path=path)
    params = [SAMPLED.replace(seed=seed, max_tokens=60, ignore_eos=False) for seed in range(16)]
    found = generate(client, [PROMPTS[0]] * 16, params)
    ends = set(model.generation_config.eos_token_id)
    assert all(ends.isdisjoint(one.token_ids[:-1]) for one in found)
    assert sum(one.finish_reason == "stop" for one in found) > 8
    assert all(token < len(tokenizer) for one in found for token in one.token_ids)
    loglikelihood = -torch.log(torch.tensor(len(tokenizer) + 64.0)).item()
    assert found[0].logprobs == pytest.approx([loglikelihood] * len(found[0].token_ids))
    assert generate(client, PROMPTS[:1], [params[0].replace(ignore_eos=True)])[0].finish_reason == "length"


# only the fast path reads prompts in place
@pytest.mark.parametrize(
    ("name", "path", "share_from"),
    [(*case, 1) for case in BOTH_PATHS] + [(*case, 10**9) for case in BOTH_PATHS if case[1] == "fast"],
)
def test_greedy_and_seeded_tokens_equal_a_plain_forward_loop(
    build, tokenizer, reference, name, path, share_from
):
    model = build(name)
    client = LocalClient(model, tokenizer, path=path, share_from=share_from)
    params = [
        GREEDY,
        SAMPLED.replace(seed=3),
        SAMPLED.replace(seed=4, top_p=0.8, temperature=0.7),
        SAMPLED.replace(top_k=5),
    ]
    cases = [(prompt, item) for prompt in PROMPTS for item in params]
    found = generate(client, *zip(*cases, strict=True))
    for (prompt, item), completion in zip(cases, found, strict=True):
        tokens, logprobs = reference(model, prompt, item)
        assert list(completion.token_ids) == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert health(client)["path"] == path


@pytest.mark.parametrize("path", ["fast", "graph", "model"])
def test_the_client_keeps_the_contract_of_all_clients(make, path):
    check_client(make(path=path), PROMPTS)


@pytest.mark.parametrize("path", ["fast", "model"])
def test_scores_equal_the_models_forward(build, tokenizer, path):
    model = build("qwen3")
    ids = PROMPTS[3]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(logprobs[place, token]) for place, token in enumerate(ids[1:])]
    assert asyncio.run(LocalClient(model, tokenizer, path=path).score(ids)) == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize(("path", "share_from"), WAYS)
def test_a_half_precision_model_gives_the_log_probs_of_forward(build, tokenizer, path, share_from):
    model = build("qwen3").to(torch.bfloat16)
    client = LocalClient(model, tokenizer, path=path, share_from=share_from)
    for completion in generate(client, [PROMPTS[3]] * 4, [SAMPLED.replace(seed=seed) for seed in range(4)]):
        ids = [*PROMPTS[3], *completion.token_ids]
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0, len(PROMPTS[3]) - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=0.2)


def test_a_samples_stream_depends_on_its_identity_alone(make):
    client = make()
    params = [SAMPLED.replace(seed=seed) for seed in range(6)]
    group = generate(client, [PROMPTS[0]] * 6, params)
    alone = [generate(client, [PROMPTS[0]], [item])[0] for item in params]
    mixed = generate(
        client, [PROMPTS[3], *[PROMPTS[0]] * 6], [GREEDY.replace(max_tokens=3), *reversed(params)]
    )
    tokens = [completion.token_ids for completion in group]
    assert len(set(tokens)) == 6
    assert [completion.token_ids for completion in alone] == tokens
    assert [completion.token_ids for completion in mixed[:0:-1]] == tokens


@pytest.mark.parametrize(("path", "share_from"), WAYS)
def test_a_groups_prompt_is_prefilled_once(make, path, share_from):
    client = make(path=path, share_from=share_from)
    params = [SAMPLED.replace(seed=seed) for seed in range(8)]
    generate(client, [PROMPTS[0]] * 8 + [PROMPTS[3]] * 8, params * 2)
    prompt_tokens = len(PROMPTS[0]) - 1 + len(PROMPTS[3]) - 1  # the last one is fed by the first decode step
    assert health(client)["prefill_tokens"] == prompt_tokens
    assert health(client)["reused_tokens"] == 8 * prompt_tokens


@pytest.mark.parametrize(("path", "share_from"), WAYS)
def test_a_late_member_of_a_group_reuses_the_cached_prompt(make, path, share_from):
    client = make(max_rows=4, path=path, share_from=share_from)
    generate(client, [PROMPTS[0]] * 7, [SAMPLED.replace(seed=seed, max_tokens=3 + seed) for seed in range(7)])
    assert health(client)["prefill_tokens"] == len(PROMPTS[0]) - 1


@pytest.mark.parametrize(("path", "share_from"), WAYS)
def test_a_session_computes_only_what_is_new_with_equal_results(make, path, share_from):
    def play(keep):
        client, conversations = make(path=path, share_from=share_from), [list(PROMPTS[0]) for _ in range(3)]
        for turn in range(3):
            params = [SAMPLED.replace(seed=10 * turn + number) for number in range(3)]
            completions = generate(client, conversations, params, ["a", "b", "c"] if keep else None)
            for ids, completion in zip(conversations, completions, strict=True):
                ids += [*completion.token_ids, 17, 18, 19]
        return conversations, health(client)["prefill_tokens"]

    with_cache, without = play(keep=True), play(keep=False)
    assert with_cache[0] == without[0]
    assert with_cache[1] == 4 + 3 * (3 + 3)  # prompt once; then a sampled token and two new ones a turn
    assert without[1] == 4 + 3 * (15 + 26)


@pytest.mark.parametrize(
    ("path", "share_from", "reused"), [("fast", 1, 0), ("fast", 10**9, 6), ("model", 1, 6)]
)
def test_a_diverging_prompt_reuses_only_the_equal_tokens(make, path, share_from, reused):
    client = make(path=path, share_from=share_from)
    prompt = PROMPTS[3]
    generate(client, [prompt, prompt], [SAMPLED] * 2, ["s", "t"])
    other = [*prompt[:6], 250, *prompt[7:]]
    before = health(client)["prefill_tokens"]
    assert (
        generate(client, [other], [GREEDY], ["s"])[0].token_ids
        == generate(make(), [other], [GREEDY])[0].token_ids
    )
    assert health(client)["prefill_tokens"] - before == len(other) - 1 - reused


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_short_and_a_long_session_can_go_on_in_one_pass(build, tokenizer, reference, name):
    model = build(name)
    client = LocalClient(model, tokenizer)
    short, long = [3, 4, 5], [6, 7] * 42
    generate(client, [short, long], [GREEDY.replace(max_tokens=1)] * 2, ["short", "long"])
    later = [[*short, *range(9, 69)], [*long, 70, 71, 72]]
    found = generate(client, later, [GREEDY.replace(max_tokens=4)] * 2, ["short", "long"])
    for prompt, completion in zip(later, found, strict=True):
        assert list(completion.token_ids) == reference(model, prompt, GREEDY.replace(max_tokens=4))[0]


@pytest.mark.parametrize(("path", "share_from"), sampled(WAYS, [("fast", 1), ("graph", 1)]))
def test_the_cache_grows_under_long_completions(build, tokenizer, reference, path, share_from):
    model = build("qwen3", max_position_embeddings=512)
    client = LocalClient(model, tokenizer, path=path, share_from=share_from)
    params = GREEDY.replace(max_tokens=150)
    found = generate(client, [PROMPTS[0], PROMPTS[3], PROMPTS[3]], [params] * 3)
    assert list(found[0].token_ids) == reference(model, PROMPTS[0], params)[0]
    assert list(found[2].token_ids) == reference(model, PROMPTS[3], params)[0]


def test_padding_leaves_parked_sessions_alone(make):
    client = make(path="graph")
    first = generate(client, [PROMPTS[3]], [SAMPLED], ["s"])[0]
    generate(client, [PROMPTS[0]] * 3, [SAMPLED] * 3)  # the session is where a fourth row would be
    ids, reused = [*PROMPTS[3], *first.token_ids, 17], health(client)["reused_tokens"]
    later = generate(client, [ids], [SAMPLED], ["s"])[0]
    assert health(client)["reused_tokens"] - reused == len(ids) - 2
    fresh = generate(make(), [ids], [SAMPLED])[0]
    assert later.token_ids == fresh.token_ids
    assert later.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def engine_with(build, tokenizer, lengths):
    """Return an engine with steps in a fixed shape, and requests for this many tokens."""
    engine = Engine(build("qwen3"), tokenizer, len(lengths), 96, "graph")
    for length in lengths:
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        engine.waiting.append(engine.request([5, 9, length], params, ""))
    return engine


def test_rows_that_end_one_by_one_make_few_batches(build, tokenizer):
    engine, batches = engine_with(build, tokenizer, range(3, 24, 3)), []
    while engine.busy:
        engine.step()
        if engine._batch is not None and engine._batch not in batches:
            batches.append(engine._batch)
    assert [batch._step.rows for batch in batches] == [8, 4, 2]  # of 7, 4 and 2 requests
    assert engine._cache.rows == 8


def test_a_row_that_ended_does_not_advance(build, tokenizer):
    engine = engine_with(build, tokenizer, [2, 20])
    while not engine.step():
        pass
    step, [ended] = engine._batch._step, engine._ended
    state = torch.stack([step.tokens_B, step.positions_B, step.places_B, step.lengths_B])
    engine.step()
    moved = torch.stack([step.tokens_B, step.positions_B, step.places_B, step.lengths_B]) - state
    assert not moved[:, ended.slot].any()
    assert moved[1:, 1 - ended.slot].eq(1).all()


def test_an_engine_that_nobody_uses_holds_no_memory(make):
    client = make(path="graph")
    decoder = client._engine._decoder
    generate(client, PROMPTS[:3], [SAMPLED] * 3, ["a", "b", ""])
    decoder._pool = "the memory of graphs"
    asyncio.run(client.release("b"))
    assert health(client)["rows_parked"] == 1 and health(client)["cache_bytes"] > 0 and decoder._steps
    asyncio.run(client.release("a"))
    assert health(client)["cache_bytes"] == 0 and not decoder._steps and decoder._pool is None


def test_parked_sessions_make_way_for_requests_the_oldest_first(make):
    client = make(max_rows=3)
    for name in "abc":
        generate(client, [PROMPTS[0]], [SAMPLED], [name])
    generate(client, [PROMPTS[1]] * 2, [SAMPLED] * 2)
    assert health(client)["evictions"] == 2
    before = health(client)["prefill_tokens"]
    ids = [*PROMPTS[0], *generate(client, [PROMPTS[0]], [SAMPLED], ["c"])[0].token_ids]
    assert health(client)["prefill_tokens"] == before
    assert len(ids) == 13


@pytest.mark.parametrize(("path", "share_from"), sampled(WAYS, [("fast", 1), ("graph", 1)]))
def test_any_traffic_through_few_rows_equals_a_fresh_engine(make, path, share_from):
    chance = random.Random(0)
    client = make(path=path, max_rows=6, share_from=share_from)

    async def conversation(number):
        name, ids, turns = f"s{number}", list(PROMPTS[number % 3]), []
        for turn in range(3):
            params = SAMPLED.replace(seed=10 * number + turn, max_tokens=chance.randint(1, 9))
            completion = await client.generate(ids, params, session=name)
            turns.append((tuple(ids), params, completion.token_ids))
            ids += [*completion.token_ids, *chance.choices(range(300), k=chance.randint(1, 6))]
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)
        await client.release(name)
        return turns

    async def run():
        return await asyncio.gather(*(conversation(number) for number in range(24)))

    fresh = make(path=path)
    for turns in asyncio.run(run()):
        for ids, params, tokens in turns:
            assert generate(fresh, [ids], [params])[0].token_ids == tokens
    assert health(client)["evictions"] > 0
    assert health(client)["rows_active"] == health(client)["rows_parked"] == 0


@pytest.mark.parametrize("padding", [0, 20, 100])
def test_parts_of_rows_waste_less_than_another_part_costs(monkeypatch, padding):
    monkeypatch.setattr(kv_cache, "PADDING", padding)
    chance = random.Random(padding)
    for _ in range(200):
        lengths = [
            chance.choice((chance.randint(1, 5), chance.randint(1, 90))) for _ in range(chance.randint(1, 12))
        ]
        parts = similar(lengths)
        rows = [list(range(len(lengths)))[part] for part, _ in parts]
        assert [row for part in rows for row in part] == list(range(len(lengths)))
        for part, (_, missing) in zip(rows, parts, strict=True):
            longest = max(lengths[row] for row in part)
            assert longest == max(lengths) - missing
            assert sum(longest - lengths[row] for row in part) <= padding
    assert similar([7] * 40) == [(slice(0, 40), 0)]


def test_a_late_short_request_does_not_wait_for_long_ones(make):
    client = make()

    async def run():
        long = [
            asyncio.create_task(client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=80))) for _ in range(3)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await client.generate(PROMPTS[1], SAMPLED.replace(max_tokens=2))
        waiting = [not task.done() for task in long]
        await asyncio.gather(*long)
        return waiting

    assert asyncio.run(run()) == [True] * 3


def test_a_slow_consumer_holds_up_nobody(make):
    client = make()
    others_done = []

    async def slow():
        await client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=2), session="slow")
        while len(others_done) < 3:
            await asyncio.sleep(0)

    async def quick():
        await client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=30))
        others_done.append(True)

    async def run():
        async with asyncio.timeout(60):
            await asyncio.gather(slow(), quick(), quick(), quick())

    asyncio.run(run())
    assert len(others_done) == 3


@pytest.mark.parametrize("path", ["fast", "model"])
def test_the_engine_sees_the_trainers_parameters_and_copies_none(build, tokenizer, reference, path):
    model = build("qwen3")
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    client = LocalClient(model, tokenizer, path=path)
    before = generate(client, PROMPTS, [GREEDY] * 5, list("abcde"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train()
    model(torch.tensor([PROMPTS[3]])).logits.log_softmax(-1)[..., 7].sum().backward()
    optimizer.step()
    asyncio.run(client.load(WeightRef(1)))
    after = generate(client, PROMPTS, [GREEDY] * 5, list("abcde"))
    assert model.training
    model.eval()
    assert [list(item.token_ids) for item in after] == [
        reference(model, prompt, GREEDY)[0] for prompt in PROMPTS
    ]
    assert after[0].token_ids != before[0].token_ids
    assert {item.version for item in after} == {1}
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places


def test_a_model_with_an_engine_still_saves(make, build, tokenizer, tmp_path):
    model = build("qwen3")
    generate(LocalClient(model, tokenizer), PROMPTS[:1], [GREEDY])
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_a_load_moves_requests_to_new_weights_as_the_old_version(make):
    client = make()

    async def run():
        task = asyncio.create_task(client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=20)))
        for _ in range(6):
            await asyncio.sleep(0)
        await client.load(WeightRef(1))
        return await task, await client.generate(PROMPTS[0], SAMPLED)

    under_way, later = asyncio.run(run())
    assert (under_way.version, len(under_way.token_ids)) == (0, 20)
    (begin, old), (moved, new) = under_way.versions
    assert (begin, old, new) == (0, 0, 1)
    assert 0 < moved < 20
    assert (later.version, later.versions) == (1, ())
    expected = generate(make(), [PROMPTS[0]], [SAMPLED.replace(max_tokens=20)])[0]
    assert under_way.token_ids == expected.token_ids  # these weights did not change


def test_a_load_before_the_first_token_leaves_one_version(make):
    client = make()

    async def run():
        await client.pause()
        task = asyncio.create_task(client.generate(PROMPTS[0], SAMPLED))
        await asyncio.sleep(0)
        await client.load(WeightRef(1))
        await client.resume()
        return await task

    found = asyncio.run(run())
    assert (found.version, found.versions) == (1, ())


@pytest.mark.parametrize("session", ["a", ""])
def test_an_abort_returns_the_tokens_so_far(make, session):
    client = make()
    long = SAMPLED.replace(max_tokens=60)

    async def run():
        tasks = [asyncio.create_task(client.generate(PROMPTS[0], long, session=name)) for name in "ab"]
        for _ in range(6):
            await asyncio.sleep(0)
        await client.pause()
        waiting = asyncio.create_task(client.generate(PROMPTS[0], long, session="a"))
        await asyncio.sleep(0)
        await client.abort(session)
        await client.resume()
        return await asyncio.gather(*tasks, waiting)

    first, other, waiting = asyncio.run(run())
    whole = generate(make(), [PROMPTS[0]], [long])[0]
    assert first.finish_reason == waiting.finish_reason == "abort"
    assert 0 < len(first.token_ids) < 60
    assert first.token_ids == whole.token_ids[: len(first.token_ids)]
    assert waiting.token_ids == ()
    assert other.finish_reason == ("abort" if not session else "length")
    assert session == "" or other.token_ids == whole.token_ids


def test_stop_tokens_end_a_completion_and_are_kept(make, tokenizer):
    client = make()
    free = generate(client, [PROMPTS[0]], [GREEDY.replace(max_tokens=30)])[0].token_ids
    cases = [(free[4],), (free[9], 299), (free[0],)]
    found = generate(
        client, [PROMPTS[0]] * 3, [GREEDY.replace(max_tokens=30, stop_token_ids=stops) for stops in cases]
    )
    for stops, completion in zip(cases, found, strict=True):
        end = min(free.index(stop) for stop in stops if stop in free)
        assert completion.token_ids == free[: end + 1]
        assert completion.finish_reason == "stop"


def test_tables_of_stops_are_bounded(tokenizer):
    rules = StopRules(tokenizer, 320, torch.device("cpu"))
    sizes = []
    for number in range(100):
        rules.table([rules.rule(SamplingParams(stop=(f"{number}",)))])
        sizes.append(len(rules._tables))
    assert max(sizes) == 64
    many = tuple(f"{number}" + "x" * 10_000 for number in range(64))
    assert rules.table([rules.rule(SamplingParams(stop=many))]).codes.any()


def test_the_end_token_stops_unless_it_is_ignored(build, tokenizer):
    model = build("qwen3")
    client = LocalClient(model, tokenizer)
    free = generate(client, [PROMPTS[0]], [GREEDY])[0].token_ids
    with torch.no_grad():  # the head of the end token becomes the one of the third token that comes up
        model.lm_head.weight[[tokenizer.eos_token_id, free[2]]] = model.lm_head.weight[
            [free[2], tokenizer.eos_token_id]
        ]
    stopped, ignored = generate(client, [PROMPTS[0]] * 2, [GREEDY.replace(ignore_eos=False), GREEDY])
    assert stopped.token_ids == (*free[:2], tokenizer.eos_token_id)
    assert stopped.finish_reason == "stop"
    assert tokenizer.eos_token not in stopped.text
    assert (len(ignored.token_ids), ignored.finish_reason) == (8, "length")


def test_a_stop_string_keeps_its_tokens_and_cuts_the_text(make, tokenizer):
    client = make()
    params = SAMPLED.replace(max_tokens=40, seed=2)
    free = generate(client, [PROMPTS[0]], [params])[0]
    texts = [tokenizer.decode(free.token_ids[: count + 1], skip_special_tokens=True) for count in range(40)]
    for start in range(2, 20):
        string = free.text[start : start + 4]
        if "\ufffd" in string:
            continue
        found = generate(client, [PROMPTS[0]] * 2, [params.replace(stop=("never said", string)), params])
        end = next(count for count, text in enumerate(texts) if string in text)
        assert found[0].token_ids == free.token_ids[: end + 1]
        assert found[0].text == free.text[: free.text.index(string)]
        assert found[0].finish_reason == "stop"
        assert found[1].token_ids == free.token_ids


def test_a_stop_string_may_be_a_special_token(make, tokenizer):
    stop = (tokenizer.eos_token,)
    rule = make()._engine.request(PROMPTS[0], SAMPLED.replace(stop=stop), "").rule
    assert rule == (frozenset([tokenizer.eos_token_id]), ())


@pytest.mark.parametrize("prompt", [[], [3, 5000], [-1], [1] * 96])
def test_an_impossible_request_is_refused_at_once(make, prompt):
    client = make()
    with pytest.raises(EngineError):
        generate(client, [prompt], [GREEDY])
    assert health(client)["prefill_tokens"] == 0


def test_max_tokens_is_cut_to_the_room_in_the_context(make, reference, build, tokenizer):
    model = build("qwen3")
    client = LocalClient(model, tokenizer, context_length=12)
    completion = generate(client, [PROMPTS[0]], [GREEDY])[0]
    assert list(completion.token_ids) == reference(model, PROMPTS[0], GREEDY.replace(max_tokens=7))[0]
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_the_context_can_be_used_to_its_last_token(build, tokenizer, reference, name):
    model = build(name)
    prompt = [7, 8] * 20
    completions = generate(
        LocalClient(model, tokenizer), [prompt, PROMPTS[0]], [GREEDY.replace(max_tokens=999)] * 2
    )
    assert [len(item.token_ids) for item in completions] == [56, 91]
    assert list(completions[0].token_ids) == reference(model, prompt, GREEDY.replace(max_tokens=56))[0]


def test_nan_weights_raise_instead_of_sampling_garbage(build, tokenizer):
    model = build("qwen3")
    client = LocalClient(model, tokenizer)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(EngineError):
        generate(client, PROMPTS, [SAMPLED] * 5)
    with torch.no_grad():
        model.model.norm.weight[3] = 1.0
    assert len(generate(client, PROMPTS, [SAMPLED] * 5)) == 5


def test_whatever_ends_the_pump_reaches_every_waiting_request(build, tokenizer):
    model = build("qwen3")
    client = LocalClient(model, tokenizer, path="model")
    model.lm_head = None

    async def run():
        async with asyncio.timeout(60):
            requests = (client.generate(prompt, SAMPLED) for prompt in PROMPTS)
            return await asyncio.gather(*requests, return_exceptions=True)

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [EngineError] * 5
    assert "NoneType" in str(errors[0])
    assert health(client)["waiting"] == health(client)["rows_active"] == 0


@pytest.mark.parametrize("path", ["fast", "graph"])
def test_waiting_requests_start_several_at_once(build, tokenizer, path):
    engine = Engine(build("qwen2"), tokenizer, 32, None, path)
    for length in [*range(5, 37), 4, 4, 4, 4]:
        engine.waiting.append(engine.request([5, 9, length], SAMPLED.replace(max_tokens=length), ""))
    waiting = []
    for _ in range(9):
        engine.step()
        waiting.append(len(engine.waiting))
    assert waiting == [4] * 6 + [2, 2, 0]  # after steps 5 to 8 a row ended; two of 32 are a sixteenth
    engine.waiting.append(engine.request([5, 9], SAMPLED, ""))
    engine.step()
    assert not engine.waiting  # since it finds a place


def test_no_step_on_a_cpu_computes_many_prompts(build, tokenizer, monkeypatch):
    """Between steps the engine's event loop answers, for example whether the server lives."""
    engine = Engine(build("qwen2"), tokenizer, 64, None, "fast")
    monkeypatch.setattr(rows, "STARTED_TOKENS", 60)
    for prompt in (*([token] * 30 for token in range(5, 11)), *[[11] * 30] * 8):
        engine.waiting.append(engine.request(prompt, SAMPLED.replace(max_tokens=9), ""))
    for _ in range(2):  # a group that starts although its prompt is longer
        engine.waiting.append(engine.request([12] * 90, SAMPLED, ""))
    waiting, places = [], set()
    while engine.waiting:
        engine.step()
        waiting.append(len(engine.waiting))
        places.add(engine._cache.rows)
    assert waiting == [14, 12, 10, 2, 0]  # the group of eight counts once
    assert places == {16}  # the cache grows once for all


def test_a_cancelled_request_frees_its_row(make):
    client = make(max_rows=2)

    async def run():
        tasks = [
            asyncio.create_task(client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=90))) for _ in range(3)
        ]
        for _ in range(4):
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        short = await client.generate(PROMPTS[1], SAMPLED)
        under_way = not tasks[1].done()
        await asyncio.gather(*tasks, return_exceptions=True)
        return short, under_way, [task.cancelled() for task in tasks]

    short, under_way, cancelled = asyncio.run(run())
    assert short.token_ids == generate(make(), [PROMPTS[1]], [SAMPLED])[0].token_ids
    assert under_way
    assert cancelled == [True, False, True]
    assert health(client)["rows_active"] == 0


def test_a_client_outlives_the_event_loops_it_is_used_in(make):
    client = make()
    expected = generate(client, PROMPTS, [SAMPLED] * 5)

    async def abandon():
        task = asyncio.create_task(client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=90)))
        await asyncio.sleep(0.01)
        return task.done()

    assert not asyncio.run(abandon())
    again = client.generate_batch(PROMPTS, [SAMPLED] * 5)
    assert [item.token_ids for item in again] == [item.token_ids for item in expected]
    assert health(client)["rows_active"] == 0


def conversations(client, delays, count=6, turns=3):
    """Multi-turn episodes whose tools take a random while; all that was sampled, by session."""

    async def episode(name):
        ids, record = list(PROMPTS[len(name) % 5]), []
        for turn in range(turns):
            completion = await client.generate(
                ids, SAMPLED.replace(seed=turn, max_tokens=3 + len(name)), session=name
            )
            record.append(completion)
            ids += [*completion.token_ids, 30 + turn]
            await asyncio.sleep(delays.random() / 50)
        await client.release(name)
        return record

    async def run():
        names = ["s" * (number + 1) for number in range(count)]
        for name in names:
            await client.expect(name)
        delays.shuffle(names)
        records = await asyncio.gather(*(episode(name) for name in names))
        return dict(zip(names, records, strict=True))

    return asyncio.run(run())


@pytest.mark.parametrize(("max_rows", "share_from"), [(4, 10**9), (64, 1)])
def test_deterministic_runs_are_bit_equal_with_slow_tools(make, max_rows, share_from):
    options = {"deterministic": True, "max_rows": max_rows, "share_from": share_from}
    runs = [conversations(make(**options), random.Random(seed)) for seed in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]


def test_a_parked_session_keeps_its_cache_without_a_wait(make):
    client = make(deterministic=True, stall_timeout_s=5)

    async def turn(ids, session):
        await client.expect(session)
        completion = await client.generate(ids, SAMPLED, session=session)
        return [*ids, *completion.token_ids, 30]

    async def run():
        pro = await turn(PROMPTS[0], "pro")
        await client.expect("con")
        await client.park("pro")
        await turn(PROMPTS[1], "con")
        before = (await client.health())["prefill_tokens"]
        await client.expect("pro")
        await client.park("con")
        await turn(pro, "pro")
        return len(pro), (await client.health())["prefill_tokens"] - before

    length, prefilled = asyncio.run(run())
    assert prefilled < length - len(PROMPTS[0])


def test_a_paused_engine_continues_where_it_stopped(make):
    client = make()

    async def run():
        task = asyncio.create_task(client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=30)))
        for _ in range(5):
            await asyncio.sleep(0)
        await client.pause()
        before = (await client.health())["decode_steps"]
        for _ in range(50):
            await asyncio.sleep(0)
        during = (await client.health())["decode_steps"]
        await client.resume()
        return await task, before == during, before

    completion, stood_still, steps = asyncio.run(run())
    assert stood_still
    assert 0 < steps < 30
    assert completion == generate(make(), [PROMPTS[0]], [SAMPLED.replace(max_tokens=30)])[0]


def test_neither_a_pause_nor_a_session_is_awaited_for_ever(make):
    paused, expecting = (make(deterministic=True, stall_timeout_s=0.05) for _ in range(2))
    asyncio.run(paused.pause())
    asyncio.run(expecting.expect("gone"))
    for client in (paused, expecting):
        with pytest.raises(EngineError):
            generate(client, PROMPTS[:1], [SAMPLED], ["here"])


def test_sleep_gives_the_cache_back_and_wake_serves_again(make):
    client = make()
    expected = generate(client, PROMPTS, [SAMPLED] * 5, list("abcde"))
    assert health(client)["cache_bytes"] > 0
    asyncio.run(client.sleep())
    assert health(client)["cache_bytes"] == health(client)["rows_parked"] == 0
    with pytest.raises(EngineError):
        generate(client, PROMPTS, [SAMPLED] * 5)
    asyncio.run(client.wake())
    assert [item.token_ids for item in generate(client, PROMPTS, [SAMPLED] * 5)] == [
        item.token_ids for item in expected
    ]


def test_a_closed_engine_fails_old_and_new_requests(make):
    client = make()

    async def run():
        task = asyncio.create_task(client.generate(PROMPTS[0], SAMPLED.replace(max_tokens=90)))
        await asyncio.sleep(0)
        await client.close()
        return await asyncio.gather(task, return_exceptions=True)

    assert "closed" in str(asyncio.run(run())[0])
    with pytest.raises(EngineError):
        generate(client, PROMPTS, [SAMPLED] * 5)


def test_weights_from_files_are_refused(make):
    with pytest.raises(EngineError):
        asyncio.run(make().load(WeightRef(3, "full", "/nowhere")))


def test_the_cache_is_no_larger_than_the_engine_says(build, tokenizer):
    model = build("llama")
    engine = Engine(model, tokenizer, 16, None, "auto")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine.waiting = [engine.request([5] * 40, params, f"s{i}") for i in range(6)]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.describe()["cache_bytes"])
    load = EngineLoad(sequences=6, prompt_tokens=40, longest=48)
    planned = LocalClient.memory(shape_of(model), Precision(), {}, load)["KV cache"]
    assert 0.3 * planned <= most <= planned

"""Sampling under a grammar: engine and trainer compute the distribution over the accepted strings, and nothing else."""

import copy
import itertools
import json
import math

import pytest
import torch
from packed import policy_gradient

from rl4llm.backends.heads import logprobs_of_logits
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.allowed import bits
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import DataError, RefusedError
from rl4llm.core.types import Completion, SamplingParams, TokenSpan, Trajectory
from rl4llm.core.weights import WeightRef
from rl4llm.data.grammars import Matcher, masks
from rl4llm.data.pack import Batching, totals_of
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.stored import dump, take_over
from rl4llm.inference.embedded.engine import Engine
from rl4llm.inference.local import LocalClient
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.runner import Runner, run

TEMPERATURE = 0.8
SIZES = (0, 1, 2, 3)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}


@pytest.fixture
def end(tokenizer):
    return tokenizer.eos_token_id


@pytest.fixture
def letters(end):
    """The grammar of up to three letters a or b, which may be none."""
    return f"start: /[ab]{{0,3}}/ <[{end}]>"


@pytest.fixture
def prompt(tokenizer):
    return tokenizer.encode("How many coins?")


@pytest.fixture
def strings(tokenizer, end):
    """All sequences of tokens that write such letters, found without a grammar."""
    texts = {"".join(letters) for size in SIZES for letters in itertools.product("ab", repeat=size)}
    pieces = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    pieces = {token: text for token, text in pieces.items() if text and text in texts}

    def continued(tokens, text):
        yield (*tokens, end)
        for token, piece in pieces.items():
            if text + piece in texts:
                yield from continued((*tokens, token), text + piece)

    return list(continued((), ""))


def sample(client, prompt, grammar, count=12, **options):
    params = SamplingParams(max_tokens=40, grammar=grammar).replace(**options)
    run(client.load(WeightRef(0)))
    return client.generate_batch([prompt] * count, [params.replace(seed=seed) for seed in range(count)])


def trajectory(prompt, *spans, name="p"):
    return Trajectory(name, (TokenSpan.context(prompt), *spans), (), {}, 1.0, "stop")


def policy(tokens, grammar="", logprobs=None):
    return TokenSpan(tuple(tokens), "policy", tuple(logprobs or [0.0] * len(tokens)), 0, (), grammar)


def packed(tokenizer, trajectories, layout="shared", budget=4096):
    batching = Batching(layout, "token", 0, budget, tokenizer=tokenizer)
    return batching.pack(
        trajectories, [1.0 - 0.4 * i for i in range(len(trajectories))], totals_of(trajectories)
    )


def computed(model, batches):
    """Return the trainer's log-probs of policy tokens, by record."""
    backend, found = TorchBackend(model), {}
    for batch in batches:
        logprobs_BT = backend.forward(batch, temperature=TEMPERATURE)
        for row, column in batch.mask_BT.nonzero().tolist():
            record = found.setdefault(int(batch.record_ids_BT[row, column]), {})
            record[int(batch.position_ids_BT[row, column])] = float(logprobs_BT[row, column])
    return {number: [record[place] for place in sorted(record)] for number, record in found.items()}


@pytest.mark.parametrize("layout", ["sorted", "packed", "shared"])
def test_probabilities_of_all_accepted_strings_sum_to_one(model, tokenizer, prompt, letters, strings, layout):
    batches = packed(tokenizer, [trajectory(prompt, policy(tokens, letters)) for tokens in strings], layout)
    sums = [math.exp(sum(logprobs)) for logprobs in computed(model, batches).values()]
    assert len(sums) == len(strings) >= 15 and sum(sums) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("path", ["fast", "graph", "model"])
def test_recorded_log_probs_are_the_trainers(model, tokenizer, prompt, letters, strings, path):
    client = LocalClient(model, tokenizer, path=path)
    said = sample(client, prompt, letters, temperature=TEMPERATURE)
    assert {item.token_ids for item in said} <= set(strings) and len({item.token_ids for item in said}) > 3
    trained = [trajectory(prompt, *TokenSpan.policy(item)) for item in said]
    for number, logprobs in computed(model, packed(tokenizer, trained)).items():
        assert logprobs == pytest.approx(said[number].logprobs, abs=2e-6)


def test_a_table_of_strings_has_the_frequencies_of_samples(model, tokenizer, prompt, letters, strings):
    table = computed(
        model, packed(tokenizer, [trajectory(prompt, policy(t, letters)) for t in strings], "sorted")
    )
    probability = {strings[i]: math.exp(sum(logprobs)) for i, logprobs in table.items()}
    said = [
        item.token_ids
        for item in sample(LocalClient(model, tokenizer), prompt, letters, 400, temperature=TEMPERATURE)
    ]
    for tokens in sorted(strings, key=probability.get)[-3:]:
        share, deviation = probability[tokens], (probability[tokens] / 400) ** 0.5
        assert said.count(tokens) / 400 == pytest.approx(share, abs=4 * deviation)


def test_grammars_of_a_batch_keep_to_their_rows(model, tokenizer, prompt, letters, end):
    digits = f"start: /[0-9]{{1,4}}/ <[{end}]>"
    client = LocalClient(model, tokenizer)
    run(client.load(WeightRef(0)))
    params = [SamplingParams(max_tokens=9, grammar=grammar, seed=7) for grammar in (letters, "", digits) * 3]
    said = client.generate_batch([prompt] * 9, params)
    alone = [client.generate_batch([prompt], [item])[0] for item in params[:3]]
    assert [item.token_ids for item in said] == [item.token_ids for item in alone] * 3
    assert all(item.text.strip("ab") == "" for item in said[::3]) and all(
        item.text.isdigit() for item in said[2::3]
    )
    assert [item.grammar for item in said] == [item.grammar for item in params]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}])
def test_filters_and_greedy_sampling_stay_inside_of_the_grammar(
    model, tokenizer, prompt, letters, strings, options
):
    assert {
        item.token_ids for item in sample(LocalClient(model, tokenizer), prompt, letters, **options)
    } <= set(strings)


def test_every_answer_to_a_schema_parses(model, tokenizer, prompt, end):
    said = sample(
        LocalClient(model, tokenizer), prompt, f"start: %json {json.dumps(SCHEMA)} <[{end}]>", max_tokens=200
    )
    ended = [json.loads(item.text) for item in said if item.finish_reason == "stop"]
    assert ended and all(type(item["n"]) is int and type(item["ok"]) is bool for item in ended)


def test_an_answer_cut_at_its_length_trains_as_sampled(model, tokenizer, prompt, end):
    grammar = f"start: /[ab]{{40}}/ <[{end}]>"
    said = sample(LocalClient(model, tokenizer), prompt, grammar, 4, max_tokens=3, temperature=TEMPERATURE)
    assert {item.finish_reason for item in said} == {"length"}
    trained = [trajectory(prompt, *TokenSpan.policy(item)) for item in said]
    for number, logprobs in computed(model, packed(tokenizer, trained)).items():
        assert logprobs == pytest.approx(said[number].logprobs, abs=2e-6)


def test_text_of_a_grammar_has_no_special_tokens(tokenizer, end):
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    inside = [*tokenizer.encode("a"), start, *tokenizer.encode("b"), end]
    assert len(masks(tokenizer, f"start: /a+/ <[{start}]> /b+/ <[{end}]>", inside)) == 4
    text = f"start: /(.|\\n)*/ <[{end}]>"
    (mask,) = bits(torch.from_numpy(masks(tokenizer, text, [end])), slice(0, len(tokenizer)))
    assert set(tokenizer.added_tokens_decoder) - set(mask.nonzero().flatten().tolist()) == {
        token for token in tokenizer.added_tokens_decoder if token != end
    }
    assert mask.sum() > 200
    with pytest.raises(DataError):
        masks(tokenizer, text, [start])


def test_new_weights_in_a_turn_continue_its_grammar(model, tokenizer, prompt, letters, strings):
    tokens = max(strings, key=len)
    whole = trajectory(prompt, policy(tokens, letters))
    pieces = [policy(tokens[:1], letters), policy(tokens[1:], letters)]
    assert computed(model, packed(tokenizer, [whole])) == computed(
        model, packed(tokenizer, [trajectory(prompt, *pieces)])
    )


def test_a_request_restarts_in_the_middle_of_its_grammar(model, tokenizer, prompt, letters):
    def play(interrupt):
        engine = Engine(model, tokenizer, 2, None, "fast")
        engine.take_weights(0)
        params = SamplingParams(grammar=letters.replace("{0,3}", "{5,9}"))
        engine.waiting = [engine.request(prompt, params.replace(seed=seed), "") for seed in (3, 4)]
        finished = []
        while len(finished) < 2:
            finished += engine.step()
            if interrupt and len(engine.running) == 2:
                interrupt -= 1
                engine.take_weights(1)
        return sorted((item.token_ids, item.logprobs) for _, item in finished)

    plain, restarted = play(interrupt=0), play(interrupt=2)
    assert [item[0] for item in plain] == [item[0] for item in restarted]
    assert min(len(item[0]) for item in plain) > 3


def mixed(prompt, tokenizer, letters, end):
    """Return trajectories of a group that sampled equal tokens under different grammars and none."""
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    other, turn = f"start: /[abc0-9]+/ <[{end}]>", (*a, *b, end)
    long = prompt * 8  # so that the prompt is shared
    rows = [
        [policy(turn, letters)],
        [policy(turn, other)],
        [policy(turn)],
        [policy(turn, letters), TokenSpan.context(b), policy(turn, other)],
        [TokenSpan.context(turn), TokenSpan.context(b), policy(turn)],
    ]
    return [trajectory(long, *spans) for spans in rows]


def gradients(model, batches):
    """Return loss, entropy and gradients by name."""
    backend, loss = TorchBackend(model), 0.0
    model.zero_grad()

    def losses(batch, logprobs_BT, entropy_BT):
        plain, metrics = policy_gradient(batch, logprobs_BT, entropy_BT)
        return plain - 0.3 * entropy_BT, metrics

    for batch in batches:
        loss += backend.forward_backward(batch, losses, temperature=TEMPERATURE, entropy=True)["loss"]
    return loss, {name: item.grad.clone() for name, item in model.named_parameters()}


@pytest.mark.parametrize("padding", [0, 96])
def test_layouts_and_micro_batches_keep_loss_and_gradient(padding, model, tokenizer, prompt, letters, end):
    model = copy.deepcopy(model)
    model.resize_token_embeddings(model.config.vocab_size + padding, mean_resizing=False)
    trajectories = mixed(prompt, tokenizer, letters, end)
    loss, expected = gradients(model, packed(tokenizer, trajectories, "sorted", 1))
    free = [
        trajectory(
            item.token_ids[: len(prompt) * 8],
            *(policy(s.token_ids) if s.grammar else s for s in item.spans[1:]),
        )
        for item in trajectories
    ]
    assert gradients(model, packed(tokenizer, free, "sorted", 1))[0] != pytest.approx(loss, abs=1e-3)
    for layout, budget in itertools.product(("sorted", "packed", "shared"), (120, 4096)):
        got, grads = gradients(model, packed(tokenizer, trajectories, layout, budget))
        assert got == pytest.approx(loss, abs=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-3)


def test_a_batch_without_grammars_has_no_masks(tokenizer, prompt):
    (batch,) = packed(None, [trajectory(prompt, policy((5, 6)))])
    assert batch.allowed_ids_BT is None and batch.allowed_CW is None
    with pytest.raises(DataError):
        packed(None, [trajectory(prompt, policy((5, 6), "start: /a/"))])


def test_logits_are_masked_as_hidden_states_are():
    logits_NV, words_CW = torch.randn(2, 40), torch.tensor([[0b1010]], dtype=torch.int32)
    logprobs_N, entropy_N = logprobs_of_logits(
        logits_NV, torch.tensor([3, 39]), entropy=True, allowed=(torch.tensor([0, -1]), words_CW)
    )
    two = logits_NV[0, [1, 3]].log_softmax(0)
    torch.testing.assert_close(logprobs_N, torch.stack([two[1], logits_NV[1].log_softmax(0)[39]]))
    torch.testing.assert_close(entropy_N[0], -(two.exp() * two).sum())


@pytest.mark.parametrize("grammar", ["start: unknown", "start: /a/ " * 20000, "start: %json {", "nothing"])
def test_an_invalid_or_huge_grammar_is_refused(model, tokenizer, prompt, grammar):
    with pytest.raises(RefusedError):
        sample(LocalClient(model, tokenizer), prompt, grammar, 1)


def test_a_grammar_beyond_the_librarys_limits_aborts_its_request(
    model, tokenizer, prompt, letters, monkeypatch
):
    monkeypatch.setattr(Matcher, "error", property(lambda self: "limit" if self.of_a else ""))
    monkeypatch.setattr(Matcher, "of_a", False, raising=False)
    client = LocalClient(model, tokenizer)
    assert [item.finish_reason for item in sample(client, prompt, letters, 2)] == ["stop"] * 2
    monkeypatch.setattr(Matcher, "of_a", True, raising=False)
    cut = sample(client, prompt, letters.replace("{0,3}", "{5,9}"), 2)
    assert [(item.finish_reason, len(item.token_ids)) for item in cut] == [("abort", 1)] * 2


def test_spans_of_a_completion_have_its_grammar():
    completion = Completion("ab", (1, 2), (-1.0, -2.0), "stop", 0, ((0, 0), (1, 1)), "start: /ab/")
    assert [span.grammar for span in TokenSpan.policy(completion)] == ["start: /ab/"] * 2


def test_stored_episodes_keep_their_grammars(model, tokenizer, letters):
    rows = [{"messages": [{"role": "user", "content": "How many?"}], "ground_truth": "a", "prompt_id": "p"}]
    runner, units = Runner(), []
    for _ in range(2):
        env = BaseMDPEnv(
            rows, tokenizer, [as_reward_function(lambda completions, **_: [0.5] * len(completions))], 1, 2
        )
        client = LocalClient(model, tokenizer)
        runner.run(client.load(WeightRef(0)))
        rollout = Rollout(env, client, Renderer(tokenizer), runner, seed=0)
        units.append(
            (rollout, rollout.begin([0], step=0, sampling_params=SamplingParams(grammar=letters))[0])
        )
    (played, unit), (again, new) = units
    played.run(unit.announce())
    played.run(unit.play())
    assert take_over(new, json.loads(dump(unit)), oldest=-1)
    before, after = (each.finish([item]).trajectories for each, item in ((played, unit), (again, new)))
    assert before == after and {span.grammar for item in after for span in item.policy_spans} == {letters}
    runner.close()

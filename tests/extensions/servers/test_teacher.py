"""A teacher behind a server: a real process of the embedded engine, and stubs that answer as SGLang and vLLM do."""

from dataclasses import replace

import pytest
import torch
from aiohttp import web
from embedded_server import embedded_server
from ended_runs import metrics
from fault_server import serving
from vowels import Vowels, prompts

from rl4llm.algorithms import Distill
from rl4llm.api import PolicyTrainer
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.backends.tiny import build_model, build_tokenizer, save_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ConfigError, EngineError, RefusedError
from rl4llm.core.images import Image
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.extensions.servers.teacher import ServedTeacher
from rl4llm.runtime.ports import free_port
from rl4llm.runtime.transport import Retry
from rl4llm.trainers.prepare import Preparation

ONCE = Retry(1)


@pytest.fixture(scope="module")
def teacher(model_dir, tmp_path_factory):
    """Return the directory of a model that is not the student, with its tokenizer."""
    directory, tokenizer = tmp_path_factory.mktemp("teacher"), load_tokenizer(model_dir)
    model = build_model(tokenizer, seed=7, hidden_size=48, num_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    save_model(model, tokenizer, directory)
    return str(directory)


@pytest.fixture(scope="module")
def url(teacher):
    with embedded_server(teacher) as (url, _):
        yield url


def packed(layout="shared", budget=64):
    """Return the batches of six trajectories of two prompts, of one or two turns."""
    members, context = [], TokenSpan.context
    for number in range(6):
        prompt = context([5 + number // 3, 9, 40, 33, 7, 12, 8, 30])
        said = TokenSpan(tuple(range(20 + number, 26 + 2 * number)), "policy", (-1.0,) * (6 + number), 0)
        spans = (prompt, said, context([11, 12]), said) if number % 2 else (prompt, said)
        members.append(Trajectory(f"p{number // 3}", spans, (), {}, 1.0, "done"))
    return Batching(layout, max_tokens_per_batch=budget).pack(members, [1.0] * 6)


def assert_scored(served, teacher, top, batches):
    local = TorchBackend(load_model(teacher), trains=False)
    for batch in batches:
        expected, actual = local.refer(batch, top), served.refer(batch, top)
        assert expected.keys() == actual.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, atol=1e-4, rtol=0)
        torch.testing.assert_close(served.forward(batch), expected["ref_logprobs_BT"], atol=1e-4, rtol=0)
        assert expected["ref_logprobs_BT"][batch.mask_BT].all()


@pytest.mark.parametrize("layout", ["shared", "sorted"])
def test_a_served_teacher_gives_the_numbers_of_its_model(layout, url, teacher, model_dir):
    assert_scored(ServedTeacher(url, load_tokenizer(model_dir)), teacher, 3, packed(layout))


def of_sglang(model, ids, top):
    """As `TokenizerManager.add_logprob_to_meta_info` of SGLang 0.5 writes it."""
    logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    rows = [[None, ids[0], None]]
    rows += [[logprobs_TV[place, token].item(), token, None] for place, token in enumerate(ids[1:])]
    best = [None]
    for row_V in logprobs_TV[:-1]:
        best.append(
            [
                [value, token, None]
                for value, token in zip(*map(torch.Tensor.tolist, row_V.topk(top)), strict=True)
            ]
        )
    return {
        "text": "",
        "meta_info": {"input_token_logprobs": rows, "input_top_logprobs": best if top else []},
    }


def of_vllm(model, ids, top):
    """As `OpenAIServingCompletion` of vLLM writes it: the token itself first, then the most probable ones."""
    logprobs_TV, rows = model(torch.tensor([ids])).logits[0].log_softmax(-1), [None]
    for row_V, token in zip(logprobs_TV[:-1], ids[1:], strict=True):
        ranks = (row_V.argsort(descending=True).argsort() + 1).tolist()
        chosen = dict.fromkeys([token, *row_V.topk(max(top, 1)).indices.tolist()[:top]])
        rows.append(
            {
                str(number): {"logprob": row_V[number].item(), "rank": ranks[number], "decoded_token": "x"}
                for number in chosen
            }
        )
    return {"choices": [{"text": "", "prompt_logprobs": rows}]}


class Stub:
    """Serves a model in the form of another server; `answer` may take the place of what a request gets."""

    running = False

    def __init__(self, kind, directory, answer=lambda ids: None):
        self.kind, self.answer = kind, answer
        self.model, self.tokenizer = load_model(directory), load_tokenizer(directory)
        self.url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
        self.port = port

    async def start(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/generate" if self.kind == "sglang" else "/v1/completions", self.generate)
        self.runner, self.running = web.AppRunner(app), True
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self):
        await self.runner.cleanup()

    async def models(self, request):
        return web.json_response({"data": [{"id": "teacher", "owned_by": self.kind}]})

    async def tokenize(self, request):
        body = await request.json()
        ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 99})

    @torch.no_grad()
    async def generate(self, request):
        body = await request.json()
        if self.kind == "sglang":
            assert body["return_logprob"] and body["logprob_start_len"] == 0
            ids, top, form = body["input_ids"], body.get("top_logprobs_num", 0), of_sglang
        else:
            ids, top, form = body["prompt"], body["prompt_logprobs"], of_vllm
        return self.answer(ids) or web.json_response(form(self.model, ids, top))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_each_form_of_scores_is_read(kind, teacher, model_dir):
    with serving(Stub(kind, teacher)) as stub:
        assert_scored(ServedTeacher(stub.url, load_tokenizer(model_dir)), teacher, 3, packed()[:2])


def test_a_sequence_that_is_not_scored_has_no_number(teacher, model_dir):
    def refuse(ids):
        return web.json_response({"error": "too long"}, status=400) if len(ids) > 18 else None

    (batch,) = packed("sorted", 4096)
    with serving(Stub("sglang", teacher, refuse)) as stub:
        numbers = ServedTeacher(stub.url, load_tokenizer(model_dir), retry=ONCE).refer(batch, 2)
    for row, positions in enumerate(batch.position_ids_BT.max(1).values.tolist()):
        missing = numbers["ref_logprobs_BT"][row].isnan()
        assert missing.any() == (positions >= 18) and not missing[~batch.mask_BT[row]].any()


def prepared(served, model_dir, budget=4096):
    """Prepare a step on a free answer and one that a grammar constrained, in a trajectory and alone."""
    tokenizer = load_tokenizer(model_dir)
    forced = f"start: /[ab]{{0,3}}/ <[{tokenizer.eos_token_id}]>"
    said = (*tokenizer.encode("ab"), tokenizer.eos_token_id)
    prompt, free, bound = (
        TokenSpan.context([5, 9, 40, 33]),
        *(TokenSpan(said, "policy", (-1.0,) * len(said), 0, (), grammar) for grammar in ("", forced)),
    )
    spans = ((prompt, bound, prompt, free), (prompt, free), (prompt, bound))
    group = Group("p", tuple(Trajectory("p", each, (), {}, 1.0, "stop") for each in spans))
    preparation = Preparation(
        algorithm=Distill(teacher_url="http://t"), policy=TorchBackend(load_model(model_dir), lr=0.0),
        reference=served, batching=Batching("sorted", max_tokens_per_batch=budget, tokenizer=tokenizer),
    )  # fmt: skip
    return preparation.prepare([group], step=0)


@pytest.mark.parametrize("budget", [1, 4096])
def test_a_sequence_that_cannot_be_scored_does_not_stop_a_step(budget, teacher, model_dir):
    """In whichever micro-batch it is. A step without any score stops, with the server's own words."""
    longest = 10

    def fail(ids):
        return web.json_response({"error": "CUDA!"}, status=500) if len(ids) > longest else None

    with serving(Stub("sglang", teacher, fail)) as stub:
        served = ServedTeacher(stub.url, load_tokenizer(model_dir), retry=ONCE)
        assert 0.5 < prepared(served, model_dir, budget).metrics["reference/unscored"] < 1
        longest = 2
        with pytest.raises(EngineError) as raised:
            prepared(served, model_dir, budget)
    assert "CUDA!" in str(raised.value)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_served_teacher_scores_no_token_of_a_grammar(kind, teacher, model_dir):
    with serving(Stub(kind, teacher)) as stub:
        step = prepared(ServedTeacher(stub.url, load_tokenizer(model_dir)), model_dir)
    assert step.metrics["reference/unscored"] == pytest.approx(0.5)
    for batch in step.updates[0].batches:
        assert torch.equal(batch.weights_BT != 0, batch.mask_BT)
        assert (batch.allowed_ids_BT[batch.mask_BT] == -1).all() and batch.ref_logprobs_BT.isfinite().all()


def test_a_server_that_is_down_delays_one_batch(teacher, model_dir):
    def fail(ids):
        seen.append(ids)
        return web.json_response({"error": "busy"}, status=503) if len(ids) > 2 else None

    seen = []
    with serving(Stub("sglang", teacher, fail)) as stub:
        served = ServedTeacher(stub.url, load_tokenizer(model_dir), retry=Retry(3, first_wait_s=0.01))
        (batch,) = packed("sorted", 4096)
        for requests in (1 + 6 * 3, 6):
            assert served.forward(batch)[batch.mask_BT].isnan().all()
            assert len(seen) == requests
            seen.clear()


def test_a_server_that_refuses_to_score_is_refused_at_once(teacher, model_dir):
    def refuse(ids):
        return web.json_response({"error": "at most 20 logprobs"}, status=400)

    with serving(Stub("vllm", teacher, refuse)) as stub, pytest.raises(RefusedError):
        ServedTeacher(stub.url, load_tokenizer(model_dir), 64)


def test_images_of_other_sequences_do_not_concern_a_server(url, model_dir):
    served, (batch,) = ServedTeacher(url, load_tokenizer(model_dir)), packed("sorted", 4096)
    feature_ids_BT = torch.full_like(batch.token_ids_BT, -1)
    feature_ids_BT[0, 1] = 0
    batch = replace(batch, feature_ids_BT=feature_ids_BT, images=(Image("0" * 8, 2, 2),))
    with pytest.raises(ConfigError):
        served.forward(batch)
    batch.mask_BT[0] = False
    assert served.forward(batch)[batch.mask_BT].isfinite().all()


def test_a_failed_request_is_repeated(teacher, model_dir):
    seen = set()

    def fail_once(ids):
        first = tuple(ids) not in seen
        seen.add(tuple(ids))
        return web.json_response({"error": "busy"}, status=503) if first else None

    with serving(Stub("vllm", teacher, fail_once)) as stub:
        served = ServedTeacher(stub.url, load_tokenizer(model_dir), retry=Retry(2, first_wait_s=0.01))
        assert_scored(served, teacher, 2, packed()[:1])


def test_a_server_with_another_tokenizer_is_refused(url):
    with pytest.raises(ConfigError):
        ServedTeacher(url, build_tokenizer(["some other words, so other tokens"] * 9, vocab_size=300))


class Student(PolicyTrainer):
    algorithm = "distill"


@pytest.mark.parametrize("options", [{}, {"divergence": "forward", "top_k": 6}], ids=["sampled", "forward"])
def test_a_served_teacher_trains_like_one_in_the_process(options, url, teacher, model_dir, tmp_path):
    rows = {}
    for name, where in (("served", {"teacher_url": url}), ("local", {"teacher_path": teacher})):
        Student(
            str(model_dir), prompts(4), [Vowels()], algorithm={"name": "distill", **where, **options}, max_steps=2,
            output={"dir": str(tmp_path / name)}, deterministic=True,
            **{"rollout.prompts": 4, "rollout.group_size": 2, "rollout.max_tokens": 6, "training.lr": 3e-3,
               "model.autocast": "none", "checkpoint.every": 0},
        ).train()  # fmt: skip
        rows[name] = [row for row in metrics(tmp_path / name) if "teacher_kl" in row]
    for served, local in zip(rows["served"], rows["local"], strict=True):
        assert served["reference/unscored"] == 0 and "reference/unscored" not in local
        for name in ("loss", "teacher_kl", "grad_norm", *(["teacher_divergence"] if options else [])):
            assert served[name] == pytest.approx(local[name], rel=1e-3, abs=1e-5), name

"""Images through a server of the embedded engine: what it computes is what the engine in the trainer's process computes."""

import asyncio
import subprocess
import sys

import pytest
from embedded_server import embedded_server
from later import later
from safetensors.torch import load_file, save_file
from server_images import (
    CONTEXT,
    Seer,
    check_new_tower,
    check_samples_and_scores,
    check_tower_trains,
    png,
    write_model,
)
from vision_models import picture, seeing_model, vision_directories, vision_of  # noqa: F401 - fixture

from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.core.errors import EngineError, RefusedError
from rl4llm.core.images import ImagePlace, Picture
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.wire import RequestError
from rl4llm.extensions.servers.clients.embedded import EmbeddedClient
from rl4llm.extensions.servers.embedded.images import read_images
from rl4llm.extensions.servers.embedded.native import read_native
from rl4llm.extensions.servers.embedded.server import EmbeddedServer
from rl4llm.inference.local import LocalClient

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, seed=3)


FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def seer(tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp("embedded"), FAMILY)
    words = "model.vision=frozen", f"inference.context_length={CONTEXT}"
    with embedded_server(directory, *words) as (url, _), Seer("embedded", url, directory) as seer:
        yield seer


@pytest.fixture
def client(seer):
    """Return a client of the server that is not behind a fleet."""
    client = seer.client_of(seer.url)
    yield client
    asyncio.run(client.close())


def test_images_are_sampled_and_scored_as_by_a_forward(seer):
    check_samples_and_scores(seer)


def test_an_image_seen_before_is_seen_by_the_new_tower(seer, tmp_path):
    check_new_tower(seer, tmp_path)


def two_turns(client, vision, seeds):
    """Return the completions of two turns with an image each, for each seed of the first image."""
    config = vision.config

    def shown(ids, places, seed):
        image = vision.store.add(picture("qwen3_vl", 2, 2, seed))
        place = ImagePlace(image, len(ids) + 1, vision.tokens(image))
        marks = [vision.placeholder] * place.length
        ids += [config.vision_start_token_id, *marks, config.vision_end_token_id, 40]
        return [*places, place]

    async def play():
        found = []
        for seed in seeds:
            ids, places = [5, 9], []
            for picture_seed in (seed, 99):
                places = shown(ids, places, picture_seed)
                found.append(await client.generate(ids, PARAMS, session=f"s{seed}", images=places))
                ids += found[-1].token_ids
        await client.disconnect()
        return found

    return asyncio.run(play())


def test_turns_equal_those_of_the_engine_in_process(vision_directories, tmp_path):  # noqa: F811
    directory, changed = vision_directories["qwen3_vl"], tmp_path / "changed"
    changed.mkdir()
    for file in directory.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    scaled = {name: tensor * (1.3 if "visual" in name else 1.1) for name, tensor in weights.items()}
    save_file(scaled, changed / "model.safetensors", metadata={"format": "pt"})
    vision, tokenizer = vision_of(directory), load_tokenizer(directory)
    with embedded_server(directory, "model.vision=frozen") as (url, _):
        server = EmbeddedClient(url, tokenizer, vocab_size=len(tokenizer), context_length=CONTEXT)
        server.vision = vision
        said = []
        for version, path in enumerate([directory, changed]):
            local = LocalClient(seeing_model(path, vision), tokenizer)
            asyncio.run(local.load(WeightRef(version)))

            async def load(version=version, path=path):
                await server.load(WeightRef(version, path=str(path), kind="full"))
                await server.disconnect()

            asyncio.run(load())
            found, expected = (two_turns(client, vision, [1, 2]) for client in (server, local))
            for one, other in zip(found, expected, strict=True):
                assert one.token_ids == other.token_ids and one.version == version
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            said.append([one.logprobs for one in found])
    assert said[0][0] != pytest.approx(said[0][2], abs=1e-3)  # the same ids with another image
    assert said[0][0] != pytest.approx(said[1][0], abs=1e-3)  # the same image after the update


def test_openai_chat_sees_the_images_of_its_parts(seer):
    tokenizer = load_tokenizer(seer.directory)
    renderer = Renderer(tokenizer, roles=(), vision=seer.vision)
    params = PARAMS.replace(temperature=0.0, ignore_eos=False, stop_token_ids=renderer.stop_token_ids)
    with later.openai.OpenAI(base_url=f"{seer.url}/v1", api_key="none", max_retries=0) as client:
        asked = {
            "model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 6, "logprobs": True,
        }  # fmt: skip

        def chat(*parts):
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else part.to_part() for part in parts
            ]
            return client.chat.completions.create(messages=[{"role": "user", "content": content}], **asked)

        for seed in (1, 3):
            parts = "Look ", Picture(png(FAMILY, seed)), " and ", Picture(png(FAMILY, 2, 2, 2)), "?"
            messages = [ChatMessage.showing("user", *parts)]
            span = renderer.context(renderer.first(messages), messages)
            (expected,) = seer.run(seer.client.generate(span.token_ids, params, images=span.images))
            done = chat(*parts)
            found = [item.logprob for item in done.choices[0].logprobs.content]
            assert done.usage.prompt_tokens == len(span.token_ids)
            assert found == pytest.approx(expected.logprobs, abs=1e-5)
        address = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
        with pytest.raises(later.openai.BadRequestError):
            client.chat.completions.create(messages=[{"role": "user", "content": [address]}], **asked)


def asked_for(seer):
    """Return the fields of a request with two images, as the client sends them."""
    ids, places = seer.prompt([5], 0, [9], 1, [40])
    return seer.client_of(seer.url)._prompt(ids, places)


def test_images_that_do_not_fit_their_request_are_refused(seer, client):
    whole = asked_for(seer)
    first, second = whole["images"]
    wrong = (
        [{**first, "digest": "0" * 64}],
        [{**first, "length": first["length"] + 1}],
        [first, {**second, "offset": first["offset"]}],
        [{name: first[name] for name in ("digest", "offset", "length")}],
        [{**first, "image": "https://example.org/a.png"}],
        [{**first, "image": "/etc/passwd"}],
        [{**first, "image": "data:image/png;base64,%%%"}],
        {"0": first},
    )

    async def scene():
        under_way = asyncio.ensure_future(client.generate([5, 9], PARAMS.replace(max_tokens=60)))
        for images in wrong:
            with pytest.raises(RefusedError):
                await client.http.post("/generate", {**whole, "images": images})
        assert len((await under_way).token_ids) == 60  # what others asked for goes on
        await client.http.post("/generate", {**whole, "sampling_params": {"max_new_tokens": 1}})
        await client.disconnect()

    asyncio.run(scene())


def test_a_known_digest_with_another_size_is_refused(seer):
    whole = asked_for(seer)
    first, second = whole["images"]
    vision = vision_of(seer.directory)
    read_images(vision, whole["images"], len(whole["input_ids"]))
    other = {**first, "image": second["image"], "length": second["length"]}
    with pytest.raises(RequestError):
        read_images(vision, [other], len(whole["input_ids"]))


def test_an_image_is_not_decoded_before_its_place_fits(seer):
    whole = asked_for(seer)
    first, _ = whole["images"]
    vision = vision_of(seer.directory)
    cut = Picture(png(FAMILY, 5, 2, 3)[:60])  # its header is whole
    broken = {**first, "image": cut.to_part()["image_url"]["url"]}
    for tokens, refusal in ((len(whole["input_ids"]), "cannot be used"), (first["length"], "cannot be at")):
        with pytest.raises(RequestError, match=refusal):
            read_images(vision, [broken], tokens)


def test_images_that_were_left_out_on_the_way_are_missed(seer, client, monkeypatch):
    ids, places = seer.prompt([5], 0, [40])
    post = client.http.post

    async def leaving_out(path, body, **options):  # as a router that does not know the field
        return await post(path, {name: body[name] for name in body if name != "images"}, **options)

    monkeypatch.setattr(client.http, "post", leaving_out)

    async def scene():
        for asked in (client.generate(ids, PARAMS, images=places), client.score(ids, places)):
            with pytest.raises(EngineError):
                await asked
        await client.disconnect()

    asyncio.run(scene())


def test_a_server_that_reads_text_refuses_images(seer):
    tokenizer = load_tokenizer(seer.directory)
    model = load_model(seer.directory, device="cpu")
    server = EmbeddedServer(model, tokenizer, LocalClient(model, tokenizer), "m", "m")
    with pytest.raises(RequestError):
        asyncio.run(server._native(read_native(asked_for(seer))))


def test_a_placeholder_that_was_sampled_stays_a_token(seer):
    ids, places = seer.prompt([5], 0, [40, seer.vision.placeholder, 7])
    (reply,) = seer.run(seer.client.generate(ids, PARAMS.replace(max_tokens=4), images=places))
    assert seer.apart([*ids, *reply.token_ids], places, reply.logprobs) < 1e-5


def test_text_loads_nothing_that_reads_images():
    code = """
import sys
import rl4llm.extensions.agents.endpoint, rl4llm.extensions.servers.embedded.__main__
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.chat_completions import read_request
from rl4llm.extensions.remote import wire
read_request({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, SamplingParams())
assert wire._chat_messages([wire._message(ChatMessage("user", "Hi"))]) == [ChatMessage("user", "Hi")]
wire.row_of(wire.row_json({"messages": [{"role": "user", "content": "Hi"}]}, ""))
seeing = {"rl4llm.data.images", "rl4llm.data.vision", "rl4llm.backends.tower"}
sys.exit(", ".join(sorted(seeing & set(sys.modules))) or 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_tower_trains_through_the_server(seer, tmp_path):
    for episode, _ in check_tower_trains(seer, tmp_path / "run"):
        assert episode["turns"] == 2  # a sampled placeholder is a token like any other

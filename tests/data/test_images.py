"""Images of rows, tools and stores: what is read, what is refused, and where they stand among the tokens."""

import base64
import io
import json
import os
import struct
import zlib

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from vision_models import vision_directories, vision_directory, vision_of  # noqa: F401 - fixtures

from rl4llm.backends.models import load_tokenizer
from rl4llm.core.errors import DataError, TemplateError
from rl4llm.core.images import Picture
from rl4llm.core.sample import SampleState, Special, group_of
from rl4llm.core.types import ChatMessage, TokenSpan, Trajectory, images_of
from rl4llm.data import images as module
from rl4llm.data.demonstrations import demonstration
from rl4llm.data.images import ImageStore, canonical, read_picture, size_of
from rl4llm.data.load import load_rows
from rl4llm.data.render import Renderer


def file_of(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, format=kind, **options)
    return data.getvalue()


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


RED, BLUE = (file_of(PIL.Image.new("RGB", (60, 40), colour)) for colour in ("red", "blue"))


def same(height, width):
    return height, width


def pixels(data, size=same):
    return canonical(Picture(data), size, 3)


@pytest.mark.parametrize(
    "value",
    [
        RED,
        bytearray(RED),
        {"bytes": RED, "path": None},
        {"url": f"data:image/png;base64,{base64.b64encode(RED).decode()}"},
        {"bytes": None, "path": "inside/red.png"},
        "inside/red.png",
        f"data:image/png;base64,{base64.b64encode(RED).decode()}",
        Picture(RED),
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:12]}",
)
def test_every_stored_form_is_the_same_picture(value, tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/red.png").write_bytes(RED)
    assert read_picture(value, tmp_path) == Picture(RED)


def test_pillow_and_long_base64_are_read():
    data = file_of(PIL.Image.fromarray(noise(40, 60)))
    assert read_picture(base64.b64encode(data).decode()) == Picture(data)
    assert (pixels(read_picture(PIL.Image.fromarray(noise(40, 60))).data) == noise(40, 60)).all()


def header_of(width, height):
    """Return a PNG of some bytes whose header promises many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


REFUSED = {
    "an address": "https://example.org/red.png",
    "a file address": "file:///etc/hostname",
    "a path outside": "../red.png",
    "an absolute path": "/etc/hostname",
    "a missing file": "no.png",
    "a text": b"not an image",
    "a number": 3,
    "another format": file_of(PIL.Image.new("RGB", (8, 8)), "GIF"),
    "many pixels": header_of(13_000, 13_000),
    "very many pixels": header_of(40_000, 40_000),
    "a long side": header_of(1 << 17, 1),
    "a path with a NUL": "red\0.png",
    "a pipe": "pipe",
    "frames": file_of(
            PIL.Image.new("RGB", (8, 8), "red"), "WEBP", save_all=True, lossless=True,
            append_images=[PIL.Image.new("RGB", (8, 8), "blue")],
        ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_image_within_the_limits_is_refused(fault, tmp_path, monkeypatch):
    (tmp_path.parent / "red.png").write_bytes(RED)
    os.mkfifo(tmp_path / "pipe")
    value = REFUSED[fault]
    monkeypatch.setattr(PIL.Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    with pytest.raises(DataError):
        read_picture(value, tmp_path)


def test_large_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    (tmp_path / "large.png").write_bytes(RED + bytes(200))
    for value in ("large.png", RED + bytes(200)):
        with pytest.raises(DataError):
            read_picture(value, tmp_path)


def test_a_picture_that_ends_early_is_a_bad_row():
    data = file_of(PIL.Image.fromarray(noise(64, 64)))
    with pytest.raises(DataError):
        pixels(data[: len(data) // 2])


def test_a_size_is_read_without_the_pixels():
    data = file_of(PIL.Image.fromarray(noise(40, 60)))
    assert size_of(Picture(data[:60])) == size_of(Picture(data)) == (40, 60)


def test_all_kinds_become_rgb_with_white_behind():
    grey = file_of(PIL.Image.new("L", (4, 2), 100))
    assert (pixels(grey) == 100).all() and pixels(grey).shape == (2, 4, 3)
    clear = file_of(PIL.Image.new("RGBA", (4, 2), (255, 0, 0, 0)))
    assert (pixels(clear) == 255).all()
    palette = PIL.Image.new("P", (4, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert (pixels(file_of(palette)) == [10, 20, 30]).all()


def with_exif(exif):
    return file_of(PIL.Image.fromarray(noise(20, 40)), exif=exif)


@pytest.mark.parametrize("orientation", range(1, 10))
def test_photographs_are_turned_as_exif_says(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = with_exif(exif)
    with PIL.Image.open(io.BytesIO(data)) as image:
        turned = np.asarray(PIL.ImageOps.exif_transpose(image))
    assert (pixels(data) == turned).all() and size_of(Picture(data)) == turned.shape[:2]


def test_broken_exif_leaves_the_pixels_as_they_are():
    data = with_exif(b"Exif\0\0no such data")
    assert size_of(Picture(data)) == (20, 40) and (pixels(data) == noise(20, 40)).all()


def test_proportions_are_refused_before_decoding(monkeypatch):
    data = with_exif(b"")
    monkeypatch.setattr(PIL.Image.Image, "load", lambda image: pytest.fail("it was decoded"))

    def refuse(height, width):
        raise ValueError(f"{height} x {width}")

    with pytest.raises(DataError):
        pixels(data, refuse)


def test_pixels_are_kept_by_digest_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 1)
    run = tmp_path / "run"
    store, first = ImageStore(run / "images", begun=run / "run.json"), noise(8, 12)
    image = store.add(first)
    assert (image.height, image.width) == (8, 12) and image == ImageStore().add(first.copy())
    assert image != store.add(noise(8, 12, seed=1)) and image != store.add(first.reshape(12, 8, 3))
    assert (store.pixels(image) == first).all()
    assert not run.exists()  # nothing is written before the run begins
    run.mkdir()
    store.add(noise(4, 8))
    assert not [*run.iterdir()]
    (run / "run.json").touch()
    store.add(noise(4, 4))
    assert len([*(run / "images").iterdir()]) == 5
    for again in (store, ImageStore(run / "images")):
        again.add(noise(2, 2))  # the only one that is kept in memory
        assert (again.pixels(image) == first).all()
    store.add(noise(2, 3))
    PIL.Image.fromarray(noise(8, 12, seed=2)).save(run / "images" / f"{image.digest}.png")
    with pytest.raises(DataError):
        ImageStore(run / "images").pixels(image)
    (run / "images" / f"{image.digest}.png").unlink()
    with pytest.raises(DataError):
        store.pixels(image)


ASKED = [{"role": "user", "content": "What is this?"}]
PLACES = {
    "no place": ({"messages": ASKED, "image": RED}, ["P", "What is this?"]),
    "a place in the text": ({"prompt": "A <image> and <image>?", "images": [RED, BLUE]}, ["A ", "P", " and ", "P", "?"]),
    "parts without data": (
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "image": RED},
        ["P", "?"],
    ),
    "parts with data": (
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "red.png"}}]}]},
        ["?", "P"],
    ),
    "null": ({"messages": ASKED, "image": None, "images": None}, []),
    "no images": ({"prompt": "Is <image> a word?"}, []),
    "columns of any name": (
        {"prompt": "<image> or <image>?", "image_1": {"bytes": RED, "path": None}, "image_2": None, "jpg": BLUE},
        ["P", " or ", "P", "?"],
    ),
    "a path elsewhere": ({"messages": ASKED, "image": "a/1.jpg", "decoded_image": RED}, ["P", "What is this?"]),
    "a picture twice": ({"prompt": "<image>?", "photo": RED, "decoded_image": [RED]}, ["P", "?"]),
    "an address": ({"prompt": "<image>?", "image_url": {"url": Picture(RED).to_part()["image_url"]["url"]}}, ["P", "?"]),
}  # fmt: skip


@pytest.mark.parametrize("form", PLACES)
def test_images_stand_where_the_row_says(form, tmp_path):
    stored, expected = PLACES[form]
    (tmp_path / "red.png").write_bytes(RED)
    row = load_rows([stored], images=True)[0] if form != "parts with data" else _of_file(stored, tmp_path)
    message = ChatMessage.from_dict(row["messages"][0])
    assert ["P" if isinstance(part, Picture) else part for part in message.parts] == expected
    assert message.content == "".join(part for part in expected if part != "P") or not expected
    assert all(row.get(name) is None for name in stored if name not in ("prompt", "messages"))
    again = ChatMessage.from_dict(json.loads(json.dumps(message.to_json())), read_picture)
    assert again == message


def _of_file(stored, directory):
    (directory / "rows.jsonl").write_text(json.dumps(stored) + "\n")
    return load_rows(directory / "rows.jsonl", images=True)[0]


def test_a_file_beside_its_row_is_a_picture_in_any_column(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    message = _of_file({"prompt": "<image>?", "photo": "red.png", "note": "blue.png"}, tmp_path)["messages"][
        0
    ]
    assert message["parts"] == [Picture(RED), "?"]


def test_pictures_beside_the_column_of_images_stay_columns():
    row = load_rows([{"prompt": "<image>?", "image": RED, "second": BLUE}], images=True)[0]
    assert row["second"] == BLUE and row["messages"][0]["parts"] == [Picture(RED), "?"]


UNMATCHED = {
    "fewer images": {"prompt": "<image><image>", "images": [RED]},
    "more images": {"prompt": "<image>", "images": [RED, BLUE]},
    "no image for a part": {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], "image": RED},
    "an image of the assistant": {"messages": [{"role": "assistant", "content": [{"type": "image", "image": RED}]}, *ASKED]},
    "many images": {"messages": [{"role": "user", "content": [{"type": "image", "image": RED}] * 65}]},
    "a video": {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
}  # fmt: skip


@pytest.mark.parametrize("fault", UNMATCHED)
def test_rows_whose_images_do_not_match_are_bad(fault):
    row = UNMATCHED[fault]
    with pytest.raises(DataError):
        load_rows([row], images=True)
    assert len(load_rows([row, {"prompt": "text"}], images=True, bad_rows="skip")) == 1


def test_rows_are_named_by_their_pixels():
    first, second = load_rows([{"prompt": "?", "image": data} for data in (RED, BLUE)], images=True)
    assert first["prompt_id"] != second["prompt_id"]
    names = [
        load_rows([{"prompt": "?", "image": PIL.Image.open(io.BytesIO(RED))}], images=True)[0] for _ in "ab"
    ]
    assert names[0]["prompt_id"] == names[1]["prompt_id"]


def test_pairs_with_images_are_refused():
    row = {"prompt": "?", "chosen": "a", "rejected": "b", "image": RED}
    with pytest.raises(DataError):
        load_rows([row], images=True, learns_from="pairs")


@pytest.fixture
def renderer(vision_directory):  # noqa: F811
    vision = vision_of(vision_directory)
    return Renderer(load_tokenizer(vision_directory), roles=("user", "tool"), vision=vision), vision


def test_only_pictures_have_places(renderer):
    renderer, vision = renderer
    text = "<|image_pad|> is a word, "
    messages = [ChatMessage.showing("user", text, Picture(RED), "and this", Picture(BLUE))]
    span = renderer.context(renderer.first(messages), messages)
    assert [place.image for place in span.images] == [vision.see(Picture(data)) for data in (RED, BLUE)]
    assert len(span.token_ids) == renderer.length(messages)
    covered = {n for place in span.images for n in range(place.offset, place.end)}
    assert covered == {n for n, token in enumerate(span.token_ids) if token == vision.placeholder}
    assert text in renderer.decode(span.token_ids)
    marks = renderer.encode("<|vision_start|><|vision_end|>")
    for place in span.images:
        assert [span.token_ids[place.offset - 1], span.token_ids[place.end]] == marks
    plain = [ChatMessage("user", text)]
    assert vision.placeholder not in renderer.first(plain)


def test_images_of_later_turns_do_not_move_earlier_ones(renderer):
    renderer, vision = renderer
    first = [ChatMessage.showing("user", Picture(RED), "Look.")]
    spans = [
        renderer.context(renderer.first(first), first),
        TokenSpan((7, renderer.stop_token_ids[0]), "policy", (0.0, 0.0), 0),
    ]
    new = [ChatMessage.showing("tool", "Here: ", Picture(BLUE))]
    token_ids = renderer.following(new, ended=True, messages=[*first, ChatMessage("assistant", "x")])
    spans.append(renderer.context(token_ids, new))
    places, tokens = images_of(spans), [token for span in spans for token in span.token_ids]
    assert [place.image for place in places] == [vision.see(Picture(data)) for data in (RED, BLUE)]
    for place in places:
        assert set(tokens[place.offset : place.end]) == {vision.placeholder}
        assert place.length == vision.tokens(place.image)


def test_a_template_without_places_is_refused(renderer):
    renderer, vision = renderer
    tokenizer = load_tokenizer(vision.config.name_or_path or vision._path)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|image_pad|>", "").replace(
        "<|vision_start|>", ""
    )
    blind = Renderer(tokenizer, roles=("user",), vision=vision)
    messages = [ChatMessage.showing("user", Picture(RED), "?")]
    with pytest.raises(TemplateError):
        blind.context(blind.first(messages), messages)
    with pytest.raises(DataError):
        Renderer(tokenizer).length(messages)


def test_a_demonstration_sees_its_images(renderer):
    renderer, vision = renderer
    messages = [ChatMessage.showing("user", "?", Picture(RED)), ChatMessage("assistant", "red")]
    trajectory = demonstration(renderer, messages, "a")
    assert [place.image for place in images_of(trajectory.spans)] == [vision.see(Picture(RED))]


def test_groups_share_only_what_shows_the_same_images(renderer):
    renderer, _ = renderer
    trajectories = {}
    samples = []
    for data in (RED, BLUE):
        messages = [ChatMessage.showing("user", "Look: ", Picture(data), "What?")]
        first = renderer.context(renderer.first(messages), messages)
        spans = (first, TokenSpan((7,), "policy", (0.0,), 0))
        sample = SampleState("a", len(samples), messages, None, {}, special=Special(own_prompt=True))
        trajectories[id(sample)] = Trajectory("a", spans, tuple(messages), {}, 0.0, "done")
        samples.append(sample)
    group = group_of(samples, trajectories, frozen=False)
    place = first.images[0]
    assert [len(one.spans[0].token_ids) for one in group.trajectories] == [place.offset, place.offset]
    for one in group.trajectories:
        assert (
            images_of(one.spans) == trajectories[id(samples[group.trajectories.index(one)])].spans[0].images
        )


def test_spans_are_cut_beside_images(renderer):
    renderer, _ = renderer
    messages = [ChatMessage.showing("user", Picture(RED), "and", Picture(BLUE), "?")]
    span = renderer.context(renderer.first(messages), messages)
    for at in (0, span.images[0].offset, span.images[0].end, span.images[1].offset, len(span.token_ids)):
        head, tail = span.cut(at)
        assert images_of([head, tail]) == span.images and head.token_ids + tail.token_ids == span.token_ids

"""A person plays an environment in the page: the real server, and a real browser."""

import json
import time

import pytest
from extensions.view.serving import get, hosting, request

from rl4llm.cli import main
from rl4llm.compose.trainer import sampling_of, task_without_model
from rl4llm.config import load_config
from rl4llm.data.load import load_rows
from rl4llm.extensions.view.play.person import Game, Person
from rl4llm.extensions.view.play.server import application

JSON = {"Content-Type": "application/json"}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
ROWS = [{"prompt": f"What is 6 times {n}?", "ground_truth": str(6 * n)} for n in (7, 8)]
TOOLS = {"name": "tool", "tools": ["calculator"], "max_steps": 3}


@pytest.fixture
def played(tmp_path, model_dir):
    """Return a function that begins prompt 0 of a configuration and returns its server and its file of episodes."""
    games = []

    def start(**sections):
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        config = {
            "model": {"path": str(model_dir)},
            "data": {"path": str(tmp_path / "rows.jsonl"), "shuffle": False},
            "rewards": [{"name": "length", "max_length": 1}],
            "rollout": {"max_tokens": 60},
        }
        (tmp_path / "task.yaml").write_text(json.dumps(config | sections))
        settings = load_config(tmp_path / "task.yaml", [])
        task = task_without_model(settings)
        person = Person(task.env.tokenizer)
        rollout = task.rollout(client=person, seed=0, max_failed_share=1.0)
        games.append(Game(rollout, person, sampling_of(settings), tmp_path / "out.jsonl"))
        games[-1].start(0)
        return application(games[-1], person), tmp_path / "out.jsonl"

    yield start
    for game in games:
        game.close()


def post(url, what, **given):
    status, _, body = request(url, f"/api/{what}", "POST", json.dumps(given), **JSON)
    return status, body.decode()


def shown(url, ready):
    """What the page shows once it is `ready`."""
    end = time.monotonic() + 60
    while not ready(state := get(url, "/api/play")):
        assert time.monotonic() < end, state
        time.sleep(0.02)
    return state


def test_an_episode_with_tools_is_played_scored_and_stored(played):
    app, out = played(env=TOOLS, rewards=["math"])
    with hosting(app) as url:
        first = shown(url, lambda state: state["asks"])
        assert "What is 6 times 7?" in first["prompt"] and first["messages"][-1]["role"] == "user"
        assert post(url, "answer", text=CALL)[0] == 200
        second = shown(url, lambda state: state["asks"] and len(state["messages"]) > 2)
        assert (second["messages"][-1]["role"], second["messages"][-1]["content"]) == ("tool", "42")
        post(url, "answer", text="It is 42.")
        end = shown(url, lambda state: not state["playing"])
        assert end["result"] == [{"role": "", "reward": 1.0, "rewards": {"math": 1.0}, "stop_reason": "done"}]
        assert post(url, "start", row=1)[0] == 200
        shown(url, lambda state: state["asks"] and "times 8" in state["prompt"])
        post(url, "answer", text="It is 9.")
        assert shown(url, lambda state: not state["playing"])["result"][0]["reward"] == 0.0
    rows = load_rows(str(out), split="train", learns_from="demonstrations")
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert rows[1]["messages"][-1]["content"] == "It is 9."


def test_an_answer_beyond_max_tokens_is_cut_as_the_policys(played):
    app, _ = played(rollout={"max_tokens": 4})
    with hosting(app) as url:
        shown(url, lambda state: state["asks"])
        post(url, "answer", text="It is certainly forty two.")
        end = shown(url, lambda state: not state["playing"])
    assert end["result"][0]["stop_reason"] == "length"
    assert "It is certainly forty two.".startswith(end["messages"][-1]["content"])


def test_an_episode_that_is_given_up_is_not_stored(played):
    app, out = played(env=TOOLS)
    with hosting(app) as url:
        shown(url, lambda state: state["asks"])
        assert post(url, "start", row=1)[0] == 409
        post(url, "leave")
        assert "gave up" in shown(url, lambda state: not state["playing"])["error"]
        assert post(url, "answer", text="late")[0] == 409
        assert post(url, "start", row=2)[0] == 404 and post(url, "start", row=0)[0] == 200
        shown(url, lambda state: state["asks"])
    assert not out.exists()


@pytest.mark.parametrize(("body", "headers", "status"), [
    ("text=42", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ("{}", JSON, 400),
    ('{"text": 42}', JSON, 400),
    ('{"text": "  "}', JSON, 400),
    ("[", JSON, 400),
    ('{"text": "42"}', JSON | {"Host": "evil.example"}, 403),
], ids=["form", "absent", "number", "empty", "broken", "host"])  # fmt: skip
def test_other_requests_answer_nothing(played, body, headers, status):
    app, _ = played()
    with hosting(app) as url:
        shown(url, lambda state: state["asks"])
        assert request(url, "/api/answer", "POST", body, **headers)[0] == status
        assert get(url, "/api/play")["asks"]


def test_a_person_plays_in_the_browser(played, browser):
    app, _ = played(env=TOOLS)
    answer, page = "document.querySelector('.answer')", browser
    with hosting(app) as url:
        page.open(url)
        for text, shows in ((CALL, "tool"), ("It is <b>42</b>", "Result")):
            page.until(f"!{answer}.hidden && !document.getElementById('answer').value")
            page.value(
                f"document.getElementById('answer').value = {json.dumps(text)}; {answer}.requestSubmit()"
            )
            page.until(f"document.getElementById('main').innerText.includes({json.dumps(shows)})")
        said = page.text("#main")
        assert "It is <b>42</b>" in said and "ground truth 42" in said
        assert page.value("document.getElementById('row').value") == "1"
        page.call("Page.navigate", url="about:blank")
    assert not page.errors


def test_what_cannot_be_played_is_refused(tmp_path, model_dir, capsys):
    (tmp_path / "task.yaml").write_text(
        json.dumps({"model": {"path": str(model_dir)}, "data": {"path": "arithmetic"}})
    )
    task = str(tmp_path / "task.yaml")
    assert main(["recipe", "play", task, "--prompt", "99999"]) == 2
    assert "they are 0 to 4095" in capsys.readouterr().err
    assert main(["recipe", "play", task, "--out", "episodes.csv"]) == 2
    assert "Accepted: a file that ends in .jsonl" in capsys.readouterr().err
    assert main(["recipe", "play", task, "parts={a: {}, b: {}}"]) == 2
    assert "several environments" in capsys.readouterr().err

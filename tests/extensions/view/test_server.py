import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from extensions.view.runs import write_run
from extensions.view.serving import get, request, served
from forked_python import started
from small_run import SmallRun

from rl4llm.cli import main
from rl4llm.extensions.evaluate.chat import conversation
from rl4llm.extensions.view.chat import Chat
from rl4llm.extensions.view.server import PAGE

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def url(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    with served(
        write_run(directory / "one", tokenizer), write_run(directory / "two", tokenizer, lr="2.0e-4")
    ) as address:
        yield address


def test_runs_their_metrics_and_their_episodes_are_served(url):
    one, two = get(url, "/api/runs")
    assert [(run["name"], run["config"]["training.lr"]) for run in (one, two)] == [
        ("one", 1e-4),
        ("two", 2e-4),
    ]
    metrics = get(url, "/api/runs/0/metrics")
    assert [row["step"] for row in metrics["rows"]] == [1, 2, 3]
    assert get(url, f"/api/runs/0/metrics?from={metrics['next']}")["rows"] == []
    listed = get(url, "/api/runs/1/episodes?from=20")
    assert len(listed["rows"]) == 5 and not listed["more"]
    assert len(get(url, "/api/runs/0/episodes")["rows"]) == 25
    answer = get(url, "/api/runs/0/episodes/3")
    text = "".join(
        answer["texts"][str(token)] for span in answer["episode"]["spans"] for token in span["token_ids"]
    )
    assert text.startswith("How much is ") and text.endswith("It is 43.")
    assert get(url, "/api/runs/0/search?q=IT%20IS%2042") == {
        "numbers": [2, 6, 11, 15, 19, 23],
        "complete": True,
    }


def test_a_name_that_only_resolves_to_loopback_is_refused(url):
    port = url.rstrip("/").rpartition(":")[2]
    for path in ("/", "/page/main.js", "/api/runs"):
        others = (
            "evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example",
            "localhost:1@evil", "evil@localhost", "2130706433", "[]", "",
        )  # fmt: skip
        for host in others:
            status, _, body = request(url, path, Host=host)
            assert status in (400, 403) and b"config" not in body, host
        for host in ("localhost", "127.0.0.1", "[::1]", "10.1.2.3", "LOCALHOST", socket.gethostname()):
            assert request(url, path, Host=host)[0] == request(url, path, Host=f"{host}:{port}")[0] == 200


def test_a_page_is_for_those_who_know_its_token(tokenizer, tmp_path):
    with served(write_run(tmp_path / "run", tokenizer), token="the-token") as url:
        for path in (
            "/",
            "/page/main.js",
            "/api/runs",
            "/api/runs?token=",
            "/?token=the-toke",
            "/?token=%C3%A9",
        ):
            status, headers, body = request(url, path)
            assert status == 403 and "Set-Cookie" not in headers and b"?token=" in body, path
            assert request(url, path, Cookie="rl4llm-view-1=the-token")[0] == 403  # of another port
        status, headers, _ = request(url, "/?token=the-token")
        cookie, *flags = headers["Set-Cookie"].split("; ")
        assert status == 200 and {"HttpOnly", "SameSite=Strict", "Path=/"} == set(flags)
        assert all(
            request(url, path, Cookie=cookie)[0] == 200 for path in ("/", "/page/main.js", "/api/runs")
        )
        assert request(url, "/api/runs?token=the-token")[0] == 200  # for scripts


@pytest.mark.parametrize("flags", [(), ("--no-token",)])
def test_the_command_prints_the_address_with_its_token(flags, tokenizer, tmp_path):
    run = write_run(tmp_path / "run", tokenizer)
    with started("-m", "rl4llm", "view", run, "--port", "0", *flags) as viewing:
        while "\n" not in (said := viewing.err.read_text()):
            assert viewing.process.is_alive(), said
            time.sleep(0.02)
        url = said.split()[0]
        path = url[url.index("/", 8) :]
        assert path == "/" if flags else re.fullmatch(r"/\?token=[\w\-]{32,}", path)
        assert (request(url, path)[0], request(url, "/api/runs")[0]) == (200, 200 if flags else 403)


def test_the_server_only_ever_reads(url):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = request(url, "/api/runs", method)
        assert status == 405 and "Access-Control-Allow-Origin" not in headers


def test_every_answer_forbids_scripts_and_readers_from_elsewhere(url):
    for path in ("/", "/page/style.css", "/api/runs", "/nothing"):
        headers = request(url, path)[1]
        assert "script-src 'self';" in headers["Content-Security-Policy"]
        assert (
            headers["X-Content-Type-Options"] == "nosniff"
            and headers["Cross-Origin-Resource-Policy"] == "same-origin"
        )


def test_missing_path_is_a_404_and_no_other_file_is_served(url):
    files = ["/page/../server.py", "/page/%2e%2e/server.py", "/page/..%2fserver.py", "/page/nothing.js"]
    for path in [
        *files,
        "/api/runs/2/metrics",
        "/api/runs/0/episodes/999",
        "/api/runs/0/episodes/1?generation=7",
    ]:
        status, _, body = request(url, path)
        assert status == 404 and b"Traceback" not in body and b"import" not in body, path
    for path in ("-1/metrics", "x/metrics", "0/episodes?from=-1", "0/metrics?from=1e9"):
        assert request(url, f"/api/runs/{path}")[0] == 400, path


def test_the_page_is_all_there_where_the_package_is_installed(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True)
    installed = {file.name for file in (tmp_path / "rl4llm" / "extensions" / "view" / "page").iterdir()}
    assert installed == {file.name for file in PAGE.iterdir()} and "main.js" in installed


def said(url, line, origin=None, page="1", **headers):
    origin = url.rstrip("/") if origin is None else origin
    headers = {"Content-Type": "application/json", "Origin": origin, "Cookie": cookie(url)} | headers
    return request(url, "/api/runs/0/chat", "POST", json.dumps({"page": page, "line": line}), **headers)


def cookie(url):
    return f"rl4llm-view-{url.rstrip('/').rpartition(':')[2]}=the-token"


def test_a_panel_talks_to_the_model_of_a_run(model_dir, tmp_path):
    small = SmallRun.at(tmp_path, model_dir)
    assert main(["train", *small.into("run")]) == 0
    with conversation(str(tmp_path / "run")) as talk:
        first, second = ([item.to_dict() for item in talk.ask(line)] for line in ("one", "two"))
    with served(tmp_path / "run", token="the-token") as url:
        about = json.loads(request(url, "/api/runs", Cookie=cookie(url))[2])
        assert about[0]["chat"]
        expected = [("1", "one", first), ("1", "two", second), ("2", "one", first), ("2", "two", second)]
        for page, line, messages in [*expected, ("1", "one", first)]:
            status, _, body = said(url, line, page=page)
            assert status == 200
            assert json.loads(body) == {"began": line == "one", "messages": messages}
        assert said(url, None)[0] == 200
        assert json.loads(said(url, "one")[2]) == {"began": True, "messages": first}
        assert said(url, "half of a pair: \ud800")[0] == 500  # the request is as it should be
        assert json.loads(said(url, "one")[2]) == {"began": True, "messages": first}


def test_another_page_begins_another_conversation(model_dir, tmp_path):
    small = SmallRun.at(tmp_path, model_dir)
    assert main(["train", *small.into("run")]) == 0
    chat = Chat()
    for page, lines in [("1", ["one"]), ("1", ["one", "two"]), ("2", ["three"]), ("1", ["four"])]:
        assert chat.ask(tmp_path / "run", page, lines[-1])["began"] is (len(lines) == 1)
        messages = chat._talk._state.sample_states[0].messages
        assert [message.content for message in messages if message.role == "user"] == lines
    chat.close()


def test_only_the_page_itself_talks_to_a_model(tokenizer, tmp_path):
    run = write_run(tmp_path / "run", tokenizer)
    with served(run, token="the-token") as url:
        port = url.rstrip("/").rpartition(":")[2]
        for origin in ("http://127.0.0.1:1", f"http://localhost:{port}", "https://evil.example", "null", ""):
            assert said(url, "hello", origin)[0] == 403, origin
        assert said(url, "hello", **{"Content-Type": "text/plain"})[0] == 403
        assert said(url, "hello", Cookie="")[0] == 403
        assert said(url, "hello")[0] == 409  # the page may, but this run has no model
    with served(run) as url:
        assert said(url, "hello")[0] in (404, 405)
        assert not get(url, "/api/runs")[0]["chat"]

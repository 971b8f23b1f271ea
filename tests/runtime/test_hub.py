"""Whether the hub can be asked is found out before its client tries for half a minute."""

import socket

import pytest

from rl4llm.runtime.hub import hub_answers


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_hub_answers_where_somebody_listens_and_nowhere_else(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        listener.listen()
        assert hub_answers()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not hub_answers()
    monkeypatch.setenv("HF_ENDPOINT", "https://no-such-host.invalid")
    assert not hub_answers()


def test_behind_a_proxy_the_hubs_own_client_finds_out(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:8")
    assert hub_answers()

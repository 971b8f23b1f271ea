"""Who reaches a server without a key: clients at its address, and no website."""

import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rl4llm_tinker.server import application
from rl4llm_tinker.service import Service


@pytest.mark.parametrize(("key", "host", "status"), [
    ("", "evil.example:8000", 403), ("", "127.0.0.1:8000", 200), ("tml-a", "evil.example:8000", 200),
])  # fmt: skip
def test_a_server_without_a_key_answers_to_addresses(tmp_path, key, host, status):
    async def scene():
        async with TestClient(TestServer(application(Service({}, tmp_path, "float32"), key))) as client:
            headers = {"X-API-Key": "tml-a", "Host": host}
            return (await client.get("/api/v1/healthz", headers=headers)).status

    assert asyncio.run(scene()) == status

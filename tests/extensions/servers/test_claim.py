"""A server has one trainer at a time: claims that others see, and that end with the process."""

import asyncio
import time

import pytest
from forked_python import started

from rl4llm.core.base_client import BasePublisher
from rl4llm.core.errors import EngineError
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.sync.wrappers import ClaimingPublisher

URL = "http://127.0.0.1:30000"
HOLD = """
import asyncio, pathlib, sys, time
from rl4llm.extensions.servers.sync.wrappers import ClaimingPublisher
from rl4llm.core.base_client import BasePublisher

class Nothing(BasePublisher):
    async def publish(self, backend, version):
        return None

publisher = ClaimingPublisher(Nothing(), sys.argv[2:], pathlib.Path(sys.argv[1]))
asyncio.run(publisher.publish(None, 0))
print("claimed", flush=True)
time.sleep(100)
"""


class Records(BasePublisher):
    """Remembers what it was asked to do."""

    def __init__(self):
        self.calls = []

    async def publish(self, backend, version):
        self.calls.append(version)
        return WeightRef(version, "full")

    async def lend_device(self, backend):
        self.calls.append("lend")

    def follow(self, backend):
        self.calls.append("follow")

    async def close(self):
        self.calls.append("close")


def claiming(root, *urls):
    return ClaimingPublisher(Records(), urls or [URL], root)


def test_what_is_claimed_is_handed_on(tmp_path):
    publisher = claiming(tmp_path)

    async def work():
        await publisher.lend_device(None)
        assert await publisher.publish(None, 3) == WeightRef(3, "full")
        publisher.follow(None)
        await publisher.publish(None, 4)
        await publisher.close()
        await publisher.close()

    asyncio.run(work())
    assert publisher._publisher.calls == ["lend", 3, "follow", 4, "close", "close"]


@pytest.mark.parametrize("same", [URL, URL + "/", "http://localhost:30000"])
@pytest.mark.parametrize("begins", ["publish", "lend_device"])
def test_a_second_trainer_is_refused_before_it_publishes(tmp_path, same, begins):
    first, second = claiming(tmp_path), claiming(tmp_path, "http://127.0.0.1:30001", same)

    async def begin(publisher):
        await (publisher.publish(None, 0) if begins == "publish" else publisher.lend_device(None))

    async def work():
        await begin(first)
        with pytest.raises(EngineError) as refused:
            await begin(second)
        assert "output.dir" not in str(refused.value)
        assert second._publisher.calls == []
        await begin(claiming(tmp_path, "http://127.0.0.1:30002"))
        await first.close()
        await begin(second)
        await second.close()

    asyncio.run(work())


def test_a_claim_ends_with_its_process(tmp_path):
    (tmp_path / "hold.py").write_text(HOLD)
    with started(tmp_path / "hold.py", tmp_path, URL) as holder:
        while "claimed\n" not in holder.out.read_text():
            assert holder.process.is_alive(), holder.err.read_text()
            time.sleep(0.02)
        publisher = claiming(tmp_path)
        with pytest.raises(EngineError):
            asyncio.run(publisher.publish(None, 0))
        holder.process.kill()
        holder.process.join()
        asyncio.run(publisher.publish(None, 0))

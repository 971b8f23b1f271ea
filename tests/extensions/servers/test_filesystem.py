"""Publishing through files: no server is asked for a version that is not right, and what it then holds is proven."""

import asyncio
import os

import pytest
from fault_server import FaultServer, small_model, started

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import StaleWeightsError, WeightsError
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.sync.verify import Canary

PARAMS = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
FILE = "model-00001-of-00001.safetensors"


@pytest.fixture
def backend(tokenizer):
    return TorchBackend(small_model(tokenizer, seed=1), lr=1e-3)


@pytest.fixture
def play(tokenizer, backend, tmp_path):
    """Run `story(server, client, publisher)` after version 1 was published."""

    def run(story):
        async def main():
            server = FaultServer(small_model(tokenizer), tokenizer)
            async with started(server, tokenizer) as client:
                publisher = FilesystemPublisher(client, WeightStore(tmp_path / "weights"))
                await publisher.publish(backend, 1)
                await story(server, client, publisher)
                await publisher.close()

        return asyncio.run(main())

    return run


def canary(client):
    return Canary(client.vocab_size, dtype="float32")


def spoiled(path):
    """Flip one bit of a weight: the highest of its exponent."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("harm", [cut_short, spoiled, os.remove], ids=["cut short", "a flipped bit", "gone"])
def test_a_version_that_does_not_read_back_reaches_no_server(play, backend, harm):
    async def story(server, client, publisher):
        class Bad(WeightStore):
            """Its disk does not keep what is written."""

            def write(self, *args, **kwargs):
                weight_ref = super().write(*args, **kwargs)
                harm(self.root / "v000002" / FILE)
                return weight_ref

        digest, calls = await client.checksum(), dict(server.calls)
        publisher._store.__class__ = Bad
        with pytest.raises(WeightsError):
            await publisher.publish(backend, 2)
        assert {path: server.calls[path] for path in calls} == calls
        assert await client.checksum() == digest
        assert (await client.generate([5, 6], PARAMS)).version == 1
        publisher._store.__class__ = WeightStore
        weight_ref = await publisher.publish(backend, 2)
        assert await canary(client).verify(backend, client, weight_ref) < 1e-4

    play(story)


def test_a_bit_that_flips_after_verification_fails_the_canary(play, backend):
    async def story(server, client, publisher):
        weight_ref = publisher.write(backend, 2)
        path = publisher._store.root / "v000002" / FILE
        content = bytearray(path.read_bytes())
        header = int.from_bytes(content[:8], "little")
        content[8 + header + 4 * 17 + 3] ^= 0x40
        path.write_bytes(content)
        await publisher.hand_over(weight_ref)
        assert await client.version() == 2  # the server says that all is well
        with pytest.raises(StaleWeightsError):
            await canary(client).verify(backend, client, weight_ref)
        weight_ref = await publisher.publish(backend, 2)  # the same version again replaces what is damaged
        assert await canary(client).verify(backend, client, weight_ref) < 1e-4

    play(story)

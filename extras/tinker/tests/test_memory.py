"""What nobody can ask for any more is freed."""

import asyncio
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from tinker_client import Client, Refused, served_here

from rl4llm.inference.local import MAX_ROWS
from rl4llm_tinker.messages import Datum
from rl4llm_tinker.models import _parts
from rl4llm_tinker.turns import JobWorker


@pytest.fixture
def server(model_dir, tmp_path):
    with served_here(model_dir, tmp_path) as found:
        yield found


def test_pass_has_at_most_512_tokens_with_its_padding():
    lengths = [100, 200, 56, 256, 256, 1, 600, *[171] * 3, *[64] * 9]
    passes = list(_parts([Datum(torch.zeros(length), {}) for length in lengths]))
    sizes = [[len(datum.tokens) for datum in part] for part in passes]
    assert sizes == [[100, 200], [56, 256], [256, 1], [600], [171, 171], [171, 64], [64] * 8]


def test_a_closed_session_frees_what_only_it_used(server):
    service, closing, client = server[1], Client(server[0]), Client(server[0])
    model = closing.model()
    for named, path in ((closing, "own"), (client, "shared")):
        seq = 1 if path == "own" else 2
        address = closing.do("save_weights_for_sampler", model_id=model, seq_id=seq, path=path)["path"]
        named.sample(named.sampler(model_path=address), 0, [3, 4])
    held = {path.name: weakref.ref(sampler) for path, sampler in service._samplers._saved.items()}
    trained = weakref.ref(service._models[model].backend)
    for _ in range(2):
        assert closing.post(f"sessions/{closing.session}/finish", b"{}") == {"type": "finish_session"}
    with pytest.raises(Refused, match="unknown"):
        closing.call("session_heartbeat", session_id=closing.session)
    for number in range(2):  # behind the jobs that free
        client.model(number)
    assert trained() is None and held["own"]() is None and held["shared"]() is not None
    assert not [key for key in service._sampling if key.startswith(closing.session)]


def test_samples_that_an_ended_session_queued_are_not_drawn():
    worker, gate, drawn, outcome = JobWorker(), threading.Event(), [], Future()

    async def first():
        await asyncio.to_thread(gate.wait)
        return b""

    async def draw(name):
        drawn.append(name)
        return b""

    try:
        worker.sample("ended", MAX_ROWS, first, Future())
        worker.sample("ended", MAX_ROWS, partial(draw, "ended"), Future())
        worker.drop("ended")
        worker.sample("other", MAX_ROWS, partial(draw, "other"), outcome)
        gate.set()
        outcome.result(60)
    finally:
        worker.close()
    assert drawn == ["other"]


def test_an_error_that_waits_for_its_client_holds_no_tensors():
    worker, outcome, found = JobWorker(), Future(), []

    def fail():
        activations = torch.zeros(3)
        found.append(weakref.ref(activations))
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("out of memory") from error

    try:
        worker.put("a", fail, outcome)
        assert "out of memory" in str(outcome.exception(60))
    finally:
        worker.close()
    assert found[0]() is None and outcome.exception().__traceback__ is not None


FREED = """
import gc
from pathlib import Path
from rl4llm.runtime.cpu import keep_freed_memory
from rl4llm_tinker.service import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

glibc = keep_freed_memory()
blocks = [b"x" * (1 << 20 | number) for number in range(300)]
on_top = [b"x" * (1 << 20 | number) for number in range(3)]  # the heap cannot shrink below it
del blocks
before = resident()
return_freed_memory()
print(not glibc or before - resident() > 200 << 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_memory_in_the_middle_of_the_heap_goes_back():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr

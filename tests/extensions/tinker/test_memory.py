"""What nobody can ask for any more is freed."""

import weakref
from concurrent.futures import Future

import torch

from rl4llm.extensions.tinker.turns import JobWorker


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

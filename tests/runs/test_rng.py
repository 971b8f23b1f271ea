import json
import random

import numpy as np
import torch

from rl4llm.runs.checkpoint import restore_rng, rng_state


def draws():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        *torch.randn(3).tolist(),
    ]


def test_restored_generators_draw_the_same_numbers_again():
    (
        random.gauss(0, 1),
        np.random.randn(),
        torch.randn(1),
    )  # odd draws, so that cached second normals are saved too
    saved = json.dumps(rng_state())
    first = draws()
    assert draws() != first
    assert restore_rng(json.loads(saved)) == ()
    assert draws() == first


def test_a_state_from_other_devices_is_reported():
    state = rng_state()
    devices = torch.cuda.device_count()
    lost = restore_rng({**state, "cuda": state["cuda"] + [state["torch"]]})
    assert lost == (
        f"The random state of {devices + 1} CUDA devices was saved, but this machine has {devices}.",
    )

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
    assert len(restore_rng({**state, "devices": {"other:0": state["torch"]}})) == 1


def test_a_state_of_earlier_versions_is_restored():
    state = rng_state()
    number = torch.cuda.device_count()
    earlier = {name: value for name, value in state.items() if name != "devices"}
    same = list(state["devices"].values())
    assert restore_rng({**earlier, "cuda": same[:number]}) == ()
    assert len(restore_rng({**earlier, "cuda": [*same, state["torch"]]})) == 1

import pytest
from hands import Hands

from rl4llm.tracking.resources import PhaseClock


def test_phases_add_up_nest_and_start_again_after_a_lap():
    hands = Hands()
    clock = PhaseClock(now=hands)
    with clock("step"):
        for _ in range(2):
            with clock("update"):
                hands.time += 1.5
        with clock("rollout"):
            hands.time += 2
    assert clock.lap() == {"time/update": 3.0, "time/rollout": 2.0, "time/step": 5.0}
    assert clock.lap() == {}


def test_a_nested_phase_counts_once_and_a_failed_one_counts():
    hands = Hands()
    clock = PhaseClock(now=hands)
    with pytest.raises(ValueError), clock("update"):
        hands.time += 1
        with clock("update"):
            hands.time += 1
            raise ValueError
    assert clock.lap() == {"time/update": 2.0}


def test_an_open_phase_counts_in_the_lap_in_which_it_ends():
    hands = Hands()
    clock = PhaseClock(now=hands)
    with clock("save"):
        hands.time += 1
        assert clock.lap() == {}
        hands.time += 1
    assert clock.lap() == {"time/save": 2.0}


def memory(lap):
    return {name: gb for name, gb in lap.items() if name.startswith("memory/")}


def test_a_phases_memory_is_the_peak_of_it_and_its_inner_phases():
    # until step, until rollout, until its end, until that of the step, ...
    taken = iter([9.0, 3.0, 8.0, 2.0, 7.0, 1.0])
    clock = PhaseClock(peak=lambda: next(taken))
    with clock("step"), clock("rollout"):
        pass
    assert memory(clock.lap()) == {"memory/step": 8.0, "memory/rollout": 8.0}
    with clock("step"):
        assert memory(clock.lap()) == {}
    assert memory(clock.lap()) == {"memory/step": 1.0}
    assert memory(PhaseClock().lap()) == {}


def test_a_listener_receives_each_phase_as_it_begins():
    heard = []
    clock = PhaseClock(on_phase=heard.append)
    with clock("step"), clock("rollout"):
        assert heard == ["step", "rollout"]

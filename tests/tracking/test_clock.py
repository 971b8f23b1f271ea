import pytest

from rl4llm.tracking.clock import Clock


class Hands:
    """A clock that only moves when told."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


def test_phases_add_up_nest_and_start_again_after_a_lap():
    hands = Hands()
    clock = Clock(now=hands)
    with clock("step"):
        for _ in range(2):
            with clock("update"):
                hands.time += 1.5
        with clock("rollout"):
            hands.time += 2
    assert clock.lap() == {"time/update": 3.0, "time/rollout": 2.0, "time/step": 5.0}
    assert clock.lap() == {}


def test_a_phase_inside_itself_counts_once_and_one_that_fails_counts_too():
    hands = Hands()
    clock = Clock(now=hands)
    with pytest.raises(ValueError), clock("update"):
        hands.time += 1
        with clock("update"):
            hands.time += 1
            raise ValueError
    assert clock.lap() == {"time/update": 2.0}


def test_a_phase_that_is_still_open_counts_in_the_lap_that_it_ends_in():
    hands = Hands()
    clock = Clock(now=hands)
    with clock("save"):
        hands.time += 1
        assert clock.lap() == {}
        hands.time += 1
    assert clock.lap() == {"time/save": 2.0}


def memory(lap):
    return {name: gb for name, gb in lap.items() if name.startswith("memory/")}


def test_the_memory_of_a_phase_is_the_most_that_it_and_those_inside_it_took_and_nothing_from_before():
    taken = iter([9.0, 3.0, 8.0, 2.0, 7.0, 1.0])  # until step, until rollout, until its end, until that of the step, ...
    clock = Clock(peak=lambda: next(taken))
    with clock("step"), clock("rollout"):
        pass
    assert memory(clock.lap()) == {"memory/step": 8.0, "memory/rollout": 8.0}
    with clock("step"):
        assert memory(clock.lap()) == {}
    assert memory(clock.lap()) == {"memory/step": 1.0}
    assert memory(Clock().lap()) == {}


def test_whoever_listens_hears_each_phase_as_it_begins():
    heard = []
    clock = Clock(on_phase=heard.append)
    with clock("step"), clock("rollout"):
        assert heard == ["step", "rollout"]

"""Programs that do what they should are graded as right, and their wrong twins as wrong."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from honest import HONEST
from sandbox_user import as_nobody


@pytest.fixture(scope="module")
def outcomes(sandbox):
    with ThreadPoolExecutor(sandbox.slots) as threads:
        done = threads.map(lambda item: sandbox.run(item.program), HONEST)
        return {item.name: outcome for item, outcome in zip(HONEST, done, strict=True)}


@pytest.mark.parametrize("item", HONEST, ids=lambda item: item.name)
def test_a_program_is_graded_as_what_it_is(item, outcomes):
    outcome = outcomes[item.name]
    assert outcome.status == item.status, outcome
    assert outcome.level == "prefork"


def test_programs_are_graded_the_same_for_an_ordinary_user(_bubblewrap):
    assert as_nobody("honest", [item.name for item in HONEST[::6]]) == {item.name: item.status for item in HONEST[::6]}

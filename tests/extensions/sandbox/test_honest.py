"""Programs that do what they should are graded as right, and their wrong twins as wrong."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from honest import HONEST
from sandbox_user import as_nobody


@pytest.fixture(scope="module")
def outcomes(sandbox, sandbox_with_loopback):
    def run(item):
        return (sandbox_with_loopback if item.loopback else sandbox).run(item.program)

    with ThreadPoolExecutor(sandbox.slots) as threads:
        done = threads.map(run, HONEST)
        return {item.name: outcome for item, outcome in zip(HONEST, done, strict=True)}


@pytest.mark.parametrize("item", HONEST, ids=lambda item: item.name)
def test_a_program_is_graded_as_what_it_is(item, outcomes):
    outcome = outcomes[item.name]
    assert outcome.status == item.status, outcome
    assert outcome.level == "prefork"


def test_programs_are_graded_the_same_for_an_ordinary_user(_bubblewrap):
    some = [item for item in HONEST if not item.loopback][::6]
    assert as_nobody("honest", [item.name for item in some]) == {item.name: item.status for item in some}

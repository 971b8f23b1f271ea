"""HumanEval's own solutions pass, and stubs fail. Its file is not part of this repository."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rl4llm.extensions.sandbox.code_tests import program_of, stored_tests


@pytest.mark.parametrize(("solution", "status"), [("{canonical_solution}", "ok"), ("    pass\n", "wrong")])
def test_all_canonical_solutions_pass_and_all_stubs_fail(solution, status, humaneval, sandbox):
    programs = [
        program_of(solution.format_map(row), stored_tests(row["test"], row), row) for row in humaneval
    ]
    with ThreadPoolExecutor(sandbox.slots) as threads:
        outcomes = list(threads.map(sandbox.run, programs))
    assert len(outcomes) == 164
    graded = zip(humaneval, outcomes, strict=True)
    assert {row["task_id"]: outcome for row, outcome in graded if outcome.status != status} == {}

"""Programs that cheat, attack or eat everything: each is contained and graded as wrong, and leaves nothing."""

import pytest
from abuse import ATTACKS
from check_abuse import run_all
from sandbox_user import as_nobody
from sweeps import sampled

pytestmark = pytest.mark.usefixtures("_bubblewrap")
QUICK = [attack for attack in ATTACKS if attack.category in ("kernel", "files", "network", "signals")][::2]


def is_sampled(attack):
    """Tell whether an attack runs in each run: against one kind of tests, another kind for each attack."""
    twins = [other for other in ATTACKS if other.source == attack.source]
    return attack is twins[ATTACKS.index(twins[0]) % len(twins)]


@pytest.fixture(scope="module")
def results(_bubblewrap, request):
    """What the attacks that are selected achieved."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return run_all([params["attack"] for params in selected if params.get("attack") in ATTACKS])


@pytest.mark.parametrize("attack", sampled(ATTACKS, is_sampled), ids=lambda attack: attack.name)
def test_an_attack_is_contained_and_never_graded_as_right(attack, results):
    assert results[attack.name] == []


def test_nothing_stays_in_the_file_system_of_the_host(results):
    assert results["files"] == []


def test_attacks_are_contained_for_an_ordinary_user_too():
    results = as_nobody("attacks", [attack.name for attack in QUICK])
    assert {name: problems for name, problems in results.items() if problems} == {}
    assert len(results) == len(QUICK) + 1

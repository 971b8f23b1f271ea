import math

import pytest

from rl4llm.tracking.alerts import CALM, COLLAPSED, LARGE, RULES, TREND, TRUNCATED, Alerts
from rl4llm.tracking.glossary import find
from rl4llm.tracking.trend import Change

HEALTHY = {
    "groups/zero_spread": 0.4,
    "groups/count": 16.0,
    "reward/mean": 0.5,
    "truncated": 0.1,
    "surprise": 0.5,
    "accuracy": 0.5,
    "mismatch/mean": 0.01,
    "grad_norm": 0.3,
    "trajectories": 128.0,
    "failures": 0.0,
    "loss": 0.1,
    "tokens/s": 100.0,
}

LEARNED = [  # the first steps of a quickstart, and then some of its later ones
    (0.223, 0.31), (0.252, 0.28), (0.229, 0.31), (0.119, 0.48), (0.115, 0.49), (0.058, 0.72), (0.056, 0.73), (0.023, 0.81),
    (0.048, 0.83), (0.013, 0.88), (0.019, 0.84), (0.020, 0.94), (0.014, 0.91), (0.001, 0.97), (0.0005, 0.99), (0.003, 0.99),
]  # fmt: skip


def told(rows):
    """Return the alerts of these steps: (step, name, last step if it is over)."""
    alerts, found = Alerts(), []
    for step, row in enumerate(rows, 1):
        found += [(step, alert.name, alert.until) for alert in alerts.take(step, HEALTHY | row)]
    return found


SICK = {
    "constant reward": {"groups/zero_spread": 1.0, "grad_norm": None},
    "everything truncated": {"truncated": 1.0},
    "entropy collapse": {"surprise": 0.01, "accuracy": 0.2},
    "growing mismatch": {"mismatch/mean": 0.05},
    "clipped first updates": {"clip_fraction/first": 0.17},
    "no gradient": {"grad_norm": 0.0},
    "failing part": {"part/web/failures": 6.0, "part/web/trajectories": 2.0, "part/sums/trajectories": 120.0},
    "broken tool": {"tool/sql/calls": 40.0, "tool/sql/raised/NameError at sql.py:9": 36.0},
    "failing calls": {"env/tool_calls": 0.25, "env/tool_errors": 0.25},
    "no calls": {"env/tool_calls": 0.0, "env/tool_errors": 0.0},
    "refused answers": {"model_faults/llm_judge/refused": 20.0},
    "binding staleness": {"staleness": 1.0, "time/rollout": 6.0, "time/step": 10.0, "fleet/idle": 0.4},
    "no progress": {TREND: Change(steps=40, begin=0.66, end=0.68, error=0.02, scale=0.47)},
    "timeouts": {"failures/math/timeout": 2.0, "played_again/llm_judge/timeout": 3.0, "failures": 2.0},
}


@pytest.mark.parametrize("name", SICK)
def test_an_alert_is_reported_once_when_it_begins_and_ends(name):
    begin, sick = 6, 12
    found = told([{}] * begin + [SICK[name]] * sick + [{}] * 10)
    assert [(other, until) for _, other, until in found] == [(name, None), (name, begin + sick)]
    assert begin + 2 <= found[0][0] <= begin + 5
    assert found[1][0] == begin + sick + CALM


@pytest.mark.parametrize("name", SICK)
def test_a_sign_that_comes_and_goes_raises_no_alert(name):
    assert told([{}] * 6 + [SICK[name], SICK[name], {}] * 20) == []


def test_a_mismatch_grows_from_the_steps_that_measured_it():
    """A step of old tokens only measures none, which is not 0."""
    rows = [{"mismatch/mean": 0.036}, *[{"mismatch/mean": None}] * 4, *[{"mismatch/mean": 0.04}] * 12]
    assert told(rows) == []


def test_all_rules_have_a_sick_run_here():
    assert {rule.name for rule in RULES} == SICK.keys()


def test_the_glossary_explains_the_metric_of_each_rule():
    metrics = {rule.name: find(rule.metric) for rule in RULES}
    assert {name: metric.name for name, metric in metrics.items()} == {
        rule.name: rule.metric for rule in RULES
    }
    assert all(metric.healthy for metric in metrics.values())
    assert metrics["everything truncated"].healthy == f"below {TRUNCATED}, where an alert begins"
    assert metrics["growing mismatch"].healthy.endswith(f"an alert begins above {LARGE}")
    assert metrics["entropy collapse"].healthy == f"above {COLLAPSED * 100:g} % of its first values"
    assert find("surprise").healthy == metrics["entropy collapse"].healthy


@pytest.mark.parametrize(
    "rows",
    [
        [
            {"surprise": nats, "accuracy": share, "reward/mean": share}
            for nats, share in LEARNED + LEARNED[-1:] * 9
        ],
        [{"groups/zero_spread": 1.0, "groups/count": 2.0}] * 31,  # 62 groups of a hard task, by chance
        [{"mismatch/mean": 3e-7 * (step + 1)} for step in range(60)],  # fp32: grows, and is nothing
        [{"mismatch/mean": 0.05}] * 60,  # a quantized engine, as it always was
        [{"grad_norm": None, "critic/grad_norm": 0.2}] * 60,  # the critic warms up
        [{"grad_norm": None, "skipped": 1.0}] * 60,  # told, and stopped, by another rule
        [{"truncated": 0.9, "failures/env/raised": 12.0, "failures": 12.0}] * 60,
        [{"env/tool_calls": 2.0, "env/tool_errors": 1.9, "tool/sql/calls": 40.0}] * 60,
        [{"tool/sql/calls": 40.0, "tool/sql/raised/KeyError at sql.py:9": 12.0}] * 60,
        [{"env/tool_calls": 0.0, "accuracy": 0.9}] * 60,  # it needs no tool
        [{"env/tool_calls": 1 / 64, "env/tool_errors": 1 / 64}] * 39,  # of 128 attempts, two call
        [{"part/web/failures": 2.0, "part/web/trajectories": 6.0, "failures": 2.0}] * 60,
        [{"failures/math/timeout": 1.0, "failures": 1.0}] * 60,  # of 128
        [{"time/rollout": 6.0, "time/step": 10.0, "fleet/idle": 0.4}] * 60,  # takes turns
        [{"staleness": 1.0, "time/rollout": 6.0, "time/step": 10.0, "fleet/idle": 0.1}] * 60,  # busy servers
        [{"staleness": 1.0, "time/rollout": 1.0, "time/step": 10.0, "fleet/idle": 0.9}]
        * 60,  # a busy trainer
        [{"reward/mean": math.nan, "mismatch/mean": math.nan, "surprise": math.nan, "truncated": None}] * 60,
    ],
)
def test_healthy_metrics_raise_no_alert(rows):
    assert told([{}] * 5 * ("mismatch/mean" not in rows[0]) + rows) == []


def test_a_run_without_groups_or_rollouts_is_watched_too():
    alerts = Alerts()
    row = {"loss": 0.0, "grad_norm": 0.0}
    found = [alert for step in range(1, 20) for alert in alerts.take(step, row)]
    assert [(alert.name, alert.step, alert.since) for alert in found] == [("no gradient", 5, 1)]


@pytest.mark.parametrize("begin", ["", "part/web/"])
def test_a_broken_tool_is_named_with_its_error_and_line(begin):
    sick = {f"{begin}{name}": value for name, value in SICK["broken tool"].items()}
    alerts = Alerts()
    found = [alert for step in range(1, 9) for alert in alerts.take(step, HEALTHY | sick)]
    assert [alert.seen for alert in found] == ["90% of the calls of tool sql raise NameError at sql.py:9"]


def test_a_resumed_run_repeats_no_alert():
    sick = HEALTHY | SICK["everything truncated"]
    whole, first = Alerts(), Alerts()
    rows = [HEALTHY] * 5 + [sick] * 8 + [HEALTHY] * 5
    all_told = [str(alert) for step, row in enumerate(rows) for alert in whole.take(step, row)]
    before = [str(alert) for step, row in enumerate(rows[:9]) for alert in first.take(step, row)]
    again = Alerts()
    for step, row in enumerate(rows[:9]):
        again.take(step, row)
    after = [str(alert) for step, row in list(enumerate(rows))[9:] for alert in again.take(step, row)]
    assert before + after == all_told and len(all_told) == 2

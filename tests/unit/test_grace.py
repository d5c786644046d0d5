import time

import pytest

from kettle.grace import GraceBudget


def test_spent_and_left_add_up_to_the_total() -> None:
    budget = GraceBudget(total_s=30.0, started_s=time.monotonic() - 10.0)
    assert budget.spent_s() == pytest.approx(10.0, abs=1.0)
    assert budget.spent_s() + budget.left_s() == pytest.approx(30.0, abs=0.5)


def test_time_runs_from_the_request_on() -> None:
    budget = GraceBudget(total_s=30.0, started_s=time.monotonic())
    before = budget.left_s()
    time.sleep(0.02)
    assert budget.left_s() <= before - 0.02


def test_overdue_budget_is_negative() -> None:
    budget = GraceBudget(total_s=5.0, started_s=time.monotonic() - 60.0)
    assert budget.left_s() < 0

"""How many updates follow each step of the environments."""

import itertools
import math

import pytest

from leanrl.support.schedule import UpdateSchedule

CASES = list(itertools.product([0.1, 0.25, 1.0, 3.0], [1, 3, 4, 64], [0, 50, 1_000]))


@pytest.mark.parametrize("updates_per_step, num_envs, starts", CASES)
def test_updates_per_step_mean_the_same_at_any_number_of_environments(updates_per_step, num_envs, starts):
    schedule = UpdateSchedule(num_envs, starts, updates_per_step)
    total, begun = 0, []
    for step in range(num_envs, 20_001, num_envs):
        due = schedule.due(step)
        if schedule.begins(step):
            begun.append(total)
        total += due
        assert 0 <= due <= math.ceil(num_envs * updates_per_step)
        assert abs(total - max(0, step - starts) * updates_per_step) < 1 + 1e-6
        assert total == 0 or step > starts
    assert total == math.floor((step - starts) * updates_per_step + 1e-6)
    assert begun == [0]


def test_one_update_every_ten_steps():
    """As 10 * 0.1 is 1, and 30 * 0.1 is 3, whatever floating-point numbers say of it."""
    schedule = UpdateSchedule(1, 100, 0.1)
    assert [step for step in range(1, 100_000) if schedule.due(step)] == list(range(110, 100_000, 10))


def test_no_update_is_lost_in_a_long_run():
    """1.4 updates for each of 5 environments are 7 a step, also where 1.4 in floating point has lost one."""
    schedule = UpdateSchedule(5, 0, 1.4)
    assert {schedule.due(step) for step in range(20_971_000, 20_972_000, 5)} == {7}
    assert schedule.owed(10**15) == 14 * 10**14


@pytest.mark.parametrize("frequencies", [(1,), (2,), (3,), (2, 3)])
@pytest.mark.parametrize("updates_per_step, num_envs, starts", CASES)
def test_patterns_are_those_that_occur(updates_per_step, num_envs, starts, frequencies):
    """What is not among them is compiled in mid-run. A step from ``starts`` on asks, whether or not it owes one."""
    schedule = UpdateSchedule(num_envs, starts, updates_per_step)
    occurring, updates = set(), 0
    for step in range(num_envs, starts + 4_001, num_envs):
        if step >= starts:
            due = schedule.due(step)
            numbers = range(updates + 1, updates + due + 1)
            occurring.add(tuple(tuple(n % frequency == 0 for frequency in frequencies) for n in numbers))
            updates += due
    patterns = schedule.patterns(*frequencies)
    assert occurring <= patterns
    # And hardly more, each of them is compiled: nothing, what the first step owes, and the mean rounded up and down.
    assert len({len(pattern) for pattern in patterns}) <= 4
    assert len(patterns) <= 4 * math.prod(frequencies)

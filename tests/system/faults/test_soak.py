"""Random kills for minutes: every job ends once, nothing is lost, doubled or left behind.

``manage.py test -m soak`` runs ten minutes and 500 jobs; ``--soak-seed`` repeats a run.
"""

import random

import pytest

from tests.system.faults.storm import KINDS, ON_JOBS, STRUCK, Storm, drills, strikes, told

LONG_SECONDS, LONG_JOBS = 600.0, 500
SHORT_SECONDS, SHORT_JOBS, SHORT_SEED = 10.0, 8, 36
HOSTS = ["ada", "bea", "cleo"]


def weather(sites, capsys, *, seed: int, seconds: float, num_jobs: int):
    """Let a storm pass over the installation and print what came of it."""
    site = sites.current()
    site.begin_case()
    with capsys.disabled():
        print(f"\nsoak seed {seed} (repeat with --soak-seed {seed})")  # noqa: T201
    outcome = Storm(site, seed=seed, seconds=seconds, num_jobs=num_jobs).run()
    with capsys.disabled():
        print(told(seed, outcome))  # noqa: T201
    return outcome


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_minutes_of_random_kills_lose_double_and_orphan_nothing(sites, capsys, soak_seed):
    outcome = weather(sites, capsys, seed=soak_seed, seconds=LONG_SECONDS, num_jobs=LONG_JOBS)

    found = (outcome.ended_once, outcome.lost, outcome.doubled, outcome.orphans, outcome.wrong)
    assert found == (LONG_JOBS, 0, [], 0, [])
    assert outcome.broken == {}


@pytest.mark.faults
@pytest.mark.slow
def test_a_short_storm_loses_doubles_and_orphans_nothing(sites, capsys):
    outcome = weather(sites, capsys, seed=SHORT_SEED, seconds=SHORT_SECONDS, num_jobs=SHORT_JOBS)

    found = (outcome.ended_once, outcome.lost, outcome.doubled, outcome.orphans, outcome.wrong)
    assert found == (SHORT_JOBS, 0, [], 0, [])
    assert outcome.broken == {}


def test_a_seed_draws_the_same_storm_again():
    first, again = (random.Random(3) for _ in range(2))  # noqa: S311 (a test, not a secret)

    assert list(strikes(first, 60, HOSTS)) == list(strikes(again, 60, HOSTS))
    assert list(drills(first, 60, HOSTS, 20)) == list(drills(again, 60, HOSTS, 20))


def test_a_long_storm_strikes_every_part():
    drawn = {one.kind for one in strikes(random.Random(1), LONG_SECONDS, HOSTS)}  # noqa: S311

    assert drawn == set(KINDS)
    assert drawn > ON_JOBS
    assert "start_timeout" not in STRUCK

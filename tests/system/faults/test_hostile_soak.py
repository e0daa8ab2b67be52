"""A hostile host beside two good ones for minutes, on SQLite and on PostgreSQL.

``manage.py test -m soak`` runs ten minutes and 2,000 messages of each wire shape after a control
run; ``--hostile-seconds`` and ``--hostile-messages`` make it shorter, ``--soak-seed`` repeats it.
"""

from contextlib import ExitStack, closing

import pytest

from tests.system.faults import neighbours
from tests.system.faults import test_postgres_killed as killed
from tests.system.faults.attack import Attack

pytestmark = [pytest.mark.faults, pytest.mark.slow]
CONTROL_SHARE = 0.1  # of the time that the hostile host has
MOST_GROWTH = 1.10  # of the web process's memory


@pytest.fixture
def site(request, tmp_path):
    """A site that keeps everything in the database of the parameter."""
    with ExitStack() as stack:
        environment = {}
        if request.param == "postgresql":
            environment["DATABASE_URL"] = stack.enter_context(killed.serving()).url
        made = neighbours.begin(tmp_path / "site", **environment)
        stack.callback(made.stop)
        yield made


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "site",
    [
        "sqlite",
        pytest.param(
            "postgresql",
            marks=pytest.mark.skipif(
                not (killed.PROGRAMS / "initdb").exists(), reason="no PostgreSQL is installed"
            ),
        ),
    ],
    indirect=True,
)
def test_a_hostile_host_costs_good_ones_nothing(site, capsys, soak_seed, hostile_extent):
    seconds, num_messages = hostile_extent
    good = neighbours.Neighbours(site)
    with closing(Attack(site, neighbours.BAD, seed=soak_seed)) as attack:
        attack.greet()
        control = good.measure(seconds * CONTROL_SHARE, None)
        beside = good.measure(seconds, attack, num_messages)

    faults, refusals = good.faults(), site.desk.refusals(slug=neighbours.BAD)
    with capsys.disabled():
        print(f"\nhostile soak, seed {soak_seed}")  # noqa: T201
        print(neighbours.told("control", control))  # noqa: T201
        print(neighbours.told("beside", beside, attack))  # noqa: T201
        print(f"  in the logs: {faults}\n  refused, by {len(refusals)} reasons")  # noqa: T201
    assert beside.lost <= control.lost
    assert (beside.wrong, beside.events_missing) == ([], [])
    assert {code: num for code, num in beside.statuses.items() if code >= "500"} == {}
    assert {reason for reason in refusals if reason.endswith("in the server")} == set()
    before, after = beside.megabytes["web"]
    assert after <= MOST_GROWTH * before

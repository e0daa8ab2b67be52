"""schemathesis to its end against a running product, as a host, as people and as nobody.

``manage.py test -m soak`` runs every phase over every operation that a caller can reach. Each run
ends by itself; ``--soak-examples 3 --soak-share 40`` makes it shorter.
"""

import pytest

from tests.system.faults import contract

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(2400)]


@pytest.fixture
def site(tmp_path):
    """A product of one's own: a caller changes its team's limits and ends its jobs."""
    made = contract.begin(tmp_path)
    try:
        contract.document(made)
        yield made
    finally:
        made.stop()


@pytest.fixture
def send(site, soak_seed, soak_extent, capsys):
    """Run schemathesis as a caller, some of its fields changed, and check what it came to."""

    def send(name: str, **changes) -> contract.Run:
        contract.host_without_agent(site, "hal")
        found = next(one for one in contract.callers(site, "hal") if one.name == name)
        caller = found._replace(**soak_extent | changes)
        known = contract.known_things(site, "hal")
        done = contract.run(site, caller, known, soak_seed)
        with capsys.disabled():
            print(f"\nschemathesis as {name}, --soak-seed {soak_seed}: exit {done.code}")  # noqa: T201
            print(done.summary)  # noqa: T201
        assert done.code == 0, done.printed[-20_000:]
        assert done.statuses["429"] <= done.statuses.total() / 100
        if caller.own:
            assert contract.is_known(site, caller), "the rest of this run was of nobody"
        return done

    return send


@pytest.mark.parametrize("name", ["nobody", "token", "person", "host"])
def test_every_answer_is_one_that_the_document_names(send, name):
    done = send(name)

    refused = {"401", "403", "429"}
    unreached = [each for each, statuses in done.answers.items() if set(statuses) <= refused]
    assert (name == "nobody") or unreached == []


def test_a_rotation_answers_what_the_document_names(send):
    """Apart from the rest, because the calls after one that is taken are nobody's."""
    done = send("host", operations=("--include-path", contract.ROTATE), own="", share=1)

    assert done.statuses["422"]


def test_the_planners_operations_answer_what_the_document_names(send):
    """One in six of their 6,300 coverage cases of bodies; most are refused and not planned."""
    done = send("token", operations=("--include-path-regex", contract.OF_PLANNER), share=6)

    assert done.statuses["422"]

"""The agent carries out orders: builds as a process of its own, removes, says how it stands."""

import pytest

from runners.environments.builder import Keeper
from runners.messages import EnvironmentOrder
from tests.runners.environments.test_building import until


@pytest.fixture
def keeper(host_dir, store):
    made = Keeper(host_dir)
    yield made
    made.stop()


def order(action: str, order_id: str = "o1", name: str = "tiny") -> EnvironmentOrder:
    return EnvironmentOrder(name=name, action=action, order_id=order_id)


def carried_out(keeper: Keeper, wanted: EnvironmentOrder) -> None:
    """Repeat an order, as beats do, until the host says that it did it."""

    def is_done() -> bool:
        keeper.obey([wanted])
        return keeper.store.state(wanted.name).order_id == wanted.order_id

    until(is_done, "the order was not carried out")


def test_an_order_to_build_is_carried_out_and_not_again(keeper):
    carried_out(keeper, order("build"))
    until(lambda: not keeper.is_building, "the build did not end")

    keeper.obey([order("build")])

    assert keeper.store.state("tiny").stage == "ready"
    assert not keeper.is_building


def test_a_build_that_was_killed_is_begun_anew_while_it_is_asked_for(keeper):
    keeper.obey([order("build")])
    keeper.stop()
    assert keeper.store.state("tiny").order_id == ""

    keeper.obey([order("build")])

    assert keeper.is_building


def test_an_order_to_remove_frees_the_disk(host_dir, built):
    keeper = Keeper(host_dir)

    keeper.obey([order("remove")])

    state = keeper.store.state("tiny")
    assert (state.stage, state.order_id) == ("absent", "o1")


def test_an_environment_in_use_stays_and_the_order_says_why(host_dir, built):
    keeper = Keeper(host_dir)
    built.hold("tiny")

    keeper.obey([order("remove")])

    state = keeper.store.state("tiny")
    assert state.stage == "ready"
    assert state.words == "It was not removed: a job runs in the environment tiny."


def test_what_the_server_knows_is_not_said_again(keeper, store):
    first = keeper.news(everything=False)
    keeper.mark_reported()

    assert first[0].name == "main"
    assert keeper.news(everything=False) is None
    assert keeper.news(everything=True) == first


def test_an_order_for_an_unknown_environment_does_nothing(keeper, store):
    keeper.obey([order("build", name="nobody")])

    assert not (store.path / "nobody").exists()

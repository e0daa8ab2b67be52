"""The first seconds of a fresh installation: the host is there, its speed is not."""

import pytest

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def review(walk, host):
    """The demo's review page while the host's micro-benchmark still runs."""
    walker = walk("?preset=demo")
    host.microbench = {}
    host.save()
    return walker.page("review").content.decode()


def test_the_review_says_that_it_only_takes_a_moment(review):
    assert "In a moment" in review
    assert "about 15 seconds" in review


def test_the_review_asks_again_by_itself(review):
    assert 'data-reload-ms="3000"' in review


def test_nothing_can_be_launched_until_then(review):
    assert 'value="launch"' not in review


def test_a_measured_host_is_not_asked_again(walk):
    page = walk("?preset=demo").page("review").content.decode()

    assert "data-reload-ms" not in page
    assert 'value="launch"' in page

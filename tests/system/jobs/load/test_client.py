"""What one client notes of an answer, and that every way to fail is an error by name."""

from tests.system.jobs.load.replies import HEAD, TOKEN, seen


def test_an_endpoint_that_falls_silent_is_given_up_after_the_timeout():
    found = seen(HEAD + TOKEN, 4.0, hangs=True)

    assert found.error == "no whole answer within 4 s"
    assert found.first is not None

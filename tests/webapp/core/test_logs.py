"""What is logged of a failure names it, and holds nothing of what variables held."""

import structlog


def fail(credential: str) -> None:
    raise ValueError(f"refused a credential of {len(credential)} letters")


def test_a_traceback_names_the_failure_and_no_variables(capsys):
    try:
        fail("canary-credential")
    except ValueError:
        structlog.get_logger("test").warning("round failed", exc_info=True)

    told = capsys.readouterr().out
    assert "ValueError: refused a credential of 17 letters" in told
    assert "canary-credential" not in told.replace('fail("canary-credential")', "")

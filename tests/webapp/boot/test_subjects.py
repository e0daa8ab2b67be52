import pytest

from webapp.boot import subjects


@pytest.mark.parametrize(
    "subject",
    ["house: Start every process.", "webapp, runners: Agree on one field.", "Merge branch 'x'"],
)
def test_a_good_subject_has_no_fault(subject):
    assert subjects.fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("house: start every process.", "not of the form"),
        ("house: Start every process", "not of the form"),
        ("Start every process.", "not of the form"),
        ("house: " + "X" * 80 + ".", "at most 72"),
    ],
)
def test_a_bad_subject_is_explained(subject, fault):
    assert fault in subjects.fault(subject)


def test_the_hook_refuses_a_bad_message(tmp_path, capsys):
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("wip\n\nbody")

    assert subjects.main(message) == 1
    assert "'wip'" in capsys.readouterr().err

"""Every reason code speaks."""

import pytest

from runners.reasons import ERROR, FAILED, STOPPED, Reason
from webapp.jobs.models import JobState
from webapp.jobs.reasons import WORDS, final_state, words_for


@pytest.mark.parametrize("reason", list(Reason))
def test_every_code_has_a_sentence_and_a_next_step(reason):
    words = words_for(reason)
    assert words.sentence.endswith(".")
    assert words.next_step.endswith(".")


def test_no_two_codes_say_the_same():
    assert len({words.sentence for words in WORDS.values()}) == len(Reason)


@pytest.mark.parametrize(
    ("reasons", "state"),
    [
        (FAILED, JobState.FAILED),
        (STOPPED, JobState.STOPPED),
        (ERROR, JobState.ERROR),
        ({Reason.OK}, JobState.SUCCEEDED),
        ({Reason.QUEUE_TIMEOUT}, JobState.EXPIRED),
    ],
)
def test_the_class_of_a_reason_decides_the_final_state(reasons, state):
    assert {final_state(reason) for reason in reasons} == {state}


def test_every_code_belongs_to_exactly_one_class():
    classes = [FAILED, STOPPED, ERROR, {Reason.OK, Reason.QUEUE_TIMEOUT}]
    assert sorted(reason for group in classes for reason in group) == sorted(Reason)

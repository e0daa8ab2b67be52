"""Exit codes, signals and the host at the end, in words."""

import pytest

from webapp.jobs.postmortem import ending_words, host_rows, limit_words

GIB = 2**30


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"signal": 9}, "signal 9 (SIGKILL): the system or a person killed it"),
        ({"signal": 11}, "signal 11 (SIGSEGV): it touched memory that is not its own"),
        ({"signal": 63}, "Ended by signal 63."),
        ({"exit_code": 1}, "Exit code 1: an error that the program did not handle."),
        ({"exit_code": 137}, "a child was ended by signal 9 (SIGKILL)"),
        ({"exit_code": 42}, "Exit code 42, of its own meaning."),
        ({"exit_code": 255}, "Exit code 255, of its own meaning."),
        ({}, "No exit code: the process never reported one."),
        ({"exit_code": 1, "rank": 3}, "handle. Rank 3 reported its failure first."),
    ],
)
def test_an_ending_is_said_in_words(record, words):
    assert words in ending_words(record)


def test_a_limit_is_named_beside_how_long_it_ran():
    assert limit_words(3725, 3600) == (
        "It ran 1 h 2 min; 1 h was the longest that it was allowed."
    )


def test_the_host_at_the_end_says_what_it_could_read():
    rows = host_rows({"conditions": {"memory_available_bytes": GIB, "load": 2.5}})

    assert [label for label, _ in rows] == ["Memory free", "Load"]
    assert rows[0][1].startswith("1")


def test_its_gpus_and_the_drivers_reports_stand_beside():
    load = {"memory_used_bytes": 79 * GIB, "temperature_celsius": 71, "foreign_pids": [4242]}
    record = {"gpus": [load], "conditions": {"xids": ["Xid 79 on PCI:0000:44:00: fallen off"]}}

    rows = dict(host_rows(record))

    assert "71" in rows["GPU 0"]
    assert "also used by 4242" in rows["GPU 0"]
    assert rows["Driver reported"].startswith("Xid 79")


def test_a_host_that_said_nothing_has_no_rows():
    assert host_rows({}) == []

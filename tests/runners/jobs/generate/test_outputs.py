"""What is written stays written: through kills in the middle of a line, and other attempts."""

import pytest

from runners.jobs.generate.outputs import Journal, earlier_journals, read_records
from runners.jobspec import GenerateSpec
from tests.runners.jobs.tiny import TINY

RECORD = {"id": "1", "text": "ä\u2028b", "output_tokens": 2}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outputs.jsonl"


def test_answers_are_there_again_for_the_next_process(path):
    Journal(path, "d").add({3: dict(RECORD)})

    assert Journal(path, "d").records == {3: RECORD}


def test_a_line_that_a_kill_cut_off_is_dropped_and_written_anew(path):
    Journal(path, "d").add({0: dict(RECORD), 1: dict(RECORD)})
    path.write_bytes(path.read_bytes()[:-4])

    again = Journal(path, "d")
    again.add({1: dict(RECORD)})

    assert again.records == Journal(path, "d").records == {0: RECORD, 1: RECORD}


def test_answers_to_other_prompts_are_no_answers_to_these(path):
    Journal(path, "d").add({0: dict(RECORD)})

    assert Journal(path, "other").records == {}
    assert read_records(path, "d") is None


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]\n", b'{"digest'])
def test_a_journal_that_is_none_begins_anew(path, content):
    path.write_bytes(content)

    assert Journal(path, "d").records == {}


def test_what_an_earlier_attempt_wrote_is_taken_over_once(path, tmp_path):
    earlier = tmp_path / "earlier.jsonl"
    Journal(earlier, "d").add({0: {"text": "old"}, 1: {"text": "old"}})
    journal = Journal(path, "d")
    journal.add({0: {"text": "new"}})

    journal.take_over([earlier, tmp_path / "missing.jsonl"])

    assert journal.records == {0: {"text": "new"}, 1: {"text": "old"}}
    assert Journal(path, "d").records == journal.records


def test_only_attempts_of_the_same_job_are_looked_at(host, make_job):
    spec = GenerateSpec(model=TINY)
    host.attempt("of-j1", spec, job_id="j1")
    host.attempt("of-j2", spec, job_id="j2")

    found = [path.parent.parent.name for path in earlier_journals(make_job(spec))]

    assert found == ["of-j1"]

"""What ended a job: memory that grew, allocators' and ranks' last words, exit codes."""

from typing import Any

import pytest

from tests.runners.test_classification import DEVICE, MAIN
from tests.webapp.metrics.conftest import append
from webapp.jobs.memory_comparison import (
    OutOfMemoryFigures,
    facts_of,
    read_oom,
    story_of,
    story_sentence,
)
from webapp.jobs.models import Attempt, Job
from webapp.jobs.postmortem import (
    ending_words,
    first_failure,
    host_rows,
    limit_words,
    only_rank,
    split_by_rank,
)
from webapp.metrics.store import Point

pytestmark = pytest.mark.django_db(databases="__all__")

GIB = 2**30
PREDICTED = {"weights": 4 * GIB, "activations": 6 * GIB, "runtime_overhead": 1 * GIB}
HELD = {"held_weights_bytes": 4.0 * GIB, "held_runtime_overhead_bytes": 1.0 * GIB}


def tell(attempt: Attempt, source: str, *values: dict[str, float]) -> None:
    """Store points as the attempt's own; each source numbers its events apart here."""
    first = {"host": 1, "job": 1001, "gpu": 2001}[source]
    points = [
        Point(first + at, 1_700_000_000_000 + 1000 * at, source, each)
        for at, each in enumerate(values)
    ]
    append(attempt.pk, points)


def fail(attempt: Attempt, *lines: str, reason: str = "oom_host", **changes: Any) -> Job:
    """End a job as one does that had eleven GiB predicted and sixteen to have."""
    record = {"exit_code": 1, "last_lines": list(lines), "peak_rss_bytes": None}
    Attempt.objects.filter(pk=attempt.pk).update(exit_record=record, **changes)
    answer = {
        "per_device_peak_bytes": 11 * GIB,
        "capacity_bytes": 16 * GIB,
        "breakdown_bytes": PREDICTED,
    }
    Job.objects.filter(pk=attempt.job_id).update(
        state="failed", reason=reason, estimate={"memory": answer}
    )
    return Job.objects.get(pk=attempt.job_id)


def test_the_term_that_grew_is_named_with_both_figures(attempt):
    tell(attempt, "job", HELD)
    tell(attempt, "host", {"rss_bytes": 9.0 * GIB}, {"rss_bytes": 14.8 * GIB})
    job = fail(attempt)
    story = story_of(job)
    assert story.culprit.term == "activations"
    sentence = story_sentence(story).replace("\N{NO-BREAK SPACE}", " ")
    assert sentence == "Activations measured 9.80 GiB against 6.00 GiB predicted."


def test_what_was_refused_counts_as_needed(attempt):
    tell(attempt, "host", {"rss_bytes": 5.0 * GIB})
    story = story_of(fail(attempt, MAIN["torch"]))
    assert story.needed_bytes == 5 * GIB + 132426121216


def test_without_a_word_of_the_job_only_the_sum_is_compared(attempt):
    tell(attempt, "host", {"rss_bytes": 15.4 * GIB})
    job = fail(attempt)
    story = story_of(job)
    assert story.culprit is None
    assert {row.measured for row in story.rows} == {None}
    assert "1.40 times the predicted" in story_sentence(story)


def test_a_job_that_kept_to_its_prediction_lacked_room(attempt):
    tell(attempt, "host", {"rss_bytes": 10.0 * GIB})
    job = fail(attempt)
    assert "less memory was available than planned" in story_sentence(story_of(job))


def test_on_a_gpu_the_fullest_ones_memory_counts(attempt):
    tell(attempt, "host", {"rss_bytes": 2.0 * GIB})
    full = {"gpu0_memory_bytes": 3.0 * GIB, "gpu1_memory_bytes": 15.0 * GIB}
    tell(attempt, "gpu", full)
    story = story_of(fail(attempt, reason="oom_gpu"))
    assert (story.metric, story.peak_bytes) == (("gpu", "gpu1_memory_bytes"), 15 * GIB)


def test_the_allocators_own_capacity_beats_the_plans(attempt):
    tell(attempt, "gpu", {"gpu0_memory_bytes": 18.0 * GIB})
    story = story_of(fail(attempt, DEVICE["torch"], reason="oom_gpu"))
    assert story.capacity_bytes == int(31.47 * GIB)
    assert dict(facts_of(story.allocator))["Held by this process"].startswith("18.7")


def test_a_hosts_own_limit_is_what_there_was(attempt):
    tell(attempt, "host", {"rss_bytes": 7.0 * GIB})
    story = story_of(fail(attempt, facts={"job_memory_bytes": 8 * GIB}))
    assert story.capacity_bytes == 8 * GIB


def test_the_limit_for_the_next_plan_leaves_what_was_really_needed(attempt):
    tell(attempt, "host", {"rss_bytes": 22.0 * GIB})
    story = story_of(fail(attempt, reason="exit_nonzero"))
    assert story.ratio == pytest.approx(2.0)
    assert story.limit_bytes == pytest.approx(8 * GIB)


def test_the_limit_for_the_next_plan_is_never_above_the_room_that_there_was(attempt):
    tell(attempt, "host", {"rss_bytes": 5.5 * GIB})
    story = story_of(fail(attempt))
    assert story.limit_bytes == story.room_bytes == 5.5 * GIB


def test_a_job_that_was_refused_had_no_more_room_than_its_peak(attempt):
    tell(attempt, "host", {"rss_bytes": 5.5 * GIB})
    story = story_of(fail(attempt, "Unable to allocate 5.50 GiB for an array"))
    assert story.room_bytes == 5.5 * GIB
    assert story.limit_bytes == pytest.approx(5.5 * GIB)


def test_a_job_without_points_or_without_prediction_has_no_story(attempt, job):
    assert story_of(fail(attempt)) is None
    assert story_of(job) is None


# The figures in what allocators wrote; each text is a recorded one.


MIB = 2**20


def test_all_of_torchs_figures_are_read():
    said = read_oom([DEVICE["torch"]])
    assert said == OutOfMemoryFigures(
        requested_bytes=int(22.78 * GIB),
        capacity=int(31.47 * GIB),
        free=int(12.73 * GIB),
        in_use=int(18.73 * GIB),
        unallocated=int(9.35 * GIB),
    )


def test_what_the_last_allocation_wanted_is_read():
    for text, asked in [
        (DEVICE["torch before 2.5"], int(55.57 * GIB)),
        (DEVICE["torch 1"], 264 * MIB),
        (DEVICE["llama.cpp"], 144 * MIB),
        (MAIN["torch"], 132426121216),
        (MAIN["torch elsewhere"], 1981808640),
        (MAIN["rust"], 4456464),
        (DEVICE["vllm"], None),
    ]:
        assert read_oom(text.splitlines()).requested_bytes == asked, (text, asked)


def test_lines_without_figures_say_nothing_and_the_last_of_several_messages_counts():
    lines = ["Tried to allocate 1.00 GiB", "freed something", "Tried to allocate 2.00 GiB"]
    assert read_oom(lines).requested_bytes == 2 * GIB
    assert read_oom(["Traceback (most recent call last):"]) == OutOfMemoryFigures()
    assert read_oom([DEVICE["torch before 2.5"]]).capacity == 12 * GIB


# The last words of ranks told apart; what torchrun 2.13 really wrote when a rank failed.


STEPS = ["[rank 0] step 1", "[rank 1] step 1"]
KILLED = """\
W1121 22:02:22.362000 31933 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 31938 closing signal SIGTERM
E1121 22:02:22.364000 31933 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 31939) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
train.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_22:02:22
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 31938)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 31938
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_22:02:22
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 31939)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 31939
=======================================================""".splitlines()
RAISED = [
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "train.py", line 9, in <module>',
    "[rank1]: ValueError: bad thing",
]


def test_lines_are_kept_by_the_rank_that_wrote_them_and_torchruns_own_apart():
    said = split_by_rank([*STEPS, *RAISED, "no number"])
    assert said.by_rank[0] == ["step 1"]
    assert said.by_rank[1][-1] == "ValueError: bad thing"
    assert said.by_rank[None] == ["no number"]
    banner = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
    lines = ["[rank 2] step 1", "RANK_LOST: closed", *KILLED]  # one rank writes without a number
    for said, by_rank, report in (
        (split_by_rank(lines, is_one=True), {2: ["step 1", "RANK_LOST: closed"]}, KILLED),
        (split_by_rank([*STEPS, *KILLED]), {0: ["step 1"], 1: ["step 1"]}, KILLED),
        (split_by_rank(KILLED[2:]), {}, KILLED[2:]),  # its beginning was cut off
    ):
        assert (said.by_rank, said.report) == (by_rank, report)
    assert split_by_rank(["", "*" * 41, banner]).by_rank == {}


def test_the_root_cause_is_the_rank_that_failed_first_not_the_one_that_was_asked_to_end():
    failure = first_failure([*STEPS, *KILLED])
    assert (failure.rank, failure.exit_code) == (1, -9)
    assert failure.record == {"exit_code": None, "signal": 9}
    own = first_failure([line.replace(": -9 ", ": 1 ") for line in KILLED])
    assert own.record == {"exit_code": 1, "signal": None}
    for cut in ([], STEPS, KILLED[:-8], ["Root Cause (first observed failure):"]):
        assert first_failure(cut) is None, cut


def test_a_host_with_one_rank_is_known_by_its_lines():
    assert only_rank(split_by_rank(["[rank 3] step 1", *KILLED[:1]])) == 3
    assert only_rank(split_by_rank(STEPS)) is None


# Exit codes, signals and the host at the end, in words.


def test_an_ending_is_said_in_words():
    for record, words in [
        ({"signal": 9}, "signal 9 (SIGKILL): the system or a person killed it"),
        ({"signal": 11}, "signal 11 (SIGSEGV): it accessed invalid memory (segmentation fault)"),
        ({"signal": 63}, "Ended by signal 63."),
        ({"exit_code": 1}, "Exit code 1: an error that the program did not handle."),
        ({"exit_code": 137}, "a child was ended by signal 9 (SIGKILL)"),
        ({"exit_code": 42}, "Exit code 42, which the program defines itself."),
        ({"exit_code": 255}, "Exit code 255, which the program defines itself."),
        ({}, "No exit code: the process never reported one."),
        ({"exit_code": 1, "rank": 3}, "handle. Rank 3 reported its failure first."),
    ]:
        assert words in ending_words(record), (record, words)


def test_a_limit_is_named_beside_how_long_it_ran():
    assert limit_words(3725, 3600) == ("It ran 1 h 2 min; the limit was 1 h.")


def test_the_host_at_the_end_says_what_it_could_read_of_itself_and_its_gpus():
    rows = host_rows({"conditions": {"memory_available_bytes": GIB, "load": 2.5}})

    assert [label for label, _ in rows] == ["Memory free", "Load"]
    assert rows[0][1].startswith("1")

    load = {"memory_used_bytes": 79 * GIB, "temperature_celsius": 71, "foreign_pids": [4242]}
    record = {"gpus": [load], "conditions": {"xids": ["Xid 79 on PCI:0000:44:00: fallen off"]}}

    rows = dict(host_rows(record))

    assert "71" in rows["GPU 0"]
    assert "also used by 4242" in rows["GPU 0"]
    assert rows["Driver reported"].startswith("Xid 79")

    assert host_rows({}) == []

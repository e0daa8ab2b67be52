"""Which part of a job's memory outgrew its prediction."""

from typing import Any

import pytest

from tests.runners.test_classification import DEVICE, MAIN
from webapp.jobs.memory_terms import facts_of, story_of, story_sentence
from webapp.jobs.models import Attempt, Job
from webapp.metrics.store import Point, append

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

    assert "less room than the plan counted on" in story_sentence(story_of(job))


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
    assert dict(facts_of(story.said))["Held by this process"].startswith("18.7")


def test_a_hosts_own_limit_is_what_there_was(attempt):
    tell(attempt, "host", {"rss_bytes": 7.0 * GIB})

    story = story_of(fail(attempt, facts={"job_memory_bytes": 8 * GIB}))

    assert story.capacity_bytes == 8 * GIB


def test_the_limit_for_the_next_plan_leaves_what_was_really_needed(attempt):
    tell(attempt, "host", {"rss_bytes": 22.0 * GIB})

    story = story_of(fail(attempt, reason="exit_nonzero"))

    assert story.ratio == pytest.approx(2.0)
    assert story.limit_bytes == pytest.approx(8 * GIB)


def test_a_job_that_was_refused_had_no_more_room_than_its_peak(attempt):
    tell(attempt, "host", {"rss_bytes": 5.5 * GIB})

    story = story_of(fail(attempt, "Unable to allocate 5.50 GiB for an array"))

    assert story.room_bytes == 5.5 * GIB
    assert story.limit_bytes == pytest.approx(5.5 * GIB)


def test_a_job_without_points_or_without_prediction_has_no_story(attempt, job):
    assert story_of(fail(attempt)) is None
    assert story_of(job) is None

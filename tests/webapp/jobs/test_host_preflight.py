"""The host's own look: what it is asked to find, and where its answer leads."""

from datetime import timedelta

import pytest
from pydantic import ValidationError

from runners.jobspec import BenchmarkSpec, FolderModel, ServeSpec, TrainSpec
from runners.messages import PreflightCheck
from tests.webapp.conftest import GIB, claim, make_beat, make_job
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.heartbeats import host_beat
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.claims import needs_of
from webapp.jobs.models import Attempt, Command, Event, Job
from webapp.jobs.services import job_submit
from webapp.jobs.views import waiting_sentence

pytestmark = pytest.mark.django_db(databases="__all__")

FIT = PreflightCheck(name="disk", ok=True, sentence="50.0 GiB of disk are free.")
UNFIT = PreflightCheck(
    name="memory",
    ok=False,
    sentence="1.00 GiB of memory are available; the job needs 4.00.",
    remedy="Free 3.00 GiB there.",
    figures={"available_bytes": 1.0 * GIB},
)


def refuse(job: Job, **changes) -> None:
    """Have the job's host find itself unfit and give the attempt back."""
    attempt = Attempt.objects.get(pk=Job.objects.get(pk=job.pk).current_attempt_id)
    with pytest.raises(ConflictProblem, match="given back"):
        claim(attempt, **{"checks": (FIT, UNFIT), **changes})
    job.refresh_from_db()


def try_again(job: Job) -> None:
    """Let the rest of a failed try pass, and give the host its turn."""
    Event.objects.filter(subject=job.pk).update(at=now() - timedelta(minutes=1))
    allocate_pool(job.pool)
    job.refresh_from_db()


def test_a_beat_brings_home_what_the_attempt_needs(job, host):
    Job.objects.update(prediction={"peak_memory_bytes": {"value": 3 * GIB, "low": 2 * GIB}})

    (wanted,) = host_beat(host=host, beat=make_beat()).wanted

    assert (wanted.needs.kind, wanted.needs.memory_bytes) == ("train", 2 * GIB)


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ({"engine": "llamacpp", "max_concurrency": 4, "max_length": 2048}, 8192),
        ({"engine": "llamacpp", "max_length": 2048, "kv_cache_tokens": 6000}, 6000),
        ({"engine": "llamacpp"}, 0),
        ({"max_length": 2048}, 0),
    ],
)
def test_a_llama_cpp_endpoint_names_the_tokens_of_its_cache(team, alice, host, sizes, tokens):
    spec = ServeSpec(model=FolderModel(path="llama"), **sizes)
    job = job_submit(job=make_job(team, alice, host, spec=spec), by="alice")

    assert needs_of(job.current_attempt).context_tokens == tokens


def test_a_model_on_the_hosts_disk_is_among_the_needs(team, alice, host):
    spec = BenchmarkSpec(model=FolderModel(path="llama"), weight_dtype="int8")
    job = job_submit(job=make_job(team, alice, host, spec=spec), by="alice")

    needs = needs_of(job.current_attempt)

    assert (needs.model, needs.weight_dtype) == (FolderModel(path="llama"), "int8")


@pytest.mark.parametrize(("way", "compiles"), [("flex", True), ("flash", False)])
def test_attention_by_blocks_is_among_the_needs_with_a_compiler(team, alice, host, way, compiles):
    spec = TrainSpec(attention=way)
    job = job_submit(job=make_job(team, alice, host, spec=spec), by="alice")

    needs = needs_of(job.current_attempt)

    assert (needs.attention, needs.compiles) == (way, compiles)


def test_what_a_fit_host_found_stands_in_the_event_of_the_start(job):
    claim(job.current_attempt, checks=(FIT,))

    event = Event.objects.get(subject=job.pk, to_state="starting")
    assert event.detail["checks"][0]["sentence"] == FIT.sentence


def test_a_host_that_is_not_fit_gives_the_job_back_with_every_check(job):
    refuse(job)

    event = Event.objects.filter(subject=job.pk).last()
    assert (job.state, event.reason, event.actor) == ("queued", "preflight_failed", "host:box")
    assert [check["ok"] for check in event.detail["checks"]] == [True, False]
    assert event.detail["checks"][1]["figures"] == {"available_bytes": 1.0 * GIB}


def test_a_job_that_is_given_back_keeps_its_place_in_the_queue(job):
    queued_at = job.queued_at
    refuse(job)

    assert job.queued_at == queued_at


def test_the_attempt_that_was_given_back_is_over_and_not_claimable(job):
    first = job.current_attempt
    refuse(job)

    with pytest.raises(ConflictProblem):
        claim(first)

    assert Attempt.objects.get(pk=first.pk).ended_at is not None
    assert Command.objects.get(attempt=first).state == "dead"


def test_the_next_try_is_an_attempt_of_its_own(job):
    first = job.current_attempt_id
    refuse(job)

    try_again(job)

    assert job.state == "preflight"
    assert job.current_attempt_id != first


def test_the_third_unfit_try_ends_the_job(job):
    for _ in range(2):
        refuse(job)
        try_again(job)
    refuse(job)

    assert (job.state, job.reason) == ("error", "preflight_failed")


def test_a_job_that_was_given_back_says_what_is_short_and_no_more(job):
    refuse(job)

    assert UNFIT.sentence in waiting_sentence(job)
    assert FIT.sentence not in waiting_sentence(job)


def test_giving_back_twice_counts_once(job):
    first = job.current_attempt
    refuse(job)

    with pytest.raises(ConflictProblem):
        claim(first, checks=(UNFIT,))

    assert Event.objects.filter(subject=job.pk, reason="preflight_failed").count() == 1


def test_a_wrong_fence_gives_nothing_back(job):
    refuse(job, fence="0" * 32)

    assert job.state == "preflight"


def test_a_claimed_attempt_cannot_be_given_back(attempt):
    refuse(attempt.job)

    assert attempt.job.state == "starting"


@pytest.mark.parametrize(
    "check",
    [
        {"sentence": "x" * 601},
        {"sentence": "a\0b"},
        {"sentence": "", "figures": {"free_bytes": float("nan")}},
        {"sentence": "", "figures": {f"f{number}": 1.0 for number in range(17)}},
    ],
    ids=["long", "null byte", "no number", "many figures"],
)
def test_a_check_that_no_database_should_keep_is_refused(check):
    with pytest.raises(ValidationError):
        PreflightCheck.model_validate({"name": "memory", "ok": True, **check})


def test_the_environment_of_an_endpoints_engine_is_among_the_needs(team, alice, host):
    spec = ServeSpec(model=FolderModel(path="llama"), engine="llamacpp")
    job = job_submit(job=make_job(team, alice, host, spec=spec), by="alice")

    assert needs_of(job.current_attempt).environment == "llamacpp"

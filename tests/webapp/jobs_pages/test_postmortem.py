"""The post-mortem: why a job failed, on which of its hosts, and the ways on from there."""

import pytest
from django.utils.timezone import localtime

from runners.shared.messages import ExitRecord
from tests.runners.test_classification import MAIN
from tests.webapp.conftest import EXIT_OK, claim, client_of, make_microbench
from tests.webapp.jobs.gangs import make_gang, make_hosts, members, silence, start, tell
from tests.webapp.jobs.test_memory_terms import KILLED
from tests.webapp.jobs.test_memory_terms import tell as tell_metrics
from webapp.hosts.models import Host
from webapp.jobs.gangs import settle_all
from webapp.jobs.launching import plan_launch
from webapp.jobs.memory_comparison import stories_of, story_of
from webapp.jobs.models import Attempt, Job
from webapp.jobs.postmortem import part_ends
from webapp.jobs.services import job_stop
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import demo_document, draft_begin, stored_draft

pytestmark = pytest.mark.django_db(databases="__all__")

MIB = 2**20
HELD = {"held_weights_bytes": 48.0 * MIB, "held_runtime_overhead_bytes": 350.0 * MIB}


@pytest.fixture
def launched(team, alice, host) -> Job:
    """A demo training that was planned and launched, and that its host claimed."""
    plan = draft_begin(team=team, owner=alice, preset="demo", model=None)
    plan_compute(plan)
    job = plan_launch(plan=plan, by=alice)
    claim(job.current_attempt)
    return job


@pytest.fixture
def starved(launched) -> Job:
    """The same, refused an allocation at three times its predicted peak."""
    attempt = Attempt.objects.get(pk=launched.current_attempt_id)
    peak = 3.0 * launched.estimate["memory"]["per_device_peak_bytes"]
    tell_metrics(attempt, "job", HELD)
    tell_metrics(attempt, "host", {"rss_bytes": peak / 2}, {"rss_bytes": peak})
    conditions = {"memory_available_bytes": 40 * MIB, "xids": ["Xid 79 on PCI: fallen"]}
    attempt.exit_record = {
        "exit_code": 1,
        "last_lines": ["Training", MAIN["torch elsewhere"].replace("1981808640", "1048576")],
        "conditions": conditions,
    }
    attempt.save()
    Job.objects.filter(pk=launched.pk).update(state="failed", reason="oom_host")
    return Job.objects.get(pk=launched.pk)


def page(user, job, tab: str = "post-mortem/") -> str:
    text = client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("&#x27;", "'")


def test_the_page_says_what_happened_which_term_grew_and_the_last_words(starved, alice):
    text = page(alice, starved)

    assert "The host ran out of main memory" in text
    assert "Exit code 1: an error that the program did not handle." in text
    assert "Activations measured" in text

    assert "DefaultCPUAllocator: not enough memory" in text
    assert "1.00 MiB" in text  # what it was refused
    assert "40.0 MiB" in text  # what was free then
    assert "Xid 79 on PCI: fallen" in text

    assert 'class="layer term-activations"' in text
    assert 'class="capacity"' in text
    assert 'id="figure-memory-timeline-0"' in text


def test_the_tab_is_there_only_for_what_failed(starved, launched, alice, job):
    link = "post-mortem/"
    assert f"/jobs/{starved.pk}/{link}" in page(alice, starved, "")
    assert f"/jobs/{job.pk}/{link}" not in page(alice, job, "")
    assert "No post-mortem" in page(alice, job)


def test_a_job_that_did_not_fail_has_no_changes_and_one_that_never_ran_a_page(job, alice):
    assert "found no smaller change" in page(alice, job, "post-mortem/changes/")
    Job.objects.filter(pk=job.pk).update(
        state="error", reason="preflight_failed", host=None, current_attempt=None
    )
    assert "did not meet what the job needs" in page(alice, job)


def test_a_job_that_reached_its_limit_says_which(attempt, alice):
    Job.objects.filter(pk=attempt.job_id).update(
        state="failed", reason="max_duration", max_duration_seconds=3600
    )
    assert "the limit was 1 h" in page(alice, attempt.job)


def test_the_changes_that_would_have_fitted_are_proven_without_javascript_too(starved, alice):
    text = page(alice, starved, "post-mortem/changes/")
    assert "fits, " in text
    assert "Plan this" in text
    assert "no limit on" not in text.lower()
    assert "fits, " in page(alice, starved, "post-mortem/?changes=1")


def test_planning_again_keeps_to_what_was_measured(starved, bob):
    answer = client_of(bob).post(f"/jobs/{starved.pk}/replan/", {"how": "memory"})
    plan = Plan.objects.exclude(pk=starved.plan_id).get()
    limit = plan.request["constraints"]["per_device_peak_bytes"]["max"]

    assert answer.headers["Location"] == f"/plans/{plan.pk}/"
    assert (plan.owner, limit) == (
        bob,
        pytest.approx(plan.draft["hardware"]["memory_limit_gib"] * 2**30),
    )
    best = plan.answer["plans"][0]["memory"]["per_device_peak_bytes"]
    assert best <= limit


def test_a_job_that_failed_for_another_reason_gets_no_advice_about_memory(starved, alice):
    Job.objects.filter(pk=starved.pk).update(reason="model_or_data_missing")
    text = page(alice, starved)
    assert "Memory against prediction" in text
    for advice in ("measured memory need", "would have fitted", "The planner may then fill"):
        assert advice not in text
    client_of(alice).post(f"/jobs/{starved.pk}/replan/", {"how": "memory"})
    assert not Plan.objects.exclude(pk=starved.plan_id).exists()


def test_a_change_is_planned_by_one_press(starved, alice):
    client = client_of(alice)
    changes = client.get(f"/jobs/{starved.pk}/post-mortem/changes/").context["changes"]
    at = next(at for at, each in enumerate(changes) if "workload" in each.changes)
    client.post(f"/jobs/{starved.pk}/replan/", {"how": "memory", "change": str(at)})
    draft = Plan.objects.exclude(pk=starved.plan_id).get().draft
    wanted = changes[at].changes["workload"]["sequence_length"]
    assert draft["workload"]["sequence_length"] == wanted


def test_a_clone_with_changes_opens_the_wizard_on_a_copy(starved, alice):
    answer = client_of(alice).post(f"/jobs/{starved.pk}/replan/", {"how": "edit"})
    copy = Plan.objects.exclude(pk=starved.plan_id).get()
    assert answer.headers["Location"] == f"/plans/{copy.pk}/edit/workload/"
    assert copy.draft["workload"] == starved.plan.draft["workload"]
    assert copy.document.hardware.memory_limit_gib is None


def test_a_job_without_a_plan_is_not_planned_again(attempt, alice):
    job_stop(job=attempt.job, by="alice")
    client_of(alice).post(f"/jobs/{attempt.job_id}/replan/", {"how": "memory"})
    assert not Plan.objects.exists()


def test_lines_of_a_job_are_text_and_a_viewer_sees_no_buttons(starved, alice, vera):
    record = starved.current_attempt.exit_record | {"last_lines": ["<script>alert(1)</script>"]}
    Attempt.objects.filter(pk=starved.current_attempt_id).update(exit_record=record)
    assert "<script>alert(1)" not in page(alice, starved)
    assert "/replan/" in page(alice, starved)
    assert "/replan/" not in page(vera, starved)


# The post-mortem of a job on several hosts: who ended first, and what each of them said.


GIB = 2**30
NOON_MS = 1_800_000_000_000
ANSWER = {
    "per_device_peak_bytes": 11 * GIB,
    "capacity_bytes": 16 * GIB,
    "breakdown_bytes": {"weights": 4 * GIB, "activations": 6 * GIB, "runtime_overhead": 1 * GIB},
}


@pytest.fixture
def hosts(team):
    return make_hosts(team, 3)


@pytest.fixture
def gang(team, alice, hosts) -> Job:
    """A training that runs on three hosts."""
    job = make_gang(team, alice, hosts)
    for member in start(job):
        tell(member, ("log", {"stream": "stdout", "text": f"[rank {member.node_rank}] step 7\n"}))
    return job


def end(member, reason: str, at_ms: int, *lines: str, **changes) -> None:
    record = EXIT_OK | {"reason": reason, "exit_code": 1, "ended_at_ms": at_ms}
    record |= {"last_lines": lines, **changes}
    tell(member, ("exited", ExitRecord(**record).model_dump(mode="json")))


@pytest.fixture
def killed(gang) -> Job:
    """One rank was killed on the second host; the others lost it or were stopped."""
    first, second, third = members(gang)
    end(second, "exit_nonzero", NOON_MS, "[rank 1] step 8", *KILLED)
    end(first, "rank_lost", NOON_MS + 2000, "[rank 0] step 8", "RANK_LOST: rank 0 of 3: closed")
    end(third, "peer_ended", NOON_MS + 3000, "[rank 2] step 8", exit_code=None, signal=15)
    gang.refresh_from_db()
    return gang


def test_every_host_has_its_row_and_its_last_lines_the_first_one_named_with_its_rank(
    killed, alice
):
    at = localtime(part_ends(killed)[0].at)
    text = page(alice, killed)

    assert f"Ended first on Box 2, rank 1, {at.day} {at:%b, %H:%M:%S}." in text
    assert "Ended by signal 9 (SIGKILL): the system or a person killed it" in text

    parts = part_ends(killed)

    assert [part.host_name for part in parts] == ["Box 2", "Box 1", "Box 3"]
    assert [part.rank for part in parts] == [1, 0, 2]
    assert "A part of the job lost its connection to the others." in page(alice, killed)

    text = page(alice, killed)

    assert text.count('<pre class="log last" tabindex="0" aria-label="Box') == 3
    assert "RANK_LOST: rank 0 of 3: closed" in text

    (first,) = [part for part in part_ends(killed) if part.is_first]

    assert [rank.lines for rank in first.ranks] == [["step 8"]]
    assert "Error report of torchrun" in page(alice, killed)


def test_the_overview_shows_the_end_of_the_host_that_failed(killed, alice):
    text = page(alice, killed, "")
    assert "Exit code 1, on Box 2" in text
    assert "Root Cause (first observed failure)" in text


def test_a_clock_that_is_wrong_does_not_change_when_it_was(gang, hosts):
    Host.objects.filter(pk=hosts[1].pk).update(clock_offset_ms=60_000)
    end(members(gang)[1], "exit_nonzero", NOON_MS + 60_000)
    (first, *_) = part_ends(gang)
    assert first.at.timestamp() * 1000 == NOON_MS


@pytest.fixture
def cut_off(gang, hosts) -> Job:
    """Two hosts lost the third, which has been silent since."""
    first, second, _ = members(gang)
    end(first, "rank_lost", NOON_MS, "RANK_LOST: rank 0 of 3: closed")
    end(second, "rank_lost", NOON_MS + 50)
    silence(hosts[2], minutes=4)
    settle_all()
    gang.refresh_from_db()
    return gang


def test_a_silent_host_may_be_the_cause_and_its_last_lines_are_what_it_had_sent(cut_off, alice):
    text = page(alice, cut_off)
    assert "No end was reported by Box 3 (no heartbeat for 4 min" in text  # or a second more
    assert "This host may be the cause: the other hosts only lost their connection to it." in text
    silent = part_ends(cut_off)[-1]
    assert (silent.host_name, silent.at) == ("Box 3", None)
    assert [rank.lines for rank in silent.ranks] == [["step 7"]]


# Memory


@pytest.fixture
def starved_gang(gang) -> Job:
    """Every host told its memory; the third ran out."""
    Job.objects.filter(pk=gang.pk).update(estimate={"memory": ANSWER})
    first, second, third = members(gang)
    for member, peak in ((first, 9.0), (second, 10.0), (third, 15.0)):
        tell_metrics(member, "host", {"rss_bytes": 2.0 * GIB}, {"rss_bytes": peak * GIB})
    end(third, "oom_host", NOON_MS, "Unable to allocate 2.00 GiB for an array")
    end(first, "rank_lost", NOON_MS + 9)
    end(second, "peer_ended", NOON_MS + 10)
    return Job.objects.get(pk=gang.pk)


def test_the_memory_told_first_is_that_of_the_only_host_that_ran_out(starved_gang):
    assert [member.host.name for member, _ in stories_of(starved_gang)] == [
        "Box 3",
        "Box 2",
        "Box 1",
    ]
    assert story_of(starved_gang).needed_bytes == 17 * GIB
    assert [story.is_oom for _, story in stories_of(starved_gang)] == [True, False, False]


def test_each_host_has_a_chart_of_its_own_points_before_the_predicted_terms(starved_gang, alice):
    text = page(alice, starved_gang)
    assert "Memory of Box 3 against prediction" in text
    assert [f'id="figure-memory-timeline-{rank}"' in text for rank in range(3)] == [True] * 3
    assert text.count('class="layer term-activations"') == 3
    found = client_of(alice).get(f"/jobs/{starved_gang.pk}/post-mortem/").context["postmortem"]
    tops = [max(part.figure["data"][-1]["y"]) for part in (found.memory, *found.other_memory)]
    assert tops == [15.0, 10.0, 9.0]


# A job on several hosts that ran out of memory is planned again by one press.


REFUSED = 64 * 2**20
LINE = "Unable to allocate 64.0 MiB for an array"


@pytest.fixture
def starved_plan(team, alice) -> Job:
    """A plan over a pool of two hosts, launched; the second needed three times its prediction."""
    hosts = make_hosts(team, 2)
    Host.objects.update(microbench=make_microbench().model_dump(mode="json"))
    draft = stored_draft(demo_document(Host.objects.get(pk=hosts[0].pk)))
    draft["hardware"] |= {"host": None, "pool": hosts[0].pool_id}
    plan = Plan.objects.create(team=team, owner=alice, name="demo", draft=draft)
    plan_compute(plan)
    job = plan_launch(plan=plan, by=alice)
    predicted = job.estimate["memory"]["per_device_peak_bytes"]
    for member in start(job):
        is_second = member.node_rank == 1
        peak = predicted * (3.0 if is_second else 1.0)
        tell_metrics(member, "host", {"rss_bytes": peak / 2}, {"rss_bytes": peak})
    first, second = members(job)
    record = EXIT_OK | {"exit_code": 1, "last_lines": [LINE], "reason": "oom_host"}
    tell(second, ("exited", record))
    tell(first, ("exited", EXIT_OK | {"exit_code": 1, "reason": "rank_lost", "ended_at_ms": 9}))
    return Job.objects.get(pk=job.pk)


def test_the_page_offers_a_plan_for_the_same_pool_that_keeps_to_what_the_host_needed(
    starved_plan, alice
):
    assert (starved_plan.state, starved_plan.reason) == ("failed", "oom_host")
    text = client_of(alice).get(f"/jobs/{starved_plan.pk}/post-mortem/").content.decode()
    assert "Plan again with the measured memory need" in text
    assert "Memory of Box 2 against prediction" in text

    client_of(alice).post(f"/jobs/{starved_plan.pk}/replan/", {"how": "memory"})

    plan = Plan.objects.exclude(pk=starved_plan.plan_id).get()
    before = starved_plan.estimate["memory"]["per_device_peak_bytes"]
    limit = plan.request["constraints"]["per_device_peak_bytes"]["max"]
    needed = 3 * before + REFUSED
    assert limit == pytest.approx(3 * before / (needed / before), rel=0.01)
    assert plan.document.hardware.pool == starved_plan.pool_id
    assert plan.request["cluster"]["nodes"] == 2

"""What a team may have: at the launch, at the turn, and where operators change it."""

import re
from datetime import timedelta

import pytest

from runners.jobspec import TrainSpec
from tests.webapp.conftest import client_of, make_job
from webapp.accounts.models import Quota
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Device
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Allocation, Job
from webapp.jobs.quotas import limit_sentences, month_start, quota_usage, used_gpu_hours
from webapp.jobs.services import job_stop, job_submit
from webapp.jobs.waiting import lines_of, waiting_line
from webapp.wizard.drafts import draft_begin

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def quota(team):
    """Return a function that limits alice's team."""
    return lambda **limits: Quota.objects.update_or_create(team=team, defaults=limits)[0]


def use(hours: float) -> None:
    """Let what is held now have been held for so long, all of it this month."""
    Allocation.objects.update(taken_at=now() - timedelta(hours=hours))


def test_without_a_quota_only_places_in_queues_are_limited(team, alice):
    assert limit_sentences(team, quota_usage(team, alice.pk)) == [
        "you have 0 of at most 100 queued jobs"
    ]


def test_a_job_of_more_devices_than_ever_allowed_is_refused(submit, node_a, quota):
    quota(max_devices=2)
    with pytest.raises(InvalidProblem, match="asks for 3 devices and your team may hold 2"):
        submit(node_a, devices_per_host=3)
    assert not Job.objects.exists()


def test_a_team_at_its_limit_waits_with_the_figures_and_a_job_within_it_passes(
    submit, node_a, quota
):
    quota(max_devices=3)
    submit(node_a, devices_per_host=2)
    job = submit(node_a, devices_per_host=2)
    assert job.state == "queued"
    assert "uses 2 of the 3 devices that it may use at once" in waiting_line(job).sentence
    assert submit(node_a, devices_per_host=1).state == "preflight"


def test_jobs_of_one_round_count_against_the_limit_together(submit, node_a, quota):
    Device.objects.update(cordoned_at=now())
    jobs = [submit(node_a) for _ in range(4)]
    quota(max_devices=2)
    Device.objects.update(cordoned_at=None)
    assert allocate_pool(node_a.pool) == jobs[:2]
    assert Allocation.objects.filter(released_at=None).count() == 2


def test_a_release_lets_the_next_in(submit, node_a, quota):
    quota(max_devices=1)
    first, second = submit(node_a), submit(node_a)
    job_stop(job=first, by="alice")
    second.refresh_from_db()
    assert second.state == "preflight"


def test_another_teams_quota_limits_nobody_else(submit, node_a, quota, other_team, charlie):
    quota(max_devices=1)
    submit(node_a)
    node_a.pool.shared_with.add(other_team)
    job = make_job(other_team, charlie, None, pool=node_a.pool, devices_per_host=3)
    assert job_submit(job=job, by="charlie").state == "preflight"


def test_gpu_hours_are_counted_while_a_gpu_is_held(submit, node_a, team, time_machine):
    time_machine.move_to("2026-11-20T12:00:00Z", tick=False)
    submit(node_a, devices_per_host=2)
    use(3.0)
    assert used_gpu_hours(team) == pytest.approx(6.0)


def test_only_this_months_hours_count(submit, node_a, team, time_machine):
    time_machine.move_to("2026-11-02T00:00:00Z", tick=False)
    submit(node_a)
    use(24.0 * 10)
    expected = (now() - month_start()).total_seconds() / 3600
    assert used_gpu_hours(team) == pytest.approx(expected)


def test_a_processor_costs_no_gpu_hours(job, team):
    use(5.0)
    assert used_gpu_hours(team) == 0.0


def test_used_up_hours_refuse_the_next_launch_with_the_day_of_new_ones(
    submit, node_a, quota, time_machine
):
    time_machine.move_to("2026-11-20T12:00:00Z", tick=False)
    node_a.last_seen_at = now()
    node_a.save(update_fields=["last_seen_at"])
    quota(max_gpu_hours_per_month=10)
    submit(node_a, devices_per_host=4)
    use(3.0)
    with pytest.raises(ConflictProblem, match=r"used 12\.0 of 10 GPU-hours.*01 December"):
        submit(node_a)


def test_used_up_hours_hold_back_who_waits_already(submit, node_a, quota):
    submit(node_a, devices_per_host=4)
    job = submit(node_a)
    quota(max_gpu_hours_per_month=0)
    assert "GPU-hours this month" in waiting_line(job).sentence


def test_a_job_that_is_too_long_is_refused(submit, node_a, quota):
    quota(max_duration_seconds=3600)
    with pytest.raises(InvalidProblem, match="run for 2 h and a job of your team may run for 1 h"):
        submit(node_a, spec=TrainSpec(time_budget_seconds=7200))


def test_a_job_gets_its_teams_end_and_keeps_one_that_comes_sooner(submit, node_a, quota):
    quota(max_duration_seconds=3600)
    assert submit(node_a).max_duration_seconds == 3600
    assert submit(node_a, max_duration_seconds=600).max_duration_seconds == 600


def test_a_person_has_so_many_places_in_queues(submit, node_a, quota):
    quota(max_queued_per_user=2)
    submit(node_a, devices_per_host=4)
    for _ in range(2):
        submit(node_a)
    with pytest.raises(ConflictProblem, match="You have 2 jobs in queues and may have 2"):
        submit(node_a)


def test_shares_decide_between_teams(submit, node_a, quota, other_team, charlie):
    node_a.pool.shared_with.add(other_team)
    submit(node_a, devices_per_host=4)
    use(1.0)
    mine = submit(node_a)
    job = make_job(other_team, charlie, None, pool=node_a.pool, devices_per_host=1)
    theirs = job_submit(job=job, by="charlie")
    assert [line.job for line in lines_of(node_a.pool)] == [theirs, mine]


# The page

FORM = {"max_devices": "8", "max_gpu_hours_per_month": "", "max_duration_hours": "24"}
FORM |= {"max_queued_per_user": "50", "share": "2"}


def test_an_operator_changes_the_limits(olga, team):
    client_of(olga).post("/queue/limits/", FORM)
    stored = Quota.objects.get(team=team)
    assert (stored.max_devices, stored.max_gpu_hours_per_month) == (8, None)
    assert (stored.max_duration_seconds, stored.share) == (86_400, 2.0)
    assert Event.objects.get(kind="team.quota").actor == "olga"


def test_nobody_else_changes_them(alice, vera, team):
    for user in (alice, vera):
        assert client_of(user).post("/queue/limits/", FORM).status_code == 403, user
    assert not Quota.objects.exists()


def test_a_limit_out_of_bounds_is_refused_in_words(olga):
    for field, value, words in [
        ("share", "0", "The value is 0; it can be 0.01 to 1000."),
        ("max_devices", "-1", "is -1. It must be at least 0"),
        ("max_duration_hours", "9999999", "it can be 0.01 to 8784"),
        ("max_queued_per_user", "many", "Enter a whole number"),
        ("max_gpu_hours_per_month", "nan", "Enter a number"),
    ]:
        answer = client_of(olga).post("/queue/limits/", {**FORM, field: value})
        assert answer.status_code == 422, (field, value, words)
        assert words in answer.content.decode(), (field, value, words)


def test_everybody_sees_what_is_left(alice, submit, node_a, quota):
    quota(max_devices=8, max_gpu_hours_per_month=100, max_duration_seconds=7200)
    submit(node_a)
    page = client_of(alice).get("/queue/limits/").content.decode()
    words = re.sub(r"<[^>]+>", " ", page)
    assert "1 of 8 devices in use" in words
    assert "of 100 GPU-hours used this month" in words
    assert "a job ends after 2 h at the latest" in words


# Before the launch


@pytest.fixture
def review(host, team, alice) -> str:
    """The address of the last step of the demo's plan."""
    plan = draft_begin(team=team, owner=alice, preset="demo", model=None)
    return f"/plans/{plan.pk}/edit/review/"


def test_the_launch_form_says_what_is_left(alice, review, quota):
    quota(max_devices=8)
    assert "0 of 8 devices in use" in client_of(alice).get(review).content.decode()


def test_the_launch_form_refuses_before_the_button_what_the_launch_would(alice, review, quota):
    quota(max_devices=0)
    page = client_of(alice).get(review).content.decode()
    assert "The job asks for 1 device and your team may hold 0 at once" in page
    assert 'name="run"' not in page

"""Jobs of a scheduler that somebody else started: ordered, stored, shown beside a plan."""

import pytest

from runners.shared.facts import OtherJobFacts, SchedulerFacts
from runners.shared.messages import Beat
from runners.shared.observed import MOST_OBSERVED, ObservedJobReport
from tests.webapp.conftest import client_of, make_beat
from tests.webapp.plans.conftest import plan_of, trained  # noqa: F401 -- fixtures
from webapp.accounts.models import Membership
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Host
from webapp.jobs.models import ObservedJob
from webapp.jobs.observed_figures import rows_of
from webapp.jobs.observed_jobs import job_observe
from webapp.plans.models import PlanState
from webapp.plans.planning import plan_compute, plan_keep
from webapp.servers.models import ObservedServer
from webapp.servers.observed_jobs import server_of

pytestmark = pytest.mark.django_db(databases="__all__")
RUNNING = OtherJobFacts(
    job_id="17", name="theirs", user="bob", state="RUNNING", nodes="n1", num_nodes=1, devices=1,
    elapsed_seconds=75,
)  # fmt: skip


@pytest.fixture
def slurm(host) -> Host:
    scheduler = SchedulerFacts(time_limit_minutes=60, max_jobs=4).model_dump(mode="json")
    facts = host.facts | {"scheduler": scheduler}
    Host.objects.filter(pk=host.pk).update(kind="slurm", facts=facts)
    host.refresh_from_db()
    return host


def report(**changes: object) -> ObservedJobReport:
    return ObservedJobReport(**{"job_id": "17", "facts": RUNNING, **changes})


def test_a_host_is_asked_until_the_end_is_known_and_what_it_reports_is_shown(slurm, olga):
    row = job_observe(host=slurm, by=olga, job_id=" 17 ", plan=None)
    assert job_observe(host=slurm, by=olga, job_id="17", plan=None).pk == row.pk
    assert host_beat(host=slurm, beat=make_beat()).observe == ("17",)
    told = report(log=("step 1",), figures={"loss": 2.5}, log_path="/home/bob/out")
    other = report(job_id="99")
    assert host_beat(host=slurm, beat=make_beat(observed=(told, other))).observe == ("17",)
    assert ObservedJob.objects.get().name == "theirs (17)"
    page = client_of(olga).get(f"/observed-jobs/{row.pk}/").content.decode()
    for words in ("theirs (17)", "RUNNING", "step 1", "/home/bob/out", "1 min 15 s", "never ends"):
        assert words in page, words
    assert "theirs (17)" in client_of(olga).get(f"/hosts/{slurm.slug}/").content.decode()
    silent = ObservedJobReport(job_id="17", problem="the scheduler does not tell: away")
    assert host_beat(host=slurm, beat=make_beat(observed=(silent,))).observe == ("17",)
    page = client_of(olga).get(f"/observed-jobs/{row.pk}/").content.decode()
    assert "away" in page
    assert "step 1" in page  # what was known stays
    ended = report(
        facts=RUNNING.model_copy(update={"state": "FAILED"}), has_ended=True, exit_code=3
    )
    assert host_beat(host=slurm, beat=make_beat(observed=(ended,))).observe == ()
    assert "Exit code" in client_of(olga).get(f"/observed-jobs/{row.pk}/").content.decode()
    slurm.refresh_from_db()
    assert "observed" not in slurm.last_beat
    assert client_of(olga).post(f"/observed-jobs/{row.pk}/remove/").status_code == 302
    kinds = list(Event.objects.filter(subject=row.pk).values_list("kind", flat=True))
    assert kinds == ["observed.added", "observed.removed"]


def test_sites_of_before_get_no_field_that_they_do_not_know():
    assert "observed" not in Beat.model_dump(make_beat(), mode="json")


def test_what_cannot_be_observed_is_refused_with_the_way_out(slurm, host, olga, plan_of):  # noqa: F811
    for job_id, words in [("", "no id of a job"), ("é", "no id"), ("17_[0-9]", "several tasks")]:
        with pytest.raises(InvalidProblem, match=words):
            job_observe(host=slurm, by=olga, job_id=job_id, plan=None)
    with pytest.raises(InvalidProblem, match="saved plan"):
        job_observe(host=slurm, by=olga, job_id="17", plan=plan_of("pretrain", "demo"))
    for number in range(MOST_OBSERVED):
        job_observe(host=slurm, by=olga, job_id=str(number), plan=None)
    with pytest.raises(ConflictProblem, match="Remove one"):
        job_observe(host=slurm, by=olga, job_id="17x", plan=None)
    Host.objects.filter(pk=host.pk).update(kind="agent")
    host.refresh_from_db()
    with pytest.raises(InvalidProblem, match="by its address"):
        job_observe(host=host, by=olga, job_id="17", plan=None)


def test_the_job_is_joined_with_the_observed_server_at_its_address(slurm, olga, team):
    row = job_observe(host=slurm, by=olga, job_id="17", plan=None)
    host_beat(host=slurm, beat=make_beat(observed=(report(addresses=("http://n1:8000",)),)))
    row.refresh_from_db()
    assert server_of(row) is None
    server = ObservedServer.objects.create(team=team, name="there", url="http://10.0.0.7:8000")
    assert server_of(row) is None  # another machine's, as far as is known
    ObservedServer.objects.update(host=slurm)
    assert server_of(row) == server
    exact = ObservedServer.objects.create(team=team, name="exact", url="http://n1:8000")
    assert server_of(row) == exact
    page = client_of(olga).get(f"/observed-jobs/{row.pk}/").content.decode()
    assert f"/servers/{exact.pk}/" in page
    served = client_of(olga).get(f"/api/v1/observed-jobs/{row.pk}").json()
    assert (served["server"], served["addresses"]) == (exact.pk, ["http://n1:8000"])


def test_figures_stand_beside_what_the_plan_says(slurm, olga, plan_of):  # noqa: F811
    draft = plan_of("pretrain", "demo")
    plan_compute(draft)
    plan = plan_keep(draft, by="olga")
    assert plan.state == PlanState.COMPUTED
    client = client_of(olga)
    sent = {"job_id": "17", "plan": plan.pk}
    answer = client.post(f"/hosts/{slurm.slug}/observe/", sent, follow=True)
    row = ObservedJob.objects.get()
    assert answer.redirect_chain[-1][0] == f"/observed-jobs/{row.pk}/"
    figures = {"loss": 2.5, "step_seconds": 0.5, "device_tokens_per_second": 100.0}
    host_beat(host=slurm, beat=make_beat(observed=(report(figures=figures),)))
    row.refresh_from_db()
    shown = {each.name: each for each in rows_of(row)}
    assert (shown["loss"].predicted, shown["devices"].ratio) == (None, 1.0)
    assert shown["tokens_per_second"].measured == 100.0
    said = shown["step_seconds"].predicted
    assert shown["step_seconds"].ratio == pytest.approx(0.5 / said.value)
    assert said.low < said.value < said.high
    detail = client.get(f"/api/v1/observed-jobs/{row.pk}").json()
    step = next(each for each in detail["figures"] if each["name"] == "step_seconds")
    assert (step["measured"], step["predicted"]) == (0.5, said.value)
    page = client.get(f"/observed-jobs/{row.pk}/").content.decode()
    assert "calibrate nothing" in page
    Membership.objects.filter(user=olga).update(role="viewer")
    assert client_of(olga).post(f"/hosts/{slurm.slug}/observe/", sent).status_code == 403

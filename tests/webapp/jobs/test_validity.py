"""A run teaches what it can: invalid figures are left out by name, and bits return."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, client_of, make_job
from tests.webapp.jobs.test_finish import plan_request
from tests.webapp.jobs.undone import undone
from tests.webapp.machines import GPU, host_of
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.accuracy import accuracy_for
from webapp.jobs.allocation import attempts_make
from webapp.jobs.calibration import recalibrate
from webapp.jobs.calibration_effect import calibration_effect_of
from webapp.jobs.gangs import devices_take
from webapp.jobs.measurement_decisions import measurement_decide
from webapp.jobs.models import Allocation, Attempt, CalibrationChange, Job, Measurement
from webapp.jobs.results import evidence_of, invalid_reason
from webapp.jobs.services import job_submit
from webapp.plans.planning import estimate_as_planned

pytestmark = pytest.mark.django_db(databases="__all__")
BUSY = {"usable_cores": 2.0, "taken_cores": 1.8}  # 0.2 cores were left
QUIET = {"usable_cores": 2.0, "taken_cores": 0.1}


@pytest.fixture
def predicted(host) -> float:
    """The step that the planner foretells of this host without any factor."""
    from planner.specs.estimate import PlanRequest
    from planner.specs.workload import Strategy

    request = PlanRequest.model_validate(plan_request(host))
    return estimate_as_planned(request, request.workload, Strategy()).performance.step_seconds


@pytest.fixture
def ran(team, alice, host, predicted, django_capture_on_commit_callbacks):
    """Let a training run to its end: so many times its predicted step, under such conditions."""

    def run(ratio: float = 1.0, conditions: dict | None = None, **progress) -> Job:
        prediction = {"step_seconds": {"value": predicted, "unit": "seconds"}}
        prediction["peak_memory_bytes"] = {"value": 1e9, "unit": "bytes"}
        job = make_job(team, alice, host, prediction=prediction, name=f"{ratio} times")
        Job.objects.filter(pk=job.pk).update(plan_request=plan_request(host))
        job.refresh_from_db()
        job = job_submit(job=job, by="alice")
        claim(job.current_attempt, claim_id=job.pk)
        attempt = Attempt.objects.get(pk=job.current_attempt_id)
        events = [("started", STARTED), *([("progress", progress)] if progress else [])]
        events.append(("result", {"measured": {"step_seconds": predicted * ratio}}))
        events[-1][1]["measured"]["peak_memory_bytes"] = 1e9
        events.append(("exited", EXIT_OK | {"conditions": conditions or QUIET}))
        with django_capture_on_commit_callbacks(execute=True):
            events_accept(host=job.host, batch=batch_of(attempt, *events))
        return Job.objects.get(pk=job.pk)

    return run


def factors(host: Host) -> dict:
    return Host.objects.get(pk=host.pk).calibration["factors"]


def step(host: Host) -> dict | None:
    """The factor of a training step's dominating class, without memory's."""
    return next((each for name, each in factors(host).items() if name != "memory"), None)


def row_of(job: Job, metric: str = "step_seconds") -> Measurement:
    return Measurement.objects.get(job=job, metric=metric)


def page(user, job: Job) -> str:
    return " ".join(client_of(user).get(f"/jobs/{job.pk}/").content.decode().split())


# The sample


def test_a_run_on_a_busy_host_moves_no_prediction_and_its_host_names_it(ran, host, alice):
    """43.5 tokens a second became 7.55 after one run with 0.2 cores left."""
    job = ran(43.5 / 7.55, BUSY)

    row = row_of(job)
    assert row.is_excluded
    assert row.invalid_reason.startswith("Other programs used 1.8 of the 2 cores")
    assert not row_of(job, "peak_memory_bytes").is_excluded
    assert step(host) is None
    assert accuracy_for(alice).by_kind == [("memory", 0.0)]
    text = client_of(alice).get(f"/hosts/{host.slug}/").content.decode()
    assert "Latest measurements excluded from calibration" in text
    assert f"/jobs/{job.pk}/#taught" in text


def test_its_page_says_why_it_changed_nothing(ran, alice):
    job = ran(43.5 / 7.55, BUSY)
    CalibrationChange.objects.filter(job=job).update(
        before={}, after={}, why=row_of(job).invalid_reason
    )
    text = page(alice, job)
    assert "This run changed no calibration factor. Other programs used 1.8 of the 2 cores" in text
    assert "<strong>left out</strong>" in text


def test_a_figure_without_a_prediction_goes_with_its_kind(ran, host):
    """Nothing was predicted for the step, so that it has no row; the run is as busy."""
    job = ran(3.0, BUSY)
    Measurement.objects.filter(job=job, metric="step_seconds").update(metric="tokens_per_second")
    recalibrate(host)
    assert step(host) is None


# Each kind of evidence


def test_what_disturbs_a_time_much_is_named_and_leaves_memory_alone():
    for evidence, words in [
        ({"usable_cores": 4.0, "taken_cores": 1.0}, "used 1.0 of the 4 cores"),
        ({"overlap_ratio": 0.5, "overlap_job": "Other"}, "Other ran on the same device for 50 %"),
        (
            {"foreign_pids": [77, 78]},
            "Another program used its GPU when it ended (process 77, 78)",
        ),
        ({"heat_throttled_ratio": 0.3}, "Heat slowed the processor for 30 %"),
        ({"slowed_by": ["heat (hardware)"]}, "Its GPU was slowed when it ended: heat (hardware)"),
        ({"clock_jump_seconds": 3600.0}, "The host's clock was set by 1 h"),
        ({"suspended_seconds": 90.0}, "The host slept for 1 min 30 s"),
        ({"steps": 1}, "The run has 1 step; 5 are needed"),
        ({"tokens": 4}, "The run generated 4 tokens per prompt; 8 are needed"),
    ]:
        assert words in invalid_reason("tpot_seconds", evidence).replace("\xa0", " "), (
            evidence,
            words,
        )
        assert invalid_reason("peak_memory_bytes", evidence) == "", (evidence, words)

    for evidence in [
        {},
        QUIET,
        {"usable_cores": 64.0, "taken_cores": 20.0, "has_gpus": True},
        {"clock_jump_seconds": 0.6, "steps": 5, "tokens": 8, "overlap_ratio": 0.01},
    ]:
        assert invalid_reason("step_seconds", evidence) == "", evidence


def test_a_run_of_three_steps_shows_too_little(ran):
    job = ran(1.5, done=3.0, total=3.0, unit="steps")
    assert "The run has 3 steps; 5 are needed" in row_of(job).invalid_reason


def test_another_job_of_ours_on_the_same_device_is_contention(ran, host, alice, team):
    first = ran(1.2)
    attempt = first.current_attempt
    hour = timedelta(hours=1)
    Attempt.objects.filter(pk=attempt.pk).update(started_at=now() - hour, ended_at=now() + hour)
    Allocation.objects.filter(attempt=attempt).update(
        taken_at=now() - hour, released_at=now() + hour
    )

    second = row_of(ran(2.0))

    assert second.invalid_reason.startswith("1.2 times ran on the same device")


def attempt_of_an_hour(team, owner, host) -> Attempt:
    """An attempt that held every device of its host for the last hour."""
    (attempt,) = attempts_make(job=make_job(team, owner, host), gang=[(host, ())])
    devices_take(attempt=attempt, devices=host.devices.all())
    start, end = now() - timedelta(hours=1), now()
    Allocation.objects.filter(attempt=attempt).update(taken_at=start, released_at=end)
    Attempt.objects.filter(pk=attempt.pk).update(started_at=start, ended_at=end)
    return Attempt.objects.get(pk=attempt.pk)


def test_a_later_claim_of_another_team_makes_nothing_invalid_and_no_job_of_theirs_is_named(
    team, other_team, alice, charlie
):
    ours = host_of(team, "ours", gpus=[GPU], machine_id=None)
    theirs = host_of(other_team, "theirs", gpus=[GPU], machine_id=None)
    first = attempt_of_an_hour(team, alice, ours)
    claimed = attempt_of_an_hour(other_team, charlie, theirs)
    for attempt, share in [(first, 0.0), (claimed, 1.0)]:
        found = evidence_of(attempt.job, attempt)
        assert found["has_gpus"]
        assert found["overlap_ratio"] == pytest.approx(share, abs=0.01)
        assert found["overlap_job"] == ""


# What a run changes


def test_the_page_says_what_a_run_changed(ran, alice):
    ran(1.3)
    ran(1.35)
    job = ran(1.3)
    (move,) = [one for one in calibration_effect_of(job).moves if "the training step" in one.name]
    assert move.num_runs == 3
    assert f"{move.before} → {move.after}</span>, based on 3 runs" in page(alice, job)


def test_a_figure_that_counts_is_not_said_to_be_left_out_because_no_factor_changed(ran, alice):
    job = ran(1.3)
    CalibrationChange.objects.filter(job=job).update(
        before={}, after={}, why="Its measurements agree with the earlier factors."
    )
    effect = calibration_effect_of(job)
    assert "agree" in effect.why
    assert {effect.why_not(each.row.metric) for each in effect.rows} == {""}
    assert "ot counted:" not in page(alice, job)

    metric = effect.rows[0].row.metric
    Measurement.objects.filter(job=job, metric=metric).update(held_back="far from earlier runs")
    held = calibration_effect_of(job)
    assert {each.row.metric: held.why_not(each.row.metric) for each in held.rows} == {
        each.row.metric: "Far from earlier runs." if each.row.metric == metric else ""
        for each in held.rows
    }
    Job.objects.filter(pk=job.pk).update(state="failed")
    failed = calibration_effect_of(Job.objects.get(pk=job.pk))
    assert failed.why_not(metric) == "The job did not succeed."


def test_a_poisoned_run_is_caught_and_said(ran, host, alice):
    def of_times() -> dict[str, float]:
        return {name: each["factor"] for name, each in factors(host).items() if name != "memory"}

    for ratio in (1.3, 1.35, 1.3):
        ran(ratio)
    before = of_times()
    for poison in (0.1, 10.0):
        with undone(poison):
            job = ran(poison)
            assert of_times() == before
            assert row_of(job).held_back
            assert "held back" in page(alice, job)


def test_the_first_run_moves_a_factor_by_a_third_at_most(ran, host):
    ran(2.0)
    assert 1.0 < step(host)["factor"] < 1.37


# People


def test_an_operator_excludes_and_includes_and_the_bits_return(ran, host, olga):
    for ratio in (1.3, 1.5, 1.2):
        job = ran(ratio)
    before = Host.objects.get(pk=host.pk).calibration
    row = row_of(job)
    address = f"/jobs/{job.pk}/measurements/{row.pk}/decide/"

    client_of(olga).post(address, {"decision": "excluded", "reason": "a backup ran"})
    between = Host.objects.get(pk=host.pk).calibration
    client_of(olga).post(address, {"decision": "included", "reason": "it ran elsewhere"})

    assert between != before
    assert Host.objects.get(pk=host.pk).calibration == before


def test_any_order_of_decisions_ends_in_the_same_bits(ran, host):
    """The property on the real rows; tests/planner holds it over many more orders."""
    rows = [row_of(ran(ratio)) for ratio in (1.3, 1.5, 0.8, 1.2)]
    before = Host.objects.get(pk=host.pk).calibration
    for decision, order in (("excluded", (2, 0, 3, 1)), ("included", (1, 2, 3, 0))):
        for row in (rows[at] for at in order):
            measurement_decide(measurement=row, decision=decision, reason="why", by="olga")
    assert Host.objects.get(pk=host.pk).calibration == before


def test_a_decision_is_audited_with_its_reason(ran, olga):
    row = row_of(ran(1.3))
    measurement_decide(measurement=row, decision="excluded", reason=" a  backup ran ", by="olga")
    event = Event.objects.get(kind="measurement.excluded")
    assert (event.actor, event.subject) == ("olga", row.job_id)
    assert event.detail["reason"] == "a backup ran"
    change = CalibrationChange.objects.get(cause="excluded")
    assert (change.actor, change.after.keys() - {"memory"}) == ("olga", set())


def test_a_person_may_have_an_invalid_one_count(ran, host, olga):
    job = ran(1.5, BUSY)
    row = row_of(job)
    measurement_decide(measurement=row, decision="included", reason="it was ours", by="olga")
    assert step(host)["n"] == 1
    assert "Included by olga: it was ours" in page(olga, job)


def test_a_decision_wants_a_reason(ran, olga):
    for reason in ["", "   ", "x" * 201]:
        with undone(reason):
            row = row_of(ran(1.3))
            address = f"/jobs/{row.job_id}/measurements/{row.pk}/decide/"

            answer = client_of(olga).post(
                address, {"decision": "excluded", "reason": reason}, follow=True
            )

            assert "“Reason”" in answer.content.decode()
            assert not row_of(row.job).is_excluded


def test_two_operators_do_not_overwrite_each_others_reason(ran, olga):
    row = row_of(ran(1.3))
    measurement_decide(measurement=row, decision="excluded", reason="a backup ran", by="otto")
    address = f"/jobs/{row.job_id}/measurements/{row.pk}/decide/"
    answer = client_of(olga).post(address, {"decision": "excluded", "reason": "mine"}, follow=True)
    assert "excluded already, by otto: a backup ran" in answer.content.decode()


def test_only_operators_decide(ran, request):
    for who in ["vera", "bob"]:
        with undone(who):
            row = row_of(ran(1.3))
            address = f"/jobs/{row.job_id}/measurements/{row.pk}/decide/"
            user = request.getfixturevalue(who)
            answer = client_of(user).post(address, {"decision": "excluded", "reason": "mine"})
            assert answer.status_code == 403
            assert "decide/" not in page(user, row.job)


def test_a_measurement_that_arrives_while_factors_are_computed_is_in_them(ran, host, monkeypatch):
    """Whoever computes last may have begun first: it begins anew."""
    from webapp.jobs import calibration

    rows = [row_of(ran(ratio)) for ratio in (1.3, 1.5)]
    compute, between = calibration.calibrate_host, []

    def slow(measurements):
        found = compute(measurements)
        if not between:
            between.append(True)
            Measurement.objects.filter(pk=rows[1].pk).update(is_excluded=True)
        return found

    monkeypatch.setattr(calibration, "calibrate_host", slow)
    recalibrate(host)

    assert step(host)["n"] == 1


def test_a_run_whose_figures_all_count_for_nothing_says_the_first_reason(ran, host):
    job = ran(2.0, BUSY, done=2.0, total=2.0, unit="steps")
    Measurement.objects.filter(job=job, metric="peak_memory_bytes").update(is_excluded=True)
    recalibrate(host)
    recalibrate(host, job=job, cause="run")
    said = CalibrationChange.objects.filter(job=job).last().why
    assert said.startswith("Other programs used 1.8 of the 2 cores")

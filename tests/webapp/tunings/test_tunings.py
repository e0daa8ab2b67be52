"""Tunings: candidates of a plan, trials one after another, and the version with the best."""

import re
from datetime import timedelta
from html import unescape

import pytest
from django.db import OperationalError, connection

from planner import api
from runners.jobspec.compress import LoadReport, LoadRow
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.plans.tuning import TuningOptions
from runners.shared.tuning import NORMAL_80
from tests.webapp.conftest import (
    EXIT_OK,
    batch_of,
    claim,
    client_of,
    make_beat,
    make_microbench,
)
from tests.webapp.jobs.test_finish import finish
from webapp.accounts.models import Membership, Quota
from webapp.agents.dispatch import allocate_all
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import BusyProblem, InvalidProblem, Problem
from webapp.jobs import launching, series
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import Job, JobState
from webapp.jobs.series import series_delete, series_stop
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute, plan_keep
from webapp.plans.saving import draft_begun_from, listed_plans
from webapp.tunings import services
from webapp.tunings.listing import view_of
from webapp.tunings.models import Tuning
from webapp.tunings.planning import tuning_plan
from webapp.tunings.services import (
    advance_all,
    candidates_of,
    search_of,
    tuning_advance,
    tuning_start,
)
from webapp.wizard.documents import document_parse, draft_of_document

pytestmark = pytest.mark.django_db(databases="__all__")
TRAINING = {"goal": "pretrain", "model": "demo", "workload": {"global_batch_size": 8}}
SERVING = {
    "goal": "serve",
    "model": "Qwen/Qwen3-0.6B",
    "workload": {"concurrency": 8, "input_tokens": 256, "output_tokens": 64},
}


@pytest.fixture
def host(host):
    """A host with units for bf16: both formats of 16 and 32 bits are worth a trial."""
    bench = make_microbench()
    rates = {"fp32": 60e9, "bf16": 90e9, "int8": 50e9}
    cpu = bench.devices[0].model_copy(update={"flops_per_second": rates})
    later = {"devices": (cpu,), "measured_at_ms": bench.measured_at_ms + 1}
    host_beat(host=host, beat=make_beat(microbench=bench.model_copy(update=later)))
    host.refresh_from_db()
    return host


def load_report(clients: int, rate: float, ttft: float) -> dict:
    """Return the report of a load test whose rates vary by 10 %."""
    measured = {"tokens_per_second": rate, "ttft_p95_seconds": ttft, "tpot_p95_seconds": 0.01}
    row = LoadRow(
        point=clients,
        requests=24,
        failed=0,
        repetitions=3,
        duration_seconds=9.0,
        measured=measured,
        interval={"tokens_per_second": (0.9 * rate, 1.1 * rate)},
    )
    fields = {"arrivals": "closed", "prompt_tokens": 256, "output_tokens": 64, "places": clients}
    return LoadReport(**fields, seed=17, rows=(row,)).model_dump(mode="json")


def planned(team, alice, document) -> Plan:
    draft, _ = draft_of_document(team, alice, document_parse(document))
    draft.save(force_insert=True)
    plan_compute(draft)
    return plan_keep(draft, by="alice")


def started(team, alice, document=TRAINING, **options) -> Tuning:
    plan = planned(team, alice, document)
    return tuning_start(team=team, by=alice, plan=plan, options=TuningOptions(**options))


def trials(tuning: Tuning) -> list[tuple[int, str]]:
    return list(tuning.trials.values_list("candidate", "ending"))


def speed_of(spec: dict) -> float:
    """Return the tokens per second of a host that compiles well and likes micro-batches of 4."""
    by_batch = {8: 1000.0, 4: 1100.0}.get(spec["micro_batch_size"], 900.0)
    recomputes = spec["activation_recomputation"] == "full"
    return by_batch * (1.5 if spec["compiled"] else 1.0) * (0.8 if recomputes else 1.0)


def end(
    tuning: Tuning, speed=speed_of, reasons=lambda _spec: "ok", seconds=20.0, rounds=40
) -> Tuning:
    """End the job of each trial as a host would, until the tuning has ended."""
    for _ in range(rounds):
        allocate_all()
        trial = tuning.trials.filter(state="running").last()
        if trial is None:
            break
        job = trial.job
        assert job.state == JobState.PREFLIGHT
        reason = reasons(job.spec)
        rate = speed(job.spec)
        finish(job, {"tokens_per_second": rate, "step_seconds": 2048 / rate}, reason=reason)
        Job.objects.filter(pk=job.pk).update(started_at=now() - timedelta(seconds=seconds))
        advance_all()
        tuning.refresh_from_db()
        if tuning.state != "running":
            return tuning
    raise AssertionError(tuning.state)


def test_the_candidates_are_what_planner_and_jobs_allow_and_the_plans_own_comes_first(
    team, alice, host
):
    def settings(document, **options):
        plan = planned(team, alice, document)
        found = tuning_plan(team, alice, plan, TuningOptions(**options)).candidates
        assert (found[0].settings, [each.number for each in found]) == ({}, [*range(len(found))])
        assert found[0].pins["weight_dtype"] == plan.answer["plans"][0]["strategy"]["weight_dtype"]
        alone = {name: each for row in found if len(row.settings) == 1
                 for name, each in row.settings.items()}  # fmt: skip
        return found, alone

    found, alone = settings(TRAINING)
    names = {"compiled", "micro_batch_size", "activation_recomputation", "compute_dtype"}
    assert {next(iter(each.settings)) for each in found[1:5]} == alone.keys() == names
    compiled = [each for each in found if each.settings.get("compiled")]
    together = [each.settings.get("activation_recomputation") for each in compiled]
    assert "selective" not in together  # the trainer refuses both
    pinned = TRAINING | {"pins": {"micro_batch_size": 2}}
    assert all(each.pins["micro_batch_size"] == 2 for each in settings(pinned)[0])
    stated = TRAINING | {"workload": {"global_batch_size": 8, "compiled": True}}
    assert "compiled" not in settings(stated)[1]
    found, _ = settings(SERVING)
    assert {each.pins["weight_dtype"] for each in found} == {"bf16", "fp32"}
    assert {each.pins.get("max_batch_tokens") for each in found} == {None, 128, 256, 1024, 2048}
    found, _ = settings(SERVING, formats=True)
    assert {each.pins["weight_dtype"] for each in found} == {"bf16", "fp32", "int8", "int4"}
    by_latency = SERVING | {"objective": "latency"}
    found, _ = settings(by_latency)
    (best, *_) = planned(team, alice, by_latency).answer["plans"]
    assert found[0].predicted == pytest.approx(best["performance"]["latency_seconds"], rel=0.01)


def test_what_cannot_be_tuned_is_refused_by_its_field(team, alice, host):
    catalog = {"hardware": {"device": "h100-sxm5-80gb"}}
    for document, options, field, words in [
        (SERVING | {"goal": "generate", "workload": {}}, {}, "goal", "slipway launch --sweep"),
        (TRAINING, {"figure": "ttft_seconds"}, "figure", "Choose one of tokens_per_second, step"),
        (SERVING, {"figure": "step_seconds"}, "figure", "no job of the goal serve measures"),
        (SERVING | catalog, {}, "host", "No host is chosen"),
        (TRAINING, {"host": "nowhere"}, "host", "There are: Box"),
    ]:
        plan = planned(team, alice, document)
        with pytest.raises((DraftProblem, InvalidProblem), match=words) as raised:
            tuning_plan(team, alice, plan, TuningOptions(**options))
        assert getattr(raised.value, "field", "") in {field, ""}, document
    assert not Job.objects.exists()


def test_the_best_becomes_the_next_version_of_the_plan_and_is_launched_like_any(team, alice, host):
    plan = planned(team, alice, TRAINING)
    tuning = tuning_start(team=team, by=alice, plan=plan, options=TuningOptions(trials=12))
    first = Job.objects.get()
    assert (first.spec["keeps_model"], first.spec["max_steps"]) == (False, tuning.trial["steps"])
    assert (first.max_duration_seconds, first.idempotency_key) == (3600.0, f"tuning-{tuning.pk}-0")
    end(tuning)
    assert tuning.state == "succeeded"
    assert trials(tuning)[0] == (0, "measured")
    assert 4 < len(trials(tuning)) <= 12
    best = candidates_of(tuning)[search_of(tuning, list(tuning.trials.all())).outcome.chosen
                                 .candidate.number]  # fmt: skip
    assert best.settings == {"micro_batch_size": 4, "compiled": True}
    gain = search_of(tuning, list(tuning.trials.all())).outcome.gain
    assert (gain.low > 0.5, gain.value) == (True, pytest.approx(0.65))
    version = tuning.result
    assert (version.series, version.version, version.saved_by) == (plan.series, 2, "alice")
    assert version.document.workload.compiled
    assert version.document.pins.stated == {  # what was tried, as the best has it
        "micro_batch_size": 4,
        "activation_recomputation": "none",
        "compute_dtype": "bf16",
        "activation_dtype": "bf16",
    }
    job = plan_launch(plan=version, by=alice)
    assert (job.spec["micro_batch_size"], job.spec["compiled"]) == (4, True)
    assert (job.spec["keeps_model"], job.spec["time_budget_seconds"]) == (True, 120.0)
    listed = {each.pk for each in listed_plans(alice, "")}
    assert listed == {version.pk}  # no plan of a trial is listed
    assert {each.host or each.requested_host for each in Job.objects.all()} == {host}
    kinds = set(Event.objects.filter(subject=tuning.pk).values_list("kind", flat=True))
    assert kinds == {"tuning.started", "tuning.succeeded"}


def test_without_a_gain_the_plan_stays_as_it_is(team, alice, host):
    tuning = end(started(team, alice, trials=6), speed=lambda _spec: 1000.0)
    assert (tuning.state, tuning.result, Plan.objects.filter(deleted_at=None).count()) == (
        "succeeded", None, 1,
    )  # fmt: skip
    assert len(trials(tuning)) == 6


def test_a_crash_leaves_out_what_would_crash_too_and_the_seconds_are_kept(team, alice, host):
    tuning = end(
        started(team, alice, trials=12, max_seconds=1000.0),
        reasons=lambda spec: "exit_nonzero" if spec["compiled"] else "ok",
        seconds=100.0,
    )
    assert (1, "failed") in trials(tuning)
    results = search_of(tuning, list(tuning.trials.all())).results
    left_out = [each for each in results if each.state == "left_out"]
    assert {bool(each.candidate.settings.get("compiled")) for each in left_out} == {True}
    assert len(trials(tuning)) == 10  # of 100 s each
    assert tuning.result.document.pins.micro_batch_size == 4
    for reason, found in [("oom_host", "memory"), ("host_rebooted", "lost")]:
        other = end(started(team, alice, trials=3), reasons=lambda _spec, why=reason: why)
        assert trials(other)[0] == (0, found)
        assert (other.state, other.result) == ("failed", None)
        assert other.problem.startswith("No trial measured anything: ")


def test_a_load_test_counts_with_its_targets_and_the_spread_of_its_repetitions(team, alice, host):
    tuning = started(team, alice, SERVING, trials=6)
    spec = Job.objects.get().spec
    assert spec["load"]["arrivals"]["concurrency"] == [8]
    assert (spec["load"]["requests_per_repetition"], spec["load"]["repetitions"]) == (8, 3)
    for number, (rate, ttft) in enumerate([(10.0, 2.0), (9.0, 0.5)] * 3):
        allocate_all()
        job = tuning.trials.get(number=number).job
        report = load_report(8, rate, ttft)
        claim(job.current_attempt)
        job.refresh_from_db()
        announced = {"name": "load", "kind": "report", "total_bytes": 2, "facts": report}
        files = {"files": {"load.json": 2}, "sha256": {"load.json": "a" * 64}}
        result = ("result", {"measured": {"tokens_per_second": rate}})
        batch = batch_of(
            job.current_attempt, result, ("artefact", announced | files), ("exited", EXIT_OK)
        )
        events_accept(host=job.host, batch=batch)
        advance_all()
    tuning.refresh_from_db()
    rows = list(tuning.trials.all())
    assert [each.is_met for each in rows] == [False, True] * 3
    assert rows[0].spread == pytest.approx(0.1 / NORMAL_80)
    assert tuning.result.document.pins.max_batch_tokens == 256  # slower, and meets the targets
    assert plan_launch(plan=tuning.result, by=alice, launch=Launch(run="load", points=[8])).spec[
        "max_batch_tokens"
    ] == 256  # fmt: skip


def test_a_killed_ticker_goes_on_and_each_trial_has_one_job(team, alice, host, monkeypatch):
    tuning = started(team, alice, trials=3)
    allocate_all()
    finish(Job.objects.get(), {"tokens_per_second": 1000.0})
    launch, raised = (
        services.plan_launch,
        [OperationalError("gone"), BusyProblem("busy", "Later.")],
    )

    def fail(**fields):
        if raised:
            raise raised.pop(0)
        return launch(**fields)

    monkeypatch.setattr(services, "plan_launch", fail)
    for said in ("", "Later."):
        advance_all()
        assert list(tuning.trials.values_list("state", "reason"))[1] == ("waiting", said)
    advance_all()
    advance_all()
    assert Job.objects.count() == 2
    # killed between the job and the row that names it
    tuning.trials.filter(number=1).update(state="waiting", job=None)
    tuning_advance(tuning)
    assert Job.objects.count() == 2
    assert tuning.trials.get(number=1).job == Job.objects.order_by("created_at").last()
    key = {"team": team, "by": alice, "plan": tuning.plan, "options": TuningOptions()}
    one, two = (tuning_start(**key, idempotency_key="k") for _ in range(2))
    assert one == two


def test_a_stopped_tuning_starts_nothing_more_and_ended_ones_are_deleted(team, alice, host):
    tuning = started(team, alice)
    with pytest.raises(Problem, match="has not ended"):
        series_delete(tuning, alice)
    series_stop(tuning, alice)
    advance_all()
    assert (tuning.state, Job.objects.get().state) == ("stopped", "stopped")
    assert trials(tuning) == [(0, "withdrawn")]
    with pytest.raises(Problem, match="has ended"):
        series_stop(tuning, alice)
    series_delete(tuning, alice)
    assert (Tuning.objects.count(), Job.objects.count()) == (0, 1)
    left = started(team, alice)
    Membership.objects.filter(user=alice).delete()
    allocate_all()
    finish(Job.objects.get(idempotency_key=f"tuning-{left.pk}-0"), {"tokens_per_second": 1.0})
    advance_all()
    assert "no longer a practitioner" in left.trials.get(number=1).reason


def test_who_may_look_start_stop_and_delete(team, alice, bob, charlie, olga, vera, host):
    plan = planned(team, alice, TRAINING)
    begin = f"/api/v1/plans/{plan.pk}/tunings"

    def send(user, method, address):
        return getattr(client_of(user), method)(address, {}, "application/json").status_code

    assert [send(each, "post", begin) for each in (vera, charlie, alice)] == [403, 404, 201]
    address = f"/api/v1/tunings/{Tuning.objects.get().pk}"
    assert [client_of(each).get(address).status_code for each in (vera, charlie)] == [200, 404]
    assert send(alice, "delete", address) == 409  # it runs
    assert [send(each, "post", f"{address}/stop") for each in (vera, bob, charlie, olga)] == [
        *(403, 403, 404, 200)
    ]
    assert [send(each, "delete", address) for each in (bob, alice)] == [403, 204]


def test_the_api_plans_starts_and_shows(team, alice, host):
    client, plan = client_of(alice), planned(team, alice, TRAINING)
    address = f"/api/v1/plans/{plan.pk}/tunings"
    dry = client.post(f"{address}?dry_run=true", {"trials": 5}, "application/json").json()
    assert (dry["id"], Tuning.objects.count(), Job.objects.count()) == ("", 0, 0)
    assert (dry["candidates"][0]["name"], dry["host"]) == ("As planned", host.name)
    assert 0 < dry["planned_seconds"] <= 3600.0
    made = client.post(address, {"trials": 8}, "application/json").json()
    assert made["candidates"][0]["state"] == "running"
    end(Tuning.objects.get())
    shown = client.get(f"/api/v1/tunings/{made['id']}").json()
    chosen = next(each for each in shown["candidates"] if each["number"] == shown["chosen"])
    assert (chosen["state"], chosen["num_measured"] >= 1, shown["gain"]["low"] > 0) == (
        "measured", True, True,
    )  # fmt: skip
    assert client.get(f"/api/v1/plans/{shown['result']}/exports").status_code == 200
    for query, count in ((f"?plan={shown['result']}", 1), (f"?plan={'0' * 26}", 0), ("", 1)):
        assert len(client.get(f"/api/v1/tunings{query}").json()["items"]) == count
    for body, path in [
        ({"trials": 1}, "body.trials"),
        ({"max_seconds": 1}, "body.max_seconds"),
        ({"figure": "speed"}, "body.figure"),
        ({"figure": "ttft_seconds"}, "figure"),
        ({"host": "nowhere"}, "host"),
    ]:
        answer = client.post(address, body, "application/json")
        found = answer.json()
        assert answer.status_code == 422, body
        assert path in {*(each["field"] for each in found.get("errors", [])), found["code"]}, found


def test_the_pages_show_candidates_trials_and_what_was_found(team, alice, vera, host):
    client, plan = client_of(alice), planned(team, alice, TRAINING)
    address = f"/plans/{plan.pk}/tune/"
    assert address in client.get(f"/plans/{plan.pk}/").content.decode()
    assert client_of(vera).get(address).status_code == 403
    page = client.get(address).content.decode()
    assert "micro-batch 4, compiled layers" in page
    asked = {"trials": "8", "max_seconds": "30", "trial_seconds": "20", "figure": ""}
    refused = client.post(address, asked | {"trials": "100"})
    assert (refused.status_code, Tuning.objects.count()) == (422, 0)
    key = re.search(r'name="key" value="(\w+)"', page)[1]
    made, again = (client.post(address, asked | {"key": key}) for _ in range(2))
    tuning = Tuning.objects.get()
    assert made["Location"] == again["Location"] == f"/tunings/{tuning.pk}/"
    assert (tuning.options["trials"], tuning.options["max_seconds"]) == (8, 1800.0)
    assert "So far" in client.get(made["Location"]).content.decode()
    first = Job.objects.get()
    for state, words in (("queued", "Waiting"), (first.state, "Running")):
        Job.objects.update(state=state)
        shown = client.get(made["Location"]).content.decode().split("<tbody>")[1].split("</tr>")[0]
        assert f"{words}</span>" in shown, shown
    assert "trial 1 of the" in client.get(f"/jobs/{first.pk}/").content.decode()
    end(tuning, reasons=lambda spec: "exit_nonzero" if spec["compiled"] else "ok")
    page = unescape(client_of(vera).get(made["Location"]).content.decode())
    for words in (
        "Best: micro-batch 4",
        "90 % interval",
        "Open the version with the best strategy",
        "Gain over the plan",
        "% more",
        "not tried",
        "It has all that candidate 1 has, which failed.",
        "The job's program reported a failure.",
    ):
        assert words in page, words
    view = view_of(tuning)
    assert (view.rows[0].is_chosen, view.tried[0].against_own[:1]) == (True, "+")
    values = [row.value for row in view.rows if row.value]
    assert values == sorted(values, reverse=True)  # the best one first
    listed = client.get("/tunings/").content.decode()
    assert "Best: micro-batch 4" in listed
    assert view.gain_words in unescape(listed)
    assert client.post(f"/tunings/{tuning.pk}/delete/")["Location"] == "/tunings/"
    catalog = planned(team, alice, TRAINING | {"hardware": {"device": "h100-sxm5-80gb"}})
    page = client.get(f"/plans/{catalog.pk}/tune/").content.decode()
    assert "No host is chosen" in page
    shown = client.get(f"/plans/{catalog.pk}/").content.decode()
    assert "No tuning of this plan: No host is chosen" in shown
    assert f"/plans/{catalog.pk}/tune/" not in shown
    Plan.objects.filter(pk=plan.pk).update(deleted_at=now())
    assert client.get(address).status_code == 404
    assert address not in client.get(f"/plans/{plan.pk}/").content.decode()


def test_a_small_budget_says_what_a_larger_one_needs(team, alice, host):
    tuning = end(started(team, alice, trials=5))
    assert (tuning.state, tuning.result) == ("succeeded", None)
    words = view_of(tuning).result_words
    assert "That is not certain" in words
    assert "4 more trials" in words


def test_a_full_queue_lets_a_trial_wait_and_other_refusals_end_the_tuning(team, alice, host):
    tuning = started(team, alice, trials=6)
    allocate_all()
    finish(Job.objects.get(), {"tokens_per_second": 1000.0})
    quota = Quota.objects.create(team=team, max_queued_per_user=0)
    for _ in range(3):
        advance_all()
    rows = list(tuning.trials.values_list("state", flat=True))
    assert rows == ["ended", "waiting"]
    assert "jobs in queues" in tuning.trials.last().reason
    quota.max_queued_per_user, quota.max_gpu_hours_per_month = 9, 0.0
    quota.save()
    advance_all()
    tuning.refresh_from_db()
    assert (tuning.state, tuning.result, tuning.trials.count()) == ("succeeded", None, 2)
    assert "GPU-hours" in tuning.problem


def test_a_hanging_collective_is_tried_once_more(team, alice, host):
    reasons = iter(["nccl_timeout", "rank_lost"])
    tuning = started(team, alice, trials=2)
    end(tuning, reasons=lambda _spec: next(reasons))
    assert trials(tuning) == [(0, "lost"), (0, "lost")]


def test_the_end_is_one_step(team, alice, host, monkeypatch):
    tuning = started(team, alice, trials=8)
    record = series.event_record

    def killed(*args, **fields):
        raise OperationalError("gone")

    monkeypatch.setattr(series, "event_record", killed)
    with pytest.raises(AssertionError, match="running"):
        end(tuning, rounds=9)
    num_plans = Plan.objects.filter(deleted_at=None).count()
    assert (tuning.state, tuning.result, num_plans) == ("running", None, 1)
    monkeypatch.setattr(series, "event_record", record)
    newer = draft_begun_from(tuning.plan, alice)
    newer.document = newer.document.model_copy(update={"objective": "memory"})
    plan_compute(newer)
    newer = plan_keep(newer, by="alice")
    planned_version = services._version

    advance_all()
    tuning.refresh_from_db()
    newer.refresh_from_db()
    assert (tuning.state, newer.is_latest) == ("succeeded", True)
    assert tuning.result.series != newer.series
    assert "has a newer version" in tuning.problem

    stopped = started(team, alice, trials=8)

    def stop(*args):
        series_stop(stopped, alice)
        return planned_version(*args)

    monkeypatch.setattr(services, "_version", stop)
    before = Plan.objects.filter(deleted_at=None).count()
    assert (end(stopped).state, stopped.result) == ("stopped", None)
    assert Plan.objects.filter(deleted_at=None).count() == before


def test_a_stop_beside_a_launch_leaves_no_job(team, alice, host):
    tuning = started(team, alice)
    # what a launch leaves that did not see the stop
    Tuning.objects.filter(pk=tuning.pk).update(state="stopped")
    advance_all()
    assert Job.objects.get().state == JobState.STOPPED
    other = started(team, alice)
    trial = services._next_trial(other, 1, 1)
    prepared = services._prepared(other, candidates_of(other)[1], 600.0)
    series_stop(other, alice)
    services._queue(other, trial, prepared)
    assert not Job.objects.filter(idempotency_key=trial.key).exists()


def test_nothing_is_planned_while_the_write_lock_is_held(team, alice, host, monkeypatch):
    depth, held = len(connection.savepoint_ids), []

    def noted(ask):
        def asked(*args, **fields):
            held.append(len(connection.savepoint_ids) - depth)
            return ask(*args, **fields)

        return asked

    monkeypatch.setattr(api, "plan", noted(api.plan))
    monkeypatch.setattr(api, "best_plan", noted(api.best_plan))
    monkeypatch.setattr(launching, "at_a_commit", noted(launching.at_a_commit))
    tuning = end(started(team, alice, trials=6))
    assert tuning.result
    assert set(held) == {0}

"""Start, advance, stop and delete tunings."""

import structlog
from django.contrib.auth.models import User
from django.db import IntegrityError, InterfaceError, OperationalError, transaction

from planner.specs.workload import Strategy
from runners.jobspec.base import NAME_LENGTH
from runners.plans.document import PlanDocument, read_stored
from runners.plans.latency_limits import target_seconds
from runners.plans.refusals import DraftProblem
from runners.plans.tuning import (
    DERIVED,
    MORE_IS_BETTER,
    Trial,
    TuningOptions,
    trial_document,
    trial_launch,
    with_settings,
)
from runners.shared.load_search import excess_of
from runners.shared.reasons import FAILED, STOPPED, Reason
from runners.shared.tuning import (
    BASELINE,
    NORMAL_80,
    Observation,
    TrialEnding,
    TuningSearch,
)
from webapp.accounts.models import Role, Team
from webapp.accounts.services import has_role
from webapp.accounts.tokens import acting_as, acting_token
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.problems import (
    BusyProblem,
    ConflictProblem,
    NotFoundProblem,
    Problem,
    UnavailableProblem,
)
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import FINAL_STATES, Job, JobState, Measurement
from webapp.jobs.points import main_row_of
from webapp.jobs.progress import elapsed_seconds
from webapp.jobs.services import job_stop
from webapp.jobs.transitions import words_for
from webapp.plans.models import Plan
from webapp.plans.planning import plan_answer, plan_compute, plan_keep
from webapp.plans.repositories import UnreachableError
from webapp.plans.saving import draft_begun_from
from webapp.tunings.models import TrialState, Tuning, TuningState, TuningTrial
from webapp.tunings.planning import PlannedCandidate, PlannedTuning, tuning_plan

log = structlog.get_logger(__name__)
ACTOR = "system:tunings"
ROLE = Role.PRACTITIONER  # that a person needs to launch
PASSING = (BusyProblem, UnavailableProblem, UnreachableError)
OUT_OF_MEMORY = frozenset({Reason.OOM_GPU, Reason.OOM_HOST})
FAULT = "Slipway failed while it started this trial; its log says where."
GONE = "The account that started the tuning is no longer a practitioner of the team."
NOTHING = "No trial measured anything: {}"
NO_VERSION = "The best strategy could not be saved as a version of the plan: {}"


# Start


def tuning_start(
    *,
    team: Team,
    by: User,
    plan: Plan,
    options: TuningOptions,
    idempotency_key: str | None = None,
) -> Tuning:
    """Plan a tuning, store it, and queue its first trial; a draft is saved before.

    The same key returns the tuning of the first call.

    Raises:
        DraftProblem: the plan cannot be tuned.
        Problem: the job service refuses the first trial.
    """
    if existing := _of_key(team, idempotency_key):
        return existing
    planned = tuning_plan(team, by, plan, options)
    try:
        with transaction.atomic():
            saved = plan_keep(plan, by=by.get_username())
            tuning = tuning_of(team, by, saved, planned)
            tuning.token, tuning.idempotency_key = acting_token(), idempotency_key
            tuning.save(force_insert=True)
            detail = {"plan": saved.pk, "candidates": len(planned.candidates)}
            event_record(tuning, "tuning.started", by.get_username(), detail=detail)
            _launch(tuning, _next_trial(tuning, BASELINE, 0))
    except IntegrityError:
        if existing := _of_key(team, idempotency_key):
            return existing
        raise
    return tuning


def tuning_of(team: Team, by: User, plan: Plan, planned: PlannedTuning) -> Tuning:
    """Return a planned tuning; it is not stored."""
    return Tuning(
        team=team,
        owner=by,
        plan=plan,
        host=planned.host,
        name=plan.name or str(plan),
        options=planned.options.model_dump(mode="json"),
        document=planned.document.model_dump(mode="json"),
        figure=planned.figure,
        candidates=[each.model_dump(mode="json") for each in planned.candidates],
        trial=planned.trial._asdict(),
    )


def _of_key(team: Team, key: str | None) -> Tuning | None:
    return Tuning.objects.filter(team=team, idempotency_key=key).first() if key else None


# What is known


def candidates_of(tuning: Tuning) -> list[PlannedCandidate]:
    """Return the candidates of a tuning, the plan's own choice first."""
    return [PlannedCandidate.model_validate(each) for each in tuning.candidates]


def search_of(tuning: Tuning, trials: list[TuningTrial]) -> TuningSearch:
    """Return the decisions of a tuning after its trials."""
    options = TuningOptions.model_validate(tuning.options)
    return TuningSearch(
        [each.candidate for each in candidates_of(tuning)],
        [_observation(each) for each in trials if each.state == TrialState.ENDED],
        options.trials,
        options.max_seconds,
        tuning.figure not in MORE_IS_BETTER,
    )


def _observation(trial: TuningTrial) -> Observation:
    ending: TrialEnding = trial.ending  # type: ignore[assignment]
    return Observation(
        trial.candidate,
        ending,
        trial.seconds,
        trial.value or 0.0,
        trial.spread,
        trial.is_met,
        trial.reason,
    )


# Advance


def advance_all() -> int:
    """Advance every tuning that runs, and return their number; each failure is its own."""
    rows = list(Tuning.objects.filter(state=TuningState.RUNNING).order_by("id"))
    for tuning in rows:
        try:
            tuning_advance(tuning)
        except Exception:  # the next round tries again; the others go on
            log.warning("tuning not advanced", tuning=tuning.pk, exc_info=True)
    ending = TuningTrial.objects.filter(state=TrialState.RUNNING, job__state__in=FINAL_STATES)
    for trial in ending.exclude(tuning__state=TuningState.RUNNING).select_related("job"):
        _settle(trial)  # its tuning was stopped before it
    return len(rows)


def tuning_advance(tuning: Tuning) -> None:
    """Read what the last trial has become; start the next one, or end the tuning.

    Two calls at once start a trial once: its number in the tuning is unique, and its job's
    idempotency key is the trial's.
    """
    trials = list(tuning.trials.select_related("job"))
    last = trials[-1] if trials else None
    if last is not None and last.state == TrialState.RUNNING:
        _settle(last)
    if last is not None and last.state == TrialState.RUNNING:
        return
    if last is not None and last.state == TrialState.WAITING:
        _start(tuning, last)
        return
    search = search_of(tuning, trials)
    candidate = search.next_candidate()
    if candidate is None:
        _finish(tuning, search)
        return
    try:
        trial = _next_trial(tuning, candidate.number, len(trials))
    except IntegrityError:
        return  # another call's
    _start(tuning, trial)


def _next_trial(tuning: Tuning, candidate: int, number: int) -> TuningTrial:
    with transaction.atomic():
        return TuningTrial.objects.create(tuning=tuning, number=number, candidate=candidate)


def _start(tuning: Tuning, trial: TuningTrial) -> None:
    """Start the job of a trial, or say why not.

    What passes by itself lets the trial wait, with its reason. What cannot be planned any more is
    a fault of the candidate; what the service refuses, such as a launch over the budget, is none.
    """
    if not Tuning.objects.filter(pk=tuning.pk, state=TuningState.RUNNING).exists():
        return
    try:
        _launch(tuning, trial)
    except PASSING as problem:
        _change(trial, TrialState.WAITING, reason=str(problem))
    except DraftProblem as problem:
        if problem.is_passing:
            _change(trial, TrialState.WAITING, reason=str(problem))
        else:
            _end_trial(trial, TrialState.WAITING, "failed", reason=str(problem))
    except Problem as problem:
        _end_trial(trial, TrialState.WAITING, "withdrawn", reason=str(problem))
    except (OperationalError, InterfaceError, IntegrityError):
        raise  # locked, gone, or another call's: the next round
    except Exception:
        log.exception("trial not started", trial=trial.pk, tuning=tuning.pk)
        _end_trial(trial, TrialState.WAITING, "failed", reason=FAULT)


def _launch(tuning: Tuning, trial: TuningTrial) -> None:
    """Start a trial's job.

    Raises:
        DraftProblem: it cannot be planned or launched any more.
        Problem: the owner may not launch any more, or the service refuses.
    """
    owner = tuning.owner
    if owner is None or not owner.is_active or not has_role(owner, tuning.team, ROLE):
        raise ConflictProblem("owner_gone", GONE)
    candidate = candidates_of(tuning)[trial.candidate]
    amount = Trial(**tuning.trial)
    document = trial_document(_document(tuning, candidate), amount)
    search = search_of(tuning, list(tuning.trials.all()))
    launch = trial_launch(document, amount, search.seconds_left)
    name = f"{tuning.name}: trial {trial.number + 1}, {candidate.words.lower()}"[:NAME_LENGTH]
    with acting_as(tuning.token):
        plan = Plan(team=tuning.team, owner=owner, name=name, is_named=True)
        plan.document = document
        plan_answer(plan, brief=True)
        with transaction.atomic():
            if existing := Job.objects.filter(team=tuning.team, idempotency_key=trial.key).first():
                _follow(tuning, trial, existing)
                return
            plan.save(force_insert=True)
            saved = plan_keep(plan, by=owner.get_username())
            # Its job shows it, and lists do not: it is no plan that somebody made.
            Plan.objects.filter(pk=saved.pk).update(deleted_at=now())
            job = plan_launch(
                plan=saved,
                by=owner,
                launch=launch,
                name=name,
                idempotency_key=trial.key,
                is_named=False,
                keeps_model=False,
            )
            _follow(tuning, trial, job)


def _document(tuning: Tuning, candidate: PlannedCandidate) -> PlanDocument:
    return with_settings(read_stored(tuning.document), candidate.pins, candidate.workload)


def _follow(tuning: Tuning, trial: TuningTrial, job: Job) -> None:
    """Let a trial follow a job; if the tuning was stopped meanwhile, stop it."""
    if not _change(trial, TrialState.WAITING, state=TrialState.RUNNING, job=job, reason=""):
        return
    if not Tuning.objects.filter(pk=tuning.pk, state=TuningState.RUNNING).exists():
        job_stop(job=job, by=ACTOR)


def _change(trial: TuningTrial, source: TrialState, **fields: object) -> bool:
    """Change a trial that is still in a state; return whether it was."""
    if not TuningTrial.objects.filter(pk=trial.pk, state=source).update(**fields):
        return False
    for name, value in fields.items():
        setattr(trial, name, value)
    return True


def _end_trial(
    trial: TuningTrial, source: TrialState, ending: TrialEnding, **fields: object
) -> None:
    _change(trial, source, state=TrialState.ENDED, ending=ending, **fields)


# What a trial has shown


def _settle(trial: TuningTrial) -> None:
    """Store what a trial has shown, if its job has ended."""
    job = trial.job
    if job is None:
        reason = "Its job was deleted."
        _end_trial(trial, TrialState.RUNNING, "withdrawn", reason=reason)
        return
    if job.state not in FINAL_STATES:
        return
    seconds = elapsed_seconds(job)
    if job.state != JobState.SUCCEEDED:
        reason = words_for(job.reason).sentence if job.reason else job.get_state_display()
        _end_trial(trial, TrialState.RUNNING, _ending(job), reason=reason, seconds=seconds)
        return
    figure = trial.tuning.figure
    value = (job.result.get("measured") or {}).get(figure)
    if not isinstance(value, int | float) or value <= 0:
        reason = f"Its job measured no {figure}."
        _end_trial(trial, TrialState.RUNNING, "failed", reason=reason, seconds=seconds)
        return
    spread, is_met = _under_load(trial, job, float(value))
    disturbed = Measurement.objects.filter(job=job, metric=figure).exclude(invalid_reason="")
    _end_trial(
        trial,
        TrialState.RUNNING,
        "measured",
        seconds=seconds,
        value=float(value),
        spread=spread,
        is_met=is_met,
        note=next((each.invalid_reason for each in disturbed), ""),
    )


def _ending(job: Job) -> TrialEnding:
    """Return whose fault the end of a job was."""
    if job.reason in OUT_OF_MEMORY:
        return "memory"
    if job.reason in FAILED:
        return "failed"
    return "withdrawn" if job.reason in STOPPED else "lost"


def _under_load(trial: TuningTrial, job: Job, value: float) -> tuple[float, bool]:
    """Return the standard error of a load test's figure, as a share, and if it meets the targets.

    It is that of a normal distribution with the interval of the repetitions. A request that failed
    meets none.
    """
    row = main_row_of(job) if job.kind == "benchmark" else None
    if row is None:
        return 0.0, True
    low, high = row.interval.get(trial.tuning.figure, (value, value))
    spread = (high - low) / 2 / NORMAL_80 / value
    targets = target_seconds(read_stored(trial.tuning.document))
    if not targets:
        return spread, not row.failed
    return spread, excess_of(targets, row.measured, row.failed) <= 1.0


# End


def _finish(tuning: Tuning, search: TuningSearch) -> None:
    """End a tuning; the best strategy becomes a version of its plan if it is certainly better."""
    chosen = search.outcome.chosen
    if chosen is None:
        reasons = [each.reason for each in search.results if each.reason]
        _end(tuning, TuningState.FAILED, problem=NOTHING.format(" ".join(reasons[:1])).strip())
        return
    number, saved, problem = chosen.candidate.number, None, ""
    if number != BASELINE:
        try:
            saved = _version(tuning, candidates_of(tuning)[number])
        except (DraftProblem, Problem) as fault:
            problem = NO_VERSION.format(fault)
    _end(tuning, TuningState.SUCCEEDED, result=saved, problem=problem)


def _version(tuning: Tuning, candidate: PlannedCandidate) -> Plan:
    """Return the next version of the tuned plan, which fixes the best strategy.

    Raises:
        DraftProblem: it cannot be planned any more.
        Problem: the plan or the account is gone.
    """
    plan, owner = tuning.plan, tuning.owner
    if plan is None or owner is None:
        raise NotFoundProblem("gone", "The plan, or the account that tuned it, is deleted.")
    draft = draft_begun_from(plan, owner)
    document = read_stored(tuning.document)
    own, *others = (each.pins for each in candidates_of(tuning))
    tried = {name for pins in others for name, x in pins.items() if x != own.get(name)} - DERIVED
    differing = {name: candidate.pins[name] for name in tried & candidate.pins.keys()}
    try:
        draft.document = with_settings(
            document, {**document.pins.stated, **differing}, candidate.workload
        )
        answer = plan_compute(draft)
        wanted = Strategy.model_validate(candidate.pins).stated.items()
        found = answer.plans[0].strategy.stated if answer.plans else {}
        if not wanted <= found.items():
            draft.document = _document(tuning, candidate)  # then all of it is fixed
            plan_compute(draft)
        return plan_keep(draft, by=owner.get_username())
    except Exception:
        draft.delete()
        raise


def _end(tuning: Tuning, state: TuningState, **fields: object) -> None:
    rows = Tuning.objects.filter(pk=tuning.pk, state=TuningState.RUNNING)
    with transaction.atomic():
        if rows.update(state=state, ended_at=now(), **fields):
            event_record(tuning, f"tuning.{state}", ACTOR)
    tuning.refresh_from_db()


# Stop and delete


def tuning_stop(*, tuning: Tuning, by: User) -> Tuning:
    """Stop the trial of a tuning that runs, and start no other; what was measured stays.

    Raises:
        ConflictProblem: it has ended.
    """
    with transaction.atomic():
        rows = Tuning.objects.filter(pk=tuning.pk, state=TuningState.RUNNING)
        if not rows.update(state=TuningState.STOPPED, ended_at=now()):
            raise ConflictProblem(
                "not_running",
                f"The tuning of {tuning.name} has ended, so it cannot be stopped.",
            )
        event_record(tuning, "tuning.stopped", by.get_username())
    running = tuning.trials.filter(state=TrialState.RUNNING).select_related("job")
    for trial in running:
        if trial.job is not None and trial.job.state not in FINAL_STATES:
            job_stop(job=trial.job, by=by.get_username(), reason=Reason.STOPPED_BY_USER)
    tuning.refresh_from_db()
    return tuning


def tuning_delete(*, tuning: Tuning, by: User) -> None:
    """Take an ended tuning out of the lists; its jobs and its version of the plan stay.

    Raises:
        ConflictProblem: it has not ended, or a job of it has not.
        NotFoundProblem: another call has deleted it.
    """
    with transaction.atomic():
        row = Tuning.objects.select_for_update().filter(pk=tuning.pk).first()
        if row is None:
            raise NotFoundProblem("gone", f"The tuning of {tuning.name} is deleted already.")
        live = row.trials.filter(state=TrialState.RUNNING, job__isnull=False)
        live = live.exclude(job__state__in=FINAL_STATES)
        if row.state == TuningState.RUNNING or live.exists():
            raise ConflictProblem(
                "still_live", f"The tuning of {row.name} has not ended. Stop it, then delete it."
            )
        event_record(row, "tuning.deleted", by.get_username(), detail={"name": row.name})
        row.delete()

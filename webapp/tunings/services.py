"""Start, advance, stop and delete tunings."""

from typing import NamedTuple

import structlog
from django.contrib.auth.models import User
from django.db import IntegrityError, InterfaceError, OperationalError, transaction

from planner.specs.workload import Strategy
from runners.jobspec.base import NAME_LENGTH
from runners.plans.document import PlanDocument, read_stored
from runners.plans.latency_limits import target_seconds
from runners.plans.launch import Launch
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
from webapp.core.clock import now
from webapp.core.problems import (
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    Problem,
)
from webapp.jobs.benchmark_reports import main_row_of
from webapp.jobs.launching import Launchable, parts_at_a_commit, plan_launch
from webapp.jobs.models import FINAL_STATES, Job, JobState, Measurement
from webapp.jobs.progress import elapsed_seconds
from webapp.jobs.reason_words import words_for
from webapp.jobs.series import (
    PASSING,
    SeriesState,
    advance_each,
    late_parts_stop,
    part_stop,
)
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, plan_answer, plan_keep
from webapp.plans.saving import draft_copied
from webapp.tunings.models import TrialState, Tuning, TuningTrial
from webapp.tunings.planning import PlannedCandidate, PlannedTuning, tuning_plan

log = structlog.get_logger(__name__)
ROLE = Role.PRACTITIONER  # that a person needs to launch
FULL_QUEUE = "max_queued"  # code of a refusal that passes, too
# Ends of a job that say little of its candidate: it is tried once more.
BY_CHANCE = frozenset({Reason.NCCL_TIMEOUT, Reason.RANK_LOST})
OUT_OF_MEMORY = frozenset({Reason.OOM_GPU, Reason.OOM_HOST})
FAULT = "Slipway failed while it started this trial; its log says where."
GONE = "The account that started the tuning is no longer a practitioner of the team."
NOTHING = "No trial measured anything: {}"
REFUSED = "No further trial could be started: {}"
SEPARATE = (
    "The plan has a newer version since, so the best strategy was saved as a plan of its own."
)
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
    if existing := Tuning.of_key(team, idempotency_key):
        return existing
    planned = tuning_plan(team, by, plan, options)
    if plan.is_brief:  # the version has the full answer, which takes seconds
        current_answer(plan)
    tuning = tuning_of(team, by, plan, planned)
    tuning.token, tuning.idempotency_key = acting_token(), idempotency_key
    prepared = _prepared(tuning, candidates_of(tuning)[BASELINE], options.max_seconds)
    try:
        with transaction.atomic():
            saved = plan_keep(plan, by=by.get_username())
            tuning.plan, tuning.name = saved, saved.name or str(saved)
            tuning.save(force_insert=True)
            detail = {"plan": saved.pk, "candidates": len(planned.candidates)}
            tuning.event("started", by.get_username(), **detail)
            _queue(tuning, _next_trial(tuning, BASELINE, 0), prepared)
    except IntegrityError:
        if existing := Tuning.of_key(team, idempotency_key):
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
    num_running = advance_each(Tuning, tuning_advance)
    late_parts_stop(Tuning, TuningTrial, _settle)
    return num_running


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
    a fault of the candidate. What the service refuses, such as a launch over a token's budget, it
    would refuse of every candidate: the tuning ends with that problem.
    """
    if not tuning.still_runs():
        return
    try:
        _launch(tuning, trial)
    except PASSING as problem:
        trial.change(TrialState.WAITING, reason=str(problem))
    except DraftProblem as problem:
        if problem.is_passing:
            trial.change(TrialState.WAITING, reason=str(problem))
        else:
            _end_trial(trial, TrialState.WAITING, "failed", reason=str(problem))
    except InvalidProblem as problem:
        _end_trial(trial, TrialState.WAITING, "failed", reason=str(problem))
    except Problem as problem:
        if problem.code == FULL_QUEUE:
            trial.change(TrialState.WAITING, reason=str(problem))
            return
        _end_trial(trial, TrialState.WAITING, "withdrawn", reason=str(problem))
        _finish(tuning, search_of(tuning, list(tuning.trials.all())), REFUSED.format(problem))
    except (OperationalError, InterfaceError, IntegrityError):
        raise  # locked, gone, or another call's: the next round
    except Exception:
        log.exception("trial not started", trial=trial.pk, tuning=tuning.pk)
        _end_trial(trial, TrialState.WAITING, "failed", reason=FAULT)


class _Prepared(NamedTuple):
    """What a trial's job is made of; the planner and the Hub have been asked."""

    plan: Plan  # not stored
    launch: Launch
    parts: Launchable


def _launch(tuning: Tuning, trial: TuningTrial) -> None:
    """Start a trial's job.

    Raises:
        DraftProblem: it cannot be planned or launched any more.
        Problem: the owner may not launch any more, or the service refuses.
    """
    if existing := _job_of(tuning, trial):
        _follow(tuning, trial, existing)
        return
    search = search_of(tuning, list(tuning.trials.all()))
    candidate = candidates_of(tuning)[trial.candidate]
    prepared = _prepared(tuning, candidate, search.seconds_left)
    with transaction.atomic():
        _queue(tuning, trial, prepared)


def _prepared(tuning: Tuning, candidate: PlannedCandidate, seconds_left: float) -> _Prepared:
    """Plan a trial's job, outside of any transaction: SQLite has one lock for all writes.

    Raises:
        DraftProblem: it cannot be planned or launched any more.
        Problem: the owner may not launch any more, or the Hub refuses.
    """
    owner = tuning.owner
    if owner is None or not owner.is_active or not has_role(owner, tuning.team, ROLE):
        raise ConflictProblem("owner_gone", GONE)
    amount = Trial(**tuning.trial)
    document = trial_document(_document(tuning, candidate), amount)
    launch = trial_launch(document, amount, seconds_left)
    with acting_as(tuning.token):
        plan = Plan(team=tuning.team, owner=owner, is_named=True)
        plan.document = document
        plan_answer(plan)
        return _Prepared(plan, launch, parts_at_a_commit(plan, launch))


def _queue(tuning: Tuning, trial: TuningTrial, prepared: _Prepared) -> None:
    """Queue a trial's job, unless the tuning was stopped meanwhile; within a transaction.

    The row of the tuning is locked, so that stopping it comes before, or finds the job.
    """
    locked = Tuning.running().select_for_update().filter(pk=tuning.pk)
    if locked.first() is None:
        return
    if existing := _job_of(tuning, trial):
        _follow(tuning, trial, existing)
        return
    plan, by, number = prepared.plan, tuning.owner, trial.number + 1
    if by is None:
        raise ConflictProblem("owner_gone", GONE)
    words = candidates_of(tuning)[trial.candidate].words.lower()
    plan.name = f"{tuning.name}: trial {number}, {words}"[:NAME_LENGTH]
    with acting_as(tuning.token):
        plan.save(force_insert=True)
        saved = plan_keep(plan, by=by.get_username())
        # Its job shows it, and lists do not: it is no plan that somebody made.
        Plan.objects.filter(pk=saved.pk).update(deleted_at=now())
        job = plan_launch(
            plan=saved,
            by=by,
            launch=prepared.launch,
            name=plan.name,
            idempotency_key=trial.key,
            is_named=False,
            keeps_model=False,
            parts=prepared.parts,
        )
        _follow(tuning, trial, job)


def _job_of(tuning: Tuning, trial: TuningTrial) -> Job | None:
    return Job.objects.filter(team=tuning.team, idempotency_key=trial.key).first()


def _document(tuning: Tuning, candidate: PlannedCandidate) -> PlanDocument:
    return with_settings(read_stored(tuning.document), candidate.pins, candidate.workload)


def _follow(tuning: Tuning, trial: TuningTrial, job: Job) -> None:
    """Let a trial follow a job; if the tuning was stopped meanwhile, stop it."""
    if not trial.change(TrialState.WAITING, state=TrialState.RUNNING, job=job, reason=""):
        return
    if not tuning.still_runs():
        part_stop(trial, Tuning.ACTOR)


def _end_trial(
    trial: TuningTrial, source: TrialState, ending: TrialEnding, **fields: object
) -> None:
    trial.change(source, state=TrialState.ENDED, ending=ending, **fields)


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
    if job.reason in FAILED - BY_CHANCE:
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


def _finish(tuning: Tuning, search: TuningSearch, problem: str = "") -> None:
    """End a tuning; the best strategy becomes a version of its plan if it is certainly better.

    It is planned first. Then one transaction saves the version and ends the tuning, so that a
    process that is killed, or a person who stops the tuning, leaves both or neither.
    """
    chosen = search.outcome.chosen
    if chosen is None:
        reasons = [each.reason for each in search.results if each.reason]
        said = problem or NOTHING.format(" ".join(reasons[:1])).strip()
        _end(tuning, SeriesState.FAILED, problem=said)
        return
    draft, number = None, chosen.candidate.number
    if number != BASELINE:
        try:
            draft = _version(tuning, candidates_of(tuning)[number])
        except (DraftProblem, Problem) as fault:
            problem = f"{problem} {NO_VERSION.format(fault)}".strip()
    _end(tuning, SeriesState.SUCCEEDED, draft, problem=problem)


def _version(tuning: Tuning, candidate: PlannedCandidate) -> Plan:
    """Return a planned draft of the next version of the tuned plan; it is not stored.

    Raises:
        DraftProblem: it cannot be planned any more.
        Problem: the plan or the account is gone.
    """
    plan, owner = tuning.plan, tuning.owner
    if plan is None or owner is None:
        raise NotFoundProblem("gone", "The plan, or the account that tuned it, is deleted.")
    document = read_stored(tuning.document)
    own, *others = (each.pins for each in candidates_of(tuning))
    tried = {name for pins in others for name, x in pins.items() if x != own.get(name)} - DERIVED
    differing = {name: candidate.pins[name] for name in tried & candidate.pins.keys()}
    draft = draft_copied(plan, owner)
    draft.document = with_settings(
        document, {**document.pins.stated, **differing}, candidate.workload
    )
    answer = plan_answer(draft)
    wanted = Strategy.model_validate(candidate.pins).stated.items()
    found = answer.plans[0].strategy.stated if answer.plans else {}
    if not wanted <= found.items():
        draft.document = _document(tuning, candidate)  # then all of it is fixed
        plan_answer(draft)
    return draft


def _end(
    tuning: Tuning, state: SeriesState, draft: Plan | None = None, *, problem: str = ""
) -> None:
    """End a tuning that still runs, and save the draft with it.

    Behind a version that was saved meanwhile it becomes a separate plan.
    """
    with transaction.atomic():
        rows = Tuning.running().select_for_update().filter(pk=tuning.pk)
        is_ended = bool(rows.update(state=state, ended_at=now(), problem=problem))
        if is_ended and draft is not None:
            owner = draft.owner
            base = Plan.objects.select_for_update().filter(pk=draft.base_id).first()
            is_newer = base is not None and not base.is_latest
            draft.save(force_insert=True)
            saved = plan_keep(draft, by=owner.get_username() if owner else "", as_new=is_newer)
            if is_newer:
                problem = f"{problem} {SEPARATE}".strip()
            Tuning.objects.filter(pk=tuning.pk).update(result=saved, problem=problem)
        if is_ended:
            tuning.event(state, Tuning.ACTOR)
    tuning.refresh_from_db()

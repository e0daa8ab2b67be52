"""Make, wake, put to sleep, change and delete deployments."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.contrib.auth.models import User
from django.db import IntegrityError, InterfaceError, OperationalError, transaction
from django.db.models import F, Q

from runners.jobspec import ServeSpec
from runners.jobspec.base import NAME_LENGTH
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.shared.reasons import Reason
from webapp.accounts.models import Role, Team
from webapp.accounts.services import has_role
from webapp.accounts.tokens import acting_as, acting_token
from webapp.audit.models import event_record
from webapp.core.clock import LeapWatch, now
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem, Problem
from webapp.deployments import warm_hours
from webapp.deployments.models import MODEL_NAME_LENGTH, Deployment, DeploymentDraft, Replica
from webapp.deployments.scaling import BUSY, SPARE, is_idle, num_needed, open_requests
from webapp.deployments.turns import (
    IDLE_TURN,
    Queue,
    has_requests,
    next_to_leave,
    starts_without,
    turn_of,
)
from webapp.jobs.endpoints import endpoint_of, hashes_of, new_key
from webapp.jobs.gangs import pool_lock
from webapp.jobs.launching import launchable_of, plan_launch
from webapp.jobs.models import FINAL_STATES, AttemptEvent, Job, JobState
from webapp.jobs.reason_words import words_for
from webapp.jobs.services import job_stop
from webapp.plans.models import Plan
from webapp.plans.planning import plan_keep

log = structlog.get_logger(__name__)
ACTOR = "system:deployments"
ROLE = Role.PRACTITIONER
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{MODEL_NAME_LENGTH - 1}}}")
ALIAS = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{MODEL_NAME_LENGTH - 1}}}")
MOST_ALIASES, MOST_FALLBACKS, MOST_REPLICAS = 20, 8, 64
LEAST_IDLE_SECONDS, MOST_IDLE_SECONDS = 6, 7 * 86_400.0
DEFAULT_IDLE_SECONDS = 900.0
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 300.0  # after a failure, before the next try
FORECAST_CHANGE = timedelta(seconds=5.0)  # of a start; a smaller one is not stored
# Until most gateways have read that a replica gets no more requests: one that still arrives is
# answered 503 by the endpoint that ends, and the gateway holds it.
LEAVING = timedelta(seconds=1.0)
MOST_DRAIN = timedelta(minutes=10)  # that open requests keep a replica which leaves
ROOM = timedelta(seconds=20.0)  # a new version waits so long for a device beside the old one
HOLD = timedelta(seconds=45.0)  # longer than a job rests that failed its checks
LEAP_REST_SECONDS = 5.0  # gateways report what is in use each second
OWN_STOP = timedelta(seconds=10.0)  # an endpoint that is told to ends by itself when idle
LOADS = 5  # the last ones, whose median is the forecast
FAULT = "Slipway failed while it started a replica; the site's log says where."
GONE = (
    "The account that owns {} is no longer a practitioner of the team. Take it over or delete it."
)


# Make and change


def deployment_create(  # noqa: PLR0913 (keyword-only: each is a column that the caller decides)
    *,
    team: Team,
    by: User,
    name: str,
    plan: Plan,
    launch: Launch,
    idle_seconds: float | None = None,
    is_kept_awake: bool = False,
    aliases: Sequence[str] = (),
    fallbacks: Sequence[str] = (),
    warm_hours: str = "",
    min_replicas: int = 1,
    max_replicas: int = 1,
    idempotency_key: str | None = None,
) -> Deployment:
    """Return a new deployment of a plan to serve, asleep; a draft is saved as a version first.

    Raises:
        InvalidProblem: a field is not valid.
        ConflictProblem: the team has a deployment of this name.
        DraftProblem: the plan cannot be launched as an endpoint.
        Problem: an option is not of an endpoint.
    """
    if made := _of_key(team, idempotency_key):
        return made
    name = _checked_name(name)
    launch = _checked_launch(launch)
    _check_idle(idle_seconds)
    _check_replicas(min_replicas, max_replicas)
    warm_hours = _checked_hours(warm_hours)
    _check_is_endpoint(plan, launch)
    try:
        with transaction.atomic():
            pool_lock(f"names {team.pk}")
            _check_free(team, [name])
            aliases = _checked_aliases(team, name, aliases)
            fallbacks = _checked_fallbacks(team, name, fallbacks)
            deployment = Deployment.objects.create(
                team=team,
                owner=by,
                token=acting_token(),
                name=name,
                plan=plan_keep(plan, by=by.get_username()),
                launch=launch.model_dump(mode="json", exclude_defaults=True),
                idle_seconds=None if is_kept_awake else idle_seconds,
                is_kept_awake=is_kept_awake,
                aliases=aliases,
                fallbacks=fallbacks,
                warm_hours=warm_hours,
                min_replicas=min_replicas,
                max_replicas=max_replicas,
                idempotency_key=idempotency_key,
            )
            event_record(
                deployment, "deployment.created", by.get_username(), detail={"name": name}
            )
    except IntegrityError:
        if made := _of_key(team, idempotency_key):  # another call with it came first
            return made
        _check_free(team, [name])
        raise
    return deployment


def _of_key(team: Team, key: str | None) -> Deployment | None:
    rows = Deployment.objects.filter(team=team, idempotency_key=key, deleted_at=None)
    return rows.first() if key else None


def deployment_change(
    *,
    deployment: Deployment,
    by: User,
    plan: Plan | None = None,
    launch: Launch | None = None,
    **fields: Any,
) -> Deployment:
    """Change a deployment: when it sleeps, its replicas, names, fall-backs, or what it runs.

    A new plan or launch is rolled out if a replica runs: another one starts, requests go to it
    once it is ready, and an old one ends, until none is left. Where there is no room for both, an
    old one ends before. When a single replica sleeps counts from its next start on.

    Raises:
        InvalidProblem: a field is not valid.
        DraftProblem: the plan cannot be launched as an endpoint.
    """
    row = _row_of(deployment)
    fields = _checked_fields(row, by, plan, launch, fields)
    with transaction.atomic():
        pool_lock(f"names {row.team_id}")
        changed = _changed(row, fields)
        detail: dict[str, Any] = dict(changed)
        if "plan" in changed:
            detail |= {"plan": changed["plan"].pk, "version": changed["plan"].version}
        if changed.get("is_paused"):
            changed["asked_at"] = None
        if is_other := bool({"launch", "plan"} & changed.keys()):
            changed["revision"] = F("revision") + 1
        Deployment.objects.filter(pk=row.pk, deleted_at=None).update(
            problem="", failures=0, failed_at=None, **changed
        )
        event_record(row, "deployment.changed", by.get_username(), detail=detail)
    row.refresh_from_db()
    if is_other and live_replicas(row) and not row.is_paused:
        _start(row, _next_number(row))
    deployment_advance(row)
    row.refresh_from_db()
    return row


def changes_checked(
    *,
    deployment: Deployment,
    by: User,
    plan: Plan | None,
    launch: Launch | None,
    fields: dict[str, Any],
) -> tuple[Deployment, dict[str, Any]]:
    """Return a deployment as it is stored, and the columns that a change would write.

    Raises:
        InvalidProblem: a field is not valid.
        DraftProblem: the plan cannot be launched as an endpoint.
    """
    row = _row_of(deployment)
    return row, _changed(row, _checked_fields(row, by, plan, launch, fields))


def _checked_fields(
    row: Deployment,
    by: User,
    plan: Plan | None,
    launch: Launch | None,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Return the columns of a change as they are kept; its names are not looked at."""
    if plan is not None and plan.team_id != row.team_id:
        raise InvalidProblem("plan", f"The plan is not of {row.team.name}. Choose one that is.")
    if "idle_seconds" in fields:
        _check_idle(fields["idle_seconds"])
    if "warm_hours" in fields:
        fields["warm_hours"] = _checked_hours(fields["warm_hours"])
    _check_replicas(
        fields.get("min_replicas", row.min_replicas), fields.get("max_replicas", row.max_replicas)
    )
    if fields.get("is_kept_awake"):
        fields["idle_seconds"] = None
    chosen = _checked_launch(launch or launch_of(row))
    if plan is not None or launch is not None:
        _check_is_endpoint(plan or row.plan, chosen)
    fields["launch"] = chosen.model_dump(mode="json", exclude_defaults=True)
    if plan is not None:
        fields["plan"] = plan_keep(plan, by=by.get_username())
    return fields


def _changed(row: Deployment, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that differ from a deployment's, its names as they are kept."""
    found = {**fields, **_checked_names(row, fields)}
    return {name: value for name, value in found.items() if value != getattr(row, name)}


def deployment_delete(*, deployment: Deployment, by: User) -> None:
    """Delete a deployment: its name is free again, its jobs stop, its usage stays.

    Raises:
        NotFoundProblem: another call has deleted it.
    """
    with transaction.atomic():
        rows = Deployment.objects.filter(pk=deployment.pk, deleted_at=None)
        if not rows.update(deleted_at=now(), asked_at=None):
            raise NotFoundProblem("gone", f"{deployment.name} is deleted already.")
        DeploymentDraft.objects.filter(deployment=deployment).delete()
        event_record(
            deployment, "deployment.deleted", by.get_username(), detail={"name": deployment.name}
        )
    _stop(live_replicas(deployment), by.get_username())


def deployment_sleep(*, deployment: Deployment, by: User) -> None:
    """Stop the replicas of a deployment; the next request wakes it.

    Raises:
        ConflictProblem: it is kept awake, or nothing runs.
    """
    row = _row_of(deployment)
    if row.is_warm(now()):
        hours = "" if row.is_kept_awake else f" in its hours, {row.warm_hours}"
        raise ConflictProblem(
            "kept_awake", f"{row.name} is kept awake{hours}. Pause it, or let it sleep when idle."
        )
    live = live_replicas(row)
    if not live and row.asked_at is None:
        raise ConflictProblem("asleep", f"{row.name} is asleep already.")
    Deployment.objects.filter(pk=row.pk).update(asked_at=None)
    event_record(row, "deployment.slept", by.get_username())
    _stop(live, by.get_username())


def _row_of(deployment: Deployment) -> Deployment:
    row = Deployment.objects.filter(pk=deployment.pk, deleted_at=None).first()
    if row is None:
        raise NotFoundProblem("gone", f"{deployment.name} is deleted.")
    return row


def launch_of(deployment: Deployment) -> Launch:
    """Return the options with which a deployment's jobs are launched."""
    return Launch.model_validate({"run": "endpoint", **deployment.launch_options})


def _checked_launch(launch: Launch) -> Launch:
    """Return the options of an endpoint's launch; how long it may be idle is the deployment's."""
    return launch.model_copy(
        update={"run": "endpoint", "idle_stop_seconds": None, "name": "", "save_as": "next"}
    )


def _checked_name(name: str) -> str:
    name = name.strip()
    if not NAME.fullmatch(name):
        raise InvalidProblem(
            "name",
            f"The name {name[:60]!r} is not valid: clients give it as their model. Use 1 to "
            f"{MODEL_NAME_LENGTH} letters, digits and any of . _ : -, such as “qwen3-8b”, and "
            "begin with a letter or digit.",
        )
    return name


def _check_free(team: Team, names: Sequence[str], besides: Deployment | None = None) -> None:
    others = Deployment.objects.filter(team=team, deleted_at=None)
    if besides is not None:
        others = others.exclude(pk=besides.pk)
    taken = {each for row in others for each in (row.name, *row.aliases)}
    if found := taken & set(names):
        raise ConflictProblem(
            "name_taken",
            f"{team.name} has a deployment that answers to {min(found)} already. Choose another "
            "name, or give that deployment the plan: its page says how.",
        )


def _checked_aliases(
    team: Team, name: str, aliases: Sequence[str], besides: Deployment | None = None
) -> list[str]:
    """Return the further names of a deployment, each once.

    Raises:
        InvalidProblem: one is not valid, or they are too many.
        ConflictProblem: another deployment answers to one.
    """
    found = sorted({each.strip() for each in aliases} - {name, ""})
    if wrong := [each for each in found if not ALIAS.fullmatch(each)]:
        raise InvalidProblem(
            "aliases",
            f"The name {wrong[0][:60]!r} is not valid: use letters, digits and any of . _ : / -, "
            "and begin with a letter or digit.",
        )
    if len(found) > MOST_ALIASES:
        raise InvalidProblem(
            "aliases", f"{len(found)} further names are given; {MOST_ALIASES} are the most."
        )
    _check_free(team, found, besides)
    return found


def _checked_names(row: Deployment, fields: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names among changed fields as they are kept.

    Raises:
        InvalidProblem: one is not valid.
        ConflictProblem: another deployment answers to one.
    """
    found = {}
    if "aliases" in fields:
        found["aliases"] = _checked_aliases(row.team, row.name, fields["aliases"], row)
    if "fallbacks" in fields:
        found["fallbacks"] = _checked_fallbacks(row.team, row.name, fields["fallbacks"])
    return found


def _checked_fallbacks(team: Team, name: str, fallbacks: Sequence[str]) -> list[str]:
    """Return the names of deployments that answer for one, in their order, each once.

    Raises:
        InvalidProblem: the team has no such deployment, or one of them leads back to this one.
    """
    found = list(dict.fromkeys(each.strip() for each in fallbacks if each.strip()))
    if len(found) > MOST_FALLBACKS:
        raise InvalidProblem(
            "fallbacks", f"{len(found)} fall-backs are given; {MOST_FALLBACKS} are the most."
        )
    rows = Deployment.objects.filter(team=team, deleted_at=None).exclude(name=name)
    after = dict(rows.values_list("name", "fallbacks"))
    if unknown := [each for each in found if each != name and each not in after]:
        raise InvalidProblem(
            "fallbacks", f"{team.name} has no other deployment named {unknown[0][:60]!r}."
        )
    for first in found:
        if name in reachable(first, lambda each: after.get(each, ())):
            raise InvalidProblem(
                "fallbacks",
                f"{first} leads back to {name}: a request would go round in a circle. Leave it "
                "out, or take the fall-backs of that one away first.",
            )
    return found


def reachable(name: str, after: Callable[[str], Sequence[str]]) -> list[str]:
    """Return a name and all that it falls back to, in the order in which they are tried, once."""
    found: dict[str, None] = {}
    rest = [name]
    while rest:
        each = rest.pop()
        if each not in found:
            found[each] = None
            rest += reversed(after(each))
    return list(found)


def _check_idle(seconds: float | None) -> None:
    if seconds is not None and not LEAST_IDLE_SECONDS <= seconds <= MOST_IDLE_SECONDS:
        raise InvalidProblem(
            "idle_seconds",
            f"It is to sleep after {seconds:g} s without a request; that can be "
            f"{LEAST_IDLE_SECONDS:g} s to 7 days, or empty: never.",
        )


def _check_replicas(least: int, most: int) -> None:
    if not 1 <= least <= MOST_REPLICAS:
        raise InvalidProblem(
            "min_replicas",
            f"It is to run with at least {least} replicas; that can be 1 to {MOST_REPLICAS}.",
        )
    if not least <= most <= MOST_REPLICAS:
        raise InvalidProblem(
            "max_replicas",
            f"It is to run with at most {most} replicas and with at least {least}; the most can "
            f"be {least} to {MOST_REPLICAS}.",
        )


def _checked_hours(text: str) -> str:
    """Return hours as they are kept: blanks are single, names of days small.

    Raises:
        InvalidProblem: they cannot be read.
    """
    text = " ".join(text.split())
    try:
        warm_hours.warm_hours(text)
    except ValueError as error:
        raise InvalidProblem(
            "warm_hours",
            f"The hours to keep it awake cannot be read: {error}. Write them like “"
            f"{warm_hours.EXAMPLE}”, or leave them empty.",
        ) from None
    return text


def _check_is_endpoint(plan: Plan, launch: Launch) -> None:
    if plan.document.goal != "serve":
        raise InvalidProblem(
            "plan", "This plan does not serve a model. Choose a plan with the goal Serve."
        )
    spec = launchable_of(plan, launch, hashes_of(new_key())).spec
    if not isinstance(spec, ServeSpec):
        raise InvalidProblem("launch", "A deployment runs endpoints; leave run out.")


# Wake


def deployment_wake(deployment: Deployment, *, by: User | None = None) -> Replica | None:
    """Start a replica unless one runs; return the one that serves, or is to serve, next.

    Of two calls at once, one starts it. After failures in a row only a person's call (``by``)
    does not wait. None: it is paused or deleted, a wait is not over, it gives way and is started
    afterwards, or its job was refused, which is kept as its problem; a person is told.

    Raises:
        DraftProblem: a person asks, and the plan cannot be launched now.
        Problem: a person asks, and the job service refuses.
    """
    instant = now()
    with transaction.atomic():
        row = Deployment.objects.select_for_update().get(pk=deployment.pk)
        if row.deleted_at or (row.is_paused and by is None):
            return None
        if by is not None:
            row.is_paused, row.failures, row.problem = False, 0, ""
            row.save(update_fields=["is_paused", "failures", "problem"])
            event_record(row, "deployment.woken", by.get_username())
        live, number = live_replicas(row), _next_number(row)
        if not live and _rests(row, instant):
            return None
        if _none_is_ready(live):
            Deployment.objects.filter(pk=row.pk).update(asked_at=row.asked_at or instant)
    if live:
        return live[0]
    return None if _gives_way(row) else _start(row, number, by)


def _next_number(deployment: Deployment) -> int:
    """Return what tells a start from the last one: two calls with one number start one job."""
    return Replica.objects.filter(deployment=deployment).count()


def _rests(deployment: Deployment, instant: datetime) -> bool:
    wait_until = next_try_at(deployment, instant)
    return wait_until is not None and instant < wait_until


def next_try_at(deployment: Deployment, instant: datetime) -> datetime | None:
    """Return when a request wakes a failing deployment again; None: at once.

    A failure in the future is of before the clock was set back, and is not waited for.
    """
    failed_at = deployment.failed_at
    if failed_at is None or failed_at > instant:
        return None
    return failed_at + rest_after(deployment.failures)


def rest_after(failures: int) -> timedelta:
    """Return how long no request wakes a deployment after so many failures in a row."""
    if not failures:
        return timedelta()
    seconds = FIRST_REST_SECONDS * 2 ** min(failures - 1, 10)
    return timedelta(seconds=min(seconds, LONGEST_REST_SECONDS))


def live_replicas(deployment: Deployment) -> list[Replica]:
    """Return the replicas that take requests now or once they are loaded, the newest first."""
    rows = Replica.objects.filter(deployment=deployment, ended_at=None, left_at=None)
    return list(rows.select_related("job__current_attempt", "deployment"))


def _start(deployment: Deployment, number: int, by: User | None = None) -> Replica | None:
    """Launch a job for a deployment; a refusal is kept as its problem, or told to a person.

    It counts against the budget of the token that asks for it, else of the deployment's own. The
    Hub may be asked, so no transaction is open meanwhile.
    """
    idle = None if deployment.is_scaled else deployment.idle_seconds
    try:
        owner = _owner_of(deployment)
        with acting_as(acting_token() or deployment.token):
            job = plan_launch(
                plan=deployment.plan,
                by=owner,
                launch=launch_of(deployment).model_copy(update={"idle_stop_seconds": idle}),
                name=f"Deployment {deployment.name}"[:NAME_LENGTH],
                is_named=False,
                key_hashes=hashes_of(new_key()),
                idempotency_key=f"deployment-{deployment.pk}-{deployment.revision}-{number}",
                served_name=deployment.name,
            )
        return _attached(deployment, job)
    except (DraftProblem, Problem) as problem:
        if by is not None:
            raise
        _failed(deployment, str(problem))
        return None
    except (OperationalError, InterfaceError, IntegrityError):
        raise  # locked, gone, or another call's
    except Exception:
        log.exception("replica not started", deployment=deployment.pk)
        _failed(deployment, FAULT)
        return None


def _attached(deployment: Deployment, job: Job) -> Replica | None:
    """Return the replica of a job; None if nobody wants it any more: then it leaves at once."""
    with transaction.atomic():
        row = Deployment.objects.select_for_update().get(pk=deployment.pk)
        is_wanted = row.deleted_at is None and not row.is_paused
        replica, _ = Replica.objects.get_or_create(
            job=job,
            defaults={
                "deployment": row,
                "plan": deployment.plan,
                "revision": deployment.revision,
                "created_at": now(),
            },
        )
    if not is_wanted:
        _stop([replica], ACTOR)
        return None
    return replica


def _owner_of(deployment: Deployment) -> User:
    """Return who owns a deployment.

    Raises:
        ConflictProblem: the account is gone, or may not launch any more.
    """
    owner = deployment.owner
    if owner is None or not owner.is_active or not has_role(owner, deployment.team, ROLE):
        raise ConflictProblem("owner_gone", GONE.format(deployment.name))
    return owner


def _failed(deployment: Deployment, words: str) -> None:
    deployment.refresh_from_db(fields=["failures"])
    Deployment.objects.filter(pk=deployment.pk).update(
        problem=words, failed_at=now(), failures=min(deployment.failures + 1, 100), asked_at=None
    )
    deployment.refresh_from_db(fields=["problem", "failed_at", "failures", "asked_at"])


# Advance


class Advance:
    """The duty that advances deployments; it rests once the clock was set.

    A busy one looks idle then, until gateways have reported its use again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._leaps = LeapWatch(LEAP_REST_SECONDS, clock)

    def step(self) -> int:
        """Advance every deployment that runs or should; return their number."""
        return 0 if self._leaps.is_recent() else advance_all()


def advance_all() -> int:
    """Advance every deployment that runs or should; return their number.

    What runs is read at once, so that those for which nothing is due cost no query each.
    """
    is_warm = Q(is_kept_awake=True) | ~Q(warm_hours="")
    rows = Deployment.objects.filter(is_warm, deleted_at=None, is_paused=False)
    running: dict[str, list[Replica]] = {}
    for replica in Replica.objects.live():
        running.setdefault(replica.deployment_id, []).append(replica)
    asked = Deployment.objects.filter(deleted_at=None, asked_at__isnull=False)
    live = Deployment.objects.filter(
        pk__in=Replica.objects.filter(ended_at=None).values("deployment")
    )
    deployments = {each.pk: each for rows in (rows, asked, live) for each in rows}
    queues: dict[str, Queue] = {}
    for deployment in deployments.values():
        try:
            _advance_if_due(deployment, running.get(deployment.pk, []), queues)
        except Exception:  # the next round tries again; the others go on
            log.warning("deployment not advanced", deployment=deployment.pk, exc_info=True)
    return len(deployments)


def _advance_if_due(
    deployment: Deployment, replicas: list[Replica], queues: dict[str, Queue]
) -> None:
    """Advance a deployment; one that serves, or waits in the queue, without its rows anew."""
    is_off = deployment.deleted_at is not None or deployment.is_paused
    if (
        is_off
        or deployment.is_scaled
        or len(replicas) != 1
        or replicas[0].is_leaving
        or replicas[0].job.deleted_at
    ):
        deployment_advance(deployment)
    elif replicas[0].job.state == JobState.QUEUED:
        if _is_wanted(deployment) and not replicas[0].is_ready:
            pool = replicas[0].job.pool_id
            queue = queues.get(pool) or queues.setdefault(pool, Queue(replicas[0].job.pool))
            _take_turn(replicas[0], queue)
    elif not (replicas[0].job.state == JobState.RUNNING and replicas[0].is_ready):
        deployment_advance(deployment)
    elif is_idle(deployment, replicas, now() - OWN_STOP):
        _sleep_idle(deployment, replicas)


def _is_wanted(deployment: Deployment) -> bool:
    return deployment.is_warm(now()) or deployment.asked_at is not None


def deployment_advance(deployment: Deployment) -> None:
    """Read what the replicas' jobs have become; stop and start what is due."""
    replicas = Replica.objects.filter(deployment=deployment, ended_at=None)
    for replica in replicas.select_related("job__current_attempt"):
        _settle(deployment, replica)
    if deployment.deleted_at is not None or deployment.is_paused:
        _leave(live_replicas(deployment), now())
        return
    _finish_roll(deployment)
    live = live_replicas(deployment)
    if deployment.asked_at is not None and not live:
        deployment.refresh_from_db(fields=["asked_at"])
    if live and not _none_is_ready(live):
        if deployment.is_scaled or len(live) > 1:
            _scale(deployment, live)
    elif not _is_wanted(deployment):
        return
    elif not live:
        deployment_wake(deployment)
    elif live[0].job.state == JobState.QUEUED:
        _take_turn(live[0], Queue(live[0].job.pool))


# Several replicas


def _scale(deployment: Deployment, live: list[Replica]) -> None:
    """Start a replica, let one leave, or let all sleep, by the requests that gateways have.

    One starts at a time: the next one once it has its devices.
    """
    instant = now()
    if is_idle(deployment, live, instant):
        _sleep_idle(deployment, live)
        return
    current = [each for each in live if each.revision == deployment.revision]
    if len(current) < len(live):
        return  # another version is rolled out
    needed = num_needed(deployment, live[0], open_requests(deployment))
    _note_need(deployment, needed - len(live), instant)
    is_short = len(live) < deployment.min_replicas or _lasts(deployment.busy_since, BUSY, instant)
    is_queued = any(each.job.state == JobState.QUEUED for each in live)
    is_free = not (is_queued or _rests(deployment, instant) or _gives_way(deployment))
    if needed > len(live) and is_short and is_free:
        _start(deployment, _next_number(deployment))
    elif len(live) > deployment.max_replicas or (
        needed < len(live) and _lasts(deployment.spare_since, SPARE, instant)
    ):
        ready = [each for each in live if each.is_ready]
        # One that has no devices yet serves nobody; of the others the one least recently used.
        waiting = [each for each in live if not each.is_ready]
        leaver = waiting[0] if waiting else min(ready, key=_used_at)
        _leave([leaver], instant)


def _sleep_idle(deployment: Deployment, replicas: list[Replica]) -> None:
    event_record(deployment, "deployment.slept", ACTOR)
    _stop(replicas, ACTOR)


def _note_need(deployment: Deployment, num_missing: int, instant: datetime) -> None:
    """Store since when a deployment has had too few replicas, or too many."""
    busy = (deployment.busy_since or instant) if num_missing > 0 else None
    spare = (deployment.spare_since or instant) if num_missing < 0 else None
    if (busy, spare) != (deployment.busy_since, deployment.spare_since):
        deployment.busy_since, deployment.spare_since = busy, spare
        deployment.save(update_fields=["busy_since", "spare_since"])


def _lasts(since: datetime | None, least: timedelta, instant: datetime) -> bool:
    return since is not None and since + least <= instant


def _used_at(replica: Replica) -> datetime:
    return replica.last_used_at or replica.ready_at or replica.created_at


def _settle(deployment: Deployment, replica: Replica) -> None:
    """Store that a replica is ready, or how it ended; stop one that has been leaving."""
    job = replica.job
    if job.state in FINAL_STATES or job.deleted_at is not None:
        rows = Replica.objects.filter(pk=replica.pk, ended_at=None)
        if not rows.update(ended_at=job.ended_at or now()):
            return  # another round has seen it
        was_wanted = not replica.is_leaving and deployment.deleted_at is None
        if was_wanted and job.state not in {JobState.SUCCEEDED, JobState.STOPPED}:
            words = words_for(job.reason or Reason.INTERNAL)
            _failed(deployment, f"{words.sentence} {words.next_step}")
        elif was_wanted and not replica.is_ready:
            _failed(deployment, "Its job was stopped before the model was loaded.")
        return
    was_ready = replica.is_ready
    mark_ready([replica])
    if replica.is_ready and not was_ready:
        endpoint = endpoint_of(job)
        replica.silent_since = None
        with transaction.atomic():
            replica.save(update_fields=["ready_at", "silent_since"])
            row = Deployment.objects.select_for_update().get(pk=deployment.pk)
            Deployment.objects.filter(pk=deployment.pk).update(
                problem="", failures=0, failed_at=None, asked_at=None,
                loads=[*row.loads, replica.load_seconds][-LOADS:],
                has_chat_template=endpoint.has_chat_template if endpoint else None,
            )  # fmt: skip
        deployment.asked_at = None
    if replica.is_leaving and _has_left(replica, now()):
        _stop([replica], ACTOR)


def _has_left(replica: Replica, instant: datetime) -> bool:
    """Return whether a replica that leaves has no open requests, or had them for too long."""
    left_at, used_at = replica.left_at or instant, replica.last_used_at
    is_used = used_at is not None and used_at + IDLE_TURN > instant
    return instant >= left_at + (MOST_DRAIN if is_used else LEAVING)


def mark_ready(replicas: Iterable[Replica]) -> None:
    """Set ``ready_at`` of replicas whose endpoint has answered on its host since."""
    waiting = {
        each.job.current_attempt_id: each
        for each in replicas
        if not each.is_ready and each.job.state == JobState.RUNNING
    }
    if not waiting:
        return
    events = AttemptEvent.objects.filter(attempt__in=list(waiting), kind="endpoint")
    for attempt_id in set(events.values_list("attempt_id", flat=True)):
        waiting[attempt_id].ready_at = now()


def _stop(replicas: Iterable[Replica], by: str) -> None:
    """Stop the jobs of replicas; an endpoint finishes its open requests first."""
    replicas = list(replicas)
    _leave(replicas, now())
    for replica in replicas:
        job = replica.job
        if job.state not in FINAL_STATES and job.state != JobState.STOPPING:
            with suppress(ConflictProblem):  # it has ended meanwhile
                job_stop(job=job, by=by, reason=Reason.STOPPED_BY_USER)


def _leave(replicas: Iterable[Replica], instant: datetime) -> None:
    keys = [each.pk for each in replicas]
    Replica.objects.filter(pk__in=keys, left_at=None).update(left_at=instant)


# Take turns on a device


def _none_is_ready(replicas: Iterable[Replica]) -> bool:
    return not any(each.is_ready for each in replicas)


def _take_turn(waiter: Replica, queue: Queue) -> None:
    """Let a replica of another deployment leave, if that is how a queued one gets its devices."""
    leaver, instant = next_to_leave(waiter, queue), now()
    _note_start(waiter, queue, instant)
    if leaver is None:
        return
    queue.left(leaver)
    busy = turn_of(leaver).total_seconds() if has_requests(leaver, instant) else None
    with transaction.atomic():
        rows = Replica.objects.filter(pk=leaver.pk, left_at=None)
        if rows.update(left_at=instant, gives_way_to=waiter):
            Deployment.objects.filter(pk=leaver.deployment_id).update(busy_seconds=busy)
            leaver.gives_way_to = waiter
            event_record(
                leaver.deployment, "deployment.gave_way", ACTOR, detail={"to": leaver.successor}
            )


def _note_start(waiter: Replica, queue: Queue, instant: datetime) -> None:
    """Store when a queued replica gets its devices, where other jobs than deployments' hold them.

    What deployments hold is forecast by their turns (``webapp.deployments.states.Line``).
    """
    has_holders = any(
        each.given_at and each.job.pool_id == waiter.job.pool_id for each in queue.replicas
    )
    seconds = None if has_holders else queue.start_seconds.get(waiter.job_id)
    starts_at = None if seconds is None else instant + timedelta(seconds=seconds)
    before = waiter.starts_at
    if before and starts_at and abs(starts_at - before) < FORECAST_CHANGE:
        return
    if starts_at != before:
        Replica.objects.filter(pk=waiter.pk).update(starts_at=starts_at)


def _gives_way(deployment: Deployment) -> bool:
    """Return whether a deployment's replica left for one that still waits in the queue.

    Its next one is queued behind: teams that used little would be before it otherwise, and the
    two would only change places.
    """
    return Replica.objects.filter(
        Q(ended_at=None) | Q(ended_at__gt=now() - HOLD),
        deployment=deployment,
        gives_way_to__left_at=None,
        gives_way_to__ended_at=None,
        gives_way_to__job__state=JobState.QUEUED,
    ).exists()


# Roll out another version


def _finish_roll(deployment: Deployment) -> None:
    """Let a replica of an older version leave for each that is ready, until none is left.

    Where the newest has no room beside them one leaves first. After each, another one starts,
    as many as run.
    """
    live, instant = live_replicas(deployment), now()
    older = [each for each in live if each.revision != deployment.revision]
    if not older or deployment.is_paused:
        return
    newer = [each for each in live if each.revision == deployment.revision]
    if not newer:  # its start was refused, or its job ended: the problem says why
        if not _rests(deployment, instant):
            _start(deployment, _next_number(deployment))
        return
    newest, num_wanted = newer[0], max(deployment.min_replicas, len(live) - 1)
    if not all(each.is_ready for each in newer):
        waited = instant - newest.created_at >= ROOM and newest.job.state == JobState.QUEUED
        if waited and starts_without(newest, older):
            _leave([next(_few_without(newest, older))], instant)
    elif len(newer) >= min(num_wanted, deployment.max_replicas):
        _leave(older, instant)
    elif not _rests(deployment, instant) and _start(deployment, _next_number(deployment)):
        _leave(older[-1:], instant)


def _few_without(newest: Replica, older: list[Replica]) -> Iterator[Replica]:
    """Yield the older replicas whose end alone gives the newest its devices, else the oldest."""
    yield from (each for each in reversed(older) if starts_without(newest, [each]))
    yield older[-1]

"""What ended jobs keep on the disks of hosts: shown with sizes, deleted by order; team models.

A host reports what each ended attempt keeps (``runners.host.files``), and gets the orders to
delete with the replies to its heartbeats, until a report shows that they were carried out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Count, F, Q, QuerySet, Sum
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from runners.jobspec.base import NAME_LENGTH
from runners.shared.messages import MAX_STORED, FilePart, FilesOrder, StoredFiles
from webapp.accounts.models import Role
from webapp.accounts.services import has_role, membership_of
from webapp.audit.models import event_record
from webapp.core.display import memory
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.core.queries import RowChange, update_each
from webapp.hosts.models import Host
from webapp.hosts.services import checks_update
from webapp.jobs.models import DOCUMENTS, FINAL_STATES, Attempt, Job
from webapp.jobs.permissions import refusal
from webapp.modelhub.models import TeamModel

ORDERS = "file_orders"  # key of Host.checks: attempt id -> part
PARTS: tuple[FilePart, ...] = ("checkpoint", "all")


class Stored(NamedTuple):
    """What one attempt keeps on its host's disk."""

    attempt: Attempt  # with its job and host
    pending: Literal["", "checkpoint", "all"]  # what its host is ordered to delete, and has not

    @property
    def total_bytes(self) -> int:
        """Return the bytes of checkpoint and output."""
        return (self.attempt.checkpoint_bytes or 0) + (self.attempt.output_bytes or 0)

    @property
    def has_checkpoint(self) -> bool:
        """Return whether a checkpoint is there that no order deletes."""
        return bool(self.attempt.checkpoint_bytes) and not self.pending


def _pending(host: Host) -> dict[str, FilePart]:
    return cast("dict[str, FilePart]", host.checks.get(ORDERS, {}))


# Of a host thousands of attempts may be read for one page: without the documents of their jobs.
SIZE = Coalesce(F("checkpoint_bytes"), 0) + Coalesce(F("output_bytes"), 0)
UNREAD = ("exit_record", "facts", *(f"job__{name}" for name in DOCUMENTS))


def _stored(attempts: QuerySet[Attempt]) -> QuerySet[Attempt]:
    return attempts.filter(Q(checkpoint_bytes__gt=0) | Q(output_bytes__gt=0))


def _with_orders(attempts: Iterable[Attempt]) -> list[Stored]:
    return [Stored(each, _pending(each.host).get(each.pk, "")) for each in attempts]


def stored_of_job(job: Job) -> list[Stored]:
    """Return what a job's attempts keep on hosts, the newest first."""
    attempts = _stored(Attempt.objects.filter(job=job)).select_related("job", "host")
    return _with_orders(attempts.order_by("-number", "node_rank"))


def stored_of_model(model: TeamModel) -> tuple[Stored | None, Job | None]:
    """Return what the attempt that made a model keeps, and its job; None where there is none."""
    if not model.attempt_id:
        return None, None
    rows = Attempt.objects.filter(pk=model.attempt_id).select_related("job", "host")
    made_by = rows.first()
    kept = _with_orders(_stored(rows))
    return (kept[0] if kept else None), (made_by.job if made_by else None)


def _on_host(host: Host, teams: Sequence[str]) -> QuerySet[Attempt]:
    """Return the attempts of these teams that keep something on a host.

    The teams are a condition on the joined job: ``job__in`` of a query of the teams' jobs would
    read every one of them.
    """
    return _stored(Attempt.objects.filter(host=host, job__team_id__in=teams))


def stored_on_host(
    host: Host, teams: Sequence[str], *, at_most: int | None = None
) -> list[Stored]:
    """Return what attempts of these teams' jobs keep on a host, the largest first."""
    rows = _on_host(host, teams).select_related("job", "host").defer(*UNREAD)
    return _with_orders(rows.order_by(SIZE.desc(), "-pk")[:at_most])


class Kept(NamedTuple):
    """How much the attempts of some teams keep on a host."""

    num_attempts: int
    num_bytes: int


def kept_on_host(host: Host, teams: Sequence[str]) -> Kept:
    """Return how much attempts of these teams' jobs keep on a host, summed by the database."""
    rows = _on_host(host, teams).order_by()
    found = rows.aggregate(number=Count("pk"), size=Coalesce(Sum(SIZE), 0))
    return Kept(found["number"], found["size"])


def orders_of(host: Host) -> tuple[FilesOrder, ...]:
    """Return the pending orders of a host."""
    return tuple(
        FilesOrder(attempt_id=key, part=part) for key, part in sorted(_pending(host).items())
    )


def report_store(host: Host, report: Sequence[StoredFiles]) -> dict[str, FilePart]:
    """Store a host's report in its attempts; return the orders that it does not show as done.

    An attempt that a complete report does not name keeps nothing.
    """
    told = {each.attempt_id: (each.checkpoint_bytes, each.output_bytes) for each in report}
    is_complete = len(report) < MAX_STORED
    names = ("checkpoint_bytes", "output_bytes")
    own = Attempt.objects.filter(host=host)
    known = {
        pk: (checkpoint, output)
        for pk, checkpoint, output in own.filter(pk__in=told).values_list("pk", *names)
    }
    if is_complete:
        rows = _stored(own).exclude(pk__in=told).values_list("pk", *names)
        known |= {pk: (checkpoint, output) for pk, checkpoint, output in rows}
        told = dict.fromkeys(known, (0, 0)) | told
    update_each(
        Attempt,
        [
            RowChange(pk, dict(zip(names, told[pk], strict=True)))
            for pk, before in known.items()
            if told[pk] != before
        ],
    )
    return {
        key: part
        for key, part in _pending(host).items()
        if not _is_done(part, told.get(key, (0, 0) if is_complete else (1, 1)))
    }


def _is_done(part: FilePart, left: tuple[int, int]) -> bool:
    checkpoint, output = left
    return checkpoint == 0 and (part == "checkpoint" or output == 0)


def files_delete(*, job: Job, part: str, by: str) -> list[Stored]:
    """Order the hosts of an ended job to delete its checkpoints, or all that it keeps there.

    Returns what the job keeps, with the orders. Its measurements, log and uploaded artefacts stay
    on the server. Models that rest on deleted weights leave the team's models.

    Raises:
        InvalidProblem: the part is unknown.
        ConflictProblem: the job has not ended, or a running job uses its weights.
        NotFoundProblem: it keeps nothing of that part.
    """
    if part not in PARTS:
        raise InvalidProblem("part", f"The part is {part[:20]!r}; it can be checkpoint or all.")
    if job.state not in FINAL_STATES:
        state = job.get_state_display().lower()
        raise ConflictProblem("still_live", f"{job.name} is {state}; stop it first.")
    kept = [each for each in stored_of_job(job) if part == "all" or each.attempt.checkpoint_bytes]
    if not kept:
        what = "no checkpoint" if part == "checkpoint" else "nothing"
        raise NotFoundProblem(
            "no_files",
            f"{job.name} keeps {what} on a host's disk, as far as its hosts reported: they do so "
            "when a job has ended, and every ten minutes.",
        )
    _order(job, dict.fromkeys((each.attempt for each in kept), part), by)
    return stored_of_job(job)


def files_release(*, job: Job, by: str) -> None:
    """Order the deletion of what a deleted job keeps, except for the models of its team."""
    models = set(
        TeamModel.objects.filter(
            attempt_id__in=Attempt.objects.filter(job=job).values("pk")
        ).values_list("attempt_id", flat=True)
    )
    parts: dict[Attempt, FilePart] = {
        each.attempt: "checkpoint" if each.attempt.pk in models else "all"
        for each in stored_of_job(job)
        if each.attempt.pk not in models or each.attempt.checkpoint_bytes
    }
    if parts and not _job_using(job, parts):
        _order(job, parts, by)


def _order(job: Job, parts: Mapping[Attempt, FilePart], by: str) -> None:
    """Order the deletion of a part of each attempt; models of deleted weights leave the team."""
    _refuse_in_use(job, parts)
    whole = [attempt.pk for attempt, part in parts.items() if part == "all"]
    with transaction.atomic():
        TeamModel.objects.filter(attempt_id__in=whole).delete()
        for attempt, part in parts.items():
            row = (
                Host.objects.select_for_update(no_key=True).only("checks").get(pk=attempt.host_id)
            )
            checks_update(row.pk, **{ORDERS: {**_pending(row), attempt.pk: part}})
        detail = {
            "parts": sorted(set(parts.values())),
            "hosts": sorted({attempt.host.slug for attempt in parts}),
        }
        event_record(job, "job.files_deleted", by, detail=detail)


def _refuse_in_use(job: Job, parts: Mapping[Attempt, FilePart]) -> None:
    if user := _job_using(job, parts):
        raise ConflictProblem(
            "in_use",
            f"{user.name} uses these files and is {user.get_state_display().lower()}; stop it "
            "first, or wait for its end.",
        )


def _job_using(job: Job, parts: Mapping[Attempt, FilePart]) -> Job | None:
    """Return a job of the team that has not ended and needs what is to be deleted, if any."""
    whole = {attempt.pk for attempt, part in parts.items() if part == "all"}
    live = Job.objects.filter(team=job.team_id, deleted_at=None).exclude(state__in=FINAL_STATES)
    for each in live:
        if each.spec.get("resume_from") == job.pk or whole & set(_attempts_used(each.spec)):
            return each
    return None


def _attempts_used(spec: Any) -> Iterable[str]:  # noqa: ANN401 (JSON)
    """Yield the attempts whose files a job's document names."""
    if isinstance(spec, dict):
        if isinstance(spec.get("attempt_id"), str):
            yield spec["attempt_id"]
        for value in spec.values():
            yield from _attempts_used(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from _attempts_used(value)


# Models of a team: renamed, and deleted.


def free_name(name: str, model: TeamModel) -> str:
    """Return a name for a model that no other model of its team has: it, or it with a number."""
    others = TeamModel.objects.filter(team_id=model.team_id).exclude(pk=model.pk)
    taken = set(others.filter(name__startswith=name[:100]).values_list("name", flat=True))
    number, candidate = 1, name[:NAME_LENGTH]
    while candidate in taken:
        number += 1
        suffix = f" ({number})"
        candidate = name[: NAME_LENGTH - len(suffix)] + suffix
    return candidate


def model_rename(*, model: TeamModel, name: str, by: str) -> None:
    """Give a model another name; plans and jobs keep the one that they were made with.

    Raises:
        InvalidProblem: the name is empty, too long, or another model of the team has it.
    """
    words = ""
    if not name:
        words = "Give the model a name."
    elif len(name) > NAME_LENGTH:
        words = f"It has {len(name)} characters; at most {NAME_LENGTH} are kept."
    elif free_name(name, model) != name:
        words = f"Another model of the team is called {name}; choose another name."
    if words:
        raise InvalidProblem(
            "invalid",
            f"The field name is not valid: {words}",
            errors=[{"field": "name", "message": words}],
        )
    before, model.name = model.name, name
    model.save(update_fields=["name"])
    event_record(model, "model.renamed", by, detail={"before": before, "after": name})


def model_delete(*, model: TeamModel, by: str, with_files: bool) -> str:
    """Delete a model of the team; return what becomes of its weights, as a sentence.

    With ``with_files`` its host is ordered to delete all that the job which made it keeps there. A
    folder that was on the host before is never deleted.

    Raises:
        ConflictProblem: a job that has not ended uses it.
    """
    kept, _job = stored_of_model(model)
    made_by = Attempt.objects.filter(pk=model.attempt_id).select_related("job", "host").first()
    with transaction.atomic():
        if made_by is not None:
            _refuse_in_use(made_by.job, {made_by: "all"})
        event_record(model, "model.deleted", by, detail={"name": model.name})
        model.delete()
        if made_by is not None and kept is not None and with_files:
            _order(made_by.job, {made_by: "all"}, by)
    if kept is None:
        return ""
    size, place = memory(kept.total_bytes), kept.attempt.host.name
    if with_files:
        return f"{place} deletes {size} of files after its next heartbeat."
    return f"Its files stay on {place}: {size}."


def model_to_change(request: HttpRequest, model_id: str, *, with_files: bool = False) -> TeamModel:
    """Return a model of the caller's teams, which a practitioner may rename and delete.

    Raises:
        Http404: the caller's teams have no such model; those of the catalog cannot be changed.
        PermissionDenied: the role is too low; its job's files belong to that job's owner.
    """
    own = TeamModel.objects.visible_to(request.user).select_related("host", "team")
    model = get_object_or_404(own, pk=model_id)
    if not has_role(request.user, model.team, Role.PRACTITIONER):
        raise PermissionDenied("To change a model you need the role Practitioner or higher.")
    job = stored_of_model(model)[1] if with_files else None
    if job and (why := refusal(membership_of(request.user, job.team), job, "delete")):
        raise PermissionDenied(why)
    return model

"""Save plans: who may, and their versions."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from django.contrib.auth.models import AnonymousUser, User
from django.db import IntegrityError, transaction
from django.db.models import Count, F, Max, Q, QuerySet
from django.http import HttpRequest

from runners.client.replies.plans import VerdictState
from runners.jobspec.base import NAME_LENGTH
from runners.plans.pins import FIELD_TITLES, FIELDS
from runners.plans.refusals import DraftProblem
from webapp.accounts.models import Role
from webapp.accounts.services import check_role, visible_with_role_or_404
from webapp.core.clock import now
from webapp.core.display import NOTHING
from webapp.core.names import checked_name
from webapp.core.problems import ConflictProblem
from webapp.core.queries import changed_words
from webapp.hosts.models import Host
from webapp.plans.explanation import hardware_words, model_words, plan_title
from webapp.plans.models import Plan, PlanState
from webapp.plans.places import pool_words, question_of
from webapp.plans.verdict import stored_state

# ---------------------------------------------------------------------------
# Store plans under a name: drafts are mutable, saved versions are not.
# ---------------------------------------------------------------------------


# Plan names: set by a person, or a title derived from the content.


def title_of(plan: Plan) -> str:
    """Return a title from the plan's goal, model and hardware, as far as they exist."""
    document = plan.readable_document
    if document is None:
        return "Unfinished plan"
    try:
        question = question_of(plan)
    except DraftProblem:
        key = document.hardware.host
        chosen = Host.objects.filter(pk=key).first() if key else None
        place = hardware_words(document.hardware, chosen.name if chosen else "")
        return plan_title(document.goal, model_words(document.model), place)
    model = question.team_model.name if question.team_model else ""
    host = question.host.name if question.host else ""
    if question.pool is not None:
        host = f"pool {pool_words(question.pool, plan.team)}"
    words = model_words(document.model, model), hardware_words(document.hardware, host)
    return plan_title(document.goal, *words)


def is_named(plan: Plan) -> bool:
    """Return whether a person named the plan, so that content changes keep the name.

    For a plan of an older release, a name different from its title counts as a person's.
    """
    if plan.is_named is not None:
        return plan.is_named
    return bool(plan.name) and plan.name != title_of(plan)


def follow_content(plan: Plan) -> None:
    """Update an unnamed plan's name to the title of its content."""
    if plan.is_named is False:
        plan.name = title_of(plan)


TRIES = 5
BESIDES = frozenset({"wizard", "launch", "name"})  # keys of a draft outside its question
ANSWERED = ("request", "answer", "is_brief", "computed_at")


class PlanChangedError(ConflictProblem):
    """Another write came first, or the plan is saved; the row is unchanged."""

    def __init__(self, plan: Plan, reader: str = "") -> None:
        current = Plan.objects.filter(pk=plan.pk).first()
        super().__init__("plan_changed", _refusal(current, reader))


def _refusal(current: Plan | None, reader: str) -> str:
    if current is None:
        return "This draft was deleted since you opened this page. Begin a new plan."
    if not current.is_draft:
        change = changed_words("This draft was saved as a plan; it was last", *_last(current))
        return f"{change} A saved plan stays as it is: choose Edit for a draft of it."
    change = changed_words("This draft was", *_last(current), reader=reader)
    return f"{change} Your change was not saved. Review the new version."


def _last(plan: Plan) -> tuple[str, Any]:
    latest: dict[str, str] = max(
        plan.edits.values(), key=lambda each: each.get("at", ""), default={}
    )
    return str(latest.get("by", "")), plan.saved_at


def content_of(plan: Plan) -> dict[str, Any]:
    """Return the content of a draft's question."""
    return {name: value for name, value in plan.draft.items() if name not in BESIDES}


# Drafts


def draft_write(plan: Plan) -> None:
    """Store a draft with its name, question and answer as the next revision.

    Raises:
        PlanChangedError: somebody wrote the draft since it was read, or the plan is saved.
    """
    follow_content(plan)
    fields = {"name": plan.name, "draft": plan.draft, "edits": plan.edits, "saved_at": now()}
    fields |= {name: getattr(plan, name) for name in ANSWERED}
    unchanged = Plan.objects.filter(
        pk=plan.pk, state=PlanState.DRAFT, revision=plan.revision, deleted_at=None
    )
    if not unchanged.update(revision=F("revision") + 1, **fields):
        raise PlanChangedError(plan)
    plan.saved_at = fields["saved_at"]
    plan.revision += 1


def answer_write(plan: Plan) -> None:
    """Store the answer of a plan that had none or only a brief one.

    If the draft changed meanwhile, nothing is stored.
    """
    fields = {name: getattr(plan, name) for name in ANSWERED} | {"verdict": _listed_verdict(plan)}
    lacking = Q(answer={}) | Q(is_brief=True)
    Plan.objects.filter(lacking, pk=plan.pk, revision=plan.revision).update(**fields)


def draft_of(plan: Plan, owner: User, *, is_untouched: bool = False) -> Plan:
    """Return a person's open draft of a saved version, or a new one.

    With ``is_untouched`` only an unmodified draft is reused.
    """
    drafts = Plan.objects.filter(base=plan, owner=owner, state=PlanState.DRAFT, deleted_at=None)
    drafts = drafts.exclude(draft__wizard__has_key="copied_job")
    if is_untouched:
        drafts = drafts.filter(revision=0)
    return drafts.order_by("-saved_at").first() or draft_begun_from(plan, owner)


def draft_begun_from(plan: Plan, owner: User, **fields: Any) -> Plan:
    """Return a new draft with the content of a version or draft; it is stored."""
    draft = draft_copied(plan, owner, **fields)
    draft.save(force_insert=True)
    return draft


def draft_copied(plan: Plan, owner: User, **fields: Any) -> Plan:
    """Return a new draft with the content of a version or draft; it is not stored."""
    named = is_named(plan)
    copied = {
        "team": plan.team,
        "owner": owner,
        "base": None if plan.is_draft else plan,
        "name": plan.name if named else title_of(plan),
        "is_named": named,
        "draft": copy.deepcopy(plan.draft),
        "edits": copy.deepcopy(plan.edits),
        **{name: copy.deepcopy(getattr(plan, name)) for name in ANSWERED},
    }
    return Plan(**{**copied, **fields})


# Versions


def is_unchanged(plan: Plan) -> bool:
    """Return whether a draft has the same question as its base version."""
    base = plan.base
    if base is None or base.deleted_at is not None:
        return False
    is_same = content_of(plan) == content_of(base)
    return is_same and (not plan.request or _answered(plan) == _answered(base))


def _answered(plan: Plan) -> tuple[Any, Any]:
    """Return the question and the best plan: brief answers contain no more."""
    return plan.request, (plan.answer.get("plans") or [])[:1]


def version_save(plan: Plan, *, name: str = "", by: str = "", as_new: bool = False) -> Plan:
    """Save a draft as the next version of its base plan, or as a separate plan.

    A draft with the same question as its base is not saved: the base is returned. A saved plan is
    returned unchanged. ``name`` is a person's, "" keeps the current name.

    Raises:
        PlanChangedError: somebody wrote the draft since it was read.
        InvalidProblem: the name holds what does not show.
    """
    if not plan.is_draft:
        return plan
    if name:
        plan.name, plan.is_named = checked_name(name, "name")[:NAME_LENGTH], True
    elif not plan.name:
        plan.name, plan.is_named = title_of(plan), False
    else:
        follow_content(plan)
    base = None if as_new else plan.base
    if base is not None and is_unchanged(plan) and plan.name == base.name:
        return base
    plan.draft = {key: plan.draft[key] for key in plan.draft if key not in {"launch", "wizard"}}
    for _ in range(TRIES):
        try:
            return _save_next(plan, base, by)
        except IntegrityError:  # another draft took that version number meanwhile
            continue
    raise PlanChangedError(plan)


def _save_next(plan: Plan, base: Plan | None, by: str) -> Plan:
    with transaction.atomic():
        series, version = plan.pk, 1
        if base is not None and base.series and base.deleted_at is None:
            series = base.series
            others = Plan.objects.filter(series=series)
            version = (others.aggregate(last=Max("version"))["last"] or 0) + 1
            others.update(is_latest=False)
        unsaved = Plan.objects.filter(pk=plan.pk, state=PlanState.DRAFT, revision=plan.revision)
        fields: dict[str, Any] = {
            "name": plan.name,
            "is_named": plan.is_named,
            "draft": plan.draft,
            "state": PlanState.COMPUTED,
            "verdict": _listed_verdict(plan, is_saved=True),
            "series": series,
            "version": version,
            "is_latest": True,
            "saved_by": by,
            "saved_at": now(),
        }
        if not unsaved.update(**fields):
            raise PlanChangedError(plan)
    for field, value in fields.items():
        setattr(plan, field, value)
    return plan


def _listed_verdict(plan: Plan, *, is_saved: bool = False) -> str:
    """Return the verdict of a saved version for lists; "" for drafts, whose verdict changes."""
    if plan.is_draft and not is_saved:
        return ""
    return stored_state(plan.answer, plan.readable_document) if plan.answer else "incomplete"


def plan_remove(plan: Plan) -> None:
    """Delete a draft, or all versions of a plan; those that were launched are only hidden."""
    if plan.is_draft:
        plan.delete()
        return
    versions = Plan.objects.filter(series=plan.series)
    is_used = Q(jobs__isnull=False) | Q(deployments__isnull=False) | Q(replicas__isnull=False)
    used = list(versions.filter(is_used).values_list("pk", flat=True).distinct())
    with transaction.atomic():
        versions.filter(pk__in=used).update(deleted_at=now())
        versions.exclude(pk__in=used).delete()


# ---------------------------------------------------------------------------
# The versions of a plan, and the changes of each against its base.
# ---------------------------------------------------------------------------


MOST_CHANGES = 6  # lines shown per version; the rest is counted
LONGEST = 60  # characters of a value
IDS = (
    "hardware.host",
    "hardware.pool",
    "model.team_model",
)  # ids are not readable; the title names them


@dataclass(frozen=True)
class Change:
    """One changed field of the question, before and after."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Version:
    """A saved version as listed on the plan's page."""

    plan: Plan
    verdict: VerdictState
    words: str
    changes: tuple[Change, ...]
    num_more: int
    num_jobs: int
    is_shown: bool


def versions_of(plan: Plan) -> list[Version]:
    """Return every version of a saved plan, newest first; a draft has none."""
    if not plan.series:
        return []
    rows = list(
        Plan.objects.filter(series=plan.series)
        .select_related("owner", "base")
        .order_by("-version")
    )
    launched = Plan.objects.filter(series=plan.series, jobs__isnull=False, jobs__deleted_at=None)
    counts = dict(launched.order_by().values_list("pk").annotate(n=Count("jobs")))
    return [_version(row, plan, counts.get(row.pk, 0)) for row in rows]


# The columns that lists of plans show: none of a plan's documents, which are large.
LISTED_COLUMNS = (
    "team", "name", "state", "verdict", "saved_at", "series", "version", "is_latest",
    "owner__username", "base__version",
)  # fmt: skip


def listed_plans(user: User | AnonymousUser, query: str) -> QuerySet[Plan]:
    """Return the newest versions of the plans that a user may see, and the user's own drafts.

    A draft that nobody changed or named is not listed. ``query`` is part of the name.
    """
    is_newest = Q(state=PlanState.COMPUTED, is_latest=True)
    is_own = Q(state=PlanState.DRAFT, owner=user.pk)
    plans = Plan.objects.visible_to(user).filter(is_newest | is_own, deleted_at=None)
    is_new_or_copy = Q(base__isnull=False) | Q(name="")
    plans = plans.exclude(is_new_or_copy, state=PlanState.DRAFT, revision=0)
    return plans.filter(name__folded_contains=query) if query else plans


def chip_of(plan: Plan) -> VerdictState:
    """Return a plan's verdict state, computed if none is stored."""
    if plan.is_draft:
        return "draft"
    if plan.verdict:
        return cast("VerdictState", plan.verdict)
    return stored_state(plan.answer, plan.readable_document) if plan.answer else "incomplete"


def _version(row: Plan, shown: Plan, num_jobs: int) -> Version:
    changes = changes_between(row.base, row) if row.base else []
    return Version(
        plan=row,
        verdict=chip_of(row),
        words=_words(row, changes),
        changes=tuple(changes[:MOST_CHANGES]),
        num_more=max(0, len(changes) - MOST_CHANGES),
        num_jobs=num_jobs,
        is_shown=row.pk == shown.pk,
    )


def _words(row: Plan, changes: list[Change]) -> str:
    """Return a version's description, if no changed field describes it."""
    base = row.base
    if base is None:
        return (
            "The first version."
            if row.version == 1
            else "Created from a version that was deleted."
        )
    if base.version != (row.version or 0) - 1 or base.series != row.series:
        return f"Created from version {base.version} of “{base.name}”."
    if changes:
        return ""
    if row.request != base.request:
        return "The same question, planned with newer measurements of the host."
    return "The same question and answer." if row.name == base.name else "Another name."


def changes_between(before: Plan, after: Plan) -> list[Change]:
    """Return the fields in which two plans' questions differ, in step order."""
    old, new = dict(_flat(content_of(before))), dict(_flat(content_of(after)))
    paths = [path for path in {**old, **new} if path not in IDS and old.get(path) != new.get(path)]
    changes = [
        Change(_name(path), *(_shown(each.get(path), _factor(path)) for each in (old, new)))
        for path in paths
    ]
    if before.name != after.name:
        changes.insert(0, Change("Name", before.name, after.name))
    return changes


def _flat(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            yield from _flat(value, path)
        elif value not in (None, "", [], False):
            yield path, value


def _name(path: str) -> str:
    """Return a field's label in the wizard, else the end of its path; pins are marked."""
    parts = path.split(".")
    words = FIELD_TITLES.get(parts[-1]) or parts[-1].replace("_", " ").capitalize()
    return f"{words}, pinned" if parts[0] == "pins" else words


def _factor(path: str) -> float:
    """Return how many of a field's unit the unit of its form field has."""
    shown = FIELDS.get(path.rpartition(".")[2])
    return shown.factor if shown else 1.0


def _shown(value: object, factor: float) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes"
    if isinstance(value, int | float) and factor != 1.0:
        return f"{value / factor:.12g}"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


# Page context


@dataclass(frozen=True)
class Saving:
    """The result of saving a draft, for its review."""

    is_draft: bool
    base: Plan | None = None
    latest: Plan | None = None  # newer than the base: saved by somebody meanwhile
    next_version: int = 1
    is_unchanged: bool = False


def saving_of(plan: Plan) -> Saving:
    """Return the result of saving a draft: a separate plan, or the next version."""
    base = plan.base if plan.is_draft else None
    if base is None or base.deleted_at is not None or not base.series:
        return Saving(plan.is_draft)
    latest = Plan.objects.filter(series=base.series).order_by("-version").first() or base
    is_newer = latest.pk != base.pk
    return Saving(
        is_draft=True,
        base=base,
        latest=latest if is_newer else None,
        next_version=(latest.version or 0) + 1,
        is_unchanged=is_unchanged(plan),
    )


def version_context(plan: Plan, user: User | AnonymousUser) -> dict[str, Any]:
    """Return version links of a plan's page: newer version, open draft."""
    if plan.is_draft:
        return {"saving": saving_of(plan)}
    versions = Plan.objects.filter(series=plan.series).order_by("-version")
    newest = plan if plan.is_latest else versions.first()
    drafts = Plan.objects.filter(
        base__series=plan.series, owner=user.pk, state=PlanState.DRAFT, revision__gt=0
    )
    return {
        "newest": newest if newest and newest.pk != plan.pk else None,
        "open_draft": drafts.order_by("-saved_at").first(),
    }


# ---------------------------------------------------------------------------
# Access to plans: members of the plan's team can change it, from practitioner on.
# ---------------------------------------------------------------------------


def changeable_plan(request: HttpRequest, plan_id: str) -> Plan:
    """Return a plan that the user may change.

    Raises:
        Http404: the plan belongs to a team that the user is not in.
        PermissionDenied: the user's role in that team is read-only.
    """
    plan, role = visible_with_role_or_404(Plan, request, pk=plan_id)
    check_role(role, Role.PRACTITIONER)
    return plan

"""The versions of a plan, and the changes of each against its base."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Count

from webapp.core.units import NOTHING
from webapp.jobs.models import Job
from webapp.plans.models import Plan, PlanState
from webapp.plans.saving import content_of, is_unchanged
from webapp.plans.verdict import stored_state
from webapp.plans.words import FIELD_WORDS

MOST_CHANGES = 6  # lines shown per version; the rest is counted
LONGEST = 60  # characters of a value
IDS = ("hardware.choice", "model.team_model")  # ids are not readable; the title names them


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
    verdict: str
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
    jobs = Job.objects.filter(plan__series=plan.series, deleted_at=None).order_by()
    counts = dict(jobs.values_list("plan").annotate(n=Count("pk")))
    return [_version(row, plan, counts.get(row.pk, 0)) for row in rows]


def chip_of(plan: Plan) -> str:
    """Return a plan's verdict state, computed if none is stored."""
    if plan.is_draft:
        return "draft"
    if plan.verdict:
        return plan.verdict
    return stored_state(plan.answer, plan.draft) if plan.answer else "incomplete"


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
        return "The first version." if row.version == 1 else "Made from a version that is deleted."
    if base.version != (row.version or 0) - 1 or base.series != row.series:
        return f"Made from version {base.version} of “{base.name}”."
    if changes:
        return ""
    if row.request != base.request:
        return "The same question, planned with newer measurements of the host."
    return "The same question and answer." if row.name == base.name else "Another name."


def changes_between(before: Plan, after: Plan) -> list[Change]:
    """Return the fields in which two plans' questions differ, in step order."""
    old, new = dict(_flat(content_of(before))), dict(_flat(content_of(after)))
    paths = [path for path in {**old, **new} if path not in IDS and old.get(path) != new.get(path)]
    changes = [Change(_name(path), _shown(old.get(path)), _shown(new.get(path))) for path in paths]
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
    words = FIELD_WORDS.get(parts[-1]) or parts[-1].replace("_", " ").capitalize()
    return f"{words}, pinned" if parts[0] == "pins" else words


def _shown(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes"
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

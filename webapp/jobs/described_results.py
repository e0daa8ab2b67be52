"""What tells the results of a search from each other: state, model, machine, size, and when."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from planner.techniques.registry import TECHNIQUES
from runners.jobspec.kinds import KINDS
from runners.plans.document import GOALS
from webapp.core.display import parameters, whole
from webapp.hosts.health import machine_words
from webapp.hosts.machines import planned_words
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.jobs.searching import MAX_ROWS, Group
from webapp.modelhub.catalog import catalog_rows
from webapp.modelhub.models import TeamModel
from webapp.plans.explanation import model_words
from webapp.plans.models import Plan
from webapp.plans.saving import chip_of

# Pages that list more of a group's results by the same query.
LISTS = {"Plans": "plan-list", "Jobs": "job-list", "Catalog": "model-list"}


class Result(NamedTuple):
    """One result: the argument of its page's address, its name, and what it is.

    ``state`` names a chip, "" without one; ``at`` is when it was saved, made or last heard.
    """

    key: Any
    name: str
    state: str = ""
    words: str = ""
    at: datetime | None = None


class Section(NamedTuple):
    """The results of one kind; ``more`` names the page that lists those beyond the first ones."""

    heading: str
    address: str
    results: list[Result]
    more: str = ""


def described(groups: Sequence[Group]) -> list[Section]:
    """Return the groups of a search with what each result is, read at once for each kind."""
    readers: Mapping[str, Callable[[list[Any]], Mapping[Any, Result]]] = {
        "Plans": _plans,
        "Jobs": _jobs,
        "Hosts": _hosts,
        "Models of your team": _models,
        "Catalog": _catalog,
        "Techniques": _techniques,
    }
    sections = []
    for heading, address, rows in groups:
        known = readers[heading]([key for key, _ in rows])
        more = LISTS.get(heading, "") if len(rows) == MAX_ROWS else ""
        results = [known.get(key) or Result(key, name) for key, name in rows]
        sections.append(Section(heading, address, results, more))
    return sections


def _plans(keys: list[str]) -> dict[str, Result]:
    found = {}
    for plan in Plan.objects.filter(pk__in=keys):
        document = plan.readable_document
        words = f"{GOALS[document.goal][0]} {model_words(document.model)}" if document else ""
        words += f" · version {plan.version}" if plan.version and plan.version > 1 else ""
        name = plan.name or "Unfinished plan"
        found[plan.pk] = Result(plan.pk, name, chip_of(plan), words, plan.saved_at)
    return found


def _jobs(keys: list[str]) -> dict[str, Result]:
    jobs = Job.objects.filter(pk__in=keys).select_related("host")
    return {
        job.pk: Result(
            job.pk,
            job.name,
            job.state,
            " · ".join(
                filter(None, (_kind_words(job), job.model_name, job.host.name if job.host else ""))
            ),
            job.created_at,
        )
        for job in jobs
    }


def _kind_words(job: Job) -> str:
    kind = KINDS.get(job.kind)
    return str(kind.title) if kind else job.kind


def _hosts(keys: list[str]) -> dict[str, Result]:
    return {
        host.slug: Result(
            host.slug,
            host.name,
            host.state,
            planned_words(host) if host.kind == "virtual" else machine_words(host.facts),
            host.last_seen_at,
        )
        for host in Host.objects.filter(slug__in=keys)
    }


def _models(keys: list[str]) -> dict[str, Result]:
    models = TeamModel.objects.filter(pk__in=keys).select_related("host")
    return {
        model.pk: Result(
            model.pk,
            model.name,
            words=" · ".join(filter(None, (
                model.get_source_display(),
                f"{parameters(model.num_parameters)} parameters" if model.num_parameters else "",
                model.weight_dtype,
                f"on {model.host.name}" if model.host else "",
            ))),
            at=model.created_at,
        )
        for model in models
    }  # fmt: skip


def _catalog(keys: list[str]) -> dict[str, Result]:
    return {
        row.entry.id: Result(
            row.entry.id,
            row.entry.id,
            words=f"{parameters(row.parameters)} parameters · reads "
            f"{whole(row.shape.max_position_embeddings)} tokens",
        )
        for row in catalog_rows()
        if row.entry.id in keys
    }


def _techniques(keys: list[str]) -> dict[str, Result]:
    return {key: Result(key, TECHNIQUES[key].title, words=TECHNIQUES[key].effect) for key in keys}

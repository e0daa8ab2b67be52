"""Jobs side by side: their settings and figures."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.urls import reverse

from runners.jobspec.train import LayoutOptions
from webapp.core.display import (
    NOTHING,
    TIMES,
    Quantity,
    listed,
    memory,
    number,
    quantity,
    signed_percent,
)
from webapp.core.figures import MAIN_FIGURES, REGISTRY, definition_of
from webapp.hosts.pools import facts_for
from webapp.jobs.measured_figures import JobFigure, JobFigures
from webapp.jobs.memory_comparison import TermRow, story_of
from webapp.jobs.models import Job

PARAMETER = "job"
MIN_JOBS, MAX_JOBS = 2, 4
LETTERS = "ABCD"


@dataclass(frozen=True)
class Side:
    """One job of the comparison; its number selects its colour, its letter labels it."""

    number: int  # from 1
    job: Job
    without_url: str  # the comparison without this job

    @property
    def letter(self) -> str:
        """Return the letter of the job."""
        return LETTERS[self.number - 1]


def address_of(ids: list[str]) -> str:
    """Return the URL of the comparison of these jobs."""
    query = "&".join(f"{PARAMETER}={each}" for each in ids)
    return f"{reverse('compare')}?{query}" if query else reverse("compare")


def sides_of(jobs: list[Job]) -> list[Side]:
    """Return the sides of the comparison."""
    ids = [job.pk for job in jobs]
    return [
        Side(at + 1, job, address_of([each for each in ids if each != job.pk]))
        for at, job in enumerate(jobs)
    ]


USUAL_LAYOUT = LayoutOptions().model_dump(mode="json")
LONGEST = 80  # characters of a value that a cell shows
WHERE, WHAT, HOW, ON = "Where", "Job", "Strategy", "Host at launch"
IGNORED = frozenset({"kind", "spec_version", "version"})


@dataclass(frozen=True)
class Setting:
    """One setting with its value in each job."""

    group: str
    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Return whether the values differ between the jobs."""
        return len(set(self.values)) > 1


def settings_of(jobs: list[Job], user: User | AnonymousUser) -> list[Setting]:
    """Return every setting of at least one of the jobs, sorted by group."""
    each = [dict(_flat_settings(job, user)) for job in jobs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    order = [WHERE, WHAT, HOW, ON]
    rows = [
        Setting(group, name, tuple(settings.get((group, name), NOTHING) for settings in each))
        for group, name in keys
    ]
    return sorted(rows, key=lambda row: order.index(row.group))


Entry = tuple[tuple[str, str], str]


def _flat_settings(job: Job, user: User | AnonymousUser) -> Iterator[Entry]:
    for name, value in _place(job):
        yield (WHERE, name), value
    for path, value in flat({**job.spec, "layout": _layout(job.spec)}):
        yield (WHAT, setting_label(path)), cell_text(value)
    strategy = job.estimate.get("strategy") if isinstance(job.estimate, Mapping) else None
    for path, value in flat(strategy or {}):
        yield (HOW, setting_label(path)), cell_text(value)
    for name, value in _host(job, user):
        yield (ON, name), value


def _layout(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout options that differ from the defaults."""
    given = spec.get("layout") or {}
    return {name: value for name, value in given.items() if value != USUAL_LAYOUT.get(name)}


def _place(job: Job) -> Iterator[tuple[str, str]]:
    yield "Kind", job.kind
    yield "Model", job.model_name or NOTHING
    yield "Host", job.shown_host.name if job.shown_host else NOTHING
    yield "Pool", job.pool.name
    yield "Hosts", str(job.num_hosts)
    yield "Devices of each host", str(job.devices_per_host or "all")
    yield "Priority", job.get_priority_display()
    yield "Plan", job.plan.name if job.plan and job.plan.name else NOTHING


def _host(job: Job, user: User | AnonymousUser) -> Iterator[tuple[str, str]]:
    attempt = job.current_attempt
    if attempt is None:
        return
    facts = facts_for(user, attempt.host, attempt.facts or attempt.host.facts)
    gpus = [str(gpu.get("name", "")) for gpu in facts.get("gpus") or ()]
    counted = [f"{gpus.count(name)} {TIMES} {name}" for name in dict.fromkeys(gpus)]
    yield "GPUs", ", ".join(counted) or "none"
    yield "Processor", str(facts.get("cpu_model") or NOTHING)
    yield "Memory", str(memory(facts["memory_bytes"])) if facts.get("memory_bytes") else NOTHING
    for name in ("driver_version", "cuda_version", "python_version", "agent_version"):
        if facts.get(name):
            yield setting_label(name), str(facts[name])
    for package, version in (facts.get("packages") or {}).items():
        yield str(package), str(version)


def flat(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every non-empty value of a document with its dotted path."""
    for key, value in document.items():
        path = f"{before}.{key}" if before else str(key)
        if isinstance(value, Mapping):
            yield from flat(value, path)
        elif value not in (None, "", [], ()) and path not in IGNORED:
            yield path, value


def setting_label(path: str) -> str:
    """Return a dotted path as text: ``model.hidden_size`` becomes “Model · hidden size”."""
    return " · ".join(part.replace("_", " ") for part in path.split(".")).capitalize()


def cell_text(value: object) -> str:
    """Return a value as cell text, truncated to ``LONGEST`` characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


RUN_TIME = "run_seconds"
NEARLY = 0.005  # smaller relative changes count as equal


@dataclass(frozen=True)
class Cell:
    """One figure of one job; None for missing values."""

    unit: str
    predicted: float | None
    measured: float | None
    ratio: float | None  # measured / predicted, once it can be evaluated
    place: str  # position of the measured value relative to the 80 % interval
    against_first: str  # change against the first job, such as "+12 %"; "" for the first
    state_words: str = ""

    @property
    def shown(self) -> Quantity | None:
        """Return the measured value, formatted."""
        return None if self.measured is None else quantity(self.measured, self.unit)

    @property
    def predicted_words(self) -> str:
        """Return the predicted value as text."""
        return "" if self.predicted is None else str(quantity(self.predicted, self.unit))


@dataclass(frozen=True)
class Row:
    """One figure of all jobs."""

    metric: str
    label: str
    cells: tuple[Cell, ...]

    @property
    def is_complete(self) -> bool:
        """Return whether every job measured it."""
        return all(cell.measured is not None for cell in self.cells)


def rows_of(sides: list[Side], figures: list[JobFigures]) -> list[Row]:
    """Return every figure that is predicted or measured for at least one job."""
    names = [*REGISTRY, *(name for each_job in figures for name in each_job)]
    rows = []
    for name in dict.fromkeys(names):
        if name == RUN_TIME:
            continue  # shown with the jobs themselves
        cells = [each_job.get(name) for each_job in figures]
        if any(cells):
            definition = next(each.definition for each in cells if each)
            rows.append(Row(name, definition.label, tuple(_cells(cells))))
    return rows + _rank_rows(sides)


def _cells(figures: list[JobFigure | None]) -> Iterator[Cell]:
    first = figures[0].measured if figures[0] else None
    for at, each in enumerate(figures):
        if each is None:
            yield Cell("", None, None, None, "", "")
            continue
        yield Cell(
            unit=each.unit,
            predicted=each.predicted_value,
            measured=each.measured,
            ratio=each.ratio,
            place=f"{each.place} the interval" if each.place else "",
            against_first=_change(each.measured, first) if at else "",
            state_words=each.state_words,
        )


def _rank_rows(sides: list[Side]) -> list[Row]:
    """Return the memory terms of a rank, if all jobs are training runs on several ranks."""
    if not all(side.job.is_shared_out and side.job.kind == "train" for side in sides):
        return []
    stories = [story_of(side.job) for side in sides]
    terms = [
        {row.term: row for row in story.rows if not row.is_rest} if story else {}
        for story in stories
    ]
    names = {term: row.name for rank_terms in terms for term, row in rank_terms.items()}
    return [
        Row(
            term,
            f"{name} on a rank",
            tuple(_rank_cells([rank_terms.get(term) for rank_terms in terms])),
        )
        for term, name in names.items()
    ]


def _rank_cells(rows: list[TermRow | None]) -> Iterator[Cell]:
    first = rows[0].measured if rows[0] else None
    for at, row in enumerate(rows):
        measured = row.measured if row else None
        against = _change(measured, first) if at else ""
        predicted, ratio = (row.predicted, row.ratio) if row else (None, None)
        yield Cell("bytes", predicted, measured, ratio, "", against)


def _change(value: float | None, first: float | None) -> str:
    if value is None or not first:
        return ""
    share = value / first - 1
    return "the same" if abs(share) < NEARLY else signed_percent(share * 100)


def answer(sides: list[Side], rows: list[Row]) -> str:
    """Return a sentence on the best job in the first main figure that all jobs measured."""
    by_metric = {row.metric: row for row in rows if row.is_complete}
    row = next((by_metric[name] for name in MAIN_FIGURES if name in by_metric), None)
    if row is None:
        return "No figure was measured by all of them yet."
    values = [cell.measured or 0.0 for cell in row.cells]
    is_rate = definition_of(row.metric).better == "higher"
    best = values.index(max(values) if is_rate else min(values))
    worst = max(values) if not is_rate else min(values)
    unit = row.cells[best].unit
    top = values[best]
    is_time = unit == "seconds"
    word = "fastest" if row.metric != "peak_memory_bytes" else "smallest"
    factor = (top / worst if is_rate else worst / top) if worst and top else 1.0
    if factor - 1 < NEARLY:
        return f"All are alike: {row.label.lower()} {quantity(top, unit)}."
    others = [
        f"{side.letter} {'took' if is_time else 'reached'} {quantity(value, unit)}"
        for side, value in zip(sides, values, strict=True)
        if side.number != best + 1
    ]
    furthest = "up to " if len(others) > 1 else ""
    return (
        f"{sides[best].letter} is {word} with {quantity(top, unit)} ({row.label.lower()}); "
        f"{listed(others)}: {furthest}{number(factor)} times apart."
    )

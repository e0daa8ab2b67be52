"""Jobs side by side: their settings, figures and charts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from runners.jobspec.train import LayoutOptions
from webapp.charts.plots import (
    ORIGIN_MS,
    ChartFigure,
    ChartSpec,
    Figure,
    Series,
    clock,
    template,
)
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
from webapp.core.parameters import reads_query
from webapp.hosts.pools import facts_for
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.measured_figures import JobFigure, JobFigures, TermRow, figures_of, story_of
from webapp.jobs.models import Job, JobState
from webapp.jobs.progress import KIND_WORDS
from webapp.pages.job_charts import Drawn, draw

# ---------------------------------------------------------------------------
# A comparison of jobs: their settings, predictions and measurements.
# ---------------------------------------------------------------------------


# The jobs of a comparison, from its URL, with their letters and colours.


PARAMETER = "job"
MIN_JOBS, MAX_JOBS = 2, 4
LETTERS = "ABCD"
NUM_OFFERED = 30


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


def requested_jobs(request: HttpRequest) -> list[Job]:
    """Return the jobs in the URL, in order.

    Raises:
        Http404: a job does not exist or is not visible to the user.
    """
    ids = list(dict.fromkeys(each for each in request.GET.getlist(PARAMETER) if each))
    rows = visible_jobs(request).filter(pk__in=ids[: MAX_JOBS * 10])
    by_id = {
        job.pk: job
        for job in rows.select_related(
            "host__team", "requested_host", "pool", "owner", "plan", "current_attempt__host"
        )
    }
    if missing := [each for each in ids if each not in by_id]:
        raise Http404(missing[0])
    return [by_id[each] for each in ids]


def sides_of(jobs: list[Job]) -> list[Side]:
    """Return the sides of the comparison."""
    ids = [job.pk for job in jobs]
    return [
        Side(at + 1, job, address_of([each for each in ids if each != job.pk]))
        for at, job in enumerate(jobs)
    ]


def jobs_to_offer(request: HttpRequest, chosen: list[Job]) -> list[Job]:
    """Return the latest jobs to choose from, those similar to the first chosen one first."""
    latest = visible_jobs(request).exclude(pk__in=[job.pk for job in chosen])
    latest = latest.exclude(state=JobState.DRAFT)
    rows = latest.select_related("host", "requested_host", "pool", "owner", "current_attempt")
    latest_jobs = list(rows[:NUM_OFFERED])
    if not chosen:
        return latest_jobs
    reference = chosen[0]
    return sorted(
        latest_jobs,
        key=lambda job: (
            job.kind != reference.kind,
            not job.plan_id or job.plan_id != reference.plan_id,
        ),
    )


# The settings of several jobs, and which of them differ.


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


# Predicted and measured figures of several jobs, one row per figure.


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


# ---------------------------------------------------------------------------
# Overlay charts: one metric of several jobs, each in its own colour from its own start.
# ---------------------------------------------------------------------------


TWIN_ROWS = 12
HEADROOM = 1.08
FEWEST_LINES = 2  # a metric of a single job is not compared


@dataclass(frozen=True)
class Line:
    """One job's series of a metric."""

    side: Side
    job_chart: Drawn

    @property
    def start_ms(self) -> int:
        """Return the start of the job's time axis."""
        start: int = self.job_chart.figure["layout"]["meta"]["start_ms"]
        return start

    @property
    def words(self) -> str:
        """Return the figure of the chart, else the last point, as text."""
        figure = next((each for each in self.job_chart.figures if each.shown), None)
        if figure is not None:
            return f"{figure.definition.label.lower()} {figure.shown}"
        return f"last point {quantity(self.job_chart.series.known[-1], self.job_chart.chart.unit)}"

    @property
    def series(self) -> Series:
        """Return the measured series, including earlier attempts."""
        return self.job_chart.line


@dataclass(frozen=True, kw_only=True)
class Overlay(ChartFigure):
    """One metric of all jobs that reported it."""

    lines: tuple[Line, ...]

    @property
    def words(self) -> str:
        """Return each job's result as text, for people who cannot see the chart."""
        return " · ".join(f"{line.side.letter}: {line.words}" for line in self.lines)

    @property
    def twin(self) -> list[tuple[str, list[str]]]:
        """Return the table equivalent: (time since start, value per job) at 12 moments."""
        length = self.figure["layout"]["xaxis"]["range"][1] - ORIGIN_MS
        moments = [length * (at + 1) / TWIN_ROWS for at in range(TWIN_ROWS)]
        return [
            (clock(moment), [_value_at(line, moment, self.chart.unit) for line in self.lines])
            for moment in moments
        ]


def _value_at(line: Line, moment_ms: float, unit: str) -> str:
    before = [
        value
        for t, value in zip(line.series.t_ms, line.series.values, strict=True)
        if value is not None and t - line.start_ms <= moment_ms
    ]
    has_ended = line.series.t_ms[-1] - line.start_ms < moment_ms - 1000 if before else True
    return "" if not before or has_ended else str(quantity(before[-1], unit))


def overlays(sides: list[Side], charts_of_sides: list[list[Drawn]]) -> list[Overlay]:
    """Return one chart per metric that at least two of the jobs reported."""
    specs: dict[str, ChartSpec] = {}
    lines: dict[str, list[Line]] = {}
    for side, charts in zip(sides, charts_of_sides, strict=True):
        for each in charts:
            if each.series.known:
                specs.setdefault(each.chart.key, each.chart)
                lines.setdefault(each.chart.key, []).append(Line(side, each))
    return [
        Overlay(
            chart=specs[key], lines=tuple(metric_lines), figure=overlay(specs[key], metric_lines)
        )
        for key, metric_lines in lines.items()
        if len(metric_lines) >= FEWEST_LINES
    ]


def overlay(chart: ChartSpec, lines: Sequence[Line]) -> Figure:
    """Return a chart as Plotly ``data`` and ``layout``; time is relative to each job's start."""
    end = ORIGIN_MS + max(1000, *(line.series.t_ms[-1] - line.start_ms for line in lines))
    data = [trace for line in lines for trace in _predicted(chart, line, end)]
    data += [_measured(chart, line) for line in lines]
    layout = template()
    layout["margin"]["r"] = 18
    layout["xaxis"]["range"] = [ORIGIN_MS, end]
    if chart.from_zero:
        tops = [y for trace in data for y in trace["y"] if y is not None]
        layout["yaxis"]["range"] = [0, max(tops, default=1.0) * HEADROOM or 1.0]
    layout["uirevision"] = chart.key
    layout["meta"] = {"start_ms": 0, "origin_ms": ORIGIN_MS, "from_zero": chart.from_zero}
    return {"data": data, "layout": layout}


def _predicted(chart: ChartSpec, line: Line, end: int) -> list[Figure]:
    prediction = line.job_chart.prediction
    if prediction is None:
        return []
    number, name = line.side.number, f"{line.side.letter} predicted"
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [ORIGIN_MS, end],
            "y": [prediction.value * chart.scale] * 2,
            "opacity": 0.75,
            "line": {"color": f"var(--series-{number})", "width": 1.25, "dash": "6px,4px"},
            "hovertemplate": f"%{{y:,.4~r}} {chart.axis}<extra>{name}</extra>",
            "meta": {"class": f"series-{number} expected"},
        }
    ]


def _measured(chart: ChartSpec, line: Line) -> Figure:
    series, number = line.series, line.side.number
    last = max(at for at, value in enumerate(series.values) if value is not None)
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": line.side.letter,
        "x": [ORIGIN_MS + t - line.start_ms for t in series.t_ms],
        "y": [None if value is None else value * chart.scale for value in series.values],
        "text": [line.side.letter if at == last else "" for at in range(len(series.t_ms))],
        "textposition": "middle right",
        "textfont": {"color": f"var(--series-{number})", "size": 11},
        "cliponaxis": False,
        "line": {"color": f"var(--series-{number})", "width": 1.75},
        "hovertemplate": f"%{{y:,.4~r}} {chart.axis}<extra>{line.side.letter}</extra>",
        "meta": {
            "metric": f"{chart.metric}:{line.side.letter}",
            "scale": chart.scale,
            "class": f"series-{number}",
        },
    }


# ---------------------------------------------------------------------------
# The comparison page of two to four jobs: settings, predicted and measured figures, charts.
# ---------------------------------------------------------------------------


UNPROCESSABLE = 422


@require_GET
@reads_query("choose", "all", repeated=(PARAMETER,))
def compare(request: HttpRequest) -> HttpResponse:
    """Compare the jobs in the URL, or show a list to choose from."""
    jobs = requested_jobs(request)
    if MIN_JOBS <= len(jobs) <= MAX_JOBS and "choose" not in request.GET:
        return render(request, "compare/compare.html", _comparison(request, jobs))
    context = {
        "chosen": jobs,
        "offered": jobs_to_offer(request, jobs),
        "is_too_many": len(jobs) > MAX_JOBS,
        "most": MAX_JOBS,
        "fewest": MIN_JOBS,
    }
    status = UNPROCESSABLE if len(jobs) > MAX_JOBS else 200
    return render(request, "compare/choose.html", context, status=status)


def _comparison(request: HttpRequest, jobs: list[Job]) -> dict[str, Any]:
    sides = sides_of(jobs)
    figures = [figures_of(job) for job in jobs]
    drawn = [draw(job, each) for job, each in zip(jobs, figures, strict=True)]
    rows = rows_of(sides, figures)
    each = settings_of(jobs, request.user)
    different = [setting for setting in each if setting.differs]
    shows_all = "all" in request.GET
    address = address_of([job.pk for job in jobs])
    return {
        "sides": sides,
        "rows": rows,
        "answer": answer(sides, rows),
        "settings": each if shows_all else different,
        "num_settings": len(each),
        "num_different": len(different),
        "shows_all": shows_all,
        "address": address,
        "overlays": overlays(sides, drawn),
        "kinds": _kinds(sides),
        "durations": [each.get("run_seconds") for each in figures],
        "can_add": len(jobs) < MAX_JOBS,
    }


def _kinds(sides: list[Side]) -> list[str]:
    """Return the kinds of the jobs, if there are several."""
    kinds = list(dict.fromkeys(KIND_WORDS.get(side.job.kind, side.job.kind) for side in sides))
    return kinds if len(kinds) > 1 else []

"""Parts of a job's page: calibration, training, charts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from django.contrib import messages
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_POST
from pydantic import ValidationError

from runners.jobspec import FileData, MixedData, UploadedData
from runners.jobspec.base import OneSource, weights_of
from webapp.accounts.models import Role
from webapp.accounts.services import has_role
from webapp.charts.figures import (
    LOSS,
    MEMORY,
    SIDE_WORDS,
    ChartFigure,
    ChartSpec,
    Prediction,
    Series,
    charts_for,
    clock,
    figure,
    value_text,
)
from webapp.core.clock import now, now_ms
from webapp.core.display import OPERATOR_WORDS, deviation_words, percent, quantity
from webapp.core.problems import ConflictProblem, InvalidProblem, Problem
from webapp.figures.registry import definition_of
from webapp.jobs.calibration import recalibrate
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import JobFigure, JobFigures, figures_of
from webapp.jobs.models import (
    FINAL_STATES,
    Artefact,
    Attempt,
    CalibrationChange,
    Event,
    Job,
    JobState,
    Measurement,
)
from webapp.jobs.points import Earlier, earlier_points, of_one_model, points_of
from webapp.metrics.models import MetricSource
from webapp.metrics.store import read_raw

# ---------------------------------------------------------------------------
# The calibration section of a job's page, and a person's decision about a measurement.
# ---------------------------------------------------------------------------


# The calibration section of a job's page: changed factors, or why none changed.


ORIGINAL = "original_"
PHASE_WORDS = {"train_step": "the training step", "memory": "peak memory"}


@dataclass(frozen=True)
class FactorMove:
    """A calibration factor of a host before and after a change."""

    name: str
    before: str
    after: str
    num_runs: int


@dataclass(frozen=True)
class FactorDecision:
    """A later decision on one of the job's figures, and its effect on the factors."""

    change: CalibrationChange
    moves: tuple[FactorMove, ...]


@dataclass(frozen=True)
class TaughtRow:
    """A measured figure of the job: whether it counts, and why not."""

    row: Measurement
    label: str
    state: str  # counts, left out, held back
    why: str


@dataclass(frozen=True)
class CalibrationEffect:
    """The effect of one run on its host's calibration."""

    host: str
    moves: tuple[FactorMove, ...]
    why: str  # why no factor changed
    decisions: tuple[FactorDecision, ...]
    rows: tuple[TaughtRow, ...]

    @property
    def reasons(self) -> list[str]:
        """Return the distinct reasons of excluded figures, without a repetition of ``why``."""
        reasons_found = [each.why for each in self.rows if each.state != "counts" and each.why]
        return [why for why in dict.fromkeys(reasons_found) if self.moves or why != self.why]

    @property
    def has_left_out(self) -> bool:
        """Return whether a figure does not count."""
        return any(each.state != "counts" for each in self.rows)


def calibration_effect_of(job: Job) -> CalibrationEffect | None:
    """Return a job's effect on calibration; None before its end or without measurements."""
    if job.state not in FINAL_STATES or job.host is None:
        return None
    rows = list(Measurement.objects.filter(job=job))
    changes = list(CalibrationChange.objects.filter(job=job))
    if not rows and not changes:
        return None
    first = next((each for each in changes if each.cause == "run"), None)
    return CalibrationEffect(
        host=job.host.name,
        moves=moves_of(first) if first else (),
        why=_why(job, first),
        decisions=tuple(
            FactorDecision(each, moves_of(each)) for each in changes if each.cause != "run"
        ),
        rows=tuple(rows_of(rows)),
    )


def _why(job: Job, change: CalibrationChange | None) -> str:
    if job.num_hosts > 1:
        return f"{job.num_hosts} hosts measured it together, so it changes the factors of none."
    if job.state != JobState.SUCCEEDED:
        return "It did not end well."
    return change.why if change else ""


def moves_of(change: CalibrationChange) -> tuple[FactorMove, ...]:
    """Return the factors that a change moved, sorted by operator class."""
    names = sorted({*change.before, *change.after})
    return tuple(
        move
        for name in names
        if (move := _move(name, change.before.get(name), change.after.get(name)))
    )


def _move(
    name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> FactorMove | None:
    old = before["factor"] if before else 1.0
    new = after["factor"] if after else 1.0
    if old == new:
        return None
    digits = next(
        (digits for digits in range(2, 5) if f"{old:.{digits}f}" != f"{new:.{digits}f}"), 5
    )
    num_runs = after["n"] if after else 0
    words = OPERATOR_WORDS.get(name, name)
    phases = [PHASE_WORDS.get(phase, phase) for phase in (after or {}).get("phases") or ()]
    named = f"{words}, by {' and '.join(phases)}" if phases else words
    return FactorMove(named, f"{old:.{digits}f}", f"{new:.{digits}f}", num_runs)


def _row(row: Measurement) -> TaughtRow:
    original = row.metric.startswith(ORIGINAL)
    metric = row.metric.removeprefix(ORIGINAL)
    label = definition_of(metric).label
    label = f"{label}, before" if original else label
    if row.is_excluded:
        decision = f"Excluded by {row.decided_by}: {row.decision_reason}"
        return TaughtRow(
            row, label, "left out", decision if row.decided_by else row.invalid_reason
        )
    if row.held_back:
        return TaughtRow(row, label, "held back", row.held_back.capitalize() + ".")
    if row.decision == "included":
        decision = f"Included by {row.decided_by}: {row.decision_reason}"
        return TaughtRow(row, label, "counts", f"{decision}. {row.invalid_reason}".strip())
    return TaughtRow(row, label, "counts", "")


def rows_of(rows: Iterable[Measurement]) -> list[TaughtRow]:
    """Return display rows for measurements: label, whether each counts, and why not."""
    return [_row(row) for row in rows]


# A person's decision to exclude or include a measurement.


Decision = Literal["excluded", "included"]
LONGEST_REASON = 200


def measurement_decide(
    *, measurement: Measurement, decision: Decision, reason: str, by: str
) -> None:
    """Exclude a measurement from calibration and accuracy, or include it; recalibrate its host.

    Factors depend only on the included measurements, so reverting a decision restores the
    previous factors bit for bit.

    Raises:
        InvalidProblem: the reason is empty or too long.
        ConflictProblem: the measurement has that state already.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise InvalidProblem("reason", "“Reason” is empty; give a reason, such as “a backup ran”.")
    if len(reason) > LONGEST_REASON:
        raise InvalidProblem(
            "reason", f"“Reason” has {len(reason)} characters; at most {LONGEST_REASON} are kept."
        )
    is_excluded = decision == "excluded"
    with transaction.atomic():
        current = Measurement.objects.select_for_update(no_key=True).get(pk=measurement.pk)
        if current.is_excluded == is_excluded:
            author_words = (
                f", by {current.decided_by}: {current.decision_reason}"
                if current.decided_by
                else ""
            )
            raise ConflictProblem(
                "decided", f"The measurement is {decision} already{author_words}."
            )
        Measurement.objects.filter(pk=measurement.pk).update(
            is_excluded=is_excluded,
            decision=decision,
            decision_reason=reason,
            decided_by=by,
            decided_at=now(),
        )
        Event.objects.create(
            at=now(),
            team_id=measurement.job.team_id,
            kind=f"measurement.{decision}",
            subject=measurement.job_id,
            attempt_id=measurement.attempt_id,
            actor=by[:80],
            detail={
                "metric": measurement.metric,
                "host": measurement.host.slug,
                "reason": reason,
                "invalid": current.invalid_reason,
            },
        )
    measurement.refresh_from_db()
    if measurement.job.num_hosts == 1:
        recalibrate(measurement.host, job=measurement.job, cause=decision, actor=by)


def may_decide(
    user: User | AnonymousUser, row: Measurement, decision: Decision | None = None
) -> bool:
    """Return whether a person may exclude or include a measurement.

    Operators of the host's team may. Operators of the job's team may too, except including an
    invalid measurement.
    """
    if has_role(user, row.host.team, Role.OPERATOR):
        return True
    target = decision or ("included" if row.is_excluded else "excluded")
    is_harmless = target == "excluded" or not row.invalid_reason
    return is_harmless and has_role(user, row.job.team, Role.OPERATOR)


@require_POST
def measurement_decide_view(
    request: HttpRequest, job_id: str, measurement_id: int
) -> HttpResponse:
    """Exclude or include a job's measurement, with a reason; ``may_decide`` is required."""
    job = load_job(request, job_id)
    rows = Measurement.objects.select_related("job__team", "host__team")
    row = get_object_or_404(rows, pk=measurement_id, job=job)
    decision: Decision = "excluded" if request.POST.get("decision") == "excluded" else "included"
    if not may_decide(request.user, row, decision):
        raise PermissionDenied(
            f"To say what counts for {row.host.name} you need the role Operator in its team. An "
            "admin of that team can make you one."
        )
    by = request.user.get_username()
    try:
        measurement_decide(
            measurement=row, decision=decision, reason=request.POST.get("reason", ""), by=by
        )
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        sentence = f"The figure is {decision}. {row.host.name} is calibrated again."
        messages.success(request, sentence)
    return redirect(f"{reverse('job-detail', args=[job.pk])}#taught")


# ---------------------------------------------------------------------------
# Parts of a training's page: the data sources that it mixes, and its text samples.
# ---------------------------------------------------------------------------


# The data sources that a training mixes, with their current figures.


FIGURES = ("weight", "loss", "reference")
UNKNOWN = "\N{EM DASH}"


@dataclass(frozen=True)
class SourceRow:
    """One data source as displayed; shares are of rows, losses in nats per token."""

    number: int
    text: str
    begun: str
    share: str = UNKNOWN
    loss: str = UNKNOWN
    reference: str = UNKNOWN


@dataclass(frozen=True)
class Mixture:
    """The sources in order; ``moves``: their shares follow their losses."""

    rows: Sequence[SourceRow]
    moves: bool
    how: str


def mixture_of(job: Job) -> Mixture | None:
    """Return a job's data mixture with its current shares; None for a single source.

    After a restart, the newest attempt with reported weights counts.
    """
    data = _mixed(job.spec)
    if data is None:
        return None
    moves = data.weights == "dynamic"
    latest = _newest(job, len(data.parts)) if moves else {}
    rows = [
        _training_row(number, _source_text(part.data), initial, latest)
        for number, (part, initial) in enumerate(
            zip(data.parts, weights_of(data), strict=True), start=1
        )
    ]
    how = f"moves every {data.update_every_steps:,} steps" if moves else "fixed shares of the rows"
    return Mixture(rows, moves, how)


def _mixed(spec: Mapping[str, object]) -> MixedData | None:
    data = spec.get("data")
    if not isinstance(data, Mapping) or data.get("source") != "mixed":
        return None
    try:
        return MixedData.model_validate(data)
    except ValidationError:  # of another version: its charts still work
        return None


def _training_row(
    number: int, text: str, initial: float, latest: Mapping[str, float]
) -> SourceRow:
    weight, loss, reference = (latest.get(f"source{number}_{name}") for name in FIGURES)
    share = UNKNOWN if weight is None else percent(weight)
    losses = (UNKNOWN if each is None else f"{each:.3f}" for each in (loss, reference))
    return SourceRow(number, text, percent(initial), share, *losses)


def _newest(job: Job, count: int) -> dict[str, float]:
    """Return the last value of each figure of each source."""
    names = [f"source{number}_{name}" for number in range(1, count + 1) for name in FIGURES]
    for attempt in job.attempts.filter(node_rank=0).order_by("-number"):
        if latest := _last(attempt, names):
            return latest
    return {}


def _last(attempt: Attempt, names: Sequence[str]) -> dict[str, float]:
    latest = {}
    for name in names:
        values = read_raw(attempt.pk, "job", name).value
        finite = values[np.isfinite(values)]
        if not len(finite):
            return {}
        latest[name] = float(finite[-1])
    return latest


def _source_text(data: OneSource) -> str:
    if isinstance(data, FileData):
        return data.path
    return (
        data.name
        if isinstance(data, UploadedData)
        else "the host\N{RIGHT SINGLE QUOTATION MARK}s own text"
    )


# Text samples that a training generated, for its page.


NAME = "samples"
LONGEST = 2000  # characters shown per text
MOST_ROWS = 60
BLANK_LINES = re.compile(r"\n{4,}")  # untrained models may generate long runs of blank lines


class Sample(NamedTuple):
    """A prompt and its continuation."""

    prompt: str
    continuation: str


class SampledStep(NamedTuple):
    """The samples of one step; ``is_final``: by the final weights."""

    step: int
    is_final: bool
    samples: tuple[Sample, ...]


class Samples(NamedTuple):
    """The sampled steps, newest first, and how they were generated."""

    steps: tuple[SampledStep, ...]
    how: str


def samples_of(job: Job) -> Samples | None:
    """Return the text samples of the job's current attempt; None if none is readable.

    All values from a host are treated as plain text.
    """
    artefact = Artefact.objects.filter(
        attempt=job.current_attempt, name=NAME, kind="report"
    ).first()
    facts = artefact.facts if artefact and isinstance(artefact.facts, dict) else {}
    stored = facts.get("samples")
    rows = [each for each in stored if _is_sample(each)] if isinstance(stored, list) else []
    steps = [
        SampledStep(step, is_final, tuple(map(_sample, step_rows)))
        for (step, is_final), step_rows in groupby(rows[-MOST_ROWS:], _written_by)
    ]
    how = facts.get("how")
    return (
        Samples(tuple(steps[::-1]), _text(how) if isinstance(how, str) else "") if rows else None
    )


def _written_by(row: Mapping[str, Any]) -> tuple[int, bool]:
    return row["step"], row.get("is_final") is True


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(_text(row["prompt"]), _text(row["continuation"]))


def _is_sample(each: object) -> bool:
    if not isinstance(each, Mapping):
        return False
    is_step = isinstance(each.get("step"), int) and not isinstance(each["step"], bool)
    return is_step and all(isinstance(each.get(key), str) for key in ("prompt", "continuation"))


def _text(text: str) -> str:
    text = BLANK_LINES.sub(lambda run: f"\n↵ \N{MULTIPLICATION SIGN} {len(run[0])}\n", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"


# ---------------------------------------------------------------------------
# The charts of one job with captions, filled from the metric store.
# ---------------------------------------------------------------------------


# Captions of charts: the figures of the chart as text.


def caption(chart: ChartSpec, series: Series, figures: JobFigures | None) -> str:
    """Return a chart's caption, for accessibility and quick reading."""
    chart_figures = [figures[name] for name in chart.figures if figures and name in figures]
    sentences = [figure_words(each) for each in chart_figures if each.measured is not None]
    if sentences:
        return " ".join(sentences)
    drawn = of_points(chart, series)
    predicted = next((each for each in chart_figures if each.predicted), None)
    return f"{drawn} {figure_words(predicted)}" if predicted else drawn


def of_points(chart: ChartSpec, series: Series) -> str:
    """Return a caption from the drawn points, if no figure has a value."""
    values = series.known
    if not values:
        return "No points yet."
    span = f"between {value_text(min(values), chart)} and {value_text(max(values), chart)}"
    return f"{value_text(values[-1], chart)} at the last point, {span}."


def figure_words(figure: JobFigure) -> str:
    """Return one figure as a sentence: name, value, deviation from the prediction."""
    label, prediction = figure.definition.label, figure.predicted
    predicted = f"predicted {quantity(prediction.value, figure.unit)}" if prediction else ""
    if figure.shown is None:
        words = f"{label}: {figure.state_words}"
        return f"{words}; {predicted}." if prediction else f"{words}."
    start = f"{label} {figure.shown}"
    if figure.state == "warm_up":
        tail = f"; {predicted}" if prediction else ""
        return f"{start} so far; {figure.state_words}{tail}."
    so_far = " so far" if figure.state == "so_far" else ""
    if prediction is None or figure.ratio is None:
        return f"{start}{so_far}."
    deviation = deviation_words(figure.ratio)
    return f"{start}{so_far}, {deviation} the {predicted}{SIDE_WORDS[figure.place]}."


TABLE_ROWS = 24


@dataclass(frozen=True, kw_only=True)
class Drawn(ChartFigure):
    """One chart of a job, with its caption and its table.

    ``series`` is the attempt's own measurements, ``line`` includes those of earlier attempts.
    """

    series: Series
    line: Series
    prediction: Prediction | None
    words: str
    figures: tuple[JobFigure, ...] = ()

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return a readable sample of the points as (time since start, value)."""
        start = self.figure["layout"]["meta"]["start_ms"]
        points = [
            (t, value)
            for t, value in zip(self.line.t_ms, self.line.values, strict=True)
            if value is not None
        ]
        step = max(1, len(points) // TABLE_ROWS)
        return [
            (clock(t - start), str(quantity(value, self.chart.unit)))
            for t, value in points[::step]
        ]


def draw(
    job: Job,
    figures: JobFigures | None = None,
    *,
    is_complete: bool = False,
    part: Attempt | None = None,
) -> list[Drawn]:
    """Return a job's charts; with ``is_complete`` one for every reported metric.

    For a job on several hosts they show one ``part``, by default the first, which reports for
    the whole job. A job waiting for its next attempt shows earlier attempts.
    """
    shown = part or job.current_attempt
    described = shown or job.attempts.filter(node_rank=0).last()
    if described is None:
        return []
    charts = _charts(job, described, is_complete=is_complete)
    metrics = [chart.metric for chart in charts]
    measured = of_one_model(job, points_of(shown, metrics)) if shown else {}
    earlier = earlier_points(job, shown, measured, metrics)
    span = span_ms(job, [earlier.before(measured.get(name) or Series(name)) for name in metrics])
    # Figures and predictions cover the whole job; under load, one point among several.
    is_whole = not described.node_rank and not job.spec.get("load")
    shown_figures = (figures or figures_of(job)) if is_whole else None
    return [
        _draw(
            chart, measured.get(chart.metric) or Series(chart.metric), earlier, span, shown_figures
        )
        for chart in charts
    ]


def _charts(job: Job, attempt: Attempt, *, is_complete: bool) -> list[ChartSpec]:
    """Return the charts for a job's kind and an attempt's metrics."""
    stored = MetricSource.objects.filter(attempt_id=attempt.pk).values_list("metrics", flat=True)
    names = {name for names in stored for name in names} | _gpu_metrics(attempt)
    kind = "serve" if job.spec.get("load") else job.kind  # the load test's own endpoint
    return [
        _adjusted(job, attempt, chart)
        for chart in charts_for(kind, names, is_complete=is_complete)
    ]


def _adjusted(job: Job, attempt: Attempt, chart: ChartSpec) -> ChartSpec:
    """Return a chart adjusted to this job.

    A classifier's loss is per text, not per token. The predicted peak is of one process on a
    host without GPUs: it is not drawn with the sum of several processes, nor with the host memory
    of a job whose model is on a GPU.
    """
    if chart is LOSS and job.spec.get("objective") == "classification":
        return replace(chart, unit="nats per text", axis="nats per text")
    if chart is not MEMORY:
        return chart
    is_several = job.processes_per_host > 1
    if is_several or attempt.host.facts.get("gpus"):
        title = f"{chart.title}, all ranks" if is_several else chart.title
        return replace(chart, title=title, predicted="", figures=("host_memory_bytes",))
    return chart


def _gpu_metrics(attempt: Attempt) -> set[str]:
    """Return the GPU metrics that the host will report, so that charts exist in advance."""
    gpus = [gpu["index"] for gpu in attempt.host.facts.get("gpus") or []]
    return {f"gpu{index}_{what}" for index in gpus for what in ("memory_bytes", "utilization")}


def _draw(
    chart: ChartSpec,
    series: Series,
    earlier: Earlier,
    span: tuple[int, int],
    figures: JobFigures | None,
) -> Drawn:
    main = figures.get(chart.predicted) if figures else None
    prediction = main.predicted if main else None
    line = earlier.before(series)
    return Drawn(
        chart=chart,
        figure=figure(chart, line, start_ms=span[0], end_ms=span[1], prediction=prediction),
        series=series,
        line=line,
        prediction=prediction,
        words=caption(chart, series, figures) + earlier.words_of(chart.metric),
        figures=tuple(figures[name] for name in chart.figures if figures and name in figures),
    )


def span_ms(job: Job, series: Iterable[Series] = ()) -> tuple[int, int]:
    """Return the start and end of a job's time axis.

    It begins with the first point, else with the start; it ends with the job, or at its
    expected end.
    """
    began = job.started_at or job.queued_at or job.created_at
    start = min((each.t_ms[0] for each in series if each.t_ms), default=_ms(began))
    if job.ended_at is not None:
        return start, _ms(job.ended_at)
    return start, now_ms() + int((job.eta_seconds or 0) * 1000)


def _ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)

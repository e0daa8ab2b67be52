"""What a job's pages show: its timeline, its predicted and measured figures, its outcome.

Everything here reads a job that is already loaded; no function asks the database.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.timezone import localtime

from webapp.charts.figures import Prediction
from webapp.core.clock import now
from webapp.core.display import Figure, quantity
from webapp.core.units import DAY, Quantity, about, clock, number, signed_percent
from webapp.jobs.energy import ENERGY, costs_of, device_labels
from webapp.jobs.models import FINAL_STATES, Event, Job, JobState, Measurement

LEAST_PERCENT = 0.05  # less would be shown as zero
KIND_WORDS = {
    "train": "Train",
    "compress": "Compress",
    "evaluate": "Evaluate",
    "benchmark": "Benchmark",
    "generate": "Generate",
    "serve": "Serve",
    "drill": "Drill",
}
FIGURES: dict[str, tuple[str, str]] = {  # metric -> label, base unit
    "tokens_per_second": ("Tokens per second", "tokens_per_second"),
    "prefill_tokens_per_second": ("Prefill speed", "tokens_per_second"),
    "decode_tokens_per_second": ("Decode speed", "tokens_per_second"),
    "step_seconds": ("Step time", "seconds"),
    "mfu": ("Model FLOP utilisation", "share"),
    "communication_ratio": ("Communication in a step", "share"),
    "exposed_communication_ratio": ("Communication that nothing hides", "share"),
    "prefill_seconds": ("Prefill time", "seconds"),
    "decode_step_seconds": ("Time per decoded token", "seconds"),
    "ttft_seconds": ("Time to first token", "seconds"),
    "tpot_seconds": ("Time per output token", "seconds"),
    "duration_seconds": ("Duration", "seconds"),
    "tasks_seconds": ("Running tasks", "seconds"),
    "peak_memory_bytes": ("Peak memory", "bytes"),
    "parameter_bytes": ("Weights in memory", "bytes"),
    "disk_bytes": ("Size on disk", "bytes"),
    "trainable_parameters": ("Trained parameters", "count"),
    "optimizer_bytes": ("Optimiser states", "bytes"),
    "acceptance_ratio": ("Guesses that were right", ""),
    "expert_hit_ratio": ("Experts found on the device", "share"),
    "expert_guess_ratio": ("Guessed experts that were right", "share"),
    "expert_bytes_brought": ("Experts brought to the device", "bytes"),
    "weights_cpu": ("Weights in host memory", "share"),
    "weights_disk": ("Weights on disk", "share"),
    "kv_cpu": ("Cache in host memory", "share"),
    "kv_disk": ("Cache on disk", "share"),
    "activations_cpu": ("Waiting activations in host memory", "share"),
    "host_bytes": ("Held in host memory", "bytes"),
    "offloaded_disk_bytes": ("Held on disk", "bytes"),
    "layer_loads": ("Layers brought to the device", ""),
    "weight_bytes_brought": ("Weights brought to the device", "bytes"),
    "kv_bytes_brought": ("Cache brought to the device", "bytes"),
    "perplexity": ("Perplexity", ""),
    "data_perplexity": ("Perplexity on kept-back samples", ""),
    "data_loss": ("Loss on kept-back samples", "nats per token"),
    "accuracy": ("Accuracy on kept-back samples", "share"),
    "f1": ("F1 on kept-back samples", "share"),
    "data_classes": ("Classes", "count"),
    "data_documents": ("Samples learnt from", "count"),
    "data_held_out": ("Samples kept back", "count"),
    "data_tokens": ("Tokens of the data", "count"),
    "data_cut": ("Samples that were cut", "count"),
    "data_left_out": ("Samples left out", "count"),
    "padding_share": ("Padding", "share"),
    "label_share": ("Tokens that are learnt", "share"),
    "next_token_accuracy": ("Next token right", "share"),
    "kl_divergence_nats": ("Divergence from the original", "nats per token"),
    "top_token_agreement": ("Same next token as the original", "share"),
    "final_loss": ("Final loss", "nats per token"),
    "exported_step": ("Step of the weights that it leaves", "count"),
    "checkpoint_wait_seconds": ("Steps waited for checkpoints", "seconds"),
    "checkpoint_copy_bytes": ("Copy of the states for checkpoints", "bytes"),
    **ENERGY,
}
MFU_NOTE = "the plan's FLOP a token times the measured speed, over the devices' peak"
UNPREDICTED = {
    "acceptance_ratio", "perplexity", "final_loss", "disk_bytes",
    "layer_loads", "weight_bytes_brought", "kv_bytes_brought",
    "next_token_accuracy", "kl_divergence_nats", "top_token_agreement",
    "expert_hit_ratio", "expert_guess_ratio", "expert_bytes_brought",
    "trainable_parameters", "optimizer_bytes",
    "accuracy", "f1", "data_classes",
    "data_perplexity", "data_loss", "data_documents", "data_held_out", "data_tokens",
    "checkpoint_wait_seconds", "checkpoint_copy_bytes", "exported_step",
    "communication_ratio", "exposed_communication_ratio",
    "data_cut", "data_left_out", "padding_share", "label_share", "tasks_seconds", *ENERGY,
}  # fmt: skip
# The figure that stands for a job in the list, best first.
MAIN_METRICS = (
    "tokens_per_second",
    "decode_tokens_per_second",
    "step_seconds",
    "prefill_tokens_per_second",
    "peak_memory_bytes",
)


# The state timeline


@dataclass(frozen=True)
class Milestone:
    """One stop on the way of a job; ``look`` is done, now, bad or empty."""

    label: str
    look: str = ""
    at: datetime | None = None
    note: str = ""


WAY = (JobState.QUEUED, JobState.PREFLIGHT, JobState.STARTING, JobState.RUNNING)


def timeline(job: Job, events: Iterable[Event]) -> list[Milestone]:
    """Return the milestones of a job with the instants at which it reached them."""
    reached: dict[str, datetime] = {event.to_state: event.at for event in events}
    if job.queued_at:
        reached.setdefault(JobState.QUEUED, job.queued_at)
    stops = [_milestone(job, state, reached) for state in WAY]
    if job.state == JobState.STOPPING:
        stops.append(Milestone("Stopping", "now", reached.get(JobState.STOPPING)))
    return [*stops, _end(job)]


def _milestone(job: Job, state: JobState, reached: Mapping[str, datetime]) -> Milestone:
    at = reached.get(state)
    if state == job.state:
        since = clock((now() - at).total_seconds()) if at else ""
        return Milestone(state.label, "now", at, since)
    if job.state in WAY:
        is_past = WAY.index(state) < WAY.index(JobState(job.state))
        return Milestone(state.label, "done" if is_past else "", at if is_past else None)
    return Milestone(state.label, "done" if at else "", at)


def _end(job: Job) -> Milestone:
    if job.state in FINAL_STATES:
        look = "bad" if job.state in {JobState.FAILED, JobState.ERROR} else "done"
        took = clock(elapsed_seconds(job)) if job.started_at else ""
        return Milestone(job.get_state_display(), look, job.ended_at, took)
    if job.state == JobState.RUNNING and job.eta_seconds is not None:
        end = localtime(now() + timedelta(seconds=job.eta_seconds))
        day = "" if job.eta_seconds < DAY else f"{end.day} {end:%b} "
        return Milestone("Done", "", None, f"about {day}{end:%H:%M}")
    return Milestone("Done")


def elapsed_seconds(job: Job) -> float:
    """Return how long the job has run so far, or ran."""
    if job.started_at is None:
        return 0.0
    return ((job.ended_at or now()) - job.started_at).total_seconds()


# Progress


@dataclass(frozen=True)
class Progress:
    """How far a job is: a share between 0 and 1 and the words beside it."""

    share: float | None
    percent: str
    words: str


def progress(job: Job) -> Progress:
    """Return a job's progress and, while it runs, what is left of it."""
    share = None
    if job.progress_total and job.progress_done is not None:
        share = min(1.0, job.progress_done / job.progress_total)
    words = [_counted(job)] if share is not None else []
    if job.state == JobState.RUNNING and job.eta_seconds is not None:
        words.append(f"{about(job.eta_seconds)} left")
    if job.phase and job.state not in FINAL_STATES:
        words.insert(0, job.phase)
    percent = "" if share is None else f"{int(share * 100)} %"
    return Progress(share, percent, " · ".join(words))


def _counted(job: Job) -> str:
    """Return ``756 of 1,200 steps``; seconds are said as a length of time."""
    done, total = job.progress_done or 0.0, job.progress_total or 0.0
    if job.progress_unit == "seconds":
        return f"{clock(done)} of {clock(total)}"
    return f"{done:,.0f} of {total:,.0f} {job.progress_unit or 'steps'}"


# Predicted against measured


def predictions(job: Job) -> dict[str, Prediction]:
    """Return what was predicted for a job when it was launched, by the result's own names."""
    return {
        name: Prediction(float(entry["value"]), entry.get("low"), entry.get("high"))
        for name, entry in job.prediction.items()
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), int | float)
    }


def figure_of(metric: str, measured: float | None, said: Prediction | None) -> Figure | None:
    """Return one figure: measured where there is a value, else the prediction alone."""
    named = FIGURES | device_labels([metric])
    label, unit = named.get(metric, (metric.replace("_", " ").capitalize(), ""))
    if said is None:
        if measured is None:
            return None
        return Figure(label, measured, unit, provenance="measured", note="measured here")
    if measured is None:
        return Figure(label, said.value, unit, said.low, said.high, note="predicted")
    note = f"measured · predicted {quantity(said.value, unit)}"
    return Figure(
        label, said.value, unit, said.low, said.high, "measured", note, measured=measured
    )


@dataclass(frozen=True)
class Compared:
    """A figure beside its ratio of measured to predicted, for the table twin."""

    metric: str
    figure: Figure
    predicted: float | None
    measured: float | None
    ratio: float | None
    how: str = ""


def compared(
    job: Job, measurements: Sequence[Measurement], latest: Mapping[str, float]
) -> list[Compared]:
    """Return predicted beside measured: final figures once they exist, else the latest points."""
    said = predictions(job)
    final = {row.metric: row.measured for row in measurements}
    costs = costs_of(job)
    paid = {name: cost.usd for name, cost in costs.items()}
    measured = {**latest, **job.result.get("measured", {}), **final, **paid}
    measured |= utilisation_of(said, measured)
    notes = {"mfu": MFU_NOTE} | job.result.get("notes", {})
    notes |= {name: cost.how for name, cost in costs.items()}
    devices = device_labels(measured)
    rows = []
    for metric in (*FIGURES, *devices):
        if metric not in said and metric not in UNPREDICTED and metric not in devices:
            continue
        found = figure_of(metric, measured.get(metric), said.get(metric))
        if found is not None:
            rows.append(_compare(metric, found, said.get(metric), measured.get(metric), notes))
    return rows


def utilisation_of(
    said: Mapping[str, Prediction], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return the share of the devices' peak that a training's measured speed is."""
    known = [said.get("mfu"), said.get("tokens_per_second")]
    speed = measured.get("tokens_per_second")
    if not speed or not all(each and each.value for each in known):
        return {}
    mfu, planned = (each.value for each in known if each)
    return {"mfu": mfu * speed / planned}


def _compare(
    metric: str,
    found: Figure,
    said: Prediction | None,
    measured: float | None,
    notes: Mapping[str, str],
) -> Compared:
    predicted = said.value if said else None
    ratio = measured / predicted if measured is not None and predicted else None
    return Compared(metric, found, predicted, measured, ratio, notes.get(metric, ""))


def answer(rows: Sequence[Compared]) -> str:
    """Return in one sentence how well the plan met what was measured."""
    judged = [row.figure for row in rows if row.figure.measured is not None and row.figure.low]
    if not judged:
        return ""
    inside = sum(1 for figure in judged if _is_inside(figure))
    if inside == len(judged):
        return "Every measured figure lies inside its 80 % interval."
    return f"{inside} of {len(judged)} measured figures lie inside their 80 % interval."


def _is_inside(figure: Figure) -> bool:
    low, high, measured = figure.low, figure.high, figure.measured
    return (
        low is not None and high is not None and measured is not None and low <= measured <= high
    )


def main_ratio(measurements: Iterable[Measurement]) -> float | None:
    """Return measured over predicted for the figure that stands for the whole job."""
    by_metric = {row.metric: row.ratio for row in measurements}
    return next((by_metric[name] for name in MAIN_METRICS if name in by_metric), None)


# Before and after a compression


@dataclass(frozen=True)
class Change:
    """One line of the before/after table."""

    label: str
    before: Quantity
    after: Quantity
    words: str


def before_after(job: Job) -> list[Change]:
    """Return what a compression changed: size, memory, speed and perplexity."""
    measured: Mapping[str, Any] = job.result.get("measured", {})
    rows = []
    for name, (label, unit) in FIGURES.items():
        before = measured.get(f"original_{name}")
        after = measured.get(name)
        if before and after is not None:
            words = _change(after / before)
            rows.append(Change(label, quantity(before, unit), quantity(after, unit), words))
    return rows


def beyond_chance(job: Job) -> str:
    """Return whether the text read suffices to tell the model from its original."""
    measured: Mapping[str, Any] = job.result.get("measured", {})
    names = ("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
    if not all(measured.get(name) for name in names):
        return ""
    ratio, low, high = (float(measured[name]) for name in names)
    verdict = "no difference that this much text can show"
    if low > 1 or high < 1:
        verdict = f"{'worse' if low > 1 else 'better'} than the original beyond chance"
    spread = f"{number(ratio, 4)}, 95 % interval {number(low, 4)} to {number(high, 4)}"
    return f"Perplexity over the original's is {spread}, window by window: {verdict}."


def _change(ratio: float) -> str:
    """Return a change in percent with a real minus; small ones with one decimal."""
    percent = (ratio - 1) * 100
    return "unchanged" if abs(percent) < LEAST_PERCENT else signed_percent(percent)

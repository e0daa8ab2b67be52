"""The effect of a compression, or of an evaluation against an original, as text and table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from webapp.core.display import Quantity, number, signed_percent
from webapp.core.figures import REGISTRY
from webapp.jobs.measured_figures import JobFigures
from webapp.jobs.models import Job, Measurement
from webapp.plans.compression_gains import perplexity_words, size_words, speed_words

LEAST_PERCENT = 0.05  # smaller changes are shown as unchanged


@dataclass(frozen=True)
class Change:
    """One line of the before/after table."""

    label: str
    before: Quantity
    after: Quantity
    words: str


def before_after(figures: JobFigures) -> list[Change]:
    """Return every figure measured on both the original and the compressed model."""
    rows = []
    for name, definition in REGISTRY.items():
        pair = _pair(figures, name)
        before, after = figures.get(f"original_{name}"), figures.get(name)
        if pair is None or before is None or after is None or not (before.shown and after.shown):
            continue
        rows.append(Change(definition.label, before.shown, after.shown, _change(*pair)))
    return rows


def won_words(job: Job, figures: JobFigures) -> str:
    """Return a compression's gains and losses in one sentence, all measured.

    Empty before both models are measured. Size is of the weight files, quality is perplexity
    per window, speed is decoding on the job's own host. A speed that does not count, for example
    because other programs took the processor, is not compared.
    """
    size, speed = _pair(figures, "disk_bytes"), _pair(figures, "decode_tokens_per_second")
    if job.kind != "compress" or size is None:
        return ""
    parts = [size_words(size[1] / size[0]), _quality_words(job)]
    why = _why_speed_is_left_out(job) if speed is not None else ""
    if speed is not None and not why:
        parts.append(f"{speed_words(speed[1] / speed[0])} here")
    sentence = ", ".join(part for part in parts if part)
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    return f"{sentence} The speeds are not compared: {why}" if why else sentence


def _why_speed_is_left_out(job: Job) -> str:
    """Return why the job's speeds and times are excluded, as a sentence; "" if they count."""
    rows = Measurement.objects.filter(job_id=job.pk, is_excluded=True).exclude(
        metric__endswith="bytes"
    )
    row = rows.order_by("pk").first()
    if row is None:
        return ""
    why = row.invalid_reason or "their measurements are excluded"
    return f"{why.rstrip('.')}."


def _pair(figures: JobFigures, name: str) -> tuple[float, float] | None:
    before, after = figures.get(f"original_{name}"), figures.get(name)
    if before is None or after is None or not before.measured or after.measured is None:
        return None
    return before.measured, after.measured


def _quality_words(job: Job) -> str:
    interval = _perplexity_interval(job)
    if interval is None:
        return "quality not measured"
    ratio, low, high = interval
    if low <= 1 <= high:
        return "same quality"
    return perplexity_words(ratio)


def _perplexity_interval(job: Job) -> tuple[float, float, float] | None:
    measured: Mapping[str, Any] = job.result.get("measured", {})
    names = ("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
    if not all(measured.get(name) for name in names):
        return None
    ratio, low, high = (float(measured[name]) for name in names)
    return ratio, low, high


def significance_note(job: Job) -> str:
    """Return whether the evaluated text suffices to distinguish the model from its original."""
    interval = _perplexity_interval(job)
    if interval is None:
        return ""
    ratio, low, high = interval
    verdict = "no difference that this amount of text can show"
    if low > 1 or high < 1:
        verdict = f"{'worse' if low > 1 else 'better'} than the original beyond chance"
    spread = f"{number(ratio, 4)}, 95 % interval {number(low, 4)} to {number(high, 4)}"
    return f"Perplexity over the original's is {spread}, window by window: {verdict}."


def _change(before: float, after: float) -> str:
    """Return a change in percent with a typographic minus; small changes with one decimal."""
    percent = (after / before - 1) * 100
    return "unchanged" if abs(percent) < LEAST_PERCENT else signed_percent(percent)

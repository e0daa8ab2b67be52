"""The report as one HTML file without further files, readable on a phone."""

from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from runners.prove.report import Figure, Report, StageName, Verdict

TITLES: dict[StageName, str] = {
    "identity": "Identity",
    "rates": "Bandwidth and arithmetic",
    "correctness": "Correctness",
    "speed": "Speed of an 8B-shaped model",
    "jobs": "Jobs as they are launched",
    "distributed": "Several devices",
}
VERDICTS: dict[Verdict, str] = {
    "proven": "Everything that was run is right",
    "failed": "Something is wrong",
    "incomplete": "Right as far as it ran, and not everything ran",
}
TONES: dict[Verdict, str] = {"proven": "good", "failed": "bad", "incomplete": "warn"}
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
THOUSAND = 1000
PLAIN_UNITS = ("tokens/s", "s", "ratio", "J/token")


def render(report: Report) -> str:
    """Return the report as HTML."""
    return _template().render(
        report=report,
        began=datetime.fromtimestamp(report.began_at_ms / 1000, UTC).strftime(
            "%Y-%m-%d %H:%M UTC"
        ),
        failures=list(report.failures()),
        titles=TITLES,
        verdicts=VERDICTS,
        tones=TONES,
        number=number,
        number_range=number_range,
        spread=spread,
        inside=is_inside,
    )


def number(value: float, unit: str) -> str:
    """Return a value in its unit with three digits, such as "21.1 GB/s".

    >>> number(21_113_784_758.0, "bytes/s"), number(0.00451, "s"), number(1234.5, "tokens/s")
    ('21.1 GB/s', '4.51 ms', '1,234 tokens/s')
    """
    scale, short = _scale(value, unit)
    return f"{_digits(value / scale)} {short}"


def number_range(low: float, high: float, unit: str) -> str:
    """Return a range with its unit once.

    >>> number_range(1.9e9, 2.2e9, "bytes/s")
    '1.9 to 2.2 GB/s'
    """
    scale, short = _scale(high, unit)
    return f"{_digits(low / scale)} to {_digits(high / scale)} {short}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """Return by what a value of a unit is divided, and the unit that then stands after it."""
    if unit == "s" and value < 1:
        return 1e-3, "ms"
    if unit in PLAIN_UNITS:
        return 1.0, unit
    scale, prefix = next(
        ((scale, prefix) for scale, prefix in PREFIXES if abs(value) >= scale), (1.0, "")
    )
    return scale, f"{prefix}{unit.replace('bytes', 'B')}"


def _digits(value: float) -> str:
    if abs(value) >= THOUSAND:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(figure: Figure) -> str:
    """Return the range of the samples and their number, or "" for a single one."""
    if len(figure.samples) <= 1:
        return ""
    range_ = number_range(min(figure.samples), max(figure.samples), figure.unit)
    return f"{range_} ({len(figure.samples)})"


def is_inside(figure: Figure) -> bool:
    """Return whether the value lies in the prediction's interval, or there is none."""
    predicted = figure.prediction
    if predicted is None or predicted.low is None or predicted.high is None:
        return True
    return predicted.low <= figure.value <= predicted.high


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = Path(__file__).with_name("report.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)

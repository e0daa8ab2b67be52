"""Print predicted and measured figures."""

from typing import Any


def report(claim: dict[str, Any], measured: dict[str, float]) -> int:
    """Print predicted and measured figures; return 0 if all are inside their intervals, else 1."""
    outside = 0
    print(f"{'figure':28} {'predicted':>11} {'80 % interval':>25} {'measured':>11}  verdict")
    for name, predicted in claim["figures"].items():
        value, low, high = measured.get(name), predicted["low"], predicted["high"]
        if value is None:
            continue
        inside = low is None or low <= value <= high
        outside += not inside
        bounds = "" if low is None else f"{low:.4g} .. {high:.4g}"
        verdict = "inside" if inside else f"outside, {value / predicted['value']:.2f} x predicted"
        print(f"{name:28} {predicted['value']:11.4g} {bounds:>25} {value:11.4g}  {verdict}")
    return 1 if outside else 0

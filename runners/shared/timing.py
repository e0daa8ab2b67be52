"""Scales all periods and timeouts, so that fault tests run faster.

``SLIPWAY_TIME_SCALE`` (default 1) multiplies every period and timeout of server and host, so
that a test of ninety seconds of silence takes three. Both sides must use the same scale.
Standard library only: the supervisor imports it too.
"""

import os

VARIABLE = "SLIPWAY_TIME_SCALE"


def scale_of(text: str) -> float:
    """Return the scale of a setting.

    Raises:
        ValueError: the setting is not a number above 0 and at most 1.
    """
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor <= 1.0:
        raise ValueError(
            f"{VARIABLE} is {text!r}; it must be a number above 0 and at most 1. Unset it to "
            "wait as long as the documentation says."
        )
    return factor


SCALE = scale_of(os.environ.get(VARIABLE) or "1")


def scale_duration(seconds: float, *, least: float = 0.0) -> float:
    """Return a scaled duration, never shortened below ``least``."""
    return max(seconds * SCALE, min(seconds, least))

"""How long the product waits, shortened in one place for rehearsals of faults.

``SLIPWAY_TIME_SCALE`` (1 unless set) multiplies every period and patience of server and host
alike, so that ninety seconds of silence can be rehearsed in three. Both sides must be given the
same scale. Standard library only: the supervisor reads it too.
"""

import os

VARIABLE = "SLIPWAY_TIME_SCALE"


def scale_of(text: str) -> float:
    """Return the factor that a setting names.

    Raises:
        ValueError: it is no number above 0 and at most 1.
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


def scaled(seconds: float, *, least: float = 0.0) -> float:
    """Return a span on the installation's scale; shortened, it is never below ``least``."""
    return max(seconds * SCALE, min(seconds, least))

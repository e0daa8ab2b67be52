"""Name the closest known spellings of an unknown name."""

from collections.abc import Iterable
from difflib import get_close_matches

MAX_NEAREST = 5
ALIKE, BARELY = 0.4, 0.2


def nearest_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return up to five known names that look like ``name``, closest first."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = get_close_matches(name.lower(), list(by_lower), n=MAX_NEAREST, cutoff=ALIKE)
    tail = name.lower().rsplit("/", 1)[-1]
    inside = [lower for lower in by_lower if tail and tail in lower and lower not in close]
    found = (*close, *sorted(inside)) or get_close_matches(
        name.lower(), list(by_lower), n=MAX_NEAREST, cutoff=BARELY
    )
    return tuple(by_lower[lower] for lower in found)[:MAX_NEAREST]

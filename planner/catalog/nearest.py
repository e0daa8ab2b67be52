"""Find the closest known names to an unknown name."""

from collections.abc import Iterable
from difflib import get_close_matches

MAX_NEAREST = 5
ALIKE, BARELY = 0.4, 0.2


def nearest_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return up to five known names similar to ``name``, closest first.

    Names that it begins with come before all others: Qwen3-8B of Qwen3-8B-of-mine.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    last_part = name.lower().rsplit("/", 1)[-1]
    begun = [
        lower for lower in by_lower if f"{last_part}-".startswith(f"{lower.rsplit('/', 1)[-1]}-")
    ]
    begun.sort(key=lambda lower: -len(lower.rsplit("/", 1)[-1]))
    alike = get_close_matches(name.lower(), list(by_lower), n=MAX_NEAREST, cutoff=ALIKE)
    close = [*begun, *(lower for lower in alike if lower not in begun)]
    containing = [
        lower for lower in by_lower if last_part and last_part in lower and lower not in close
    ]
    matches = (*close, *sorted(containing)) or get_close_matches(
        name.lower(), list(by_lower), n=MAX_NEAREST, cutoff=BARELY
    )
    return tuple(by_lower[lower] for lower in matches)[:MAX_NEAREST]

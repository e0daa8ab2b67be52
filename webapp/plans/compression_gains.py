"""Gains and losses of a compression in words: size, quality, speed.

The same text is used for predicted values of plans and measured values of jobs.
"""

from planner.specs.estimate import Estimate
from webapp.core.display import TIMES, memory, number, signed_percent

NEARLY = 0.02  # smaller changes of speed or size count as none
MANY_TIMES = 1.5  # from here a change of speed is shown as a factor, below as per cent
SAME_QUALITY = 0.0005  # smaller changes of perplexity count as none
SAME_PERPLEXITY = "same perplexity"


def size_words(ratio: float) -> str:
    """Return a size ratio (after ÷ before) as text."""
    if abs(ratio - 1) < NEARLY:
        return "the same size"
    return f"{_whole_percent(ratio)} {'smaller' if ratio < 1 else 'larger'}"


def speed_words(ratio: float) -> str:
    """Return a speed ratio (after ÷ before) as text."""
    if not ratio or abs(ratio - 1) < NEARLY:
        return "as fast"
    side, factor = ("faster", ratio) if ratio > 1 else ("slower", 1 / ratio)
    if factor < MANY_TIMES:
        return f"{_whole_percent(ratio)} {side}"
    return f"{number(factor, 2)}{TIMES} {side}"


def perplexity_words(ratio: float) -> str:
    """Return a perplexity ratio (after ÷ before) as text."""
    if abs(ratio - 1) < SAME_QUALITY:
        return SAME_PERPLEXITY
    change = signed_percent(abs(ratio - 1) * 100).removeprefix("+")
    return f"{change} {'higher' if ratio > 1 else 'lower'} perplexity"


def planned_gains(best: Estimate, speed: str = "") -> str:
    """Return the gains of a planned compression; empty for other goals."""
    usage = best.memory
    if not usage.checkpoint_bytes or not usage.disk_bytes:
        return ""
    original = usage.disk_bytes - usage.checkpoint_bytes
    sizes = f"{memory(usage.checkpoint_bytes)} instead of {memory(original)}"
    parts = [f"{size_words(usage.checkpoint_bytes / original)} ({sizes})"]
    if best.quality and best.quality.perplexity_ratio:
        words = perplexity_words(best.quality.perplexity_ratio[1])
        parts.append(words if words == SAME_PERPLEXITY else f"about {words}")
    return ", ".join([*parts, *([speed] if speed else [])])


def _whole_percent(ratio: float) -> str:
    return f"{round(abs(ratio - 1) * 100)} %"

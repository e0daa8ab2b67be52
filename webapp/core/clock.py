"""The clock of the web side; tests set it with time-machine."""

from datetime import datetime

from django.utils import timezone


def now() -> datetime:
    """Return the current instant, timezone-aware, by the server's clock."""
    return timezone.now()


def now_ms() -> int:
    """Return the current instant in milliseconds since the Unix epoch."""
    return int(now().timestamp() * 1000)

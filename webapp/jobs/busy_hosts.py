"""What to expect of a run on a host that is busy now."""

from webapp.core.display import counted, percent
from webapp.hosts.models import Host
from webapp.hosts.services import Contact, contact_of
from webapp.hosts.use import HostUse
from webapp.jobs.results import MOST_TAKEN, MOST_TAKEN_WITH_GPU

SEVERAL_TIMES = 0.75  # of the processor in use, from which on a run is several times slower


def busy_words(host: Host, use: HostUse | None) -> str:
    """Return what uses a host in contact so much that a run would be slower; "" if nothing does.

    The limits are those above which a measurement calibrates no host.
    """
    if use is None or contact_of(host) is not Contact.LIVE:
        return ""
    if use.num_foreign_gpus:
        return f"Other programs use {counted(use.num_foreign_gpus, 'GPU')} of {host.name} now"
    most = MOST_TAKEN if use.gpus is None else MOST_TAKEN_WITH_GPU
    if use.processor <= most:
        return ""
    by_jobs = f", in part by {counted(use.num_jobs, 'job')}" if use.num_jobs else ""
    return f"{percent(use.processor)} of the processor of {host.name} is in use now{by_jobs}"


def busy_effect(use: HostUse) -> str:
    """Return what a run on a busy host will be like."""
    times = "several times slower" if use.processor > SEVERAL_TIMES else "slower"
    return (
        f"Predictions are for an idle machine: expect a run that starts now to be {times}, and "
        "its speed to calibrate nothing."
    )


def busy_note(host: Host | None) -> dict[str, str] | None:
    """Return what uses a host now, and what that does to a run; None if nothing does."""
    use = HostUse.of(host) if host else None
    words = busy_words(host, use) if host else ""
    return {"title": words, "text": busy_effect(use)} if use and words else None

"""Where a job's metrics also stand: the run of an experiment tracker."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from runners.jobspec.trackers import TRACKERS
from webapp.jobs.models import Artefact

NAME = "tracking"


class TrackedRun(NamedTuple):
    """A run of a tracker; ``url``: its page, empty where only the job's files have it."""

    title: str
    project: str
    run: str
    url: str


def tracked_run(artefacts: Iterable[Artefact]) -> TrackedRun | None:
    """Return the run that a job reported among its artefacts.

    What a host sends is text; an address that is none of the web is left out.
    """
    for each in artefacts:
        facts = each.facts if each.name == NAME and isinstance(each.facts, dict) else {}
        titles = {str(name): tracker.title for name, tracker in TRACKERS.items()}
        if title := titles.get(str(facts.get("tracker"))):
            texts = [str(facts.get(name) or "") for name in ("project", "run", "url")]
            is_web = urlsplit(texts[2]).scheme in {"http", "https"}
            return TrackedRun(title, texts[0], texts[1], texts[2] if is_web else "")
    return None

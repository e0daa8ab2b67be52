"""The settings of several jobs, and which of them differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AnonymousUser, User

from runners.jobspec.train import LayoutOptions
from webapp.core.units import NOTHING, TIMES, memory
from webapp.hosts.sharing import facts_for
from webapp.jobs.models import Job

USUAL_LAYOUT = LayoutOptions().model_dump(mode="json")
LONGEST = 80  # characters of a value that a cell shows
WHERE, WHAT, HOW, ON = "Where", "What it ran", "Strategy", "The host, as it was then"
IGNORED = frozenset({"kind", "spec_version", "version"})


@dataclass(frozen=True)
class Setting:
    """One setting with its value in each job."""

    group: str
    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Return whether the values differ between the jobs."""
        return len(set(self.values)) > 1


def settings_of(jobs: list[Job], user: User | AnonymousUser) -> list[Setting]:
    """Return every setting of at least one of the jobs, sorted by group."""
    each = [dict(_flat_settings(job, user)) for job in jobs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    order = [WHERE, WHAT, HOW, ON]
    rows = [
        Setting(group, name, tuple(settings.get((group, name), NOTHING) for settings in each))
        for group, name in keys
    ]
    return sorted(rows, key=lambda row: order.index(row.group))


Entry = tuple[tuple[str, str], str]


def _flat_settings(job: Job, user: User | AnonymousUser) -> Iterator[Entry]:
    for name, value in _place(job):
        yield (WHERE, name), value
    for path, value in flat({**job.spec, "layout": _layout(job.spec)}):
        yield (WHAT, words_of(path)), shown(value)
    strategy = job.estimate.get("strategy") if isinstance(job.estimate, Mapping) else None
    for path, value in flat(strategy or {}):
        yield (HOW, words_of(path)), shown(value)
    for name, value in _host(job, user):
        yield (ON, name), value


def _layout(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout options that differ from the defaults."""
    given = spec.get("layout") or {}
    return {name: value for name, value in given.items() if value != USUAL_LAYOUT.get(name)}


def _place(job: Job) -> Iterator[tuple[str, str]]:
    yield "Kind", job.kind
    yield "Model", job.model_name or NOTHING
    yield "Host", job.shown_host.name if job.shown_host else NOTHING
    yield "Pool", job.pool.name
    yield "Hosts", str(job.num_hosts)
    yield "Devices of each host", str(job.devices_per_host or "all")
    yield "Priority", job.get_priority_display()
    yield "Plan", job.plan.name if job.plan and job.plan.name else NOTHING


def _host(job: Job, user: User | AnonymousUser) -> Iterator[tuple[str, str]]:
    attempt = job.current_attempt
    if attempt is None:
        return
    facts = facts_for(user, attempt.host, attempt.facts or attempt.host.facts)
    gpus = [str(gpu.get("name", "")) for gpu in facts.get("gpus") or ()]
    counted = [f"{gpus.count(name)} {TIMES} {name}" for name in dict.fromkeys(gpus)]
    yield "GPUs", ", ".join(counted) or "none"
    yield "Processor", str(facts.get("cpu_model") or NOTHING)
    yield "Memory", str(memory(facts["memory_bytes"])) if facts.get("memory_bytes") else NOTHING
    for name in ("driver_version", "cuda_version", "python_version", "agent_version"):
        if facts.get(name):
            yield words_of(name), str(facts[name])
    for package, version in (facts.get("packages") or {}).items():
        yield str(package), str(version)


def flat(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every non-empty value of a document with its dotted path."""
    for key, value in document.items():
        path = f"{before}.{key}" if before else str(key)
        if isinstance(value, Mapping):
            yield from flat(value, path)
        elif value not in (None, "", [], ()) and path not in IGNORED:
            yield path, value


def words_of(path: str) -> str:
    """Return a dotted path as text: ``model.hidden_size`` becomes “Model · hidden size”."""
    return " · ".join(part.replace("_", " ") for part in path.split(".")).capitalize()


def shown(value: object) -> str:
    """Return a value as cell text, truncated to ``LONGEST`` characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"

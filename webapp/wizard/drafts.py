"""How a draft begins and how a suggestion changes it."""

from typing import Any

from django.contrib.auth.models import User

from webapp.accounts.models import Team
from webapp.hosts.models import Host, HostState
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan, PlanState
from webapp.wizard.defaults import Draft, demo_draft, quantize_draft, serve_draft

PINNED = "pins."


def first_host(team: Team) -> Host | None:
    """Return the host that a new plan proposes: a ready one, first enrolled first."""
    hosts = Host.objects.filter(team=team, kind="agent").exclude(
        state__in=[HostState.RETIRED, HostState.PENDING]
    )
    ready = hosts.filter(state=HostState.READY).order_by("created_at").first()
    return ready or hosts.order_by("created_at").first()


def draft_begin(
    *, team: Team, owner: User, preset: str = "", model: TeamModel | None = None
) -> Plan:
    """Return a new plan with a complete draft, or the same owner's untouched one like it."""
    draft = _first_draft(team, preset, model)
    untouched = Plan.objects.filter(team=team, owner=owner, state=PlanState.DRAFT, draft=draft)
    return untouched.first() or Plan.objects.create(team=team, owner=owner, draft=draft)


def _first_draft(team: Team, preset: str, model: TeamModel | None) -> Draft:
    host = first_host(team)
    if preset == "quantize" and model is not None:
        return quantize_draft(model, host)
    if preset == "demo":
        return demo_draft(host)
    has_seen_one = Job.objects.filter(team=team, state=JobState.SUCCEEDED).exists()
    return serve_draft(host) if has_seen_one or preset == "serve" else demo_draft(host)


def suggestion_apply(draft: Draft, changes: dict[str, Any]) -> list[str]:
    """Change a draft as a suggestion says and return what could not be changed by name."""
    left = []
    for name, value in changes.items():
        part, _, rest = name.partition(".")
        if isinstance(value, dict) and not rest:
            left += suggestion_apply(draft, {f"{part}.{key}": one for key, one in value.items()})
        elif not _change(draft, part, rest, value):
            left.append(name)
    draft["is_touched"] = True
    return left


def _change(draft: Draft, part: str, name: str, value: Any) -> bool:  # noqa: ANN401 -- JSON
    """Change one field of a draft; return whether it has such a field."""
    if part in {"strategy", "pins"}:
        draft["pins"][name] = value
        return True
    if part == "workload":
        values = draft["workload"][draft["goal"]["goal"]]
        if name in values:
            values[name] = value
            return True
        return False
    if part == "cluster" and name in draft["hardware"]:
        draft["hardware"] |= {"choice": "catalog", name: value}
        return True
    if part == "model" and isinstance(value, str):
        draft["model"] |= {"source": "catalog", "catalog_id": value}
        return True
    return False

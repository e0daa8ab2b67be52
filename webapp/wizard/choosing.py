"""What the comboboxes say beside an option: what fits, what is owned or recent."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from django.contrib.auth.models import AnonymousUser, User

from planner.catalog.devices import devices_of_every_size
from planner.catalog.models import get_model
from planner.specs.cluster import ClusterSpec
from webapp.accounts.models import Team
from webapp.core.problems import Problem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import Host, HostModel, HostState
from webapp.modelhub.catalog import catalog_rows
from webapp.plans.models import Plan
from webapp.plans.planning import fits_on
from webapp.wizard.drafts import first_host

CONVERSATION_TOKENS = 2048
FIT_ORDER = ("bf16", "int8", "int4")  # the best quality first
RECENT_PLANS = 40  # that are looked through
MOST_RECENT = 5


class Place(NamedTuple):
    """A host and its cluster."""

    host: Host
    cluster: ClusterSpec


def usual_place(team: Team | None) -> Place | None:
    """Return the host that a team's new plan is for; None without a measured one."""
    host = first_host(team) if team else None
    try:
        return Place(host, cluster_for_host(host)) if host else None
    except Problem:
        return None


def fitting_dtype(model: str, place: Place | None) -> str:
    """Return the best weight dtype in which a catalog model fits on a host, "" if none does."""
    return _fitting_dtype(model, place.cluster.model_dump_json()) if place else ""


@lru_cache(maxsize=4096)
def _fitting_dtype(model: str, cluster: str) -> str:
    spec = ClusterSpec.model_validate_json(cluster)
    tokens = min(CONVERSATION_TOKENS, get_model(model).max_position_embeddings)
    estimates = ((dtype, fits_on(model, spec, dtype, tokens)) for dtype in FIT_ORDER)
    return next((dtype for dtype, found in estimates if found and found.fits), "")


def model_notes(user: User | AnonymousUser, team: Team | None) -> dict[str, object]:
    """Return of the catalog's models the recent ones, those on hosts, and what fits where."""
    place = usual_place(team)
    repositories = HostModel.objects.filter(
        host__in=Host.objects.visible_to(user).exclude(state=HostState.RETIRED), is_complete=True
    )
    owned = set(repositories.order_by().values_list("repository", flat=True))
    ids = [row.entry.id for row in catalog_rows()]
    fits = {name: dtype for name in ids if (dtype := fitting_dtype(name, place))}
    where = place.host.name if place else ""
    return {
        "groups": {
            "Recent": _recent(user, "model", "catalog_id", ids),
            "On your hosts": [name for name in ids if name in owned],
        },
        "notes": {
            name: f"fits {where} in {fits[name]}" if name in fits else f"does not fit {where}"
            for name in ids
            if place
        },
    }


def device_notes(user: User | AnonymousUser) -> dict[str, object]:
    """Return of the catalog's devices the recent ones."""
    ids = [device.id for device in devices_of_every_size()]
    return {"groups": {"Recent": _recent(user, "hardware", "device", ids)}, "notes": {}}


def _recent(user: User | AnonymousUser, part: str, name: str, ids: Iterable[str]) -> list[str]:
    """Return what the user's latest plans chose, the latest first."""
    plans = Plan.objects.visible_to(user).filter(owner_id=user.pk, deleted_at=None)
    latest = plans.order_by("-pk").values_list(f"draft__{part}", flat=True)[:RECENT_PLANS]
    chosen = dict.fromkeys((each or {}).get(name) for each in latest if _is_chosen(each))
    known = set(ids)
    return [each for each in chosen if each in known][:MOST_RECENT]


def _is_chosen(part: dict[str, object] | None) -> bool:
    """Return whether a part of a draft chose from the catalog."""
    if not part:
        return False
    return part.get("source", "catalog") == "catalog" and not (
        part.get("host") or part.get("pool")
    )

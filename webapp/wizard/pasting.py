"""Drafts from pasted text: another tool's command line or configuration, or a config.json."""

import copy
from typing import Any

from django.contrib.auth.models import User

from planner.imports import Import, read_paste
from planner.specs.base import PlannerError
from webapp.accounts.models import Team
from webapp.core.display import sentence
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.plans.models import Plan
from webapp.wizard.documents import document_of_request, document_parse, draft_fill
from webapp.wizard.drafts import DEFAULT_DEVICE, first_host, serve_draft

MOST_SHOWN = 60  # settings of each kind that the review lists


def paste_read(text: str) -> Import:
    """Return what pasted text says.

    Raises:
        InvalidProblem: it is not of a tool that is known, or cannot be read.
    """
    try:
        return read_paste(text)
    except PlannerError as error:
        raise InvalidProblem(
            "text", f"The pasted text: {sentence(error.message)}", field=error.field or "text"
        ) from error


def paste_draft(
    *, team: Team, owner: User, imported: Import, host: str = "", pool: str = ""
) -> tuple[Plan, list[str]]:
    """Return an unsaved draft of an import, and notes on what the wizard has no field for.

    What the text does not say has the wizard's default.

    Raises:
        InvalidProblem: a value is outside the wizard's limits.
    """
    request: dict[str, Any] = copy.deepcopy(dict(imported.request))
    if "workload" not in request:
        request["workload"] = {"kind": imported.goal or "serve"}
    own = first_host(team)
    named = _with_device(request, own) if not host and not pool else []
    document, notes = document_of_request(request, host=host, pool=pool)
    parsed = document_parse(document)
    plan = Plan(team=team, owner=owner, draft=serve_draft(own))
    notes = [*named, *notes, *draft_fill(plan, parsed)]
    plan.draft["is_touched"] = True
    plan.draft["imported"] = imported_words(imported, notes)
    return plan, notes


def _with_device(request: dict[str, Any], own: Host | None) -> list[str]:
    """Name a device of the catalog where a text says only how many, and the host has fewer."""
    cluster = request.get("cluster") or {}
    count = int(cluster.get("devices_per_node") or 1) * int(cluster.get("nodes") or 1)
    num_own = own.devices.filter(is_present=True, kind="gpu").count() if own else 0
    if "device" in cluster or "instance" in cluster or count <= max(1, num_own):
        return []
    request["cluster"] = {**cluster, "device": DEFAULT_DEVICE}
    note = (
        f"The text has {count} devices and does not say which: planned for {DEFAULT_DEVICE}. "
        "Choose yours in the Hardware step."
    )
    return [note]


def imported_words(imported: Import, notes: list[str]) -> dict[str, list[list[str]]]:
    """Return what became of each setting, for the review page: pairs of source and words."""
    understood = [[each.source, f"{each.field} = {each.value}"] for each in imported.understood]
    unused = [[each.source, each.reason or ""] for each in imported.ignored]
    unknown = [[each.source, each.reason or ""] for each in imported.unknown]
    unused += [["", note] for note in notes]
    return {
        "understood": understood[:MOST_SHOWN],
        "unused": unused[:MOST_SHOWN],
        "unknown": unknown[:MOST_SHOWN],
    }

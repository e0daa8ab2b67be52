"""Benchmark of the CPU time of the wizard's verdict: first of a process, and later ones.

Each later verdict is for a workload that the process has not planned before, as when a user types
another number.
"""

import time
from collections.abc import Iterator
from http import HTTPStatus
from statistics import median
from typing import Any, NamedTuple

from django.test import Client

from webapp.plans.models import Plan
from webapp.wizard.drafts import options_for, step_form

SERVER = {"device": "h100-sxm-80gb", "devices_per_node": 8}


class Case(NamedTuple):
    """One draft, and the workload field that is changed."""

    preset: str
    model: str
    hardware: dict[str, Any]
    changed: str


CASES = {
    "serve 8B on an RTX 4090": Case(
        "serve", "meta-llama/Llama-3.1-8B", {"device": "rtx-4090"}, "concurrency"
    ),
    "serve 70B on 8 H100": Case("serve", "meta-llama/Llama-3.1-70B", SERVER, "concurrency"),
    "serve 405B on 16 H100": Case(
        "serve", "meta-llama/Llama-3.1-405B", SERVER | {"nodes": 2}, "concurrency"
    ),
    "fine-tune 8B on 8 H100": Case(
        "finetune", "meta-llama/Llama-3.1-8B", SERVER, "sequence_length"
    ),
}
FIRST = "the first verdict of a process"


def names() -> list[str]:
    """Return the names of all figures."""
    return [FIRST, *(f"verdict: {name}" for name in CASES)]


def seconds_of(client: Client, rounds: int) -> Iterator[tuple[str, float]]:
    """Yield the CPU seconds of each verdict; for later ones, the median of ``rounds``."""
    for number, (name, case) in enumerate(CASES.items()):
        plan = _draft(client, case)
        first, *later = [_seconds(client, plan, case, change) for change in range(rounds + 1)]
        if not number:
            yield FIRST, first
        yield f"verdict: {name}", median(later)


def _draft(client: Client, case: Case) -> Plan:
    location = client.get(f"/plans/new/?preset={case.preset}")["Location"]
    plan = Plan.objects.get(pk=location.split("/")[2])
    plan.draft["goal"]["goal"] = case.preset
    plan.draft["model"] |= {"source": "catalog", "catalog_id": case.model}
    plan.draft["hardware"] |= {"choice": "catalog", **case.hardware}
    plan.save()
    return plan


def _seconds(client: Client, plan: Plan, case: Case, change: int) -> float:
    plan.refresh_from_db()
    form = step_form("workload", plan.draft, options_for(plan))
    shown = {field.html_name: field.value() for field in form or ()}
    sent = {name: value for name, value in shown.items() if value is not None}
    sent[case.changed] = int(sent[case.changed]) + change + 1
    began = time.process_time()
    answer = client.post(
        f"/plans/{plan.pk}/verdict/?step=workload", sent, headers={"HX-Request": "true"}
    )
    elapsed = time.process_time() - began
    if answer.status_code != HTTPStatus.OK:
        raise RuntimeError(f"the verdict answered {answer.status_code}")
    return elapsed

"""A template of two jobs: one classifier on the same text and seed, under DDP and under ZeRO."""

from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from runners.classification import DEMO_ENCODER
from webapp.accounts.models import Role, Team
from webapp.accounts.roles import current_team, require_role
from webapp.compare.jobs import address_of
from webapp.core.problems import Problem
from webapp.hosts.models import Host, HostState
from webapp.jobs.models import Job
from webapp.plans.access import signed_in
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_of, plan_launch
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.defaults import demo_minutes, finetune_draft

NAME = "Text classification, DDP against ZeRO"
RANKS = 2
STAGES = (1, 2, 3)
USUAL_STAGE = 2
MILLION_TOKENS = 0.8  # about 200 steps
BUDGET_DEMOS = 2  # as many times the demo's two minutes at most, on a slow host
KEY_LENGTH = 40
# Pinned in both, so that the layouts differ in ZeRO's stage alone.
PINS = {
    "data_parallel_size": RANKS,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "micro_batch_size": 8,
    "activation_recomputation": "none",
}


class Ready(NamedTuple):
    """What the template asks: where both run, and which stage of ZeRO stands beside DDP."""

    hosts: tuple[Host, ...]
    stages: tuple[int, ...] = STAGES
    usual: int = USUAL_STAGE
    name: str = NAME


def ready_hosts(team: Team) -> tuple[Host, ...]:
    """Return the team's hosts that could take two ranks: processors, and pairs of like GPUs."""
    hosts = Host.objects.filter(team=team, kind="agent", state=HostState.READY)
    return tuple(host for host in hosts.order_by("created_at") if _takes_two(host))


def _takes_two(host: Host) -> bool:
    names = [gpu["name"] for gpu in host.facts.get("gpus") or []]
    return bool(host.facts) and (not names or names.count(names[0]) >= RANKS)


def template_draft(host: Host, zero_stage: int) -> dict[str, Any]:
    """Return a draft of the classifier on a host; stage 0 is DDP."""
    draft = finetune_draft(host)
    draft["model"] |= {"source": "config", "config": dict(DEMO_ENCODER)}
    draft["workload"]["finetune"] |= {
        "method": "classification",
        "sequence_length": 128,
        "global_batch_size": 32,
        "million_tokens": MILLION_TOKENS,
        "time_budget_minutes": demo_minutes() * BUDGET_DEMOS,
        "rows": "padded",
    }
    draft["hardware"]["ranks_per_host"] = RANKS
    draft["pins"] = {**PINS, "zero_stage": zero_stage}
    return draft


@transaction.atomic
def launch_both(
    *, team: Team, by: User, host: Host, zero_stage: int, key: str = ""
) -> tuple[Job, Job]:
    """Queue both jobs, or none; with the same ``key`` again those of the first time.

    Raises:
        DraftProblem: one of them cannot run on this host.
        Problem: the job service refuses.
    """
    plans = [_plan(team, by, host, stage) for stage in (0, zero_stage)]
    for plan in plans:
        launch_of(plan)  # both can run before either is queued
    jobs = [
        plan_launch(
            plan=plan,
            by=by,
            name=f"Classifier, {word}",
            idempotency_key=f"{key}-{at}" if key else None,
        )
        for at, (plan, word) in enumerate(zip(plans, ("DDP", f"ZeRO-{zero_stage}"), strict=True))
    ]
    return jobs[0], jobs[1]


def _plan(team: Team, by: User, host: Host, zero_stage: int) -> Plan:
    plan = Plan.objects.create(team=team, owner=by, draft=template_draft(host, zero_stage))
    plan_compute(plan)
    return plan


@require_POST
@require_role(Role.PRACTITIONER)
def template_launch(request: HttpRequest) -> HttpResponse:
    """Launch the template's two jobs and show them side by side."""
    team = current_team(request)
    hosts = {host.pk: host for host in ready_hosts(team)}
    host = hosts.get(request.POST.get("host", ""))
    stage = request.POST.get("zero_stage", "")
    if host is None:
        messages.error(request, "No such host can take two ranks now. Choose one that is ready.")
        return redirect("plan-new")
    if stage not in map(str, STAGES):
        messages.error(request, f"ZeRO has the stages 1, 2 and 3, and not “{stage[:20]}”.")
        return redirect("plan-new")
    try:
        jobs = launch_both(
            team=team,
            by=signed_in(request),
            host=host,
            zero_stage=int(stage),
            key=request.POST.get("key", "")[:KEY_LENGTH],
        )
    except (DraftProblem, Problem) as problem:
        messages.error(request, str(problem))
        return redirect("plan-new")
    return redirect(address_of([job.pk for job in jobs]))

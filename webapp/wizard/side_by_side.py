"""A template of two jobs: the same classifier, text and seed with DDP and with ZeRO."""

from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from runners.jobspec.base import DEMO_ENCODER
from webapp.accounts.models import Role, Team
from webapp.accounts.roles import current_team, require_role
from webapp.compare.comparison import address_of
from webapp.core.problems import Problem
from webapp.hosts.models import Host, HostState
from webapp.jobs.models import Job
from webapp.plans.access import signed_in
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_of, plan_launch
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import demo_minutes, finetune_draft

NAME = "Text classification, DDP against ZeRO"
RANKS = 2
STAGES = (1, 2, 3)
USUAL_STAGE = 2
MILLION_TOKENS = 0.8  # about 200 steps
BUDGET_DEMOS = 2  # time budget on a slow host, in demo durations
KEY_LENGTH = 40
# Pinned in both jobs, so that only the ZeRO stage differs.
PINS = {
    "data_parallel_size": RANKS,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "micro_batch_size": 8,
    "activation_recomputation": "none",
}


class Ready(NamedTuple):
    """The choices of the template: the host, and the ZeRO stage to compare with DDP."""

    hosts: tuple[Host, ...]
    stages: tuple[int, ...] = STAGES
    usual: int = USUAL_STAGE
    name: str = NAME


def ready_hosts(team: Team) -> tuple[Host, ...]:
    """Return the team's hosts that can run two ranks: CPU hosts, and two GPUs of one model."""
    hosts = Host.objects.filter(team=team, kind="agent", state=HostState.READY)
    return tuple(host for host in hosts.order_by("created_at") if _can_run_two_ranks(host))


def _can_run_two_ranks(host: Host) -> bool:
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
    """Queue both jobs or none; a repeated ``key`` returns the jobs of the first call.

    Raises:
        DraftProblem: one of the jobs cannot run on this host.
        Problem: the job service rejects a job.
    """
    plans = [_plan(team, by, host, stage) for stage in (0, zero_stage)]
    for plan in plans:
        launch_of(plan)  # raises before either job is queued
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
    """Launch the template's two jobs and redirect to their comparison."""
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

"""The engine of an endpoint that is left open: a search over those that run on its host."""

from typing import NamedTuple

from planner import api
from planner.specs.estimate import Estimate
from runners.jobspec.engines import OWN, Engine, listed, running_on
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.plans.weights import reads
from webapp.agents.environments import environments_of
from webapp.core.problems import Problem
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.jobs.launching import gpu_vendors, launch_context, launchable_in
from webapp.plans.models import Plan
from webapp.plans.planning import plan_answer

TIE = 0.05  # of the objective: as good, so that nothing is installed for it


class Candidate(NamedTuple):
    """An engine that can start the endpoint, and its best plan there."""

    engine: Engine
    best: Estimate
    is_installed: bool


def engine_settle(plan: Plan, launch: Launch) -> list[str]:
    """Choose the engine of a draft's endpoint by its objective; return the reason as a note.

    Engines whose plans are as good within 5 % are tried in the order: installed on the host,
    Slipway's own, the better one. Nothing changes for a draft without a host that runs jobs, or
    that starts no endpoint.

    Raises:
        DraftProblem: no engine that runs there can start the endpoint; it says why for each.
    """
    document = plan.document
    host = Host.objects.filter(team=plan.team, pk=document.hardware.host or "").first()
    is_endpoint = document.goal == "serve" and launch.run == "endpoint"
    if host is None or host.kind not in RUNS_JOBS or not is_endpoint:
        return []
    found: list[Candidate] = []
    refusals: list[str] = []
    for engine in running_on("cpu", *gpu_vendors(host)):
        try:
            found.append(_candidate(plan, launch, engine, host))
        except DraftProblem as problem:
            refusals.append(f"{engine.title}: {problem.sentence}")
        except Problem as problem:
            refusals.append(f"{engine.title}: {problem.detail}")
    if not found:
        raise DraftProblem(f"No engine runs this on {host.name}. {' '.join(refusals)}", "engine")
    chosen, words = _chosen(plan, found)
    document.hardware.engine = chosen.engine.planned_as
    document.launch = launch.with_values(engine=chosen.engine.name)
    plan.document = document
    others = f" Not: {' '.join(refusals)}" if refusals else ""
    return [f"Engine: {chosen.engine.title}, {words}.{others}"]


def _candidate(plan: Plan, launch: Launch, engine: Engine, host: Host) -> Candidate:
    """Return the best plan of one engine.

    Raises:
        DraftProblem: nothing fits, or a job cannot start it.
    """
    trial = Plan(team=plan.team, owner=plan.owner, draft={**plan.draft})
    document = plan.document
    document.hardware.engine = engine.planned_as
    trial.document = document
    answer = plan_answer(trial, brief=True)
    if not answer.plans:
        raise DraftProblem("nothing fits.", "engine")
    context = launch_context(trial)
    if not reads(engine.name, context.model):
        raise DraftProblem("it does not read the files of this repository.", "engine")
    launchable_in(context, launch.with_values(engine=engine.name))
    return Candidate(engine, answer.plans[0], _is_installed(engine, host))


def _is_installed(engine: Engine, host: Host) -> bool:
    """Return whether the host has built the engine's environment, or needs none."""
    is_on_cpu = not gpu_vendors(host)
    name = engine.cpu_environment if is_on_cpu and engine.cpu_environment else engine.environment
    built = {each.state.name for each in environments_of(host) if each.is_built}
    return name is None or name in built


def _chosen(plan: Plan, found: list[Candidate]) -> tuple[Candidate, str]:
    """Return the candidate to start, and why, for a sentence."""
    objective = plan.document.objective
    best = min(found, key=lambda each: api.penalty(each.best, objective))
    tied = [each for each in found if api.gap(each.best, best.best, objective) <= TIE]
    first = min(
        tied,
        key=lambda each: (
            not each.is_installed,
            each.engine.name != OWN,
            api.penalty(each.best, objective),
        ),
    )
    compared = listed((each.engine.title for each in found), "and")
    if len(found) == 1:
        return first, "the only one that starts this endpoint on the host"
    if first is not best:
        why = "it is installed already" if first.is_installed else "it is Slipway's own"
        return first, f"as good as {best.engine.title} within {TIE:.0%}, and {why}"
    return first, f"the best of {compared} by the plan's objective"

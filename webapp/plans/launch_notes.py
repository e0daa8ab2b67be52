"""The review page's notes: what a launch would do, or why it is not possible."""

from contextlib import suppress
from typing import Any

from runners.engines import ENGINES
from runners.jobspec import BenchmarkSpec, GenerateSpec
from runners.jobspec.serve import ON_GPUS, EngineName
from webapp.jobs.models import Job
from webapp.plans.drafting import drafts_for
from webapp.plans.engines import engines_for
from webapp.plans.errors import DraftProblem
from webapp.plans.launch_descriptions import EXPLANATIONS, words_of
from webapp.plans.launch_options import quota_note
from webapp.plans.launching import Launch, launch_of
from webapp.plans.measuring import usual_points
from webapp.plans.models import Plan
from webapp.plans.questions import draft_shape
from webapp.plans.serving import EndpointOptions, adapters_of


def launch_note(plan: Plan) -> dict[str, Any]:
    """Return what launching would do, or why not: ``can``, ``title`` and ``text``."""
    try:
        launch = launch_of(plan)
    except DraftProblem as problem:
        again = "yes" if problem.is_passing else ""
        title = "In a moment" if again else "It cannot be launched as it is"
        note = {"can": "", "again": again, "title": title, "text": problem.sentence}
        return note if again else note | _only_endpoint_note(plan)
    text = words_of(launch.spec)
    host = launch.place
    note = {"can": "yes", "title": f"What happens on {host}", "text": text, "host": host}
    is_generation = isinstance(launch.spec, GenerateSpec)
    adapters = adapters_of(plan.team, launch.spec.model) if is_generation else ()
    job = Job(
        team=plan.team,
        owner=plan.owner,
        name="The job",
        spec=launch.spec.model_dump(mode="json"),
        prediction=launch.prediction,
        max_duration_seconds=launch.max_duration_seconds,
        num_hosts=launch.spread.num_hosts,
        devices_per_host=launch.spread.devices_per_host,
    )
    names: dict[str, Any] = {"adapter_names": [each.name for each in adapters]}
    if is_generation:
        names |= {"drafts": drafts_for(launch.host, launch.spec.model, draft_shape(plan))}
    return note | names | _endpoint_note(plan, launch) | quota_note(job)


def _only_endpoint_note(plan: Plan) -> dict[str, Any]:
    """Return the endpoint note of a plan that only GPU engines can run, if any can."""
    launches: dict[EngineName, Launch] = {}
    for engine in ON_GPUS:
        with suppress(DraftProblem):
            launches[engine] = launch_of(plan, EndpointOptions(engine=engine))
    if not launches:
        return {}
    launch = next(iter(launches.values()))
    return {
        "endpoint": EXPLANATIONS["serve"],
        "can_serve": "yes",
        "host": launch.place,
        "engines": [(engine, ENGINES[engine].words) for engine in launches],
        "can_reuse": "yes",
        "drafts": drafts_for(launch.host, launch.spec.model, draft_shape(plan)),
    }


def _endpoint_note(plan: Plan, launch: Launch) -> dict[str, Any]:
    """Return the endpoint note of a plan, or why it cannot run as an endpoint."""
    if not isinstance(launch.spec, BenchmarkSpec):
        return {}
    points: dict[str, Any] = {"measures": "yes", "points": usual_points(launch.spec.batch_size)}
    try:
        launch_of(plan, EndpointOptions())
    except DraftProblem as problem:
        return points | {"endpoint": problem.sentence}
    count = len(adapters_of(plan.team, launch.spec.model))
    adapters = {"adapters": str(count)} if count else {}
    engines = [(name, each.words) for name, each in engines_for(launch.host)]
    if any(name in ON_GPUS for name, _words in engines):
        drafts = drafts_for(launch.host, launch.spec.model, draft_shape(plan))
        points |= {"drafts": drafts, "can_reuse": "yes"}
    serving = {"endpoint": EXPLANATIONS["serve"], "can_serve": "yes", "engines": engines}
    return points | adapters | serving

"""What the review page says before anything is launched: what would happen, or why it cannot."""

from contextlib import suppress
from typing import Any

from runners.endpoint_spec import ON_GPUS, EngineName
from runners.engines import ENGINES
from runners.jobspec import BenchmarkSpec, GenerateSpec
from webapp.jobs.models import Job
from webapp.plans.drafting import drafts_for
from webapp.plans.engines import engines_for
from webapp.plans.errors import DraftProblem
from webapp.plans.launch_words import EXPLANATIONS, words_of
from webapp.plans.launching import Launch, launch_of
from webapp.plans.measuring import usual_points
from webapp.plans.models import Plan
from webapp.plans.questions import draft_shape
from webapp.plans.serving import EndpointWish, adapters_of
from webapp.plans.wishes import quota_note


def launch_note(plan: Plan) -> dict[str, Any]:
    """Return what launching would do, or why it cannot: ``can``, ``title`` and ``text``."""
    try:
        launch = launch_of(plan)
    except DraftProblem as problem:
        again = "yes" if problem.is_passing else ""
        title = "In a moment" if again else "It cannot be launched as it is"
        note = {"can": "", "again": again, "title": title, "text": problem.sentence}
        return note if again else note | _only_endpoint_note(plan)
    text = words_of(launch.spec)
    host = launch.place
    told = {"can": "yes", "title": f"What happens on {host}", "text": text, "host": host}
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
    return told | names | _endpoint_note(plan, launch) | quota_note(job)


def _only_endpoint_note(plan: Plan) -> dict[str, Any]:
    """Return the endpoint of a plan that only engines on GPUs can run, where one can."""
    found: dict[EngineName, Launch] = {}
    for engine in ON_GPUS:
        with suppress(DraftProblem):
            found[engine] = launch_of(plan, EndpointWish(engine=engine))
    if not found:
        return {}
    launch = next(iter(found.values()))
    return {
        "endpoint": EXPLANATIONS["serve"],
        "can_serve": "yes",
        "host": launch.place,
        "engines": [(engine, ENGINES[engine].words) for engine in found],
        "can_reuse": "yes",
        "drafts": drafts_for(launch.host, launch.spec.model, draft_shape(plan)),
    }


def _endpoint_note(plan: Plan, launch: Launch) -> dict[str, Any]:
    """Return what an endpoint of the plan would be, or why there can be none."""
    if not isinstance(launch.spec, BenchmarkSpec):
        return {}
    points: dict[str, Any] = {"measures": "yes", "points": usual_points(launch.spec.batch_size)}
    try:
        launch_of(plan, EndpointWish())
    except DraftProblem as problem:
        return points | {"endpoint": problem.sentence}
    count = len(adapters_of(plan.team, launch.spec.model))
    adapters = {"adapters": str(count)} if count else {}
    engines = [(name, each.words) for name, each in engines_for(launch.host)]
    if any(name in ON_GPUS for name, _words in engines):
        drafts = drafts_for(launch.host, launch.spec.model, draft_shape(plan))
        points |= {"drafts": drafts, "can_reuse": "yes"}
    said = {"endpoint": EXPLANATIONS["serve"], "can_serve": "yes", "engines": engines}
    return points | adapters | said

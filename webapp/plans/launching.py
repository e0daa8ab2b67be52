"""A plan as a job: which program runs, on which model, and what it is expected to measure.

What this release cannot run is refused here with the way out, before anything is queued.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib.auth.models import User

from planner.catalog.models import get_entry
from planner.catalog.reading import data_text
from planner.specs.model import ModelSpec as ModelShape
from planner.specs.plan import PlannedStrategy
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    FolderModel,
    GenerateSpec,
    ModelRef,
    ModelSpec,
    RandomModel,
    ServeSpec,
    TrainSpec,
)
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.jobs.models import Job
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.demo import demo_config
from webapp.modelhub.models import TeamModel
from webapp.plans.compressing import compress_spec
from webapp.plans.errors import DraftProblem
from webapp.plans.generating import generate_spec, is_weights_only, kept_going, offload_of
from webapp.plans.measuring import Measuring, usual_points
from webapp.plans.models import Plan
from webapp.plans.options import check_serving
from webapp.plans.planning import current_answer, plan_keep
from webapp.plans.predicting import prediction_of
from webapp.plans.questions import Question, draft_shape, question_of
from webapp.plans.serving import EndpointWish, adapters_of, serve_spec
from webapp.plans.sharing import Spread, check_model, policy_of, spread_of
from webapp.plans.training import needs_weights, train_spec
from webapp.plans.wishes import NOTHING_MORE, Wish, quota_note
from webapp.plans.words import model_words, plan_title

Draft = dict[str, Any]
RUNNABLE_DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "int4")
NOTHING_BESIDES = Measuring()
TRAINING_SHARE = 3  # a run may take this much longer than its budget for what surrounds it
GRACE_SECONDS = 900.0


class Launch(NamedTuple):
    """Everything that a job is made of."""

    host: Host  # of a pool, one like the others there
    spec: ModelSpec
    model_name: str
    best: PlannedStrategy
    prediction: dict[str, dict[str, Any]]
    max_duration_seconds: float | None
    spread: Spread = Spread()
    pool: Pool | None = None
    is_pinned: bool = True  # to that host; of a pool only where the model's weights lie there

    @property
    def place(self) -> str:
        """Return where it runs, by name."""
        if self.pool is None:
            return self.host.name
        count = self.spread.num_hosts
        return f"{self.pool.name} ({f'{count} hosts' if count > 1 else 'one host'})"


def plan_launch(
    *,
    plan: Plan,
    by: User,
    name: str = "",
    idempotency_key: str | None = None,
    secrets: Sequence[str] = (),
    wish: Wish = NOTHING_MORE,
) -> Job:
    """Queue the job that the plan describes and return it; ``secrets`` are names.

    Raises:
        DraftProblem: there is nothing to launch, or this release cannot run it.
        Problem: the job service refuses.
    """
    launch = launch_of(plan, wish.endpoint, wish.measuring)
    plan_keep(plan, name or plan.name or plan_title(plan.draft, launch.model_name, launch.place))
    job = job_create(
        team=plan.team,
        owner=by,
        host=launch.host if launch.is_pinned else None,
        pool=launch.pool,
        num_hosts=launch.spread.num_hosts,
        devices_per_host=launch.spread.devices_per_host,
        spec=launch.spec.model_copy(update={"secrets": tuple(secrets)}),
        name=plan.name,
        model_name=launch.model_name,
        plan=plan,
        estimate=launch.best.model_dump(mode="json"),
        prediction=launch.prediction,
        idempotency_key=idempotency_key,
        max_duration_seconds=wish.max_duration_seconds or launch.max_duration_seconds,
        max_retries=wish.max_retries,
        priority=wish.priority,
    )
    return job_submit(job=job, by=by.get_username())


def launch_of(
    plan: Plan, endpoint: EndpointWish | None = None, measuring: Measuring = NOTHING_BESIDES
) -> Launch:
    """Return what would be launched; with ``endpoint`` a serve plan stays up.

    Raises:
        DraftProblem: there is nothing to launch, or this release cannot run it.
    """
    question = question_of(plan)
    answer = current_answer(plan)
    if question.host is None:
        raise DraftProblem(
            "This hardware is only thought of. Choose one of your hosts to launch.", "choice"
        )
    if question.host.kind not in RUNS_JOBS:
        raise DraftProblem(
            f"{question.host.name} is only planned for, so nothing can run on it. Choose one of "
            "your hosts to launch, or add the machine as a host.",
            "choice",
        )
    if not answer.plans:
        raise DraftProblem("Nothing fits on this host, so there is nothing to launch.", "choice")
    best = answer.plans[0]
    spread = spread_of(best, plan.draft["goal"]["goal"])
    model = _model_ref(plan.draft, question)
    check_model(model, spread)
    shape = draft_shape(plan)
    spec = _spec(plan.draft, model, best, shape)
    if endpoint is not None:
        spec = _endpoint_spec(plan, question, spec, endpoint, best)
    elif isinstance(spec, BenchmarkSpec):
        spec = _measured_spec(spec, measuring)
    policy = policy_of(plan.draft["hardware"], spread)
    if isinstance(spec, TrainSpec):
        spec = spec.model_copy(update={"parallel": policy})
    if isinstance(spec, GenerateSpec):
        spec = kept_going(spec, policy)
    return Launch(
        host=question.host,
        spec=spec,
        model_name=_model_name(plan.draft, question.team_model),
        best=best,
        prediction=prediction_of(spec, best, question),
        max_duration_seconds=_max_duration(spec),
        spread=spread,
        pool=question.pool,
        is_pinned=question.pool is None or (spread.num_hosts == 1 and question.is_bound),
    )


def _model_name(draft: Draft, team_model: TeamModel | None) -> str:
    return model_words(draft, team_model.name if team_model else "")


def launch_note(plan: Plan) -> dict[str, str]:
    """Return what launching would do, or why it cannot: ``can``, ``title`` and ``text``."""
    try:
        launch = launch_of(plan)
    except DraftProblem as problem:
        again = "yes" if problem.is_passing else ""
        title = "In a moment" if again else "It cannot be launched as it is"
        return {"can": "", "again": again, "title": title, "text": problem.sentence}
    text = EXPLANATIONS[launch.spec.kind]
    if getattr(launch.spec, "weight_dtype", "") == "fp8":
        text += FLOATS_OF_8_BITS
    if isinstance(launch.spec, TrainSpec) and launch.spec.lora is not None:
        text = EXPLANATIONS["lora"]
    if isinstance(launch.spec.model, RandomModel):
        text += (
            " This model's weights are not on the host, so it runs with random ones: speed and "
            "memory are real, the text and its perplexity are not."
        )
    host = launch.place
    note = {"can": "yes", "title": f"What happens on {host}", "text": text, "host": host}
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
    return note | _endpoint_note(plan, launch) | quota_note(job)


def _endpoint_note(plan: Plan, launch: Launch) -> dict[str, str]:
    """Return what an endpoint of the plan would be, or why there can be none."""
    if not isinstance(launch.spec, BenchmarkSpec):
        return {}
    points = {"measures": "yes", "points": usual_points(launch.spec.batch_size)}
    try:
        launch_of(plan, EndpointWish())
    except DraftProblem as problem:
        return points | {"endpoint": problem.sentence}
    count = len(adapters_of(plan.team, launch.spec.model))
    adapters = {"adapters": str(count)} if count else {}
    return points | adapters | {"endpoint": EXPLANATIONS["serve"], "can_serve": "yes"}


FLOATS_OF_8_BITS = (
    " Weights are held as 8-bit floats, in half the memory of 16 bit; products are in 16 bit, so "
    "expect no more speed."
)
EXPLANATIONS = {
    "train": "The host trains the model on its own text, evaluates it on text that it kept back, "
    "and leaves it as a model of your team.",
    "lora": "The host trains an adapter beside the model's weights, which stay as they are, on "
    "its own text, and evaluates it on text that it kept back. It leaves the adapter in peft's "
    "format, and the merged model as a model of your team.",
    "compress": "The host compresses the weights, saves them, loads them again, and measures "
    "size, speed, memory and perplexity before and after.",
    "generate": "The host loads the model as planned, answers every prompt, and leaves the "
    "answers as a file. What is answered stays so, whatever stops the job.",
    "benchmark": "The host loads the model as planned and measures prefill, decode and peak "
    "memory. It ends with the measurements.",
    "serve": "The host loads the model as planned and answers requests in OpenAI's form, at an "
    "address of its own, until somebody stops it. The job's page has the address, the key and "
    "live figures.",
}


# The model


def _model_ref(draft: Draft, question: Question) -> ModelRef:
    """Return where the job finds the model."""
    chosen = draft["model"]
    if question.team_model is not None:
        return _team_model_ref(question.team_model, question.host, question.pool)
    if chosen["source"] == "folder":
        return FolderModel(path=chosen["path"])
    if chosen["source"] == "demo":
        is_training = draft["goal"]["goal"] == "pretrain"
        return DemoModel() if is_training else RandomModel(config=demo_config())
    if chosen["source"] == "catalog":
        entry = get_entry(chosen["catalog_id"])
        return RandomModel(config=json.loads(data_text(f"configs/{entry.config}.json")))
    return RandomModel(config=chosen["config"])


def _team_model_ref(model: TeamModel, host: Host | None, pool: Pool | None) -> ModelRef:
    if model.host_id and host and model.host_id != host.pk:
        raise DraftProblem(
            f"The weights of {model.name} lie on another host. Choose {model.host}, or copy the "
            f"model's folder to {pool.name if pool else host.name}.",
            "choice",
        )
    if model.source == "job":
        return ArtefactModel(attempt_id=model.attempt_id, name=model.artefact_name or "model")
    if model.source == "folder":
        return FolderModel(path=model.path)
    return RandomModel(config=model.config)


# The program


def _spec(
    draft: Draft, model: ModelRef, best: PlannedStrategy, shape: ModelShape | None
) -> ModelSpec:
    """Return the typed document that the host runs."""
    goal = draft["goal"]["goal"]
    away = best.strategy.away
    if away and not (goal == "generate" and is_weights_only(best.strategy)):
        raise DraftProblem(
            f"This plan has {', '.join(away)}: it is planned, but jobs keep everything on the "
            "device in this release. Choose fewer bits, a smaller batch or a smaller model.",
            "weight_dtype",
        )
    if goal == "compress":
        return _compress_spec(draft, model)
    if goal == "serve":
        check_serving(best.strategy)
        return _benchmark_spec(draft, model, best)
    if goal == "generate":
        offload = offload_of(best.strategy, shape) if shape else None
        return generate_spec(draft, model, _runnable_dtype(best), best.strategy, offload)
    return train_spec(draft, model, best)


def _endpoint_spec(
    plan: Plan, question: Question, spec: ModelSpec, wish: EndpointWish, best: PlannedStrategy
) -> ServeSpec:
    """Return a serve plan's measurement as an endpoint of the same model and weights."""
    if not isinstance(spec, BenchmarkSpec):
        raise DraftProblem("Only a plan to serve can be started as an endpoint.", "goal")
    needs_weights(spec.model, "An endpoint")
    shape = draft_shape(plan)
    fields = {
        "name": _model_name(plan.draft, question.team_model),
        "weight_dtype": spec.weight_dtype,
        "positions": shape.max_position_embeddings if shape else None,
        "max_batch_tokens": best.strategy.max_batch_tokens,
    }
    found = serve_spec(plan.draft, spec.model, fields, wish)
    adapters = adapters_of(plan.team, spec.model) if wish.has_adapters else ()
    return found.model_copy(update={"adapters": adapters})


def _measured_spec(spec: BenchmarkSpec, measuring: Measuring) -> BenchmarkSpec:
    if measuring.load is not None:
        needs_weights(spec.model, "Load on an endpoint")
    return spec.model_copy(update=measuring._asdict())


def _compress_spec(draft: Draft, model: ModelRef) -> CompressSpec:
    spec = compress_spec(draft, model)
    needs_weights(model, "Compressing")
    return spec


def _benchmark_spec(draft: Draft, model: ModelRef, best: PlannedStrategy) -> BenchmarkSpec:
    values = draft["workload"]["serve"]
    return BenchmarkSpec.model_validate(
        {
            "model": model,
            "weight_dtype": _runnable_dtype(best),
            "batch_size": values["concurrency"],
            "prompt_tokens": values["input_tokens"],
            "output_tokens": values["output_tokens"],
        }
    )


def _runnable_dtype(best: PlannedStrategy) -> str:
    dtype = best.strategy.weight_dtype or "bf16"
    if dtype not in RUNNABLE_DTYPES:
        raise DraftProblem(
            f"Weights in {dtype} do not run here yet. Pin them to one of "
            f"{', '.join(RUNNABLE_DTYPES)} under hardware.",
            "weight_dtype",
        )
    return dtype


def _max_duration(spec: ModelSpec) -> float | None:
    """Return after how many seconds the job is ended, where its length is known."""
    if isinstance(spec, TrainSpec) and spec.time_budget_seconds:
        return spec.time_budget_seconds * TRAINING_SHARE + GRACE_SECONDS
    return None

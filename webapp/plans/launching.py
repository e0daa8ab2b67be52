"""Launch a plan as a job: its program, model and predicted measurements.

Unsupported plans are refused here with a remedy, before anything is queued.
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
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    FolderModel,
    GenerateSpec,
    JobSpec,
    ModelRef,
    ModelSpec,
    RandomModel,
    ServeSpec,
    TrainSpec,
)
from runners.jobspec.serve import ON_GPUS
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.jobs.models import Job
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.demo import demo_config
from webapp.modelhub.models import TeamModel
from webapp.plans.compressing import compress_spec
from webapp.plans.drafting import drafts_for, team_model_ref, with_draft, with_engine_draft
from webapp.plans.engine_choice import check_engine
from webapp.plans.engines import check_host, check_split, options_of, spread_on
from webapp.plans.errors import DraftProblem
from webapp.plans.generating import (
    generate_spec,
    kept_going,
    offload_of,
    with_adapters,
)
from webapp.plans.launch_options import NOTHING_MORE, LaunchOptions
from webapp.plans.measuring import Measuring
from webapp.plans.models import Plan
from webapp.plans.options import check_serving
from webapp.plans.planning import plan_keep, verdict_answer
from webapp.plans.predicting import prediction_of
from webapp.plans.questions import Question, draft_shape, question_of
from webapp.plans.saving import is_unchanged
from webapp.plans.serving import EndpointOptions, adapters_of, serve_spec
from webapp.plans.sharing import (
    TRAININGS,
    Spread,
    check_model,
    policy_of,
    processes_of,
    spread_of,
)
from webapp.plans.training import needs_weights, train_spec
from webapp.plans.training_data import shared_out
from webapp.plans.words import model_words, plan_title

Draft = dict[str, Any]
STATES_AWAY = frozenset({"optimiser states on cpu", "optimiser states on nvme"})  # in training
RUNNABLE_DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "int4")
NOTHING_BESIDES = Measuring()
TRAINING_SHARE = 3  # limit relative to the time budget: setup and saving need time too
GRACE_SECONDS = 900.0


class Launch(NamedTuple):
    """The parts of a job to be created."""

    host: Host  # of a pool: a representative host
    spec: ModelSpec
    model_name: str
    best: PlannedStrategy
    prediction: dict[str, dict[str, Any]]
    max_duration_seconds: float | None
    spread: Spread = Spread()
    pool: Pool | None = None
    is_pinned: bool = True  # to the host; for a pool only if the weights exist on that host alone

    @property
    def place(self) -> str:
        """Return the name of the host, or of the pool with the number of hosts."""
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
    wish: LaunchOptions = NOTHING_MORE,
    is_named: bool = True,
    as_new: bool = False,
) -> Job:
    """Queue the job described by the plan and return it; ``secrets`` are names.

    A draft is saved first: as the next version of its original plan, or with ``as_new`` as a
    separate plan. The job refers to that version. ``name`` names the job, and the plan too if a
    person chose it (``is_named``).

    Raises:
        DraftProblem: there is nothing to launch, or this release cannot run it.
        Problem: the job service refuses.
    """
    launch = launch_of(plan, wish.endpoint, wish.measuring, wish.adapter, wish.draft)
    if not plan.name and not name:
        plan.name, plan.is_named = plan_title(plan.draft, launch.model_name, launch.place), False
    plan_name = name if is_named and not is_unchanged(plan) else ""
    saved = plan_keep(plan, plan_name, by=by.get_username(), as_new=as_new)
    job = job_create(
        team=plan.team,
        owner=by,
        host=launch.host if launch.is_pinned else None,
        pool=launch.pool,
        num_hosts=launch.spread.num_hosts,
        devices_per_host=launch.spread.devices_per_host,
        spec=launch.spec.model_copy(update={"secrets": tuple(secrets)}),
        name=name.strip() or saved.name,
        model_name=launch.model_name,
        plan=saved,
        estimate=launch.best.model_dump(mode="json"),
        prediction=launch.prediction,
        idempotency_key=idempotency_key,
        max_duration_seconds=wish.max_duration_seconds or launch.max_duration_seconds,
        max_retries=wish.max_retries,
        priority=wish.priority,
    )
    return job_submit(job=job, by=by.get_username())


def launch_of(
    plan: Plan,
    endpoint: EndpointOptions | None = None,
    measuring: Measuring = NOTHING_BESIDES,
    adapter: str = "",
    draft: str = "",
) -> Launch:
    """Return the launch of a plan; with ``endpoint`` a serve plan becomes an endpoint.

    Raises:
        DraftProblem: there is nothing to launch, or this release cannot run it.
    """
    question = question_of(plan)
    answer = verdict_answer(plan)
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
    goal = plan.draft["goal"]["goal"]
    check_engine(plan.draft, endpoint.engine if endpoint else None)
    if endpoint is not None:
        check_host(endpoint.engine, question.host)
    on_gpus = endpoint.engine if endpoint and endpoint.engine in ON_GPUS else None
    spread = spread_on(best, on_gpus) if on_gpus else spread_of(best, goal)
    model = _model_ref(plan.draft, question)
    processes = processes_of(best, plan.draft["hardware"])
    # CPU ranks share the host's one CPU device.
    spread = Spread(spread.num_hosts, 1) if processes > 1 else spread
    check_model(model, spread)
    if endpoint is not None and goal == "serve":
        spec: ModelSpec = _endpoint_spec(plan, question, model, endpoint, best)
    else:
        spec = _spec(plan.draft, model, best, draft_shape(plan))
        spec = _with_measuring(spec, endpoint, measuring)
    policy = policy_of(plan.draft["hardware"], spread, processes)
    if isinstance(spec, TrainSpec):
        spec = spec.model_copy(update=shared_out(spec, policy, processes, plan))
    if isinstance(spec, GenerateSpec):
        trained = adapters_of(plan.team, spec.model)
        drafts = drafts_for(question.host, model, draft_shape(plan))
        spec = with_adapters(with_draft(kept_going(spec, policy), drafts, draft), trained, adapter)
    return Launch(
        host=question.host,
        spec=spec,
        model_name=_model_name(plan.draft, question.team_model),
        best=best,
        prediction=prediction_of(spec, best, question),
        max_duration_seconds=max_duration_of(spec),
        spread=spread,
        pool=question.pool,
        is_pinned=question.pool is None or (spread.num_hosts == 1 and question.is_bound),
    )


def _model_name(draft: Draft, team_model: TeamModel | None) -> str:
    return model_words(draft, team_model.name if team_model else "")


# The model


def _model_ref(draft: Draft, question: Question) -> ModelRef:
    """Return the job's reference to the model."""
    chosen = draft["model"]
    if question.team_model is not None:
        return team_model_ref(question.team_model, question.host, question.pool)
    if chosen["source"] == "folder":
        return FolderModel(path=chosen["path"])
    if chosen["source"] == "demo":
        is_training = draft["goal"]["goal"] == "pretrain"
        return DemoModel() if is_training else RandomModel(config=demo_config())
    if chosen["source"] == "catalog":
        entry = get_entry(chosen["catalog_id"])
        return RandomModel(config=json.loads(data_text(f"configs/{entry.config}.json")))
    return RandomModel(config=chosen["config"])


# The program


def _spec(
    draft: Draft, model: ModelRef, best: PlannedStrategy, shape: ModelShape | None
) -> ModelSpec:
    """Return the job spec for the plan's goal."""
    goal = draft["goal"]["goal"]
    if goal != "generate":
        _refuse_offloaded(best, allowed=STATES_AWAY if goal in TRAININGS else frozenset())
    if goal == "compress":
        return _compress_spec(draft, model)
    if goal == "serve":
        return _serving_benchmark(draft, model, best)
    if goal == "generate":
        offload = offload_of(best.strategy, shape) if shape else None
        return generate_spec(draft, model, _runnable_dtype(best), best.strategy, offload)
    return train_spec(draft, model, best, shape)


def _refuse_offloaded(best: PlannedStrategy, allowed: frozenset[str] = frozenset()) -> None:
    if away := [each for each in best.strategy.offload_places if each not in allowed]:
        raise DraftProblem(
            f"This plan has {', '.join(away)}: it is planned, but only jobs that generate keep "
            "these off the device. Choose fewer bits, a smaller batch or a smaller model.",
            "weight_dtype",
        )


def _serving_benchmark(draft: Draft, model: ModelRef, best: PlannedStrategy) -> BenchmarkSpec:
    """Return the benchmark of a serve plan on the built-in engine."""
    _refuse_offloaded(best)
    check_split("slipway", best.strategy)
    check_serving(best.strategy)
    return _benchmark_spec(draft, model, best)


def _with_measuring(
    spec: ModelSpec, endpoint: EndpointOptions | None, measuring: Measuring
) -> ModelSpec:
    """Return the spec with the requested measurement options."""
    if endpoint is not None:
        raise DraftProblem("Only a plan to serve can be started as an endpoint.", "goal")
    return _measured_spec(spec, measuring) if isinstance(spec, BenchmarkSpec) else spec


def _endpoint_spec(
    plan: Plan,
    question: Question,
    model: ModelRef,
    options: EndpointOptions,
    best: PlannedStrategy,
) -> ServeSpec:
    """Return the endpoint spec of a serve plan."""
    if options.engine in ON_GPUS:
        spec = _benchmark_spec(plan.draft, model, best)
    else:
        spec = _serving_benchmark(plan.draft, model, best)
    needs_weights(model, "An endpoint")
    shape = draft_shape(plan)
    fields = {
        "name": _model_name(plan.draft, question.team_model),
        "weight_dtype": spec.weight_dtype,
        "positions": shape.max_position_embeddings if shape else None,
        "max_batch_tokens": best.strategy.max_batch_tokens,
        "engine_options": options_of(best) if options.engine in ON_GPUS else None,
    }
    endpoint = serve_spec(plan.draft, model, fields, options)
    adapters = adapters_of(plan.team, model) if options.has_adapters else ()
    endpoint = endpoint.model_copy(update={"adapters": adapters})
    drafts = drafts_for(question.host, model, shape) if question.host else []
    return with_engine_draft(endpoint, drafts, options.draft, options.reuse)


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


def max_duration_of(spec: JobSpec) -> float | None:
    """Return the job's time limit in seconds, if its length is known."""
    if isinstance(spec, TrainSpec) and spec.time_budget_seconds:
        return spec.time_budget_seconds * TRAINING_SHARE + GRACE_SECONDS
    return None

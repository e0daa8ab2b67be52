"""Launch a plan as a job, and clone a job."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from pydantic import TypeAdapter, ValidationError

from planner.catalog.models import get_entry
from planner.catalog.reading import data_text
from planner.specs.estimate import PlannedStrategy
from planner.specs.model import ModelSpec as ModelShape
from planner.specs.workload import AWAY_TITLES
from runners.jobspec import (
    BenchmarkSpec,
    DemoModel,
    DraftModelSpeculation,
    FolderModel,
    GenerateSpec,
    JobSpec,
    ModelRef,
    ModelSpec,
    ProveSpec,
    RandomModel,
    ServeSpec,
    TrainSpec,
)
from runners.jobspec.request_options import refusal_lines
from runners.jobspec.serve import ON_GPUS, EngineName
from runners.launchers.launch import ENGINES
from webapp.core.names import checked_name
from webapp.core.numbers import number_fault
from webapp.core.problems import InvalidProblem, Problem
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.jobs.artefacts import adapters_of, lacks_gguf
from webapp.jobs.models import Job, Priority
from webapp.jobs.quotas import check_submit, limit_sentences
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.draft import PlanDraft
from webapp.plans.drafting import (
    LOOKUP,
    compress_spec,
    drafts_for,
    team_model_ref,
    with_draft,
    with_engine_draft,
)
from webapp.plans.explanation import DraftProblem, model_words, plan_title
from webapp.plans.models import Plan, PlanState
from webapp.plans.planning import plan_keep, verdict_answer
from webapp.plans.predicting import Measuring, prediction_of, usual_points
from webapp.plans.questions import Question, draft_shape, question_of
from webapp.plans.saving import draft_begun_from, is_unchanged
from webapp.plans.serving import (
    ALL_ADAPTERS,
    EndpointOptions,
    check_engine,
    check_host,
    check_serving,
    check_split,
    engines_for,
    generate_spec,
    offload_of,
    options_of,
    serve_spec,
    spread_on,
    with_adapters,
    with_chained_stages,
)
from webapp.plans.sharing import (
    TRAININGS,
    Spread,
    check_model,
    policy_of,
    processes_of,
    spread_of,
)
from webapp.plans.training import needs_weights, shared_out, text_words, train_spec

# ---------------------------------------------------------------------------
# Launch a plan as a job: its program, model, options and predicted measurements.
# ---------------------------------------------------------------------------


# Launch options of a person, and the team's quota for the launch.


LEAST_SECONDS, MOST_SECONDS = 36.0, 8784 * 3600.0


class LaunchOptions(NamedTuple):
    """The options of a launch form."""

    max_duration_seconds: float | None = None
    max_retries: int = 0
    priority: int = Priority.NORMAL
    endpoint: EndpointOptions | None = None  # run as an endpoint instead of a benchmark
    measuring: Measuring = Measuring()
    adapter: str = ""  # for a generation: an adapter by name, or "all"
    draft: str = ""  # id of the team model that drafts


NOTHING_MORE = LaunchOptions()


def launch_options_of(posted: Mapping[str, str]) -> LaunchOptions:
    """Return the options of a posted launch form.

    Raises:
        InvalidProblem: a field is invalid.
    """
    hours, retries = posted.get("hours", "").strip(), posted.get("retries", "0").strip() or "0"
    fault = number_fault(hours) if hours else ""
    seconds = float(hours) * 3600 if hours and not fault else None
    if fault or (seconds is not None and not LEAST_SECONDS <= seconds <= MOST_SECONDS):
        why = f", {fault}" if fault else ""
        raise InvalidProblem(
            "hours",
            f"“Time limit, in hours” is {hours[:20]}{why}; it can be 0.01 to 8784 hours, or "
            "empty.",
        )
    if not (retries.isascii() and retries.isdecimal()):
        raise InvalidProblem(
            "retries", f"“Retries after a host failure” is {retries[:20]}; it can be 0 to 5."
        )
    is_low = posted.get("priority") == str(Priority.LOW.value)
    adapter = posted.get("adapter", "").strip()
    priority = Priority.LOW if is_low else Priority.NORMAL
    draft = posted.get("draft", "").strip()
    return LaunchOptions(seconds, int(retries), priority, adapter=adapter, draft=draft)


def quota_note(job: Job) -> dict[str, str]:
    """Return the quota note of a job: remaining limits, or why it is refused."""
    limits = "; ".join(limit_sentences(job.team, job.owner_id))
    try:
        check_submit(job)
    except Problem as problem:
        note = {"title": "Your team's limit", "text": problem.detail, "limits": limits}
        # A shorter time limit is typed into the form itself, so the form stays.
        return note | ({"is_over": "yes"} if problem.code == "max_duration" else {"can": ""})
    return {"limits": limits}


# What a launch does, by kind of job, as text.


FLOATS_OF_8_BITS = (
    " Weights are held as 8-bit floats, in half the memory of 16 bit; products are in 16 bit, so "
    "expect no more speed."
)
EXPLANATIONS = {
    "train": "The host trains the model on its own text, evaluates it on held-out text, "
    "and saves it as a model of your team.",
    "lora": (
        "The host trains an adapter on its own text and evaluates it on held-out text; the "
        "model's weights stay frozen. It stores the adapter in peft's format, and the merged "
        "model as a model of your team."
    ),
    "classification": "The host trains the encoder and its head to tell the labels of texts "
    "apart, evaluates it on held-out texts, and saves it as a model of your team.",
    "compress": "The host compresses the weights, saves them, loads them again, and measures "
    "size, speed, memory and perplexity before and after.",
    "generate": "The host loads the model as planned, answers every prompt and writes the "
    "answers to a file. Finished answers are kept if the job stops.",
    "benchmark": "The host loads the model as planned and measures prefill, decode and peak "
    "memory. It ends with the measurements.",
    "serve": (
        "The host loads the model as planned and serves an OpenAI-compatible API at its own "
        "address until somebody stops it. The job's page has the address, the key and live "
        "figures."
    ),
}
RANDOM_WEIGHTS = (
    " This model's weights are not on the host, so it runs with random ones: speed and memory are "
    "real, the text and its perplexity are not."
)


def launch_description(spec: ModelSpec) -> str:
    """Return a description of what launching a spec does."""
    if isinstance(spec, TrainSpec) and spec.objective == "classification":
        return EXPLANATIONS["classification"]
    text = EXPLANATIONS[spec.kind]
    if getattr(spec, "weight_dtype", "") == "fp8":
        text += FLOATS_OF_8_BITS
    if isinstance(spec, TrainSpec):
        text = EXPLANATIONS["lora"] if spec.lora is not None else text
        text = text.replace("its own text", text_words(spec.data))
    return text + (RANDOM_WEIGHTS if isinstance(spec.model, RandomModel) else "")


TRAINING_PLACES = frozenset(
    {"optimiser states on cpu", "optimiser states on nvme", AWAY_TITLES["activations_cpu"]}
)
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
        name=checked_name(name, "name") or saved.name,
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
            "No host is chosen, only a catalog device. Choose a host to launch.", "choice"
        )
    if question.host.kind not in RUNS_JOBS:
        raise DraftProblem(
            f"{question.host.name} is a planning-only host, so no job can run on it. Choose one "
            "of your hosts to launch, or add the machine as a host.",
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
        if endpoint is not None:
            raise DraftProblem("Only a plan to serve can be started as an endpoint.", "goal")
        if isinstance(spec, BenchmarkSpec):
            if measuring.load is not None:
                needs_weights(spec.model, "Load on an endpoint")
            spec = spec.model_copy(update=measuring._asdict())
    policy = policy_of(plan.draft["hardware"], spread, processes)
    if isinstance(spec, TrainSpec):
        spec = spec.model_copy(update=shared_out(spec, policy, processes, plan))
    if isinstance(spec, GenerateSpec):
        trained = adapters_of(plan.team, spec.model)
        drafts = drafts_for(question.host, model, draft_shape(plan))
        spec = with_adapters(
            with_draft(with_chained_stages(spec, policy), drafts, draft), trained, adapter
        )
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


def _model_name(draft: PlanDraft, team_model: TeamModel | None) -> str:
    return model_words(draft, team_model.name if team_model else "")


# The model


def _model_ref(draft: PlanDraft, question: Question) -> ModelRef:
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
    draft: PlanDraft, model: ModelRef, best: PlannedStrategy, shape: ModelShape | None
) -> ModelSpec:
    goal = draft["goal"]["goal"]
    if goal != "generate":
        _refuse_offloaded(best, allowed=TRAINING_PLACES if goal in TRAININGS else frozenset())
    if goal == "compress":
        compression = compress_spec(draft, model)
        needs_weights(model, "Compressing")
        return compression
    if goal == "serve":
        return _serving_benchmark(draft, model, best)
    if goal == "generate":
        offload = offload_of(best.strategy, shape) if shape else None
        return generate_spec(draft, model, _runnable_dtype(best), best.strategy, offload)
    return train_spec(draft, model, best, shape)


def _refuse_offloaded(best: PlannedStrategy, allowed: frozenset[str] = frozenset()) -> None:
    if away := [each for each in best.strategy.offload_places if each not in allowed]:
        raise DraftProblem(
            f"This plan has {', '.join(away)}. The planner covers this, but of the jobs only "
            "batch generation supports it. Choose fewer bits, a smaller batch or a smaller model.",
            "weight_dtype",
        )


def _serving_benchmark(draft: PlanDraft, model: ModelRef, best: PlannedStrategy) -> BenchmarkSpec:
    """Return the benchmark of a serve plan on the built-in engine."""
    _refuse_offloaded(best)
    check_split("slipway", best.strategy)
    check_serving(best.strategy)
    return _benchmark_spec(draft, model, best)


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
    if options.engine == "llamacpp" and lacks_gguf(model):
        raise DraftProblem(
            "“Engine” is llamacpp, which serves GGUF files, and the model has none. Compress the "
            "model with the method GGUF and serve what that makes, or choose another engine.",
            "engine",
        )
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


def _benchmark_spec(draft: PlanDraft, model: ModelRef, best: PlannedStrategy) -> BenchmarkSpec:
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
            f"A benchmark job cannot load {dtype} weights. Set the weight dtype in the Hardware "
            f"step to one of {', '.join(RUNNABLE_DTYPES)}.",
            "weight_dtype",
        )
    return dtype


def max_duration_of(spec: JobSpec) -> float | None:
    """Return the job's time limit in seconds, if its length is known."""
    if isinstance(spec, TrainSpec) and spec.time_budget_seconds:
        return spec.time_budget_seconds * TRAINING_SHARE + GRACE_SECONDS
    if isinstance(spec, ProveSpec):
        return 60 * spec.minutes + GRACE_SECONDS
    return None


# The review page's notes: what a launch would do, or why it is not possible.


def launch_note(plan: Plan) -> dict[str, Any]:
    """Return what launching would do, or why not: ``can``, ``title`` and ``text``."""
    try:
        launch = launch_of(plan)
    except DraftProblem as problem:
        again = "yes" if problem.is_passing else ""
        title = "In a moment" if again else "This plan cannot be launched yet"
        note = {"can": "", "again": again, "title": title, "text": problem.sentence}
        return note if again else note | _only_endpoint_note(plan)
    text = launch_description(launch.spec)
    host = launch.place
    note = {"can": "yes", "title": f"Launch on {host}", "text": text, "host": host}
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
        "refusals": refusal_lines(launches),
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
    engines = [
        (name, each.words)
        for name, each in engines_for(launch.host)
        if name != "llamacpp" or not lacks_gguf(launch.spec.model)
    ]
    if any(name in ON_GPUS for name, _words in engines):
        drafts = drafts_for(launch.host, launch.spec.model, draft_shape(plan))
        points |= {"drafts": drafts, "can_reuse": "yes"}
    serving: dict[str, Any] = {"endpoint": EXPLANATIONS["serve"], "can_serve": "yes"}
    serving |= {"engines": engines, "refusals": refusal_lines(name for name, _words in engines)}
    return points | adapters | serving


# ---------------------------------------------------------------------------
# Clone a job as a draft: its plan's version, and the fields of its launch form.
# ---------------------------------------------------------------------------


HOUR, MINUTE = 3600.0, 60.0
_SPEC: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)


def clone_begin(*, job: Job, owner: User) -> Plan:
    """Return a draft of the version that a job ran, with its launch form filled in.

    An unchanged clone of the same job by the same person is reused.

    Raises:
        DraftProblem: the job was not launched from a plan, or the plan is deleted.
    """
    plan = job.plan
    if plan is None:
        raise DraftProblem(
            "This job was not launched from a plan, or its plan was deleted. Start a new plan."
        )
    clones = Plan.objects.filter(base=plan, owner=owner, state=PlanState.DRAFT, revision=0)
    if existing := clones.filter(draft__launch__job=job.pk).first():
        return existing
    draft = {**copy.deepcopy(plan.draft), "launch": launch_fields(job)}
    return draft_begun_from(plan, owner, draft=draft)


def launch_fields(job: Job) -> dict[str, Any]:
    """Return the launch form's values that correspond to a job, by field name."""
    fields: dict[str, Any] = {
        "job": job.pk,
        "job_name": job.name,
        "priority": str(job.priority),
        "retries": str(job.max_retries),
        "secrets": list(job.spec.get("secrets") or ()),
    }
    try:
        spec = _SPEC.validate_python(job.spec)
    except ValidationError:  # written by an older release; the plan's own fields are still usable
        return fields
    limit = job.max_duration_seconds
    if limit is not None and limit != max_duration_of(spec):
        fields["hours"] = f"{limit / HOUR:g}"
    if isinstance(spec, ServeSpec):
        fields |= _endpoint_fields(spec, job)
    elif isinstance(spec, BenchmarkSpec):
        fields["profile"] = spec.profile
        if load := spec.load:
            fields |= {
                "arrivals": load.arrivals.kind,
                "points": ", ".join(f"{point:g}" for point in load.arrivals.points),
                "requests": str(load.requests_per_repetition),
                "repetitions": str(load.repetitions),
            }
    elif isinstance(spec, GenerateSpec):
        fields |= _generate_fields(spec, job)
    return fields


def _endpoint_fields(spec: ServeSpec, job: Job) -> dict[str, Any]:
    idle, options = spec.idle_stop_seconds, spec.engine_options
    fields: dict[str, Any] = {
        "idle": f"{idle / MINUTE:g}" if idle else "",
        "engine": spec.engine,
        "adapters": bool(spec.adapters),
    }
    if options is None:
        return fields
    if options.has_prefix_cache is not None:
        fields["reuse"] = "yes" if options.has_prefix_cache else "no"
    if options.lookup_tokens is not None:
        fields["draft"] = LOOKUP
    elif options.draft is not None:
        fields["draft"] = _team_model_id(options.draft.model, job)
    return fields


def _generate_fields(spec: GenerateSpec, job: Job) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if len(spec.adapters) > 1:
        fields["adapter"] = ALL_ADAPTERS
    elif spec.adapters:
        fields["adapter"] = spec.adapters[0].name
    if isinstance(spec.speculation, DraftModelSpeculation):
        fields["draft"] = _team_model_id(spec.speculation.model, job)
    return fields


def _team_model_id(ref: ModelRef, job: Job) -> str:
    """Return the id of the team model that a job's spec refers to, "" if it is gone."""
    models = TeamModel.objects.filter(team=job.team).exclude(source="config")
    same = (each for each in models if team_model_ref(each, each.host, None) == ref)
    return str(next((each.pk for each in same), ""))

"""Launch a plan as a job, and clone a job."""

import copy
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from pydantic import TypeAdapter, ValidationError

from planner.catalog.models import config_by_name, published_config
from planner.specs.estimate import PlannedStrategy
from planner.specs.model import ModelSpec as ModelShape
from planner.specs.units import HOUR
from runners.hub.object_store import S3
from runners.hub.repository import COMMIT, RepositoryName
from runners.hub.settings import source_of
from runners.jobspec import (
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    DraftModelSpeculation,
    EvaluateSpec,
    FileData,
    FolderModel,
    GenerateSpec,
    HubData,
    HubModel,
    JobSpec,
    MixedData,
    ModelRef,
    ModelSpec,
    NamedAdapter,
    ProveSpec,
    RandomModel,
    ServeSpec,
    TrainData,
    TrainSpec,
    UploadedData,
)
from runners.jobspec.base import weights_of
from runners.jobspec.engines import ENGINES, EngineName
from runners.jobspec.objectives import OBJECTIVES, TRL
from runners.jobspec.references import hub_references, store_references
from runners.jobspec.request_options import refusal_lines
from runners.jobspec.serve import EndpointSettings
from runners.plans.document import ModelChoice
from runners.plans.generation_spec import ALL_ADAPTERS
from runners.plans.job_specs import launch_spread, spec_of
from runners.plans.latency_limits import target_seconds
from runners.plans.launch import USED_BY, Launch, LaunchOptionError, kind_of
from runners.plans.launch_case import DraftModel, LaunchCase
from runners.plans.refusals import DraftProblem
from runners.plans.serving_spec import MEMORY_MARGIN, engines_on, needs_gguf
from runners.plans.speculative_decoding import LOOKUP
from runners.plans.spread import Spread
from runners.plans.weights import reads, repository_of, weights_for
from runners.shared.engine_commands import shown_command
from runners.shared.load_search import target_words
from webapp.accounts.models import Secret, Team
from webapp.core.display import memory, percent
from webapp.core.names import checked_name
from webapp.core.problems import InvalidProblem, Problem
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.jobs.artefacts import Producer, adapters_of, lacks_gguf, producer_of
from webapp.jobs.cached_models import Use, bytes_to_download, link_rates
from webapp.jobs.models import Job, Priority
from webapp.jobs.quotas import check_submit, limit_sentences, quota_usage
from webapp.jobs.scheduler_options import check_scheduler, scheduler_of
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.models import demo_config, num_parameters
from webapp.plans.explanation import hardware_words, model_words, plan_title
from webapp.plans.models import Plan, PlanState
from webapp.plans.places import NamedRows, Question, question_of, uploads_of
from webapp.plans.planning import plan_keep, verdict_answer
from webapp.plans.predicting import prediction_of, usual_points
from webapp.plans.repositories import at_a_commit, hub_of
from webapp.plans.saving import draft_begun_from, is_unchanged
from webapp.plans.teachers import teacher_ref
from webapp.plans.team_models import draft_models_for, team_model_id, team_model_ref
from webapp.plans.verdict import closest_miss

# ---------------------------------------------------------------------------
# Launch a plan as a job: its program, model, options and predicted measurements.
# ---------------------------------------------------------------------------


def quota_note(job: Job) -> dict[str, str]:
    """Return the quota note of a job: remaining limits, or why it is refused."""
    usage = quota_usage(job.team, job.owner_id)  # the job is not stored
    limits = "; ".join(limit_sentences(job.team, usage))
    try:
        check_submit(job, usage)
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
    "trl": "The host trains the model by TRL's {} on its own text, checks every record first, and "
    "{}.",
    "classification": "The host trains the encoder and its head to tell the labels of texts "
    "apart, evaluates it on held-out texts, and saves it as a model of your team.",
    "compress": "The host compresses the weights, saves them, loads them again, and measures "
    "size, speed, memory and perplexity before and after.",
    "generate": "The host loads the model as planned, answers every prompt and writes the "
    "answers to a file. Finished answers are kept if the job stops.",
    "evaluate": "The host loads the model, and reads held-out text with it: perplexity and "
    "next-token accuracy, beside the original's where one is named.",
    "benchmark": "The host loads the model as planned and measures prefill, decode and peak "
    "memory. It ends with the measurements.",
    "serve": (
        "The host loads the model as planned and serves an OpenAI-compatible API at its own "
        "address until somebody stops it. The job's page has the address, the key and live "
        "figures."
    ),
}
# What a training by TRL leaves: a model that scores answers makes none.
REWARD_SAVED = "stores it with the job: it scores answers, and is no model of your team"
ADAPTER_SAVED = "stores the adapter in peft's format"
MERGED_SAVED = f"{ADAPTER_SAVED}, and the merged model as a model of your team"
MODEL_SAVED = "saves it as a model of your team"
RANDOM_WEIGHTS = (
    " This model's weights are not on the host, so it runs with random ones: speed and memory are "
    "real, the text and its perplexity are not."
)
DOWNLOAD = " First it downloads what its cache lacks of {}, a repository of the Hub."
TEACHER_DOWNLOAD = " It downloads what its cache lacks of the teacher, {}."
DOWNLOAD_OF = " First it downloads about {1} of {0}, a repository of the Hub{2}."
IN_CACHE = " {} is in this host's cache: nothing is downloaded."
IN_CACHE_BEFORE = " {} is in this host's cache; if it has changed since, that is downloaded first."
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # of a parameter, of checkpoints without other parts


def launch_description(spec: ModelSpec, download: str = "") -> str:
    """Return a description of what launching a spec does; ``download``: what comes before."""
    if isinstance(spec, TrainSpec) and spec.objective == "classification":
        return EXPLANATIONS["classification"]
    text = EXPLANATIONS[spec.kind]
    if getattr(spec, "weight_dtype", "") == "fp8":
        text += FLOATS_OF_8_BITS
    if isinstance(spec, TrainSpec):
        text = EXPLANATIONS["lora"] if spec.lora is not None else text
        if spec.engine == TRL:
            objective = OBJECTIVES[spec.objective]
            text = EXPLANATIONS["trl"].format(objective.trainer, _saved_by_trl(spec))
        text = text.replace("its own text", text_words(spec.data))
    text += named_data_words(spec)
    if isinstance(spec, TrainSpec) and isinstance(spec.teacher, HubModel):
        text += TEACHER_DOWNLOAD.format(spec.teacher.repository)
    if isinstance(spec.model, HubModel):
        return text + (download or DOWNLOAD.format(spec.model.repository))
    return text + (RANDOM_WEIGHTS if isinstance(spec.model, RandomModel) else "")


def _saved_by_trl(spec: TrainSpec) -> str:
    """Return what a training by TRL stores, for a sentence."""
    if OBJECTIVES[spec.objective].scores:
        return REWARD_SAVED
    if spec.lora is None:
        return MODEL_SAVED
    return MERGED_SAVED if spec.lora.is_merged else ADAPTER_SAVED


def named_data_words(spec: ModelSpec) -> str:
    """Return the sentence about the data set that a job other than a training reads, or ""."""
    if isinstance(spec, GenerateSpec) and isinstance(spec.prompts, HubData):
        return f" Its prompts are those of {text_words(spec.prompts)}."
    if isinstance(spec, EvaluateSpec) and isinstance(spec.text, HubData):
        return f" The text is {text_words(spec.text)}."
    if isinstance(spec, CompressSpec) and isinstance(spec.calibration_data, HubData):
        return f" It calibrates with {text_words(spec.calibration_data)}."
    return ""


def text_words(data: TrainData) -> str:
    """Return a description of a training's data for a sentence."""
    if isinstance(data, UploadedData):
        return f"the uploaded {data.name}"
    if isinstance(data, FileData):
        return f"its file {data.path}"
    if isinstance(data, HubData):
        subset = f"subset {data.subset}, " if data.subset else ""
        first = f"first {data.records:,} records of the " if data.records else ""
        return f"the {first}{subset}split {data.split} of {data.name}, a data set of the Hub"
    if not isinstance(data, MixedData):
        return "its own text"
    shares = zip(weights_of(data), data.parts, strict=True)
    mixture = " and ".join(f"{percent(share)} {text_words(part.data)}" for share, part in shares)
    moving = f" by weights that move every {data.update_every_steps:,} steps"
    return mixture if data.weights == "fixed" else f"at first {mixture}{moving}"


AS_PLANNED = Launch()
TRAINING_SHARE = 3  # limit relative to the time budget: setup and saving need time too
GRACE_SECONDS = 900.0
DOWNLOAD_SECONDS = 6 * HOUR  # of 200 GB over a slow link, in which no limit of ours ends a job


class Launchable(NamedTuple):
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


def plan_launch(  # noqa: PLR0913 (keyword-only: what the caller decides)
    *,
    plan: Plan,
    by: User,
    launch: Launch = AS_PLANNED,
    name: str = "",
    key_hashes: tuple[str, ...] = (),
    idempotency_key: str | None = None,
    is_named: bool = True,
    served_name: str = "",
    keeps_model: bool = True,
    parts: Launchable | None = None,
) -> Job:
    """Queue the job that a plan's document and ``launch`` describe, and return it.

    A draft is saved first: as the next version of its original plan, or as a separate plan if
    ``launch`` says so. The job refers to that version. ``name``, else the launch's, names the
    job, and the plan too if a person chose it (``is_named``). ``key_hashes`` are those of an
    endpoint's new key, and ``served_name`` the name of the deployment whose job it is. Without
    ``keeps_model`` a training measures speed and memory alone. ``parts``: what
    ``parts_at_a_commit`` said before, so that neither planner nor Hub is asked again.

    Raises:
        DraftProblem: there is nothing to launch, or this release cannot run it.
        Problem: the job service refuses.
    """
    parts = parts or parts_at_a_commit(plan, launch, key_hashes)
    spec = parts.spec
    if served_name and isinstance(spec, ServeSpec):
        spec = spec.model_copy(update={"served_name": served_name})
    if not keeps_model and isinstance(spec, TrainSpec):
        spec = spec.model_copy(update={"keeps_model": False})
    name = name or launch.name
    if not plan.name and not name:
        title = plan_title(plan.document.goal, parts.model_name, parts.place)
        plan.name, plan.is_named = title, False
    plan_name = name if is_named and not is_unchanged(plan) else ""
    by_name = by.get_username()
    saved = plan_keep(plan, plan_name, by=by_name, as_new=launch.save_as == "new")
    job = job_create(
        team=plan.team,
        owner=by,
        host=parts.host if parts.is_pinned else None,
        pool=parts.pool,
        num_hosts=parts.spread.num_hosts,
        devices_per_host=parts.spread.devices_per_host,
        spec=spec,
        name=checked_name(name, "name") or saved.name,
        model_name=parts.model_name,
        plan=saved,
        estimate=parts.best.model_dump(mode="json"),
        prediction=parts.prediction,
        idempotency_key=idempotency_key,
        max_duration_seconds=launch.max_duration_seconds or parts.max_duration_seconds,
        max_retries=launch.max_retries,
        priority=Priority.LOW if launch.priority == "low" else Priority.NORMAL,
        shared_bytes=shared_bytes_of(parts, launch, is_deployed=bool(served_name)),
    )
    return job_submit(job=job, by=by_name)


def shared_bytes_of(parts: Launchable, launch: Launch, *, is_deployed: bool) -> int | None:
    """Return the memory that a job asks for of a device which it shares; None: it shares none.

    It is the planned peak with the margin that engines get, or the part that one is told to take.

    Raises:
        InvalidProblem: the launch wants it to share, and its plan uses several devices.
    """
    if not (is_deployed if launch.shared is None else launch.shared):
        return None
    if parts.spread == Spread():
        options = parts.spec.engine_options if isinstance(parts.spec, ServeSpec) else None
        memory = parts.best.memory
        taken = (options.memory_ratio or 0.0) * memory.capacity_bytes if options else 0.0
        return int(max(MEMORY_MARGIN * memory.per_device_peak_bytes, taken))
    if launch.shared:
        raise InvalidProblem(
            "shared",
            f"This plan uses {parts.spread.num_hosts * parts.spread.devices_per_host} devices, "
            "and only jobs on one device share it. Leave shared out.",
        )
    return None


@dataclass(frozen=True)
class LaunchContext:
    """What every launch of a plan starts from: its question, its best strategy and its model.

    What only some launches need is read when it is needed, and once.
    """

    question: Question
    host: Host
    best: PlannedStrategy
    model: ModelRef
    shape: ModelShape | None
    team: Team

    @property
    def model_name(self) -> str:
        """Return the model's short name."""
        team_model = self.question.team_model
        return model_words(self.question.document.model, team_model.name if team_model else "")

    @property
    def config(self) -> dict[str, Any]:
        """Return the config.json of the model."""
        own = self.question.team_model
        return own.config if own else _config_of(self.question.document.model)

    @property
    def stored_config(self) -> dict[str, Any]:
        """Return the config.json of the repository with the weights, {} where it is unknown.

        Of a model of the catalog the document may name another repository or branch.
        """
        is_of_catalog = self.question.document.model.source == "catalog"
        if self.question.team_model or not is_of_catalog or not isinstance(self.model, HubModel):
            return self.config
        revision = self.model.revision
        is_named_branch = revision not in {"", "main"} and not COMMIT.fullmatch(revision)
        return {} if is_named_branch else config_by_name(self.model.repository)

    @cached_property
    def draft_models(self) -> tuple[DraftModel, ...]:
        """Return the models of the team on the host that could draft for this one."""
        return draft_models_for(self.host, self.model, self.shape)

    @cached_property
    def producer(self) -> Producer | None:
        """Return the job that wrote the model, if one did."""
        return producer_of(self.model)

    @cached_property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """Return the adapters that the team's jobs trained on the model."""
        return adapters_of(self.team, self.model, self.producer, self.host)

    @cached_property
    def download(self) -> str:
        """Return what the download of the model adds on the host; "" if nothing is downloaded.

        From what hosts reported and what the planner knows: the Hub is not asked.
        """
        model, shape = self.model, self.shape
        if not isinstance(model, HubModel):
            return ""
        if self.question.document.hardware.pool:  # whose hosts differ
            return DOWNLOAD.format(model.repository)
        known = None
        if shape is not None and shape.weight_dtype in BYTES and model.weights == "safetensors":
            known = num_parameters(shape) * BYTES[shape.weight_dtype]
        missing = bytes_to_download(Use(model.repository, model.revision), self.host, known)
        if missing == 0:
            is_commit = bool(COMMIT.fullmatch(model.revision))
            return (IN_CACHE if is_commit else IN_CACHE_BEFORE).format(model.repository)
        if missing is None:
            return DOWNLOAD.format(model.repository)
        rate = link_rates(self.host).get(source_of(model.hub).link)
        takes = f": {rate.words(missing)}" if rate else ""
        return DOWNLOAD_OF.format(model.repository, memory(missing), takes)

    def case(self, launch: Launch, key_hashes: tuple[str, ...] = ()) -> LaunchCase:
        """Return what the names of a launch stand for; only what it names is looked up."""
        is_gguf_engine = launch.run == "endpoint" and needs_gguf(launch.engine)
        return LaunchCase(
            best=self.best,
            model=weights_for(self.model, launch, self.config, self.stored_config),
            model_name=self.model_name,
            shape=self.shape,
            host_name=self.host.name,
            gpu_vendors=gpu_vendors(self.host),
            lacks_gguf=is_gguf_engine and lacks_gguf(self.producer),
            uploads=uploads_of(self.question.document, self.team),
            draft_models=self.draft_models if launch.draft_model else (),
            adapters=self.adapters if launch.adapters or launch.adapter else (),
            key_hashes=key_hashes,
            config=self.config,
            teacher=teacher_ref(
                self.question.document, self.question.teacher, self.host, self.question.pool
            ),
        )


def gpu_vendors(host: Host) -> tuple[str, ...]:
    """Return the vendors of the GPUs that a host reports."""
    return tuple({each.get("vendor", "nvidia") for each in host.facts.get("gpus") or ()})


def launch_context(plan: Plan, rows: NamedRows | None = None) -> LaunchContext:
    """Return what every launch of a plan starts from; ``rows``: of its document, if read before.

    Raises:
        DraftProblem: there is nothing to launch.
    """
    question = question_of(plan, rows)
    answer = verdict_answer(plan)
    if lacking := (plan.draft.get("wizard") or {}).get("lacks_model"):
        raise DraftProblem(
            f"The pasted text names {lacking}, so that the weights to load are not known. Choose "
            "a model in the Model step: of the catalog, of the Hub, or a folder on the host.",
            "catalog_id",
        )
    if question.host is None:
        hardware = question.document.hardware
        count = hardware.devices_per_node * hardware.nodes
        raise DraftProblem(
            f"No host is chosen, only catalog hardware: {hardware_words(hardware)}. Choose a "
            f"host{f' with {count} GPUs' if count > 1 else ''} to launch, or add one.",
            "host",
        )
    if question.host.kind not in RUNS_JOBS:
        raise DraftProblem(
            f"{question.host.name} is a planning-only host, so no job can run on it. Choose one "
            "of your hosts to launch, or add the machine as a host.",
            "host",
        )
    if not answer.plans:
        missed = closest_miss(answer.rejected)
        raise DraftProblem(
            f"Nothing fits on {question.host.name}, so there is nothing to launch"
            + (f": {missed.reason}" if missed else "")
            + ". Choose a smaller model or shorter texts, or a host with more memory.",
            "host",
        )
    model = _model_ref(question)
    return LaunchContext(
        question, question.host, answer.plans[0], model, question.shape, plan.team
    )


def launchable_of(
    plan: Plan, launch: Launch = AS_PLANNED, key_hashes: tuple[str, ...] = ()
) -> Launchable:
    """Return the job of a plan and of the options of its launch.

    Raises:
        DraftProblem: there is nothing to launch, or this release cannot run it.
        InvalidProblem: the load levels of a load test are invalid.
    """
    return launchable_in(launch_context(plan), launch, key_hashes)


def parts_at_a_commit(
    plan: Plan, launch: Launch = AS_PLANNED, key_hashes: tuple[str, ...] = ()
) -> Launchable:
    """Return the job of a plan, its repositories at the commit that the Hub has now.

    Raises:
        DraftProblem: there is nothing to launch, or this release cannot run it.
        InvalidProblem: an option is not valid, or the Hub refuses a repository.
    """
    parts = launchable_of(plan, launch, key_hashes)
    return parts._replace(spec=at_a_commit(parts.spec, plan.team))


def launchable_in(
    context: LaunchContext, launch: Launch = AS_PLANNED, key_hashes: tuple[str, ...] = ()
) -> Launchable:
    """Return the job of a plan's strategy and of the options of its launch.

    Raises:
        DraftProblem: this release cannot run it.
        InvalidProblem: the load levels of a load test are invalid.
    """
    question, best = context.question, context.best
    spread = launch_spread(question.document, launch, best)
    try:
        spec = spec_of(question.document, launch, context.case(launch, key_hashes))
        spec = _with_hub_token(spec, context.team)
        longest = check_scheduler(context.host if question.pool is None else None, launch, spread)
    except LaunchOptionError as error:
        raise InvalidProblem(error.name, str(error)) from error
    if context.host.has_scheduler and question.pool is None:
        spec, spread = _on_slots(spec, spread)
    return Launchable(
        host=context.host,
        spec=spec,
        model_name=context.model_name,
        best=best,
        prediction=prediction_of(spec, best, question),
        max_duration_seconds=min(filter(None, (max_duration_of(spec), longest)), default=None),
        spread=spread,
        pool=question.pool,
        is_pinned=question.pool is None or (spread.num_hosts == 1 and question.is_bound),
    )


def _on_slots(spec: ModelSpec, spread: Spread) -> tuple[ModelSpec, Spread]:
    """Return a scheduler's job: a slot for each node, and the ranks that a node gets."""
    if isinstance(spec, TrainSpec):
        ranks = max(spec.parallel.processes_per_host, spread.devices_per_host)
        parallel = spec.parallel.model_copy(update={"processes_per_host": ranks})
        spec = spec.model_copy(update={"parallel": parallel})
    return spec, Spread(1, spread.num_hosts)


def _with_hub_token(spec: ModelSpec, team: Team) -> ModelSpec:
    """Return a spec that downloads with the team's token or key of each source, if it has one."""
    hubs = {hub_of(each) for each in hub_references(spec)}
    names = {source_of(each).token_name for each in hubs}
    if store_references(spec):
        names.update(S3.secrets)
    if not (lacking := names - set(spec.secrets)):
        return spec
    own = Secret.objects.filter(team=team, name__in=lacking).order_by("name")
    added = own.values_list("name", flat=True)
    return spec.model_copy(update={"secrets": (*spec.secrets, *added)}) if added else spec


def _model_ref(question: Question) -> ModelRef:
    """Return the job's reference to the model of a document."""
    chosen = question.document.model
    if question.team_model is not None:
        return team_model_ref(question.team_model, question.host, question.pool)
    if chosen.source == "folder":
        return FolderModel(path=chosen.path or "")
    if chosen.source == "demo":
        is_training = question.document.goal == "pretrain"
        return DemoModel() if is_training else RandomModel(config=demo_config())
    return repository_of(chosen) or RandomModel(config=_config_of(chosen))


def _config_of(chosen: ModelChoice) -> dict[str, Any]:
    """Return the config.json of a model of the catalog, or the one that a document has."""
    if chosen.source != "catalog":
        return chosen.config or {}
    return published_config(chosen.catalog_id)


def max_duration_of(spec: JobSpec) -> float | None:
    """Return the job's time limit in seconds, if its length is known."""
    if isinstance(spec, TrainSpec) and spec.time_budget_seconds:
        own = spec.time_budget_seconds * TRAINING_SHARE + GRACE_SECONDS
        downloads = hub_references(spec) or store_references(spec)
        return own + (DOWNLOAD_SECONDS if downloads else 0.0)
    if isinstance(spec, ProveSpec):
        return 60 * spec.minutes + GRACE_SECONDS
    return None


# The review page's notes: what a launch would do, or why it is not possible.


def endpoint_command(plan: Plan, launch: Launch) -> str:
    """Return the engine's command line of an endpoint that a launch would start.

    Raises:
        DraftProblem: this release cannot run it.
        InvalidProblem: an option is not of an endpoint.
    """
    spec = launchable_of(plan, launch).spec
    return shown_command(spec) if isinstance(spec, ServeSpec) else ""


def launch_note(plan: Plan, rows: NamedRows | None = None) -> dict[str, Any]:
    """Return what launching would do, or why not: ``can``, ``title`` and ``text``.

    ``rows``: those that the plan's document names, if they were read before.
    """
    try:
        context = launch_context(plan, rows)
    except DraftProblem as problem:
        return _refusal_note(problem)
    try:
        parts = launchable_in(context)
    except DraftProblem as problem:
        note = _refusal_note(problem)
        return note if note["again"] else note | _only_endpoint_note(context)
    host = parts.place
    note = {
        "can": "yes",
        "title": f"Launch on {host}",
        "text": launch_description(parts.spec, context.download),
        "host": host,
    }
    job = Job(
        team=plan.team,
        owner_id=plan.owner_id,
        name="The job",
        spec=parts.spec.model_dump(mode="json"),
        prediction=parts.prediction,
        max_duration_seconds=parts.max_duration_seconds,
        num_hosts=parts.spread.num_hosts,
        devices_per_host=parts.spread.devices_per_host,
    )
    names: dict[str, Any] = {"adapter_names": []}
    may_be_random = kind_of(context.question.document.goal) in USED_BY["weights"]
    if isinstance(context.model, HubModel) and may_be_random:
        names["has_weights"] = "yes"
    if isinstance(parts.spec, GenerateSpec):
        names["can_evaluate"] = _can_evaluate(context)
        names["adapter_names"] = [each.name for each in context.adapters]
        names["drafts"] = context.draft_models
    scheduler = scheduler_of(context.host) if parts.pool is None else None
    names["scheduler"] = scheduler.offered if scheduler is not None else {}
    return note | names | _endpoint_note(context, parts) | quota_note(job)


def _can_evaluate(context: LaunchContext) -> str:
    """Return "yes" if the plan's model can also be evaluated by a job, else ""."""
    with suppress(DraftProblem):
        launchable_in(context, Launch(run="evaluation"))
        return "yes"
    return ""


def _refusal_note(problem: DraftProblem) -> dict[str, Any]:
    again = "yes" if problem.is_passing else ""
    title = "In a moment" if again else "This plan cannot be launched yet"
    return {"can": "", "again": again, "title": title, "text": problem.sentence}


def _only_endpoint_note(context: LaunchContext) -> dict[str, Any]:
    """Return the endpoint note of a plan that only engines of their own run, if any can."""
    launches: dict[EngineName, Launchable] = {}
    for engine in engines_on(context.best, gpu_vendors(context.host)):
        with suppress(DraftProblem):
            launches[engine.name] = launchable_in(
                context, Launch(run="endpoint", engine=engine.name)
            )
    if not launches:
        return {}
    return {
        "title": "No benchmark or load test of this plan",
        "endpoint": EXPLANATIONS["serve"] + context.download,
        "can_serve": "yes",
        "host": next(iter(launches.values())).place,
        "engines": [(engine, ENGINES[engine].words) for engine in launches],
        "refusals": refusal_lines(launches),
        "drafts": context.draft_models,
    }


def _endpoint_note(context: LaunchContext, parts: Launchable) -> dict[str, Any]:
    """Return the endpoint note of a plan, or why it cannot run as an endpoint."""
    if not isinstance(parts.spec, BenchmarkSpec):
        return {}
    points: dict[str, Any] = {
        "measures": "yes",
        "points": usual_points(parts.spec.batch_size),
        "targets": target_words(target_seconds(context.question.document)),
    }
    try:
        launchable_in(context, Launch(run="endpoint"))
    except DraftProblem as problem:
        return points | {"endpoint": problem.sentence}
    count = len(context.adapters)
    adapters = {"adapters": str(count)} if count else {}
    engines = [
        each
        for each in engines_on(context.best, gpu_vendors(context.host))
        if reads(each.name, context.model)
        and not (needs_gguf(each.name) and lacks_gguf(context.producer))
    ]
    takes_drafts = any("draft_model" in each.features for each in engines)
    if takes_drafts and gpu_vendors(context.host):  # on processors no engine was seen with one
        points["drafts"] = context.draft_models
    serving: dict[str, Any] = {
        "endpoint": EXPLANATIONS["serve"] + context.download,
        "can_serve": "yes",
    }
    serving |= {
        "engines": [(each.name, each.words) for each in engines],
        "refusals": refusal_lines(each.name for each in engines),
    }
    return points | adapters | serving


# ---------------------------------------------------------------------------
# Clone a job as a draft: its plan's version, and the fields of its launch form.
# ---------------------------------------------------------------------------


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
    if existing := clones.filter(draft__wizard__copied_job=job.pk).first():
        return existing
    draft = {
        **copy.deepcopy(plan.draft),
        "launch": launch_of_job(job).model_dump(mode="json"),
        "wizard": {"copied_job": job.pk, "copied_name": job.name},
    }
    return draft_begun_from(plan, owner, draft=draft)


def launch_of_job(job: Job) -> Launch:
    """Return the options with which a job was launched, without its name."""
    launch = Launch(
        priority="low" if job.priority == Priority.LOW else "normal",
        max_retries=job.max_retries,
        secrets=list(job.spec.get("secrets") or ()),
    )
    try:
        spec = _SPEC.validate_python(job.spec)
    except ValidationError:  # written by an older release; the plan's own fields are still usable
        return launch
    for name, value in spec.scheduler_options.items():
        setattr(launch, name, value)
    document = job.plan.readable_document if job.plan is not None else None
    if isinstance(getattr(spec, "model", None), RandomModel) and document is not None:
        is_chosen = repository_of(document.model) is not None
        launch.weights = "random" if is_chosen else "published"
    limit = job.max_duration_seconds
    if limit is not None and limit != max_duration_of(spec):
        launch.max_duration_seconds = limit
    launch.shared = True if job.shared_bytes is not None else None
    if isinstance(spec, ServeSpec):
        _read_endpoint(launch, spec, job)
    elif isinstance(spec, BenchmarkSpec):
        launch.profile = spec.profile
        if load := spec.load:
            launch.run, launch.arrivals = "load", load.arrivals.kind
            if load.search:
                launch.levels = "search"
                launch.max_search_seconds = load.search.max_seconds
            else:
                launch.points = [float(point) for point in load.arrivals.points]
            launch.requests_per_repetition = load.requests_per_repetition
            launch.repetitions = load.repetitions
    elif isinstance(spec, EvaluateSpec):
        launch.run, launch.original = "evaluation", _named(spec.original)
    elif isinstance(spec, GenerateSpec):
        _read_generation(launch, spec, job)
    elif isinstance(spec, TrainSpec) and (tracker := spec.tracker):
        launch.tracker, launch.tracker_project = tracker.name, tracker.project
        launch.tracker_run, launch.tracker_url = tracker.run_name, tracker.url
    return launch


def _named(original: ModelRef | None) -> str:
    """Return the name of an evaluation's original, "" if it has none of the Hub."""
    if not isinstance(original, HubModel):
        return ""
    return str(RepositoryName(original.repository, original.revision, "", original.hub))


def _read_endpoint(launch: Launch, spec: ServeSpec, job: Job) -> None:
    for name in Launch.model_fields.keys() & EndpointSettings.model_fields.keys():
        setattr(launch, name, getattr(spec, name))
    launch.run, launch.adapters = "endpoint", bool(spec.adapters)
    launch.engine_args = list(spec.engine_args)
    options = spec.engine_options
    if options is None:
        return
    launch.prefix_caching = options.has_prefix_cache
    if options.lookup_tokens is not None:
        launch.draft_model = LOOKUP
    elif options.draft is not None:
        launch.draft_model = team_model_id(options.draft.model, job.team)


def _read_generation(launch: Launch, spec: GenerateSpec, job: Job) -> None:
    if len(spec.adapters) > 1:
        launch.adapter = ALL_ADAPTERS
    elif spec.adapters:
        launch.adapter = spec.adapters[0].name
    if isinstance(spec.speculation, DraftModelSpeculation):
        launch.draft_model = team_model_id(spec.speculation.model, job.team)

"""The job's spec of a plan document and its launch: a pure function of both and a LaunchCase."""

from planner.specs.estimate import PlannedStrategy
from planner.specs.on_policy import OWN_ENGINE
from planner.specs.workload import AWAY_TITLES
from runners.jobspec import GenerateSpec, ModelSpec, ServeSpec, TrainSpec
from runners.jobspec.engines import has_feature
from runners.jobspec.objectives import TRL
from runners.jobspec.trackers import TrackerOptions
from runners.plans.compression_spec import compress_spec
from runners.plans.document import PlanDocument
from runners.plans.engine_choice import check_engine, trainer_of
from runners.plans.evaluation_spec import evaluate_spec
from runners.plans.generation_spec import (
    generate_spec,
    offload_of,
    with_adapters,
    with_chained_stages,
)
from runners.plans.latency_limits import target_seconds
from runners.plans.launch import Launch
from runners.plans.launch_case import LaunchCase
from runners.plans.model_checks import check_model, needs_weights
from runners.plans.pins import FIELD_TITLES
from runners.plans.refusals import DraftProblem, validated
from runners.plans.rotary_scaling import scaling_args
from runners.plans.serving_spec import benchmark_spec, check_host, endpoint_spec, engine_spread
from runners.plans.speculative_decoding import with_draft
from runners.plans.spread import Spread, policy_of, processes_of, spread_of
from runners.plans.strategy_checks import refuse_offloaded, runnable_dtype
from runners.plans.training_spec import data_and_parallel_fields, train_spec
from runners.plans.workloads import CompressWork, GenerateWork, ServeWork, TrainingData

TRAINING_PLACES = frozenset(
    {"optimiser states on cpu", "optimiser states on nvme", AWAY_TITLES["activations_cpu"]}
)


def spec_of(document: PlanDocument, launch: Launch, case: LaunchCase) -> ModelSpec:
    """Return the spec of the job that a document and the options of its launch describe.

    Raises:
        DraftProblem: this release cannot run it; ``field`` is the document's or the launch's.
        LaunchOptionError: the load levels of a load test are invalid.
    """
    engine = launch.engine if launch.run == "endpoint" else None
    check_engine(document, engine)
    if engine is not None:
        check_host(engine, case)
    spread = launch_spread(document, launch, case.best)
    check_model(case.model, spread)
    scaling = scaling_args(document.model.rope_scaling, launch, case)
    spec = _spec_of_goal(document, launch, case)
    processes = processes_of(case.best, document.hardware)
    policy = policy_of(document.hardware, spread, processes)
    if isinstance(spec, TrainSpec) and isinstance(document.workload, TrainingData):
        fields = data_and_parallel_fields(spec, policy, processes, document.workload, case.uploads)
        spec = spec.model_copy(update={**fields, "tracker": _tracker(launch)})
    if isinstance(spec, GenerateSpec):
        spec = with_chained_stages(spec, policy)
        spec = with_draft(spec, case.draft_models, launch.draft_model)
        spec = with_adapters(spec, case.adapters, launch.adapter)
    if isinstance(spec, ServeSpec) and scaling:
        spec = spec.model_copy(update={"engine_args": (*spec.engine_args, *scaling)})
    asked = {"secrets": tuple(launch.secrets), "scheduler_options": launch.scheduler_options}
    return spec.model_copy(update=asked)


def _tracker(launch: Launch) -> TrackerOptions | None:
    """Return where a training's metrics are written besides the site.

    Raises:
        DraftProblem: the tracker's address or names are none, or a secret would go there readable.
    """
    if launch.tracker is None:
        return None
    fields = {
        "name": launch.tracker,
        "project": launch.tracker_project or "slipway",
        "run_name": launch.tracker_run,
        "url": launch.tracker_url,
    }
    words, field = "The tracker cannot be used", "tracker_url"
    tracker = validated(TrackerOptions, fields, words, field)
    try:
        tracker.check_secrets(launch.secrets)
    except ValueError as error:
        raise DraftProblem(f"{words}: {error}.", field) from error
    return tracker


def launch_spread(document: PlanDocument, launch: Launch, best: PlannedStrategy) -> Spread:
    """Return the number of hosts and of devices on each that a launch takes.

    Raises:
        DraftProblem: jobs do not support the way in which the strategy splits the model.
    """
    has_layout = launch.run == "endpoint" and has_feature(launch.engine, "parallel_sizes")
    spread = engine_spread(best, launch.engine) if has_layout else spread_of(best, document.goal)
    # CPU ranks share the host's one CPU device.
    is_shared = processes_of(best, document.hardware) > 1
    return Spread(spread.num_hosts, 1) if is_shared else spread


def _spec_of_goal(document: PlanDocument, launch: Launch, case: LaunchCase) -> ModelSpec:
    values, model, best = document.workload, case.model, case.best
    if isinstance(values, ServeWork):
        if launch.run == "endpoint":
            return endpoint_spec(values, launch, case)
        return benchmark_spec(values, launch, case, target_seconds(document))
    if launch.run == "endpoint":
        raise DraftProblem("Only a plan to serve can be started as an endpoint.", "goal")
    if isinstance(values, GenerateWork):
        if launch.run == "evaluation":
            return evaluate_spec(model, best, launch.original, values)
        offload = offload_of(best.strategy, case.shape) if case.shape else None
        return generate_spec(values, model, runnable_dtype(best), best.strategy, offload)
    if isinstance(values, CompressWork):
        refuse_offloaded(best)
        compression = compress_spec(values, model)
        needs_weights(model, "Compressing")
        return compression
    refuse_offloaded(best, allowed=TRAINING_PLACES)
    trainer = trainer_of(document)
    if trainer == TRL:
        _refuse_pins_of_trl(document)
        _refuse_other_generator(best)
    return train_spec(
        values, model, best, case.shape, case.uploads, trainer=trainer, teacher=case.teacher
    )


def _refuse_pins_of_trl(document: PlanDocument) -> None:
    """Refuse what a person fixed of the strategy and TRL's trainers do not run.

    Raises:
        DraftProblem: names the pin.
    """
    pins = document.pins.stated
    for name in ("attention", "checkpoint_writing"):
        value = pins.get(name, "in_step")
        if value != "in_step":
            raise DraftProblem(
                "TRL's jobs do not run what is fixed on the step “Hardware”, "
                f"{FIELD_TITLES.get(name, name)} {value}. Leave it open.",
                name,
            )


def _refuse_other_generator(best: PlannedStrategy) -> None:
    """Refuse a plan whose answers another engine than the job's generates.

    Raises:
        DraftProblem: names the engine that the plan has.
    """
    rollout = best.strategy.rollout
    if rollout is not None and rollout.engine not in {None, OWN_ENGINE}:
        raise DraftProblem(
            f"This plan generates answers with {rollout.engine}, and jobs generate with the "
            f"trained weights, in the training's own process ({OWN_ENGINE}). Leave the engine of "
            "the pin rollout out.",
            "rollout",
        )

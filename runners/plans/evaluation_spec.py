"""The job that evaluates a plan's model on held-out text, alone or beside an original."""

from planner.specs.base import PlannerError
from planner.specs.estimate import PlannedStrategy
from runners.hub.names import parse, reason_of
from runners.jobspec import EvaluateSpec, HostText, HubModel, ModelRef
from runners.plans.data_set import DataSet
from runners.plans.model_checks import needs_weights
from runners.plans.refusals import DraftProblem
from runners.plans.spread import Spread, spread_of
from runners.plans.strategy_checks import refuse_offloaded, runnable_dtype
from runners.plans.weights import is_gguf_repository


def evaluate_spec(
    model: ModelRef, best: PlannedStrategy, original: str, data: DataSet
) -> EvaluateSpec:
    """Return the evaluation of a model; ``original``: a repository to compare it with, or "".

    ``data``: the text that is read, if a data set is named.

    Raises:
        DraftProblem: the model has no weights, takes several devices or offloads weights, or the
            original is no repository of weights that a job reads.
    """
    needs_weights(model, "An evaluation")
    refuse_offloaded(best)
    if spread_of(best, "generate") != Spread():
        raise DraftProblem(
            "An evaluation loads the model on one device, and the plan takes several. Choose a "
            "host with one device that holds it, or fix tensor_parallel_size, "
            "pipeline_parallel_size and data_parallel_size at 1.",
            "tensor_parallel_size",
        )
    return EvaluateSpec(
        model=model,
        weight_dtype=runnable_dtype(best),
        original=_repository(original) if original else None,
        text=data.hub_data() if data.data_repository else HostText(),
    )


def _repository(text: str) -> HubModel:
    try:
        name = parse(text)
    except PlannerError as error:
        raise DraftProblem(f"“Compared with”: {reason_of(error)}.", "original") from error
    if is_gguf_repository(text):
        raise DraftProblem(
            f"“Compared with”: {text} is of GGUF files, and a job reads safetensors. Name the "
            "repository of its original weights.",
            "original",
        )
    return HubModel(repository=name.repository, revision=name.revision, hub=name.hub)

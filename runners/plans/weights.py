"""Where a job gets the weights of a plan's model from: a repository, or random numbers."""

from collections.abc import Mapping

from planner.catalog.format_names import names_gguf
from planner.specs.base import PlannerError
from runners.hub.names import parse
from runners.jobspec import HubModel, ModelRef, RandomModel
from runners.jobspec.engines import ENGINES, OWN, OWN_STORED_METHODS, EngineName
from runners.plans.document import ModelChoice
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem


def repository_of(chosen: ModelChoice) -> HubModel | None:
    """Return the repository that has a model's weights; None where the document names none.

    Of a model of the catalog that is its own one, unless the document names another.
    """
    text = chosen.repository
    if text is None and chosen.source == "catalog":
        text = chosen.catalog_id
    if text is None or chosen.source not in {"catalog", "hub"}:
        return None
    try:
        name = parse(text)
    except PlannerError:
        return None
    return HubModel(
        repository=name.repository,
        revision=chosen.revision or name.revision,
        weights="gguf" if is_gguf_repository(text) else "safetensors",
        file=name.file,
        hub=name.hub,
    )


def stated_repository(chosen: ModelChoice) -> str | None:
    """Return the repository that a document names, as ``slipway launch`` names it again."""
    if chosen.repository is None or chosen.source not in {"catalog", "hub"}:
        return None
    try:
        return str(parse(chosen.repository))
    except PlannerError:
        return None


def is_gguf_repository(text: str) -> bool:
    """Return whether a text names a repository of GGUF files, by its name or by a file of it.

    >>> is_gguf_repository("unsloth/Qwen3-8B-GGUF:Q4_K_M"), is_gguf_repository("Qwen/Qwen3-8B")
    (True, False)
    """
    try:
        name = parse(text)
    except PlannerError:
        return False
    return bool(name.file) or names_gguf(name.repository) is not None


def names_weights(text: str) -> bool:
    """Return whether a text says where weights are, beside which model they are of.

    A repository of GGUF files, one of ModelScope, or a revision.

    >>> names_weights("ms://Qwen/Qwen3-8B"), names_weights("Qwen/Qwen3-8B")
    (True, False)
    """
    try:
        name = parse(text)
    except PlannerError:
        return False
    return bool(name.hub) or name.revision not in {"", "main"} or is_gguf_repository(text)


def weights_for(
    model: ModelRef, launch: Launch, config: dict[str, object], stored: Mapping[str, object]
) -> ModelRef:
    """Return the reference with which a launch loads a model.

    ``config``: of the model, for random weights in its shape. ``stored``: of the repository that
    has its weights, {} where that is not known.

    Raises:
        DraftProblem: random weights were chosen where text counts, or the repository's files are
            not those, or not in a format, that the engine reads.
    """
    if not isinstance(model, HubModel):
        return model
    if launch.weights == "random":
        return RandomModel(config=config)
    engine = launch.engine if launch.run == "endpoint" else OWN
    if not reads(engine, model):
        _refuse(model, launch, sorted(ENGINES[engine].weights - {"random"}))
    if engine == OWN and (method := _foreign_format(stored)):
        raise DraftProblem(
            f"The weights of {model.repository} are quantised by {method}, which Slipway's own "
            f"engine and jobs do not read. Name the repository of its unquantised weights, and "
            "compress that if it is too large; or serve this one with vLLM or SGLang, which read "
            "such formats.",
            "engine" if launch.run == "endpoint" else "repository",
        )
    return model


def _foreign_format(config: Mapping[str, object]) -> str:
    """Return how a config says that weights are quantised, "" if jobs read them."""
    stored = config.get("quantization_config")
    method = str(stored.get("quant_method") or "")[:40] if isinstance(stored, dict) else ""
    return "" if method in OWN_STORED_METHODS else method


def reads(engine: EngineName, model: ModelRef) -> bool:
    """Return whether an engine reads the files of a model's repository, if it has one."""
    return not isinstance(model, HubModel) or model.weights in ENGINES[engine].weights


def _refuse(model: HubModel, launch: Launch, formats: list[str]) -> None:
    kinds = {"gguf": "GGUF", "safetensors": "safetensors"}
    what = (
        f"“Engine” is {launch.engine}, which reads" if launch.run == "endpoint" else "A job reads"
    )
    example = f"{model.repository}-GGUF:Q4_K_M" if "gguf" in formats else "its original repository"
    wanted = " or ".join(kinds[each] for each in formats)
    raise DraftProblem(
        f"{what} {wanted} files, and {model.repository} is a "
        f"repository of {kinds[model.weights]} files. Name one of the other kind as the model's "
        f"repository, such as {example}, or choose another engine.",
        "engine" if launch.run == "endpoint" else "repository",
    )

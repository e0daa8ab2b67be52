"""Public API: estimate one strategy, search for the best one, and solve inverse questions.

``parse_model`` reads their documents, with errors that name the field.

Importing this module loads the request and response models only. Each function imports its
implementation on the first call: an estimate does not load the search, and a search does not load
the inverse questions.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError

from planner.specs.base import BadRequestError, location_of
from planner.specs.estimate import (
    FIGURES,
    Estimate,
    EstimateRequest,
    InverseAnswer,
    InverseRequest,
    Objective,
    PlanAnswer,
    PlanRequest,
    UnknownFigureError,
)


def estimate(request: EstimateRequest) -> Estimate:
    """Return the estimate of the request's strategy, with every term of the explanation.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or the strategy is impossible.
    """
    from planner.workload.costing import estimate_request

    return estimate_request(request)


def engines_of(request: PlanRequest) -> tuple[str | None, ...]:
    """Return the engines that a search compares, the usual one first: one, unless it is ``auto``.

    Raises:
        PlannerError: the device is unknown.
    """
    from planner.search.question import engines_of as compared

    return compared(request, request.cluster)


def penalty(estimate: Estimate, objective: Objective) -> float:
    """Return what a search by an objective makes as small as it can, in the objective's unit."""
    from planner.search.rank import penalty_of

    return penalty_of(estimate, objective)


def gap(estimate: Estimate, best: Estimate, objective: Objective) -> float:
    """Return by which share of the best one's merit an estimate is worse, 0 or more."""
    from planner.search.rank import gap_of

    return gap_of(estimate, best, objective)


def plan(request: PlanRequest) -> PlanAnswer:
    """Return the ranked strategies, the frontier, the rejections and the suggestions.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or a pin is impossible.
    """
    from planner.search.engine import search

    return search(request)


def best_plan(request: PlanRequest) -> PlanAnswer:
    """Return the best plan only, without frontier, runners-up and suggestions.

    If no plan meets the targets, the answer holds the best plan that fits, and its ``request`` has
    no targets. If nothing fits, it holds the rejections.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or a pin is impossible.
    """
    from planner.search.engine import search_best

    return search_best(request)


def inverse(request: InverseRequest) -> InverseAnswer:
    """Return the limit of one quantity: context, batch, users, model, devices or price.

    Raises:
        PlannerError: a name is unknown, or the question does not suit the workload.
    """
    from planner.search.inverse import answer_inverse

    return answer_inverse(request)


# Documents from outside: parsed, or refused with the field, its value and the nearest names.


S = TypeVar("S", bound=BaseModel)
NEAREST_FIELDS = 3
# Fields of other tools that stand for something that no request can say, with what to do.
NOT_MODELLED = dict.fromkeys(
    ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules", "lora_paths"),
    # Source: vLLM, vllm/config/lora.py and vllm/lora/layers (the buffers of a start).
    "adapters at serving time are not modelled: vLLM sets max_loras x max_lora_rank of adapter "
    "weights aside before it sizes the cache; leave it out, and plan with a "
    "gpu_memory_utilization that is lower by their share",
)
# Parts of pydantic's error paths that name a union branch instead of a field.
UNION_PARTS = frozenset(
    {"str", "ModelSpec", "dict[str,any]", "DeviceSpec", "serve", "generate", "train", "compress"}
)


def parse_model(spec: type[S], text: str) -> S:
    """Return a model parsed from JSON.

    Raises:
        BadRequestError: the text is not JSON, or a field is wrong.
    """
    try:
        return spec.model_validate_json(text)
    except ValidationError as error:
        raise readable(error, spec) from error


def readable(error: ValidationError, spec: type[BaseModel]) -> BadRequestError:
    """Return the first error of a document of a spec: field, message, given value."""
    details = error.errors(include_url=False)
    first_error = next((d for d in details if d["type"] != "string_type"), details[0])
    location = [part for part in map(str, location_of(first_error)) if "(" not in part]
    path = [part for part in location if part not in {*UNION_PARTS, "[key]"}]
    name = ".".join(path) or "request"
    given = first_error.get("input")
    shown = "" if isinstance(given, dict | list) else f" (given: {given!r})"
    if isinstance(first_error.get("ctx", {}).get("error"), UnknownFigureError):
        hint = _hint(path[-1], {one: one for one in FIGURES})
        return BadRequestError(f"{name}: there is no such figure of an estimate; {hint}", name)
    if first_error["type"] == "extra_forbidden":
        hint = NOT_MODELLED.get(path[-1]) or _fields_to_use(spec, location)
        return BadRequestError(f"{name}: there is no such field{shown}; {hint}", name)
    message = str(first_error["msg"]).removeprefix("Value error, ")
    return BadRequestError(f"{name}: {message}{shown}", name)


def _fields_to_use(spec: type[BaseModel], location: list[str]) -> str:
    """Return the fields that may stand in place of an unknown one, the nearest where any is near.

    At the top of a request a field of one of its parts is named with its place.
    """
    *parents, unknown = location
    valid = known_fields(spec) if not parents else {one: one for one in fields_at(spec, parents)}
    return _hint(unknown, valid)


def _hint(unknown: str, valid: Mapping[str, str]) -> str:
    """Return the valid names that are nearest to an unknown one, as they are shown, or all."""
    from planner.catalog.reading import nearest_names

    names = nearest_names(unknown, sorted(valid))[:NEAREST_FIELDS]
    if names:
        return f"nearest: {', '.join(valid[each] for each in names)}"
    return f"choose among {', '.join(sorted(valid))}"


def fields_at(spec: type[BaseModel], parents: list[str]) -> frozenset[str]:
    """Return the fields of a document at a path, such as ``["workload", "serve"]``.

    A part that is no field names a branch of a union: its ``kind``, or its class.
    """
    specs = [spec]
    for part in parents:
        fields = [one.model_fields[part] for one in specs if part in one.model_fields]
        if fields:
            specs = [one for field in fields for one in _specs_in(field.annotation)]
            continue
        branch = [one for one in specs if part in {one.__name__, _kind_of(one)}]
        specs = branch or specs
    return frozenset(name for one in specs for name in one.model_fields)


def _kind_of(spec: type[BaseModel]) -> object:
    """Return the value of ``kind`` that selects a spec in a union."""
    return spec.model_fields["kind"].default if "kind" in spec.model_fields else None


@cache
def known_fields(root: type[BaseModel]) -> Mapping[str, str]:
    """Return all fields of a request by name, including nested ones, with their dotted paths.

    A name in several parts has the path that is nearest to the top.
    """
    paths: dict[str, str] = {}
    pending: list[tuple[str, type[BaseModel]]] = [("", root)]
    visited: set[type[BaseModel]] = set()
    for prefix, spec in pending:  # grows while it is read: the parts of a part come last
        if spec in visited:
            continue
        visited.add(spec)
        for name, field in spec.model_fields.items():
            paths.setdefault(name, prefix + name)
            pending += [(f"{prefix}{name}.", one) for one in _specs_in(field.annotation)]
    return paths


def _specs_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the specs in an annotation, including unions and collections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _specs_in(part)

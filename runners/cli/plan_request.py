"""The request that a model, options and ``--set`` make: defaults, then a file, then they."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.cli.errors import CliError, planner_errors
from runners.cli.output import progress
from runners.cli.plan_options import GOALS, Goal, field_of, options_of
from runners.cli.plans import is_file, read_document
from runners.cli.repositories import Published, read_repository
from runners.cli.settings import place_of, read_setting

if TYPE_CHECKING:
    from planner.catalog.gguf_names import ModelName
    from planner.specs.estimate import PlanAnswer, PlanRequest

Document = dict[str, Any]  # the JSON of a PlanRequest
COMPARED = frozenset({"serve", "generate"})  # goals whose engine is open
# Serving has one kind of arrival; the default holds only if none of them is given.
ARRIVALS = ("concurrency", "request_rate_per_second", "burst_requests")


@dataclass(frozen=True)
class Requested:
    """A request as a document, the defaults in it that nobody gave, and the given options."""

    document: Document
    assumed: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # path of a field -> the option


def build_document(
    goal_name: str,
    model: str | None,
    options: Mapping[str, str],
    *,
    hardware: Sequence[str] = (),
    settings: Sequence[str] = (),
    base: Document | None = None,
    is_draft: bool = False,
    has_cluster: bool = True,
) -> Requested:
    """Return the request of a goal's options, by parameter names, and of ``--set`` values.

    ``base`` is a request from a file, which takes the place of the defaults; if ``is_draft``, the
    defaults fill what it lacks. Without ``has_cluster`` the request is in part: a server sets the
    hardware and the engine.

    Raises:
        CliError: a text cannot be read, or names no hardware, model or object.
    """
    document = _copy_of(base, goal_name)
    clusters, notes = _clusters(document, hardware if has_cluster else ())
    known = {each.key: each for each in options_of(goal_name)}
    chosen = {known[key]: text for key, text in options.items()}
    given = [
        (each.field, each.read(text, field_of(goal_name, each))) for each, text in chosen.items()
    ]
    given += map(read_setting, settings)
    if model is not None:
        stated, assumed = _set_model(document, model, dict(given))
        given, notes = [*stated, *given], (*notes, *assumed)
    for path, value in given:
        _set_given(document, clusters, path, value, has_cluster=has_cluster)
    if "model" not in document:
        raise CliError(
            "MODEL is missing: give a catalog id, the path of a config.json, or --from FILE",
            field="model",
        )
    _settle_hardware(document, has_cluster=has_cluster)
    named = {path for path, _ in given}
    _settle_run_length(document, named)
    filled: Iterable[str] = ()
    if not base or is_draft:
        goal = GOALS[goal_name]
        batch = _fill_batch(document, named) if base and goal.kind == "train" else ()
        filled = (*batch, *_fill_defaults(document, goal_name, named))
    flags = {each.field: each.names[0] for each in chosen}
    return Requested(document, (*notes, *filled), flags)


def _copy_of(base: Document | None, goal_name: str) -> Document:
    """Return a copy of a file's request whose workload is of the goal's kind.

    Raises:
        CliError: the file is of another goal.
    """
    document: Document = json.loads(json.dumps(base or {}, default=str))
    own = GOALS[goal_name].kind
    kind = _object(document, "workload").setdefault("kind", own)
    if kind != own:
        raise CliError(
            f"workload.kind is {kind!r} in the file, but `plan {goal_name}` makes {own!r}: "
            "use the goal of the file",
            field="workload.kind",
        )
    return document


def _set_given(
    document: Document,
    clusters: Sequence[Document],
    path: str,
    value: object,
    *,
    has_cluster: bool,
) -> None:
    """Set what an option or a setting gives; what is of the cluster in every one of them.

    Raises:
        CliError: the hardware is a server's, or a part of the path has no fields.
    """
    if path.partition(".")[0] in {"cluster", "hardware_options"} and not has_cluster:
        raise CliError(
            f"--set {path}: the server knows the hardware of its hosts; leave it out, or "
            "name hardware of the catalog by --on",
            field=path,
        )
    for each in clusters[1:] if path.startswith("cluster.") else ():
        set_field({"cluster": each}, path, value)
    set_field(document, path, value)


def _settle_hardware(document: Document, *, has_cluster: bool) -> None:
    """Set this machine where no hardware is named, and leave out what a server sets."""
    from runners.cli.hardware import THIS, parse_hardware

    cluster = _object(document, "cluster")
    if not has_cluster:
        for name in ("cluster", "hardware_options"):
            document.pop(name, None)
    elif not {"device", "instance"} & cluster.keys():
        document["cluster"] = {**parse_hardware(THIS), **cluster}


def _set_model(
    document: Document, name: str, given: Mapping[str, object]
) -> tuple[list[tuple[str, object]], list[str]]:
    """Set the model that a name stands for, and return the fields that it states, and notes.

    Raises:
        CliError: no model has this name, or it states another quantisation than an option.
    """
    found = read_model(name)
    document.pop("repository", None)
    if isinstance(found, dict):
        document["model"] = found
        return [], []
    if isinstance(found, Published):
        document["model"], document["repository"] = found.config, found.name
        return [], []
    from planner.catalog.gguf_names import agreed_pins

    document["model"] = found.id
    pins = {**document.get("pins", {})}
    if (quantization := given.get("pins.quantization")) is not None:
        pins["quantization"] = quantization
    with planner_errors():
        stated = agreed_pins(found, pins, "--quantization")
    if not stated or document["workload"]["kind"] not in {"serve", "generate"}:
        return [], []
    return [(f"pins.{pin}", value) for pin, value in stated.items()], [
        found.assumed or f"{' '.join(stated.values())}, as MODEL states (--quantization)"
    ]


def _settle_run_length(document: Document, named: Collection[str]) -> None:
    """Let a run end by its tokens or its time: an option takes the place of a file's other one.

    Raises:
        CliError: both are given.
    """
    both = {"tokens", "time_budget_seconds"}
    workload = _object(document, "workload")
    if not both <= workload.keys():
        return
    given = {name for name in both if f"workload.{name}" in named}
    if len(given) == 1:
        workload.pop(*(both - given))
    elif given:
        raise CliError(
            "--tokens and --time-budget are both given, and a run ends by one of them: with "
            "--tokens the plan says how long it takes, with --time-budget how many tokens it "
            "trains",
            field="workload.time_budget_seconds",
        )


def _object(document: Document, name: str) -> Document:
    """Return a part of the request, made if it is absent; a cluster's text is a cloud offer."""
    part = document.setdefault(name, {})
    if name == "cluster" and isinstance(part, str):
        document[name] = part = {"instance": part}
    if not isinstance(part, dict):
        raise CliError(f"{name} is {part!r}: it must be an object with fields", field=name)
    return part


def set_field(document: Document, path: str, value: object) -> None:
    """Set a field of nested objects by its dotted path; None removes it.

    Raises:
        CliError: a part of the path is a value instead of an object.
    """
    place, last = place_of(document, path)
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value


def _clusters(
    document: Document, hardware: Sequence[str]
) -> tuple[list[Document], tuple[str, ...]]:
    """Set the clusters that texts name, and return them with what was assumed of them.

    Without texts they are the document's own.
    """
    from runners.cli.hardware import read_hardware_option

    if not hardware:
        return [_object(document, "cluster")], ()
    found = [read_hardware_option(each) for each in hardware]
    clusters = [each.cluster for each in found]
    document["cluster"] = clusters[0]
    document.pop("hardware_options", None)
    if len(clusters) > 1:
        document["hardware_options"] = clusters
    return clusters, tuple(each.note for each in found if each.note)


def _fill_defaults(document: Document, goal_name: str, given: Collection[str]) -> Iterator[str]:
    """Set the goal's defaults that nobody gave, and yield each with its option."""
    goal, workload = GOALS[goal_name], _object(document, "workload")
    flags = {each.field: each.names[0] for each in options_of(goal_name)}
    for name in goal.defaults:
        names = ARRIVALS if name in ARRIVALS else (name,)
        if name in workload or any(f"workload.{each}" in given for each in names):
            continue
        workload[name], reason = _default_of(name, goal, document)
        value = workload[name]
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        why = f": {reason}" if reason else ""
        yield f"{name.replace('_', ' ')} {shown}{why} ({flags[f'workload.{name}']})"
    if goal.kind in COMPARED and "engine" not in document and "cluster" in document:
        is_gguf = str(_object(document, "pins").get("quantization")).startswith("gguf")
        document["engine"] = "llama_cpp" if is_gguf else "auto"
        compared = "" if is_gguf else ": the engines that sites run, compared"
        yield f"engine {document['engine']}{compared} (--engine)"


def _default_of(name: str, goal: Goal, document: Document) -> tuple[object, str]:
    """Return a goal's default for the model and the hardware of a request, and its reason."""
    usual = goal.defaults[name]
    if name == "concurrency" and "cluster" in document and _is_personal(document["cluster"]):
        return 1, "one person's machine"
    if name not in {"sequence_length", "global_batch_size"}:
        return usual, ""
    from planner.catalog.models import get_model, model_from_config
    from planner.catalog.usual_batch import usual_batch, usual_length
    from planner.specs.base import PlannerError

    given, workload = document["model"], document["workload"]
    try:
        model = get_model(given) if isinstance(given, str) else model_from_config(given, "custom")
    except PlannerError:
        return usual, ""  # the search says what is wrong
    pretrains = workload.get("method", goal.defaults.get("method")) == "pretrain"
    if name == "sequence_length":
        return usual_length(model, pretrains=pretrains)
    sequence = workload.get("sequence_length")
    if not isinstance(sequence, int) or sequence < 1:
        return usual, ""  # validation of the request says what is wrong
    return usual_batch(model, sequence, _devices(document) or 1, pretrains=pretrains)


def _is_personal(cluster: Document) -> bool:
    """Return whether a cluster is one computer of a person: a laptop, a CPU, unified memory."""
    from planner.catalog.devices import find_device

    device = cluster.get("device")
    found = find_device(device) if isinstance(device, str) else None
    fields = found.model_dump(include={"id", "kind"}) if found else device
    if not isinstance(fields, dict):
        return False
    return fields.get("kind") in {"cpu", "uma"} or str(fields.get("id")).endswith("-laptop")


def _fill_batch(document: Document, given: Collection[str]) -> Iterator[str]:
    """Set the sequences of one update that a trainer's file makes on the hardware, and yield them.

    They are micro-batch x accumulation x data-parallel ranks, where the file states a micro-batch.
    """
    workload, pins = _object(document, "workload"), _object(document, "pins")
    micro = pins.get("micro_batch_size")
    name = "global_batch_size"
    is_stated = name in workload or f"workload.{name}" in given
    if is_stated or not isinstance(micro, int) or not (devices := _devices(document)):
        return
    steps = pins.get("gradient_accumulation_steps") or 1
    ranks = devices
    for axis in ("tensor", "pipeline", "context"):
        ranks //= pins.get(f"{axis}_parallel_size") or 1
    ranks = pins.get("data_parallel_size") or max(1, ranks)
    workload[name] = micro * steps * ranks
    yield (
        f"global batch size {micro * steps * ranks:,} = micro-batch {micro} x accumulation "
        f"{steps} x {ranks} ranks (--batch-size)"
    )


def _devices(document: Document) -> int | None:
    """Return the number of devices of a request's first cluster, None if it is not known."""
    from planner.catalog.devices import find_instance
    from planner.specs.cluster import ClusterSpec

    try:
        cluster = ClusterSpec.model_validate(document["cluster"])
    except (KeyError, ValueError):
        return None  # validation of the request says what is wrong
    if cluster.instance is None:
        return cluster.num_devices
    offer = find_instance(cluster.instance)
    return None if offer is None else offer.devices * cluster.nodes


def read_model(name: str) -> "ModelName | Published | Document":
    """Return a model of the catalog with what its name states, a repository, or a config.json.

    Raises:
        CliError: the file is not there or is not a JSON object, or no model has the name.
    """
    for path in (Path(name, "config.json"), Path(name)):
        if path.suffix == ".json" and is_file(path):
            return read_document(str(path))
    from planner.catalog.gguf_names import read_model_name
    from planner.specs.base import PlannerError

    try:
        return read_model_name(name)
    except PlannerError as error:
        if is_path(name):
            what = "a folder without a config.json" if Path(name).is_dir() else "not there"
            raise CliError(
                f"MODEL is {name!r}: this path is {what}; give a config.json, a folder with one, "
                "or a name of the catalog",
                code="not_found",
                field="model",
            ) from error
        if "/" in name:
            return read_repository(name, "MODEL")
        raise CliError(
            f"MODEL is {name!r}: {error}; `slipway models find TEXT` searches",
            code=error.code,
            field="model",
        ) from error


def is_path(name: str) -> bool:
    """Return whether a text is written as a path: not as a repository's or a model's name.

    >>> [is_path(each) for each in ("./a/b", "a/b/config.json", "hf.co/org/name", "ms://org/name")]
    [True, True, False, False]
    """
    from planner.catalog.model_names import ADDRESS

    if "://" in name or ADDRESS.fullmatch(name):
        return False
    is_written = name.startswith(("/", "./", "../", "~", ".\\")) or name.endswith((".json", "/"))
    return is_written or name.count("/") > 1 or Path(name).is_dir()


def by_option(error: CliError, options: Mapping[str, str]) -> CliError:
    """Return an error of a request that begins with the options that gave what it names.

    ``options`` are by the path of their field.

    >>> by_option(CliError("top: at most 100", field="top"), {"top": "--top"}).detail
    '--top: at most 100'
    """
    path = (error.field or "").replace("strategy.", "pins.")
    parts = {path, path.rpartition(".")[0] or path}  # others of the part may be named with it
    detail = error.detail.removeprefix(f"{path}: ")

    def is_named(field_path: str) -> bool:
        parent, _, name = field_path.rpartition(".")
        # A name that is a usual word counts where the sentence begins with it.
        begin = r"\b" if "_" in name else "^"
        of_part = parent in parts and re.search(rf"{begin}{name}\b", detail) is not None
        return of_part or field_path == path

    found = [option for field_path, option in options.items() if is_named(field_path)]
    words = f"{', '.join(found)}: {detail}" if found else error.detail
    return CliError(words, code=error.code, exit_code=error.exit_code, field=error.field)


def request_of(document: Document) -> "PlanRequest":
    """Return the validated request of a document.

    Raises:
        CliError: a field is unknown, or its value is out of range; the message names it.
    """
    from planner.api import parse_model
    from planner.specs.estimate import PlanRequest

    with planner_errors():
        return parse_model(PlanRequest, json.dumps(document, default=str))


def answer_of(request: "PlanRequest") -> "PlanAnswer":
    """Return the planner's answer; a slow search shows that it runs.

    Raises:
        CliError: a name is unknown, or a pin is impossible.
    """
    with progress("Searching strategies"):
        from planner.api import plan

        with planner_errors():
            return plan(request)

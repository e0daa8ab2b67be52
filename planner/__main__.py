"""The command line: ``python -m planner estimate|plan|export|import|models|devices|...``.

Commands import fitting and plotting code on demand, because scipy takes longer to load than an
estimate takes to compute.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from planner.api import estimate, inverse, parse_model, plan
from planner.catalog.devices import (
    Instance,
    get_device,
    get_instance,
    list_devices,
    list_instances,
)
from planner.catalog.models import get_entry, get_model, list_models
from planner.catalog.topologies import get_topology, list_topologies
from planner.cost.parameters import count_parameters
from planner.exports.registry import FORMATS, export, export_case
from planner.specs.base import BadRequestError, JsonObject, PlannerError
from planner.specs.estimate import (
    EstimateRequest,
    InverseRequest,
    PlanAnswer,
    PlannedStrategy,
    PlanRequest,
)
from planner.techniques.registry import TECHNIQUES, get, technique_row

OK, BAD_REQUEST, NOTHING = 0, 2, 3


def request_id(line: str) -> object:
    """Return the ``id`` of a possibly invalid request, for its error message."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document.get("id") if isinstance(document, dict) else None


def run_estimate(source: TextIO, sink: TextIO) -> int:
    """Answer JSON Lines with JSON Lines, in order; an invalid line gives an error line."""
    status = OK
    for line in source:
        if not line.strip():
            continue
        try:
            answer = estimate(parse_model(EstimateRequest, line)).model_dump_json(
                exclude={"terms"}
            )
        except PlannerError as error:
            status = NOTHING
            answer = json.dumps({"id": request_id(line), "error": error.to_json()})
        sink.write(answer + "\n")
        sink.flush()
    return status


def run_plan(source: TextIO, sink: TextIO) -> int:
    """Answer one plan request; the status states whether a plan was found."""
    answer = plan(parse_model(PlanRequest, source.read()))
    sink.write(answer.model_dump_json(indent=2) + "\n")
    return OK if answer.plans else NOTHING


def run_inverse(source: TextIO, sink: TextIO) -> int:
    """Answer one inverse question; the status states whether a limit was found."""
    answer = inverse(parse_model(InverseRequest, source.read()))
    sink.write(answer.model_dump_json(indent=2) + "\n")
    return OK if answer.limits else NOTHING


def run_export(
    source: TextIO, sink: TextIO, format_name: str, *, measure: bool = False, rank: int = 1
) -> int:
    """Export one plan as another tool's arguments, or as the script that measures it.

    The input is an answer of ``plan``, from which the plan of ``rank`` is used; or a request with
    the chosen plan as ``plan``; or a request alone.
    """
    request, planned = _request_and_plan(_json_object(source.read()), rank)
    exported = export(format_name, export_case(request, planned))
    sink.write(exported.measure if measure else exported.text)
    if FORMATS[format_name].comment is None:
        # A format without comments cannot contain its notes.
        print(*exported.notes, sep="\n", file=sys.stderr)
    return OK


def _request_and_plan(document: JsonObject, rank: int) -> tuple[PlanRequest, PlannedStrategy]:
    """Return the request of a document, and its plan to export."""
    if "plans" in document and "request" in document:
        answer = parse_model(PlanAnswer, json.dumps(document))
        if answer.request is not None:
            return answer.request, _plan_of_rank(answer, rank)
    chosen = document.pop("plan", None)
    request = parse_model(PlanRequest, json.dumps(document))
    if chosen is not None:
        return request, parse_model(PlannedStrategy, json.dumps(chosen))
    return request, _plan_of_rank(plan(request), rank)


def _plan_of_rank(answer: PlanAnswer, rank: int) -> PlannedStrategy:
    """Return the plan of a rank, counted from 1.

    Raises:
        BadRequestError: the answer has no plan of this rank.
    """
    if not answer.plans:
        raise BadRequestError("nothing fits this request: there is no plan to export", "request")
    if not 1 <= rank <= len(answer.plans):
        raise BadRequestError(f"rank is {rank}: it must be 1 to {len(answer.plans)}", "rank")
    return answer.plans[rank - 1]


def _json_object(text: str) -> JsonObject:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BadRequestError(f"standard input is not valid JSON: {error}", "request") from error
    if not isinstance(document, dict):
        raise BadRequestError("standard input must be one JSON object", "request")
    return document


def run_import(source: TextIO, sink: TextIO, path: str | None, *, as_json: bool) -> int:
    """Print the draft of a request that another tool's command line or file describes.

    The text is read from a file, or from standard input without one.
    """
    from planner.imports import import_table, read_paste

    try:
        text = Path(path).read_text("utf-8") if path else source.read()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{path or 'standard input'} cannot be read: {error}") from error
    imported = read_paste(text)
    written = imported.model_dump_json(indent=2) + "\n" if as_json else import_table(imported)
    sink.write(written)
    return OK


def model_row(model_id: str) -> JsonObject:
    """Return a catalog model with its parameter count and source."""
    spec, entry = get_model(model_id), get_entry(model_id)
    aliases = list(entry.aliases) if spec.id == entry.id else []
    shape = spec.model_dump(mode="json", exclude={"id"})
    return {"id": spec.id, "parameters": count_parameters(spec).total, "aliases": aliases, **shape}


def instance_row(instance: Instance) -> JsonObject:
    """Return a cloud offer, named by its devices and price."""
    name = f"{instance.devices} x {instance.gpu}, ${instance.price_usd_per_hour:g} an hour"
    return {**instance.model_dump(mode="json"), "name": name}


def rows_of(kind: str, key: str | None) -> list[JsonObject]:
    """Return one catalog entry, or all entries."""
    if kind == "models":
        return [model_row(name) for name in ([key] if key else [e.id for e in list_models()])]
    if kind == "devices":
        return [d.model_dump(mode="json") for d in ([get_device(key)] if key else list_devices())]
    if kind == "instances":
        return [instance_row(i) for i in ([get_instance(key)] if key else list_instances())]
    if kind == "topologies":
        found = [get_topology(key)] if key else list_topologies()
        return [each.model_dump(mode="json") for each in found]
    return [technique_row(t) for t in ([get(key)] if key else TECHNIQUES.values())]


def run_catalog(sink: TextIO, kind: str, key: str | None, *, as_json: bool) -> int:
    """Print a catalog, as JSON or as one line per entry: id, name, source."""
    rows = rows_of(kind, key)
    if as_json:
        sink.write(json.dumps(rows[0] if key else rows, indent=2, ensure_ascii=False) + "\n")
        return OK
    for row in rows:
        name = str(row.get("id") or row.get("key"))
        what = row.get("name") or row.get("title") or f"{row.get('parameters', 0):,} parameters"
        sink.write(f"{name:44} {what}  [{row.get('source') or 'no source'}]\n")
    return OK


def run_calibrate(sink: TextIO, what: str) -> int:
    """Fit the factors to the published measurements and print the factor file."""
    from planner.fitting.left_out import to_csv
    from planner.fitting.published_speeds import build_factors, predictions
    from planner.fitting.quality_fit import build_compression, build_quality
    from planner.fitting.serving_factors import build_priors, serving_cases

    if what == "left-out":
        sink.write(to_csv(predictions()[0]))
        return OK
    builders: dict[str, Callable[[], JsonObject]] = {
        "quality": build_quality,
        "compression": build_compression,
        "priors": lambda: build_priors(serving_cases()),
    }
    built = builders.get(what, build_factors)()
    sink.write(json.dumps(built, indent=1) + "\n")
    return OK


def run_accuracy_gate(sink: TextIO, *, prints_baseline: bool) -> int:
    """Print what is less accurate than was accepted; or the errors of today, to be accepted."""
    from planner.fitting.accuracy_gate import baseline, errors_today, to_json, worsened

    today = errors_today()
    if prints_baseline:
        sink.write(to_json(today))
        return OK
    words = worsened(baseline(), today)
    sink.writelines(f"{line}\n" for line in words or ["no class of rows is less accurate"])
    return NOTHING if words else OK


def run_accuracy(sink: TextIO, picture: str | None = None) -> int:
    """Compute and print the accuracy page, or one of its pictures."""
    from planner.fitting.accuracy import accuracy_page, pictures

    if picture is None:
        sink.write(accuracy_page())
        return OK
    drawn = pictures()
    if picture not in drawn:
        known = ", ".join(drawn)
        raise BadRequestError(f"no picture {picture!r}: choose among {known}", "picture")
    sink.write(drawn[picture])
    return OK


def run_quality(sink: TextIO) -> int:
    """Compute and print the quality page."""
    from planner.fitting.quality_fit import quality_page

    sink.write(quality_page())
    return OK


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m planner", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("estimate", help="JSON Lines in, JSON Lines out: cost fixed strategies")
    commands.add_parser("plan", help="one JSON request in, ranked plans out")
    commands.add_parser("inverse", help="the limit of one parameter: a request with its question")
    calibrating = commands.add_parser("calibrate", help="fit factors to published measurements")
    calibrating.add_argument(
        "what",
        nargs="?",
        choices=("speed", "quality", "compression", "left-out", "priors"),
        default="speed",
    )
    commands.add_parser("quality", help="what compression costs, as the docs page")
    showing = commands.add_parser("accuracy", help="predicted against published, as a docs page")
    shown = showing.add_mutually_exclusive_group()
    shown.add_argument("--picture", help="one picture of the page, as an SVG")
    shown.add_argument("--gate", action="store_true", help="what is less accurate than accepted")
    shown.add_argument("--baseline", action="store_true", help="the errors of today, to accept")
    exporter = commands.add_parser("export", help="a plan as another tool's arguments")
    exporter.add_argument("--format", required=True, choices=sorted(FORMATS))
    exporter.add_argument("--measure", action="store_true", help="the script that checks it")
    exporter.add_argument("--rank", type=int, default=1, help="which plan of an answer, from 1")
    importer = commands.add_parser("import", help="another tool's settings as a draft request")
    importer.add_argument("file", nargs="?", help="without one, standard input")
    importer.add_argument("--json", action="store_true")
    for kind in ("models", "devices", "instances", "topologies", "techniques"):
        listing = commands.add_parser(kind, help=f"list the {kind} with their sources")
        listing.add_argument("id", nargs="?")
        listing.add_argument("--json", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an invalid request prints one line."""
    chosen = arguments().parse_args(argv)
    commands: dict[str, Callable[[], int]] = {
        "estimate": lambda: run_estimate(sys.stdin, sys.stdout),
        "plan": lambda: run_plan(sys.stdin, sys.stdout),
        "inverse": lambda: run_inverse(sys.stdin, sys.stdout),
        "accuracy": lambda: (
            run_accuracy_gate(sys.stdout, prints_baseline=chosen.baseline)
            if chosen.gate or chosen.baseline
            else run_accuracy(sys.stdout, chosen.picture)
        ),
        "quality": lambda: run_quality(sys.stdout),
        "calibrate": lambda: run_calibrate(sys.stdout, chosen.what),
        "export": lambda: run_export(
            sys.stdin, sys.stdout, chosen.format, measure=chosen.measure, rank=chosen.rank
        ),
        "import": lambda: run_import(sys.stdin, sys.stdout, chosen.file, as_json=chosen.json),
    }
    try:
        if chosen.command in commands:
            return commands[chosen.command]()
        return run_catalog(sys.stdout, chosen.command, chosen.id, as_json=chosen.json)
    except PlannerError as error:
        print(error, file=sys.stderr)
        return BAD_REQUEST


if __name__ == "__main__":
    sys.exit(main())

"""Plans kept on this machine, and the commands that read them: ``export`` and ``explain``.

A plan is the planner's answer as JSON, in a file named by a digest of its content: the same
answer has the same id on every machine.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runners.cli.config import data_folder, write_private
from runners.cli.errors import CliError, ExitCode, planner_errors
from runners.cli.output import OutputOption, write_document

if TYPE_CHECKING:
    from planner.exports.export import Export, ExportCase
    from planner.specs.estimate import PlanAnswer

ID_DIGITS, LEAST_DIGITS = 10, 4
LAST = "last"  # names the plan that was kept last
ID = re.compile(rf"[0-9a-f]{{{LEAST_DIGITS},{ID_DIGITS}}}")
VOLATILE = {"id", "searched"}  # fields of an answer that differ between two equal searches


def plans_folder() -> Path:
    """Return the folder of kept plans."""
    return data_folder() / "plans"


def keep_plan(answer: "PlanAnswer") -> "PlanAnswer":
    """Return the answer with the id under which it is kept; its file is replaced as a whole.

    Raises:
        CliError: the folder cannot be written.
    """
    content = answer.model_dump_json(exclude=VOLATILE)
    plan_id = hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]
    kept = answer.model_copy(update={"id": plan_id})
    write_private(plans_folder() / f"{plan_id}.json", kept.model_dump_json())
    return kept


def load_plan(name: str) -> "PlanAnswer":
    """Return a kept plan by its id, the beginning of it or ``last``; or an answer from a file.

    Raises:
        CliError: nothing has this id, several begin with it, or a file holds no answer.
    """
    from planner.api import parse_model
    from planner.specs.base import PlannerError
    from planner.specs.estimate import PlanAnswer

    path = _kept_path(name)
    document = read_document(str(path) if path else name)
    if "plans" not in document or "request" not in document:
        raise CliError(
            f"{name} holds no answer of the planner with its request: make one with "
            "`slipway plan … -o json`",
            field="plan",
        )
    try:
        return parse_model(PlanAnswer, json.dumps(document))
    except PlannerError as error:
        raise CliError(
            f"{name} is not a plan of this release ({error}): plan again", field="plan"
        ) from error


def is_file(path: Path) -> bool:
    """Return whether a path is that of a file; a text that cannot be a path is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def read_text(source: str) -> str:
    """Return the text of a file, or of standard input for ``-``.

    Raises:
        CliError: it cannot be read.
    """
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CliError(f"{source} cannot be read: {reason}", code="not_read") from error


def read_document(source: str) -> dict[str, Any]:
    """Return a JSON or YAML object from a file, or from standard input for ``-``.

    Raises:
        CliError: it cannot be read, or is not one object.
    """
    return parse_document(read_text(source), source)


def parse_document(text: str, source: str) -> dict[str, Any]:
    """Return the JSON or YAML object of a text that was read from a source.

    Raises:
        CliError: it is not one object.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        import yaml

        try:
            document = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise CliError(f"{source} is neither JSON nor YAML: {error}") from error
    if not isinstance(document, dict):
        raise CliError(f"{source} holds {type(document).__name__}, but must hold one object")
    return document


def _kept_path(name: str) -> Path | None:
    """Return the file of a kept plan, or None if the name is that of a file."""
    if name == "-" or is_file(Path(name)):
        return None
    if name == LAST and (kept := complete_plan("")):
        return plans_folder() / f"{kept[0]}.json"
    if ID.fullmatch(name):
        found = sorted(plans_folder().glob(f"{name}*.json"))
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(path.stem for path in found)
            raise CliError(f"plan is {name!r}: several begin with it: {ids}", field="plan")
    raise CliError(
        f"plan is {name!r}: no plan with this id is kept in {plans_folder()}, and it is no file; "
        "`slipway plan` prints the id of each plan",
        code="not_found",
        exit_code=ExitCode.FAILED,
        field="plan",
    )


def complete_plan(incomplete: str) -> list[str]:
    """Return the ids of kept plans, the newest first."""
    paths = plans_folder().glob(f"{incomplete}*.json")
    return [path.stem for path in sorted(paths, key=lambda path: -path.stat().st_mtime)]


def complete_format(incomplete: str) -> list[str]:
    """Return the export formats that a text begins."""
    from planner.exports.registry import FORMATS

    return [key for key in FORMATS if key.startswith(incomplete)]


PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN",
        help="The id of a kept plan, last for the newest, a file of `plan -o json`, or - for "
        "standard input.",
        autocompletion=complete_plan,
    ),
]
RankOption = Annotated[int, typer.Option("--rank", help="Which of its plans, from 1.")]


def export(
    plan: Annotated[str | None, PlanArgument.__metadata__[0]] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="vllm, sglang, tensorrt_llm, llama.cpp, torchrun, accelerate, deepspeed, "
            "torchtitan, megatron, slurm, kubernetes or compose.",
            autocompletion=complete_format,
        ),
    ] = None,
    *,
    rank: RankOption = 1,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Write the script that checks the plan's figures instead."),
    ] = False,
    listed: Annotated[
        bool,
        typer.Option("--list", help="List the formats, of a PLAN those that can express it."),
    ] = False,
) -> None:
    """Write a plan as another tool's arguments or files."""
    if listed:
        _show_formats(plan, rank)
        return
    if plan is None or to is None:
        name = "PLAN" if plan is None else "--to"
        raise CliError(
            f"{name} is missing: `slipway export PLAN --to FORMAT`; --list lists the formats",
            field=name,
        )
    answer = load_plan(plan)
    exporting = _exported(answer, to, rank)
    typer.echo(exporting.measure if measure else exporting.text, nl=False)
    from planner.exports.registry import FORMATS

    if FORMATS[exporting.key].comment is None:  # a format without comments cannot hold its notes
        for note in exporting.notes:
            typer.echo(note, err=True)


def _show_formats(plan: str | None, rank: int) -> None:
    """Print the export formats with the tool of each: all, or those that can express a plan."""
    from planner.exports.registry import FORMATS, possible_formats
    from runners.cli.output import show, table

    keys: Iterable[str] = FORMATS
    if plan is not None:
        answer = load_plan(plan)
        keys = possible_formats(_case(answer, rank))
    show(table(("FORMAT", "TOOL"), [(key, FORMATS[key].title) for key in keys], fixed=(0,)))


def _exported(answer: "PlanAnswer", to: str, rank: int) -> "Export":
    from planner.exports.registry import export as exported

    with planner_errors():
        return exported(format_key(to), _case(answer, rank))


def _case(answer: "PlanAnswer", rank: int) -> "ExportCase":
    """Return one of the plans of an answer, as exports take it.

    Raises:
        CliError: the answer has no such plan.
    """
    from planner.exports.registry import export_case
    from runners.cli.report import nothing_fits

    if not answer.plans or answer.request is None:
        raise nothing_fits(answer)
    if not 1 <= rank <= len(answer.plans):
        raise CliError(
            f"--rank is {rank}: this answer has plans 1 to {len(answer.plans)}", field="--rank"
        )
    with planner_errors():
        return export_case(answer.request, answer.plans[rank - 1])


def format_key(name: str) -> str:
    """Return the planner's key of an export format: ``llama.cpp`` is ``llama_cpp``."""
    return {"k8s": "kubernetes"}.get(name.lower(), re.sub(r"[^a-z0-9]+", "_", name.lower()))


def explain(plan: PlanArgument, output: OutputOption = "table") -> None:
    """Show why each other strategy lost: what it needs, and the limit that it misses."""
    answer = load_plan(plan)
    if output != "table":
        write_document(answer.model_dump_json(), output)
        return
    from runners.cli.report import print_ledger

    print_ledger(answer)

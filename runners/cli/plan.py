"""``slipway plan GOAL MODEL``: the command of each goal, and of another tool's text."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typer._click import Context
from typer._click.exceptions import NoSuchOption

from runners.cli.errors import CliError, planner_errors
from runners.cli.groups import LazyGroup, group
from runners.cli.option_fields import give_options
from runners.cli.output import OutputOption, write_document
from runners.cli.plan_options import GOALS, field_of, options_of
from runners.cli.plan_request import (
    Document,
    Requested,
    answer_of,
    build_document,
    by_option,
    request_of,
)
from runners.cli.plans import keep_plan, parse_document, read_text

if TYPE_CHECKING:
    from planner.specs.estimate import PlanAnswer


class PlanGroup(LazyGroup):
    """The goals; an option of a goal that stands without one is refused with the way out."""

    helps: ClassVar = {name: goal.words for name, goal in GOALS.items()}

    def load_command(self, name: str) -> Callable[..., None]:
        """Return the command of a goal, with its options."""
        return _plan_command(name)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the options before the goal.

        Raises:
            NoSuchOption: an option is unknown here.
        """
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            goals = [
                name
                for name in GOALS
                if any(error.option_name in each.names for each in options_of(name))
            ]
            if goals:
                error.message += (
                    f". It needs a GOAL: `slipway plan GOAL --from FILE {error.option_name} …`, "
                    f"where GOAL is {' or '.join(goals)}"
                )
            raise


app = group("Find the best plan for a goal, a model and hardware; no server is needed.", PlanGroup)


def complete_model(incomplete: str) -> list[str]:
    """Return the catalog's models that a name begins, with or without their owner."""
    from planner.catalog.models import list_models

    names = [name for entry in list_models() for name in (entry.id, entry.id.rpartition("/")[2])]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_hardware(incomplete: str) -> list[str]:
    """Return the catalog's devices that a text begins, else the server's hosts; a count stays."""
    from planner.catalog.devices import devices_of_every_size
    from planner.catalog.hardware_names import COUNT_FIRST

    match = COUNT_FIRST.fullmatch(incomplete)
    name = match[2] if match else incomplete
    before = incomplete.removesuffix(name)
    found = [each.id for each in devices_of_every_size() if each.id.startswith(name.lower())]
    names = [*(f"{before}{each}" for each in found), *(["this"] if incomplete in "this" else [])]
    if names:
        return names
    from runners.cli.server import complete_host

    return [name for name, _ in complete_host(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A catalog id (llama-3.1-8b), or the path of a config.json.",
        autocompletion=complete_model,
    ),
]
HardwareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        "--hardware",
        metavar="HARDWARE",
        help="8xh200, 2x8xh100 (nodes x devices), a cloud offer, a host or pool of the server, or "
        "this (machine), which is the default. Repeat it to choose among several.",
        autocompletion=complete_hardware,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Any field of the request, by its path."),
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="A request or an answer in JSON or YAML, or another tool's command line or file; "
        "- reads.",
    ),
]


PasteOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Without a GOAL: a command line or a file of another tool, such as vLLM, SGLang, "
        "llama.cpp, torchrun, Axolotl or LLaMA-Factory, or a config.json; - reads.",
    ),
]


@app.callback(invoke_without_command=True)
def plan_from(
    context: typer.Context,
    from_: PasteOption = None,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    output: OutputOption = "table",
) -> None:
    """Find the best plan for a goal, a model and hardware; no server is needed."""
    if context.invoked_subcommand is not None:
        return
    if from_ is None:
        raise CliError(f"GOAL is missing: one of {', '.join(GOALS)}, or --from FILE", field="GOAL")
    base, words = _imported(read_text(from_), hardware or ())
    workload = base.get("workload", {})
    goal = workload.get("kind", "serve")
    if goal == "train" and workload.get("method", "full") != "pretrain":
        goal = "tune"
    _plan_documents(
        partial(build_document, goal, None, {}, settings=set_ or (), base=base, is_draft=True),
        hardware or (),
        output,
        words,
    )


def _imported(text: str, hardware: Sequence[str] = ()) -> tuple[Document, tuple[str, ...]]:
    """Return the draft request of another tool's text, and what it plans in place of the text.

    A table of what became of each setting is printed. Hardware that is named is no longer missing.

    Raises:
        CliError: the text is of no tool that is known.
    """
    from planner.imports import import_table, read_paste

    with planner_errors():
        imported = read_paste(text)
    missing = tuple(
        each for each in imported.missing if not (hardware and each.startswith("cluster."))
    )
    typer.echo(import_table(imported.model_copy(update={"missing": missing})), err=True)
    base: Document = imported.model_dump(mode="json")["request"]
    if imported.goal:
        base.setdefault("workload", {}).setdefault("kind", imported.goal)
    return base, imported.assumptions


def _plan_command(goal_name: str) -> Callable[..., None]:
    """Return the command of a goal: its own options are a parameter each."""

    def command(
        *,
        model: ModelArgument = None,
        hardware: HardwareOption = None,
        set_: SetOption = None,
        from_: FromOption = None,
        output: OutputOption = "table",
        **texts: str | None,
    ) -> None:
        on = hardware or ()
        base, is_draft, words = _read_base(from_, on) if from_ else (None, False, ())
        build = partial(
            build_document,
            goal_name,
            model,
            {key: text for key, text in texts.items() if text is not None},
            settings=set_ or (),
            base=base,
            is_draft=is_draft,
        )
        _plan_documents(build, on, output, words)

    goal, options = GOALS[goal_name], options_of(goal_name)
    command.__doc__ = goal.words
    give_options(command, {each: field_of(goal_name, each) for each in options}, goal.defaults)
    return command


# Keys of a request or an answer, of which another tool's file has none or the model alone.
OWN_KEYS = frozenset({"workload", "plans", "cluster", "pins", "constraints", "objective"})


def _read_base(
    source: str, hardware: Sequence[str]
) -> tuple[Document | None, bool, tuple[str, ...]]:
    """Return the request of a file, whether it is a draft of another tool's text, and its words.

    Raises:
        CliError: it cannot be read, or is neither a request nor of a tool that is known.
    """
    text = read_text(source)
    try:
        base = parse_document(text, source)
    except CliError as error:
        try:
            draft, words = _imported(text, hardware)
        except CliError as other:
            raise CliError(
                f"{error}; as another tool's text: {other}", field=other.field
            ) from other
        return draft, True, words
    if "plans" in base:  # an answer holds its request
        return base.get("request"), False, ()
    if OWN_KEYS & base.keys() or set(base) <= {"model", "engine"}:
        return base, False, ()
    draft, words = _imported(text, hardware)
    return draft, True, words


def _with_words(answer: "PlanAnswer", words: Sequence[str]) -> "PlanAnswer":
    """Return an answer whose plans say what they leave out of another tool's text."""
    said = tuple(f"not as in the text: {each}" for each in words)
    plans = [
        tuple(each.model_copy(update={"warnings": (*each.warnings, *said)}) for each in listed)
        for listed in (answer.plans, answer.pareto)
    ]
    return answer.model_copy(update={"plans": plans[0], "pareto": plans[1]})


def _plan_documents(
    build: Callable[..., Requested],
    hardware: Sequence[str],
    output: str,
    words: Sequence[str] = (),
) -> None:
    """Plan the request that ``build`` makes for the hardware, keep the answer, and print it.

    ``words`` are what the plans leave out of the text that the request was made of. Hardware that
    no catalog knows is looked up among the server's hosts and pools.

    Raises:
        CliError: the request is wrong, or nothing fits: then after the reasons are printed.
    """
    try:
        requested = build(hardware=hardware)
    except CliError as error:
        if (error.code, error.field) != ("unknown_device", "--on"):
            raise
        from runners.cli.launch import plan_on_server

        requested = build(has_cluster=False)
        answer = plan_on_server(requested.document, hardware, unknown=error)
    else:
        try:
            answer = answer_of(request_of(requested.document))
        except CliError as error:
            raise by_option(error, requested.options) from error
    answer = keep_plan(_with_words(answer, words))
    if output == "table":
        from runners.cli.report import print_plan

        print_plan(answer, requested.assumed)
    else:
        write_document(answer.model_dump_json(), output)
    if not answer.plans:
        from runners.cli.report import nothing_fits

        raise nothing_fits(answer)

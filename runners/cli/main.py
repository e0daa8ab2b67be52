"""The program ``slipway``: its commands by name, and errors as exit codes.

A command's module is imported when the command runs, so that ``slipway --help`` loads neither the
planner nor rich.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import typer
from typer._click.exceptions import ClickException
from typer._completion_classes import completion_init
from typer.main import get_command

from runners.cli.errors import CliError, ExitCode
from runners.cli.groups import LazyGroup


class LazyCommand(NamedTuple):
    """A command: its module, the function or Typer of it, and one line of help."""

    module: str
    attribute: str
    words: str


COMMANDS = {
    "plan": LazyCommand("plan", "app", "Find the best plan for a goal, a model and hardware."),
    "explain": LazyCommand("plans", "explain", "Show why each other strategy lost."),
    "export": LazyCommand("plans", "export", "Write a plan as another tool's arguments."),
    "models": LazyCommand(
        "catalog", "models", "List or find models of the catalog, add one of the team."
    ),
    "devices": LazyCommand("catalog", "devices", "List or find devices of the catalog."),
    "bench": LazyCommand("bench", "bench", "Load-test an OpenAI-compatible endpoint."),
    "login": LazyCommand("account", "login", "Keep a server and an access token for it."),
    "logout": LazyCommand("account", "logout", "Forget the server and the token."),
    "whoami": LazyCommand("account", "whoami", "Show who calls, and with which scope."),
    "launch": LazyCommand("launch", "launch", "Launch a plan or a job.yaml, and follow it."),
    "verify": LazyCommand("launch", "verify", "Run a plan, and compare it with its prediction."),
    "plans": LazyCommand("launch", "plans", "List, show, print and delete the server's plans."),
    "tune": LazyCommand("tunings", "tune", "Measure a plan's best strategies on its host."),
    "ps": LazyCommand("jobs", "ps", "List jobs."),
    "get": LazyCommand("jobs", "get", "Show a job with its figures."),
    "logs": LazyCommand("jobs", "logs", "Print or follow a job's log."),
    "events": LazyCommand("jobs", "events", "List what a job's supervisor reported."),
    "metrics": LazyCommand("jobs", "metrics", "Print a job's figures or metrics."),
    "stop": LazyCommand("jobs", "stop", "Stop a job."),
    "resume": LazyCommand("jobs", "resume", "Go on from the checkpoint of an ended job."),
    "rerun": LazyCommand("jobs", "rerun", "Run a job again from the start."),
    "clone": LazyCommand("jobs", "clone", "Make a draft plan of a job."),
    "compare": LazyCommand("jobs", "compare", "Put jobs side by side."),
    "artefacts": LazyCommand("jobs", "artefacts", "List or download what a job made."),
    "files": LazyCommand("jobs", "files", "List or delete what a job keeps on its hosts."),
    "open": LazyCommand("jobs", "open_page", "Open a job's page in the browser."),
    "delete": LazyCommand("jobs", "delete", "Delete an ended job from the history."),
    "hosts": LazyCommand("hosts", "hosts", "List, add, check, label, cordon and drain hosts."),
    "queue": LazyCommand("hosts", "queue", "List and reorder waiting jobs."),
    "workflows": LazyCommand("workflows", "workflows", "List, follow, stop and resume workflows."),
    "tunings": LazyCommand("tunings", "tunings", "List, follow, stop and delete tunings."),
    "deployments": LazyCommand(
        "deployments", "deployments", "Keep models under names, wake them, see their usage."
    ),
    "servers": LazyCommand("servers", "servers", "Watch servers that somebody else started."),
    "observed": LazyCommand(
        "observed_jobs", "observed", "Observe jobs that somebody else gave to a scheduler."
    ),
    "keys": LazyCommand("deployments", "keys", "List, make and revoke clients' keys."),
    "approvals": LazyCommand("approvals", "approvals", "List and withdraw requested launches."),
    "data": LazyCommand("data", "data", "List, upload and delete training data."),
    "tokens": LazyCommand("account", "tokens", "List, make and revoke access tokens."),
    "secrets": LazyCommand("account", "secrets", "List, store and delete secrets."),
    "mcp": LazyCommand("mcp", "mcp", "Serve the Model Context Protocol to an agent."),
    "api": LazyCommand("raw", "api", "Call any operation of the API."),
    "doctor": LazyCommand("doctor", "doctor", "Check this machine and the configuration."),
    "completion": LazyCommand("completion", "completion", "Print a shell's completion script."),
}
COLLECTION_THRESHOLD = 100_000  # objects
DEBUG = "SLIPWAY_DEBUG"  # a variable that prints the traceback of an unexpected error
ERROR_FILE = "last-error.txt"
MOST_SAID = 200  # characters of an unexpected error's own text


class Commands(LazyGroup):
    """The commands of ``slipway``."""

    helps: ClassVar = {name: lazy.words for name, lazy in COMMANDS.items()}

    def load_command(self, name: str) -> object:
        """Return the function or the Typer of a command; its module is imported."""
        lazy = COMMANDS[name]
        return getattr(importlib.import_module(f"runners.cli.{lazy.module}"), lazy.attribute)


app = typer.Typer(
    cls=Commands,
    add_completion=False,  # a command of its own
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(*, is_given: bool) -> None:
    if is_given:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"slipway {version('slipway')}")
        except PackageNotFoundError:
            typer.echo("slipway, from a checkout that is not installed")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
]


@app.callback()
def slipway(*, version: VersionOption = False) -> None:
    """Plan, run and measure open language models on the hardware that you have.

    Exit status: 0 done, 1 failed, 2 wrong usage, 3 nothing fits, 4 denied.
    """


def run() -> int:
    """Run the command in argv; the entry point of the installed program."""
    from runners.shared.environment import escape_unknown_characters

    escape_unknown_characters()
    # It would read the metadata of every installed package for plugins that nothing here uses.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Hundreds of collections while modules are loaded, which free nothing, took 0.07 s of a plan.
    gc.set_threshold(COLLECTION_THRESHOLD)
    return main(sys.argv[1:])


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; an error is one sentence on stderr."""
    completion_init()  # answers shells that ask for completions
    try:
        status = get_command(app)(list(arguments), prog_name="slipway", standalone_mode=False)
    except CliError as error:
        return _report(error, as_json=is_json(arguments))
    except ClickException as error:
        if not is_json(arguments):
            error.show()
            return error.exit_code
        return _report(CliError(error.format_message(), code="usage"), as_json=True)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 (a fault of the program, of any kind)
        return _report(_unexpected(error), as_json=is_json(arguments))
    return int(status or 0)


def _unexpected(error: Exception) -> CliError:
    """Return the error for a fault of the program; its traceback is kept in a file.

    Arguments are left out of the file: they may hold a token or a secret.
    """
    import platform
    import traceback

    from runners.cli.config import data_folder, write_private

    details = "".join(traceback.format_exception(error))
    if os.environ.get(DEBUG):
        typer.echo(details, err=True, nl=False)
        where = "its traceback is above"
    else:
        try:
            path = data_folder() / ERROR_FILE
            write_private(path, f"Python {platform.python_version()}\n{details}")
            where = f"its traceback is in {path}"
        except CliError:
            where = f"set {DEBUG}=1 to print its traceback"
    said = f": {error}".splitlines()[0][:MOST_SAID] if str(error) else ""
    return CliError(
        f"a fault of Slipway, not of your input ({type(error).__name__}{said}); {where}; please "
        "report it with the command",
        code="unexpected",
        exit_code=ExitCode.FAILED,
    )


def is_json(arguments: Sequence[str]) -> bool:
    """Return whether the output is to be JSON, also if the arguments cannot be parsed."""
    joined = " ".join(arguments)
    return any(f"{name}json" in joined for name in ("-o ", "-o", "--output ", "--output="))


def _report(error: CliError, *, as_json: bool) -> int:
    text = json.dumps(error.to_json(), ensure_ascii=False) if as_json else f"slipway: {error}"
    typer.echo(text, err=True)
    return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(run())

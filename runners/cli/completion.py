"""``slipway completion``: the script that completes commands, names and options in a shell."""

from typing import Annotated, Literal

import typer
from typer._completion_shared import get_completion_script, install

COMPLETE_VARIABLE = "_SLIPWAY_COMPLETE"
ShellArgument = Annotated[
    Literal["bash", "zsh", "fish"],
    typer.Argument(metavar="SHELL", help="bash, zsh or fish."),
]
InstallOption = Annotated[
    bool, typer.Option("--install", help="Add it to the start files of the shell instead.")
]


def completion(shell: ShellArgument = "bash", *, into_shell: InstallOption = False) -> None:
    """Print a completion script: `source <(slipway completion bash)`."""
    if into_shell:
        _, path = install(shell, "slipway", COMPLETE_VARIABLE)
        typer.echo(f"Completion is in {path}; open a new shell to have it.")
        return
    typer.echo(
        get_completion_script(prog_name="slipway", complete_var=COMPLETE_VARIABLE, shell=shell)
    )

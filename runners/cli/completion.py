"""``slipway completion``: the script that completes commands, names and options in a shell."""

from typing import Annotated, Literal

import typer

ShellArgument = Annotated[
    Literal["bash", "zsh", "fish"],
    typer.Argument(metavar="SHELL", help="bash, zsh or fish."),
]


def completion(shell: ShellArgument = "bash") -> None:
    """Print a completion script: `source <(slipway completion bash)`."""
    from typer._completion_shared import get_completion_script

    script = get_completion_script(
        prog_name="slipway", complete_var="_SLIPWAY_COMPLETE", shell=shell
    )
    typer.echo(script)

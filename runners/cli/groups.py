"""Groups of commands; those of a lazy one are known by name and help, and made when used."""

from collections.abc import Mapping
from typing import ClassVar

import typer
from typer._click import Command, Context
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


def group(words: str, cls: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """Return a group without commands, whose help shows if none is named."""
    return typer.Typer(
        cls=cls, help=words, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )


class LazyGroup(TyperGroup):
    """A group whose commands have no parameters until one of them is named."""

    helps: ClassVar[Mapping[str, str]]  # of each command, by its name

    def __init__(self, **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type] # as Typer gives them
        for name, words in self.helps.items():
            self.add_command(TyperCommand(name, help=words, rich_markup_mode=None))

    def load_command(self, name: str) -> object:
        """Return the function or the Typer of a command, which may import what it needs."""
        raise NotImplementedError

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        """Return the command that arguments name, with its own parameters and commands."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_of(name, self.load_command(name)), rest


def command_of(name: str, loaded: object) -> Command:
    """Return the command of a function or a Typer."""
    if not isinstance(loaded, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name)(loaded)  # type: ignore[type-var] # a function, as its group knows
        loaded = alone
    command = get_command(loaded)
    command.name = name
    return command

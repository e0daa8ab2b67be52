"""What the commands of workflows and of tunings have in common: to follow, stop and delete one."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import typer

from runners.cli.errors import CliError, ExitCode
from runners.cli.server import confirm, server

if TYPE_CHECKING:
    from runners.client.generated import Slipway

POLL_SECONDS = 3.0


class SeriesReply(Protocol):
    """A series as the server replies it."""

    @property
    def id(self) -> str:
        """Return its id."""

    @property
    def name(self) -> str:
        """Return its name, of a tuning that of its plan."""

    @property
    def state(self) -> str:
        """Return its state."""


R = TypeVar("R", bound=SeriesReply)


class Series(ABC, Generic[R]):
    """The calls and the words of one kind of series."""

    NOUN: ClassVar[str]  # its plural is the group of commands

    @abstractmethod
    def get(self, client: "Slipway", series_id: str) -> R:
        """Return a series."""

    @abstractmethod
    def stop_call(self, client: "Slipway", series_id: str) -> object:
        """Let the server stop a series."""

    @abstractmethod
    def delete_call(self, client: "Slipway", series_id: str) -> object:
        """Let the server delete a series."""

    @abstractmethod
    def failure(self, series: R) -> str:
        """Return why a failed series failed, and what can be done."""

    def title(self, series: R) -> str:
        """Return what a question calls it."""
        return f"the {self.NOUN} {series.name} ({series.id})"

    def is_over(self, series: R) -> bool:
        """Return whether following it ends."""
        return series.state != "running"

    def follow(self, client: "Slipway", series: R, report: Callable[[R], None]) -> R:
        """Report each state of a series until it is over, and return the last one.

        Raises:
            Exit: the command was interrupted.
        """
        try:
            while True:
                report(series)
                if self.is_over(series):
                    return series
                time.sleep(POLL_SECONDS)
                series = self.get(client, series.id)
        except KeyboardInterrupt:
            command = f"slipway {self.NOUN}s"
            typer.echo(
                f"\nThe {self.NOUN} goes on. `{command} get {series.id}` shows it, `{command} "
                f"stop {series.id}` stops it.",
                err=True,
            )
            raise typer.Exit(ExitCode.INTERRUPTED) from None

    def check(self, series: R) -> None:
        """Raise if a series that is over has failed.

        Raises:
            CliError: the series failed.
        """
        if series.state == "failed":
            sentence = f"the {self.NOUN} failed. {self.failure(series)}"
            raise CliError(sentence.strip(), code="failed", exit_code=ExitCode.FAILED)

    def stop(self, series_id: str, *, yes: bool) -> None:
        """Ask, and stop a series."""
        with server() as client:
            found = self.get(client, series_id)
            confirm(f"Stop {self.title(found)}?", yes=yes)
            self.stop_call(client, found.id)
        typer.echo(f"Stopped {found.id}.")

    def delete(self, series_id: str, *, yes: bool) -> None:
        """Ask, and take a series out of the list."""
        with server() as client:
            found = self.get(client, series_id)
            confirm(f"Delete {self.title(found)}, {found.state}, from the list?", yes=yes)
            self.delete_call(client, found.id)
        typer.echo(f"Deleted {found.id}.")

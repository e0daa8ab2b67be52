"""``manage.py prune``: show the size of old data, and delete it."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.core import display
from webapp.core.problems import Problem
from webapp.operations.ticker import Lifetimes, heaps


class Command(BaseCommand):
    """Show or delete old data."""

    help = "Show what is older than its lifetime with its bytes (--dry-run), or delete it (--yes)."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the action and the retention days of each kind of data."""
        action = parser.add_mutually_exclusive_group(required=True)
        action.add_argument(
            "--dry-run", action="store_true", help="only show what would be deleted"
        )
        action.add_argument(
            "--yes", action="store_true", help="delete what is older than its lifetime"
        )
        for name, days in Lifetimes()._asdict().items():
            words = f"days after which {name} are old (default: {days})"
            parser.add_argument(f"--{name}-days", type=int, default=days, help=words)

    def handle(self, *_args: object, **options: Any) -> None:
        """Print a line per kind of data; delete it with ``--yes``."""
        lifetimes = Lifetimes(**{name: options[f"{name}_days"] for name in Lifetimes._fields})
        for name, days in lifetimes._asdict().items():
            if days < 1:
                raise CommandError(f"--{name}-days is {days}; the least is 1.")
        old_heaps = heaps(lifetimes)
        for heap in old_heaps:
            self.stdout.write(line(f"{heap.num_things:,}", heap.num_bytes, heap.name))
        self.stdout.write(
            line("", sum(heap.num_bytes for heap in old_heaps), "in total (estimated)")
        )
        if options["yes"]:
            self._remove([heap for heap in old_heaps if heap.num_things])

    def _remove(self, old_heaps: list[Any]) -> None:
        try:
            for heap in old_heaps:
                self.stdout.write(f"deleted {heap.remove():,} of {heap.name}")
        except Problem as problem:
            raise CommandError(problem.detail) from problem
        self.stdout.write("The database keeps the freed room for its next rows.")


def line(count: str, num_bytes: int, words: str) -> str:
    """Return a row of the table: count, size, kind."""
    return f"{count:>12}  {display.memory(num_bytes)!s:>10}  {words}"

"""``manage.py prune``: say what has outlived its use and how much room it takes, and delete it."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.core import units
from webapp.core.problems import Problem
from webapp.core.pruning import Lifetimes, heaps


class Command(BaseCommand):
    """Delete what is old."""

    help = "Show what is older than its lifetime with its bytes (--dry-run), or delete it (--yes)."

    def add_arguments(self, parser: CommandParser) -> None:
        """Take what to do and after how many days each kind is old."""
        doing = parser.add_mutually_exclusive_group(required=True)
        doing.add_argument("--dry-run", action="store_true", help="only say what would go")
        doing.add_argument("--yes", action="store_true", help="delete it")
        for name, days in Lifetimes()._asdict().items():
            words = f"days after which {name} are old (default: {days})"
            parser.add_argument(f"--{name}-days", type=int, default=days, help=words)

    def handle(self, *_args: object, **options: Any) -> None:
        """Print a line per kind."""
        lifetimes = Lifetimes(**{name: options[f"{name}_days"] for name in Lifetimes._fields})
        for name, days in lifetimes._asdict().items():
            if days < 1:
                raise CommandError(f"--{name}-days is {days}: at least a day is kept.")
        found = heaps(lifetimes)
        for heap in found:
            self.stdout.write(line(f"{heap.num_things:,}", heap.num_bytes, heap.name))
        self.stdout.write(line("", sum(heap.num_bytes for heap in found), "about, in all"))
        if options["yes"]:
            self._remove([heap for heap in found if heap.num_things])

    def _remove(self, found: list[Any]) -> None:
        try:
            for heap in found:
                self.stdout.write(f"deleted {heap.remove():,} of {heap.name}")
        except Problem as problem:
            raise CommandError(problem.detail) from problem
        self.stdout.write("The database keeps the freed room for its next rows.")


def line(count: str, num_bytes: int, words: str) -> str:
    """Return a row of the table: how many, how much, what."""
    return f"{count:>12}  {units.memory(num_bytes)!s:>10}  {words}"

"""``manage.py audit verify`` and ``audit head``."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.audit.chain import events_seal, findings, head, num_unsealed


class Command(BaseCommand):
    """Verify that the history is unchanged."""

    help = "Verify the chain over the history, or print its head to keep it elsewhere."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the action and the expected head."""
        parser.add_argument("what", choices=["verify", "head"])
        parser.add_argument("--expect", default="", help="a head that was printed earlier")

    def handle(self, *_args: object, **options: Any) -> None:
        """Print every finding; fail if there is one."""
        if options["what"] == "head":
            while events_seal():
                pass
            self.stdout.write(head())
            return
        sentences = list(findings(options["expect"]))
        for sentence in sentences:
            self.stderr.write(sentence)
        if sentences:
            raise CommandError(
                f"The history does not agree with its chain: {len(sentences)} findings."
            )
        self.stdout.write(f"The chain holds up to {head()}; {num_unsealed()} events wait for it.")

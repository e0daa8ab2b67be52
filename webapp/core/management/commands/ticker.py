"""``manage.py ticker``: everything that happens because time passes."""

from django.core.management.base import BaseCommand

from runners.timing import scaled
from webapp.core.loop import Stopper, run_loop
from webapp.core.ticker import Ticker

TICK_SECONDS = scaled(1.0, least=0.1)


class Command(BaseCommand):
    """One loop; each duty has its own period."""

    help = "Run the periodic duties: contact, time-outs, allocation, metric chunks."

    def handle(self, *_args: object, **_options: object) -> None:
        """Run until TERM or INT."""
        stop = Stopper()
        stop.listen()
        run_loop("ticker", Ticker().step, TICK_SECONDS, stop)

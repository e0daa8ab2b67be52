"""``manage.py ticker``: run the periodic tasks."""

import threading

from django.core.management.base import BaseCommand

from runners.shared.timing import scale_duration
from webapp.operations.ticker import PROMPT, UPKEEP, Stopper, Ticker, all_duties, run_loop

TICK_SECONDS = scale_duration(1.0, least=0.1)


class Command(BaseCommand):
    """Run two loops, one per group of tasks; each task has its own period."""

    requires_system_checks = ()  # they load every page, which is not needed here
    help = "Run the periodic duties: contact, time-outs, allocation, metric chunks."

    def handle(self, *_args: object, **_options: object) -> None:
        """Run until SIGTERM or SIGINT."""
        stop = Stopper()
        stop.listen()
        tickers = {
            group: Ticker([duty for duty in all_duties() if duty.group == group])
            for group in (PROMPT, UPKEEP)
        }
        upkeep = threading.Thread(
            target=run_loop, args=(UPKEEP, tickers[UPKEEP].step, TICK_SECONDS, stop), name=UPKEEP
        )
        upkeep.start()
        run_loop("ticker", tickers[PROMPT].step, TICK_SECONDS, stop)
        upkeep.join()

"""``manage.py ticker``: run the periodic tasks."""

import threading

from django.core.management.base import BaseCommand

from runners.shared.timing import scale_duration
from webapp.operations.ticker import GROUPS, Stopper, Ticker, all_duties, run_loop

TICK_SECONDS = scale_duration(1.0, least=0.1)


class Command(BaseCommand):
    """Run one loop per group of tasks; each task has its own period."""

    requires_system_checks = ()  # they load every page, which is not needed here
    help = "Run the periodic duties: contact, time-outs, allocation, metric chunks."

    def handle(self, *_args: object, **_options: object) -> None:
        """Run until SIGTERM or SIGINT."""
        stop = Stopper()
        stop.listen()
        duties = all_duties()
        prompt, *others = (
            (group, Ticker([duty for duty in duties if duty.group == group]).step)
            for group in GROUPS
        )
        threads = [
            threading.Thread(target=run_loop, args=(*each, TICK_SECONDS, stop), name=each[0])
            for each in others
        ]
        for thread in threads:
            thread.start()
        run_loop(*prompt, TICK_SECONDS, stop)
        for thread in threads:
            thread.join()

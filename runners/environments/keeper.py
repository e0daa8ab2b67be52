"""Carries out an operator's orders for this host's environments, one at a time.

A build is a separate process. It may outlive the agent; a killed build is restarted while the
server repeats the order.
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from runners.config import HostDir
from runners.environment_messages import EnvironmentOrder, EnvironmentState
from runners.environments.store import LAST, EnvironmentBusyError, Store
from runners.supervision import record

PROJECT = Path(__file__).resolve().parents[2]

log = logging.getLogger(__name__)


class Keeper:
    """Manages the environments of one host."""

    def __init__(self, host_dir: HostDir) -> None:
        self.store = Store(host_dir)
        self._host_dir = host_dir
        self._child: subprocess.Popen[bytes] | None = None
        self._current_states: tuple[EnvironmentState, ...] = ()
        self._reported_states: tuple[EnvironmentState, ...] = ()

    @property
    def is_building(self) -> bool:
        """Return whether a build of this agent is running."""
        return self._child is not None and self._child.poll() is None

    def news(self, *, everything: bool) -> tuple[EnvironmentState, ...] | None:
        """Return every environment's state, or None if unchanged since the last report."""
        self._current_states = self.store.states()
        return (
            self._current_states
            if everything or self._current_states != self._reported_states
            else None
        )

    def mark_reported(self) -> None:
        """Record that the server received the last states."""
        self._reported_states = self._current_states

    def obey(self, orders: Sequence[EnvironmentOrder]) -> None:
        """Carry out the orders, unless a build is running."""
        if self.is_building:
            return
        self.store.sweep()
        known = set(self.store.names())
        for order in (order for order in orders if order.name in known):
            state = self.store.state(order.name)
            if state.order_id == order.order_id or state.stage == "building":
                continue  # already done, or a job builds it
            if order.action == "remove":
                self._remove(order)
            elif not self.is_building:
                self._build(order)

    def stop(self) -> None:
        """Terminate a running build; its unfinished files are deleted."""
        if self._child is not None and self.is_building:
            self._child.terminate()
            self._child.wait()

    def _build(self, order: EnvironmentOrder) -> None:
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "runners.environments"),
                *(str(self._host_dir.path), order.name, order.order_id),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=PROJECT,
            start_new_session=True,
        )

    def _remove(self, order: EnvironmentOrder) -> None:
        words = ""
        try:
            self.store.remove(order.name)
        except EnvironmentBusyError as busy:
            words = f"It was not removed: {busy}."
        self._note(order, words)

    def _note(self, order: EnvironmentOrder, words: str) -> None:
        log.info("environment %s: %s %s", order.name, order.action, words or "done")
        document = {"order_id": order.order_id, "words": words}
        record.write_json(self.store.home(order.name) / LAST, document)

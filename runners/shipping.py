"""Two threads of the agent: one ships the events of all attempts, one uploads artefacts."""

import logging
import threading
from collections.abc import Callable, Mapping

from runners.attempts import AttemptFolder, attempt_folders
from runners.client import ServerClient, ServerError
from runners.config import HostConfig, HostDir
from runners.shipper import AttemptShipper, EventStream
from runners.supervision.record import LockedError
from runners.timing import scaled
from runners.uploader import upload_artefacts

BUSY_SECONDS = scaled(0.25, least=0.1)
IDLE_SECONDS = scaled(1.0, least=0.2)
UPLOAD_SECONDS = scaled(2.0, least=0.3)

log = logging.getLogger(__name__)


class Loop(threading.Thread):
    """A daemon thread that repeats a step until it is stopped."""

    def __init__(self, name: str, step: Callable[[], float]) -> None:
        super().__init__(name=name, daemon=True)
        self._step = step
        self._stopped = threading.Event()
        self._wake_event = threading.Event()

    def run(self) -> None:
        """Repeat the step, which returns the pause in seconds; log failures and continue."""
        while not self._stopped.is_set():
            try:
                rest_seconds = self._step()
            except Exception:
                log.exception("%s failed; it goes on", self.name)
                rest_seconds = IDLE_SECONDS
            self._wake_event.wait(rest_seconds)
            self._wake_event.clear()

    def wake(self) -> None:
        """End the present pause."""
        self._wake_event.set()

    def stop(self) -> None:
        """Stop after the present step and wait for the thread."""
        self._stopped.set()
        self.wake()
        self.join(timeout=20.0)


class Shipping:
    """The shippers of all attempts with events that the server has not stored."""

    def __init__(
        self, host_dir: HostDir, client: ServerClient, event_stream: EventStream | None
    ) -> None:
        self._host_dir = host_dir
        self._client = client
        self._stream = event_stream
        self._shippers: dict[str, AttemptShipper] = {}
        self._acked: dict[str, int] = {}
        self._lock = threading.Lock()

    def learn(self, acked: Mapping[str, int]) -> None:
        """Store the acknowledged numbers of a heartbeat reply."""
        with self._lock:
            self._acked.update(acked)

    def step(self) -> float:
        """Ship every attempt's events once; return the seconds until the next step."""
        with self._lock:
            acked, self._acked = self._acked, {}
        num_sent = 0
        for folder in attempt_folders(self._host_dir.attempts):
            try:
                num_sent += self._ship(folder, acked.get(folder.attempt_id))
            except Exception:  # a damaged attempt must not block the others
                log.exception("attempt %s could not be shipped", folder.attempt_id)
        return BUSY_SECONDS if num_sent or self._shippers else IDLE_SECONDS

    def _ship(self, folder: AttemptFolder, acked_seq: int | None) -> int:
        shipper = self._shipper(folder)
        if shipper is None:
            return 0
        if acked_seq is not None:
            shipper.learn(acked_seq)
        num_sent = shipper.pump()
        if shipper.is_done:
            shipper.finish()
        return num_sent

    def close(self) -> None:
        """Release the shippers' locks for other processes."""
        for shipper in self._shippers.values():
            shipper.close()
        self._shippers.clear()

    def _shipper(self, folder: AttemptFolder) -> AttemptShipper | None:
        shipper = self._shippers.get(folder.attempt_id)
        if not folder.spool.is_dir():
            if shipper:
                shipper.close()
                del self._shippers[folder.attempt_id]
            return None
        if shipper is None:
            try:
                shipper = AttemptShipper(folder, self._client, self._stream)
            except LockedError:
                return None
            self._shippers[folder.attempt_id] = shipper
        return shipper


class Uploads:
    """Uploads the artefacts of ended attempts, one attempt at a time."""

    def __init__(self, host_dir: HostDir, client: ServerClient, config: HostConfig) -> None:
        self._host_dir = host_dir
        self._client = client
        self._config = config

    def step(self) -> float:
        """Upload the pending artefacts; return the seconds until the next step."""
        for folder in self.waiting():
            try:
                upload_artefacts(folder, self._client, self._config.upload_cap_bytes)
            except ServerError as error:
                log.info("the upload of %s waits: %s", folder.attempt_id, error)
                break
        return UPLOAD_SECONDS

    def waiting(self) -> list[AttemptFolder]:
        """Return the ended attempts with artefacts to upload."""
        return [
            folder
            for folder in attempt_folders(self._host_dir.attempts)
            if folder.is_settled and not folder.is_uploaded and folder.is_stored
        ]

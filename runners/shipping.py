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
    """A daemon thread that repeats a step until it is told to stop."""

    def __init__(self, name: str, step: Callable[[], float]) -> None:
        super().__init__(name=name, daemon=True)
        self._step = step
        self._stopped = threading.Event()

    def run(self) -> None:
        """Repeat the step; it returns the seconds to rest. A failed step is not the last."""
        while not self._stopped.is_set():
            try:
                rest_seconds = self._step()
            except Exception:
                log.exception("%s failed; it goes on", self.name)
                rest_seconds = IDLE_SECONDS
            self._stopped.wait(rest_seconds)

    def stop(self) -> None:
        """Let the present step end and wait for that."""
        self._stopped.set()
        self.join(timeout=20.0)


class Shipping:
    """The shippers of all attempts that the server does not hold whole."""

    def __init__(
        self, host_dir: HostDir, client: ServerClient, event_stream: EventStream | None
    ) -> None:
        self._host_dir = host_dir
        self._client = client
        self._stream = event_stream
        self._shippers: dict[str, AttemptShipper] = {}
        self._told: dict[str, int] = {}
        self._lock = threading.Lock()

    def learn(self, acked: Mapping[str, int]) -> None:
        """Take in what a beat's reply says that the server has stored."""
        with self._lock:
            self._told.update(acked)

    def step(self) -> float:
        """Pump every attempt once and return the seconds until the next time."""
        with self._lock:
            told, self._told = self._told, {}
        num_sent = 0
        for folder in attempt_folders(self._host_dir.attempts):
            try:
                num_sent += self._ship(folder, told.get(folder.attempt_id))
            except Exception:  # one attempt's damage must not hold up the others
                log.exception("attempt %s could not be shipped", folder.attempt_id)
        return BUSY_SECONDS if num_sent or self._shippers else IDLE_SECONDS

    def _ship(self, folder: AttemptFolder, told: int | None) -> int:
        shipper = self._shipper(folder)
        if shipper is None:
            return 0
        if told is not None:
            shipper.learn(told)
        num_sent = shipper.pump()
        if shipper.is_done:
            shipper.finish()
        return num_sent

    def close(self) -> None:
        """Let other processes ship."""
        for shipper in self._shippers.values():
            shipper.close()
        self._shippers.clear()

    def _shipper(self, folder: AttemptFolder) -> AttemptShipper | None:
        known = self._shippers.get(folder.attempt_id)
        if not folder.spool.is_dir():
            if known:
                known.close()
                del self._shippers[folder.attempt_id]
            return None
        if known is None:
            try:
                known = AttemptShipper(folder, self._client, self._stream)
            except LockedError:
                return None
            self._shippers[folder.attempt_id] = known
        return known


class Uploads:
    """Uploads what ended attempts left, one attempt after the other."""

    def __init__(self, host_dir: HostDir, client: ServerClient, config: HostConfig) -> None:
        self._host_dir = host_dir
        self._client = client
        self._config = config

    def step(self) -> float:
        """Upload what waits and return the seconds until the next look."""
        for folder in self.waiting():
            try:
                upload_artefacts(folder, self._client, self._config.upload_cap_bytes)
            except ServerError as error:
                log.info("the upload of %s waits: %s", folder.attempt_id, error)
                break
        return UPLOAD_SECONDS

    def waiting(self) -> list[AttemptFolder]:
        """Return the ended attempts whose artefacts were not uploaded yet."""
        return [
            folder
            for folder in attempt_folders(self._host_dir.attempts)
            if folder.is_settled and not folder.is_uploaded and folder.is_stored
        ]

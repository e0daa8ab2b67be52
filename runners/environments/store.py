"""The environments of a host on its disk: where each lies, what state it is in, its removal.

A built one is a folder named by the digest of its pins. It comes there by one rename, so
what stands there is whole. ``build.lock`` is held by whoever builds or removes, ``use.lock``
is shared by the jobs that run in it: a dead process holds neither.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from runners.config import HostDir
from runners.environment_messages import MAIN, EnvironmentState
from runners.environments.pins import NAME, SHIPPED, Pins, PinsError, read_pins
from runners.supervision import record

BUILT = "environment.json"
PROGRESS = "progress.json"
LAST = "last.json"
LOOK_SECONDS = 0.3  # whoever only asks whether a lock is free holds it shortly
UNFINISHED = (".building-", ".gone-")


class EnvironmentBusyError(Exception):
    """Somebody builds it, or a job runs in it."""


class Store:
    """Every environment that this host knows.

    A file below ``environments/pins`` of the host's folder takes the place of the shipped one
    of its name: the operator of the host knows which builds its devices need.
    """

    def __init__(self, host_dir: HostDir, shipped: Path = SHIPPED) -> None:
        self.path = host_dir.path / "environments"
        self.min_free_bytes = host_dir.config().min_free_bytes
        self._shipped = shipped

    # What there may be

    def names(self) -> list[str]:
        """Return the environments that can be built here."""
        found = [*self._shipped.glob("*.txt"), *(self.path / "pins").glob("*.txt")]
        return sorted({path.stem for path in found if NAME.fullmatch(path.stem)})

    def pins(self, name: str) -> Pins:
        """Return an environment by its name.

        Raises:
            PinsError: this host knows none of that name, or its file is damaged.
        """
        if not NAME.fullmatch(name) or name not in self.names():
            known = ", ".join([MAIN, *self.names()])
            raise PinsError(f"this host knows the environments {known}, not {name[:40]!r}")
        own = self.path / "pins" / f"{name}.txt"
        return read_pins(own if own.exists() else self._shipped / f"{name}.txt")

    # Where it lies

    def home(self, name: str) -> Path:
        """Return the folder of an environment's builds, locks and words, made if it must be."""
        path = self.path / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def folder(self, pins: Pins) -> Path:
        """Return where the build of these pins lies, or will."""
        return self.path / pins.name / pins.digest

    def python(self, pins: Pins) -> Path:
        """Return the interpreter of the build of these pins."""
        return self.folder(pins) / "bin" / "python"

    def is_ready(self, pins: Pins) -> bool:
        """Return whether it is built, and the Python that it stands on is still there."""
        return (self.folder(pins) / BUILT).exists() and self.python(pins).exists()

    # How it stands

    def states(self) -> tuple[EnvironmentState, ...]:
        """Return every environment as it is now, the agent's own first."""
        words = f"Python at {sys.prefix}"
        own = EnvironmentState(
            name=MAIN, stage="ready", purpose="Runs the agent and most jobs.", words=words[:600]
        )
        return (own, *map(self.state, self.names()))

    def state(self, name: str) -> EnvironmentState:
        """Return one environment as it is now."""
        try:
            pins = self.pins(name)
        except PinsError as error:
            return EnvironmentState(name=name, stage="failed", words=str(error)[:600])
        home = self.path / name
        last = record.read_json(home / LAST) or {}
        said = EnvironmentState(
            name=name,
            stage="absent",
            purpose=pins.purpose[:400],
            size_bytes=pins.size_bytes,
            num_packages=len(pins.packages),
            is_tried=pins.is_tried,
            order_id=str(last.get("order_id", "")),
        )
        return said.model_copy(update=self._standing(pins, last))

    def _standing(self, pins: Pins, last: record.Record) -> dict[str, object]:
        home, built = self.path / pins.name, self.folder(pins) / BUILT
        doing = record.read_json(home / PROGRESS)
        if doing is not None and record.is_locked(home / "build.lock"):
            return {"stage": "building", **doing}
        words = str(last.get("words", ""))[:600]
        if self.is_ready(pins):
            size = (record.read_json(built) or {}).get("size_bytes", 0)
            return {"stage": "ready", "size_bytes": int(size), "words": words}
        if words:
            return {"stage": "failed", "words": words}
        return {"stage": "outdated"} if self._builds(pins.name) else {}

    def _builds(self, name: str) -> list[Path]:
        home = self.path / name
        return [path.parent for path in home.glob(f"*/{BUILT}")] if home.is_dir() else []

    # Who has it

    @contextlib.contextmanager
    def building(self, name: str) -> Iterator[Path]:
        """Be the only one who builds or removes it; what a dead builder left goes first.

        Raises:
            EnvironmentBusyError: somebody else does.
        """
        home = self.home(name)
        try:
            with record.locked(home / "build.lock", LOOK_SECONDS):
                (home / PROGRESS).unlink(missing_ok=True)
                for path in home.iterdir():
                    if path.name.startswith(UNFINISHED):
                        shutil.rmtree(path, ignore_errors=True)
                yield home
        except record.LockedError:
            raise EnvironmentBusyError(f"the environment {name} is being built") from None

    def hold(self, name: str) -> int:
        """Return a descriptor that keeps it from being removed until its last holder ends."""
        handle = os.open(self.home(name) / "use.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.set_inheritable(handle, True)  # noqa: FBT003 - the library's own signature
        return handle

    def remove(self, name: str) -> None:
        """Delete every build of an environment.

        Raises:
            EnvironmentBusyError: it is being built, or a job runs in it.
        """
        with self.building(name) as home:
            self._delete(home, self._builds(name))
            (home / LAST).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete what killed builds left, and builds of other pins that nobody uses any more."""
        for name in filter(self._has_rubbish, self.names()):
            with contextlib.suppress(EnvironmentBusyError, PinsError), self.building(name) as home:
                pins = self.pins(name)
                if self.is_ready(pins):
                    now = self.folder(pins)
                    self._delete(home, [each for each in self._builds(name) if each != now])

    def _has_rubbish(self, name: str) -> bool:
        home = self.path / name
        found = home.iterdir() if home.is_dir() else ()
        return len(self._builds(name)) > 1 or any(
            path.name.startswith(UNFINISHED) for path in found
        )

    @staticmethod
    def _delete(home: Path, folders: list[Path]) -> None:
        if not folders:
            return
        try:
            with record.locked(home / "use.lock"):
                gone = [each.rename(home / f".gone-{secrets.token_hex(4)}") for each in folders]
        except record.LockedError:
            raise EnvironmentBusyError(f"a job runs in the environment {home.name}") from None
        for each in gone:
            shutil.rmtree(each, ignore_errors=True)

"""The host's folder: its identity (credential.json) and its configuration (config.json)."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from runners.jobspec.base import IpAddress, Port, SchedulerKind
from runners.shared.environment import creation_error
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.object_stores import ObjectStore
from runners.shared.ray import RayConfig
from runners.shared.redis_address import shipper_user, with_user, worker_user
from runners.shared.slurm import SlurmConfig
from runners.shared.timing import LONGEST_BEAT_SECONDS

DEFAULT_HOST_DIR = Path("~/.slipway/host")  # HostDir expands it
CREDENTIAL = "credential.json"
CONFIG = "config.json"
REDIS_CA = "redis-ca.pem"


class HostConfigError(Exception):
    """A file of the host's folder is missing or damaged; the text gives the remedy."""


class Credential(BaseModel):
    """The host's identity for its server; secret, readable only by its owner."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: str
    host_id: str
    name: str
    credential: str
    command_key: str
    redis_url: str | None  # without a user; None: everything goes over HTTP
    redis_secret: str | None = (
        None  # of both Redis users of the host; None: Redis without authentication
    )
    beat_seconds: float

    @property
    def worker_url(self) -> str | None:
        """The Redis URL of the doorbell's worker."""
        return self._url_for(worker_user(self.host_id))

    @property
    def shipper_url(self) -> str | None:
        """The Redis URL of the shipper."""
        return self._url_for(shipper_user(self.host_id))

    def _url_for(self, user: str) -> str | None:
        if self.redis_url is None or self.redis_secret is None:
            return self.redis_url
        return with_user(self.redis_url, user, self.redis_secret)


SchedulerSettings = SlurmConfig | KubernetesConfig | RayConfig
OwnPath = Annotated[Path, AfterValidator(Path.expanduser)]  # ``~`` is the agent's home


class HostConfig(BaseModel):
    """The host operator's configuration; every field has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_roots: tuple[OwnPath, ...] = ()  # folders with models that jobs may read
    reward_roots: tuple[OwnPath, ...] = ()  # further folders with files of reward functions
    tracker_urls: tuple[str, ...] = ()  # tracking servers to which jobs may send a team's secret
    object_stores: tuple[ObjectStore, ...] = ()  # of which jobs may read models and data
    upload_cap_bytes: NonNegativeInt = 2 * 1024**3  # larger artefacts stay on the host
    min_free_bytes: NonNegativeInt = 2 * 1024**3  # with less, no new attempt starts
    job_memory_bytes: PositiveInt | None = None  # limit per process of a job
    # Of all downloads and copies of models and data sets together; None: no limit.
    max_transfer_bytes_per_second: int | None = Field(default=None, ge=64 * 1024)
    max_beat_seconds: float = Field(default=LONGEST_BEAT_SECONDS, gt=0)
    address: IpAddress | None = None  # for other hosts to reach this one; None: its first address
    first_gang_port: Port = 29400  # one is reserved for each job over several hosts
    last_gang_port: Port = 29499
    slurm: SlurmConfig | None = None  # if set, jobs run on Slurm's nodes
    kubernetes: KubernetesConfig | None = None  # if set, jobs run in a cluster's pods
    ray: RayConfig | None = None  # if set, jobs run on a Ray cluster's nodes

    @model_validator(mode="after")
    def _is_of_one_scheduler(self) -> Self:
        if len(kinds := [kind for kind in get_args(SchedulerKind) if getattr(self, kind)]) > 1:
            raise ValueError(f"{' and '.join(kinds)} are both set; a host has one scheduler")
        return self

    @property
    def scheduler(self) -> SchedulerSettings | None:
        """Return the settings of the scheduler that owns the machines of the jobs."""
        each = (getattr(self, kind) for kind in get_args(SchedulerKind))
        return next(filter(None, each), None)


class HostDir:
    """Paths below the host's folder."""

    def __init__(self, path: Path) -> None:
        try:
            self.path = path.expanduser().resolve()
        except RuntimeError:
            raise HostConfigError(
                f"{path} is not known: HOME is not set, and user {os.getuid()} has no home folder "
                "in the system's list. Set HOME, or name the host's folder with --dir"
            ) from None
        self.attempts = self.path / "attempts"
        self.models = self.path / "models"
        self.rewards = self.path / "rewards"
        self.quarantine = self.path / "quarantine"
        self.wake = self.path / "wake"
        self.agent_lock = self.path / "agent.lock"
        self.microbench = self.path / "microbench.json"
        self.nonces = self.path / "nonces.sqlite3"
        self.pings = self.path / "last_ping"

    def make(self) -> None:
        """Create the folders, inaccessible to other users.

        Raises:
            HostConfigError: the folder cannot be created or written.
        """
        for folder in (self.path, self.attempts, self.models, self.rewards):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                remedy = "name another folder with --dir"
                raise HostConfigError(creation_error(folder, error, remedy)) from None
        if self.is_open():  # it existed before
            with contextlib.suppress(
                PermissionError
            ):  # owned by another user: the doctor reports it
                self.path.chmod(0o700)

    def is_open(self) -> bool:
        """Return whether other users can access or own the folder."""
        status = self.path.stat()
        return bool(status.st_mode & 0o077) or status.st_uid != os.getuid()

    def credential(self) -> Credential:
        """Return the host's credential.

        Raises:
            HostConfigError: the host is not enrolled, or the file is damaged.
        """
        path = self.path / CREDENTIAL
        if not path.exists():
            raise HostConfigError(
                f"{self.path} holds no enrolled host; run "
                f"`python -m runners enroll --server URL --token TOKEN --dir {self.path}` first"
            )
        try:
            return Credential.model_validate_json(path.read_bytes(), extra="ignore")
        except ValidationError as error:
            field = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise HostConfigError(
                f"{path} is damaged ({field}: {error.errors()[0]['msg']}); enrol this host again"
            ) from None

    def save_credential(self, credential: Credential) -> None:
        """Write the credential, readable only by its owner."""
        stated = credential.model_dump_json(indent=2, exclude_defaults=True)
        write_secret(self.path / CREDENTIAL, stated)

    def redis_ca(self) -> Path | None:
        """Return the path of Redis's certificate authority, or None for a public one.

        Raises:
            HostConfigError: SLIPWAY_REDIS_CA names a file that this user cannot read.
        """
        if named := os.environ.get("SLIPWAY_REDIS_CA", "").strip():
            named_file = Path(named).expanduser()
            if not (named_file.is_file() and os.access(named_file, os.R_OK)):
                raise HostConfigError(
                    f"SLIPWAY_REDIS_CA is {named!r}, and there is no such file that this user may "
                    "read; correct the variable, or unset it for the certificates of the enrolment"
                )
            return named_file
        path = self.path / REDIS_CA
        return path if path.exists() else None

    def save_redis_ca(self, pem: str) -> None:
        """Write the certificates of Redis's authority."""
        write_secret(self.path / REDIS_CA, pem)

    def save_address(self, address: str) -> None:
        """Store the address by which other hosts reach this one in config.json.

        Raises:
            HostConfigError: config.json is there but is not valid.
        """
        self._save({"address": address})

    def save_scheduler(self, scheduler: SchedulerSettings) -> None:
        """Store the settings of the host's scheduler in config.json; a host has one.

        Raises:
            HostConfigError: config.json is there but is not valid.
        """
        stated = scheduler.model_dump(mode="json", exclude_defaults=True)
        self._save({**dict.fromkeys(get_args(SchedulerKind)), scheduler.KIND: stated})

    def _save(self, changes: Mapping[str, object]) -> None:
        """Write what is set, changed by ``changes``, of which None removes a setting.

        An agent of an earlier release refuses settings that it does not know.
        """
        document = self.config().model_dump(mode="json", exclude_unset=True) | dict(changes)
        stated = {name: value for name, value in document.items() if value is not None}
        text = json.dumps(stated, indent=2)
        temporary = self.path / f".{CONFIG}.{os.getpid()}"
        temporary.write_text(f"{text}\n")
        temporary.replace(self.path / CONFIG)

    def config(self) -> HostConfig:
        """Return the host's configuration.

        Raises:
            HostConfigError: config.json exists but is invalid.
        """
        path = self.path / CONFIG
        if not path.exists():
            return HostConfig()
        try:
            return HostConfig.model_validate(json.loads(path.read_bytes()))
        except (ValidationError, ValueError) as error:
            raise HostConfigError(f"{path} is not valid: {error}") from None


def write_secret(path: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)
    temporary.replace(path)

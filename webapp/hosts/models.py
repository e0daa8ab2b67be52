"""Models of GPU hosts: pools, devices, enrolment tokens, the epoch, refused messages."""

from typing import get_args

from django.conf import settings
from django.db import models

from runners.jobspec.base import NAME_LENGTH, SchedulerKind
from webapp.accounts.models import Team, TeamOwned
from webapp.core.ids import UlidModel

SCHEDULERS = get_args(SchedulerKind)  # kinds of hosts that hand their jobs on
RUNS_JOBS = ("agent", *SCHEDULERS)  # kinds of hosts that run jobs
# Large JSON columns, deferred by queries over all hosts.
DOCUMENTS = ("facts", "planned", "microbench", "calibration", "last_beat", "checks")


class HostState(models.TextChoices):
    """Lifecycle state of a host; contact is derived separately, from ``last_seen_at``."""

    PENDING = "pending-enrolment", "Pending enrolment"
    CHECKING = "checking", "Checking"
    READY = "ready", "Ready"
    DRAINING = "draining", "Draining"
    MAINTENANCE = "maintenance", "Maintenance"
    RETIRED = "retired", "Retired"


class Pool(TeamOwned):
    """A group of hosts that share one job queue."""

    name = models.CharField(max_length=40)
    slug = models.SlugField(max_length=40)
    shared_with = models.ManyToManyField(Team, blank=True, related_name="shared_pools")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["team", "slug"], name="one_pool_slug")]

    def __str__(self) -> str:
        return self.name


class Host(TeamOwned):
    """A machine that runs jobs (``agent``), hands them to a scheduler, or exists only in plans."""

    name = models.CharField(max_length=80)
    slug = models.SlugField(max_length=80, unique=True)
    kind = models.CharField(
        max_length=16,
        choices=[
            ("agent", "Agent"),
            ("slurm", "Slurm"),
            ("kubernetes", "Kubernetes"),
            ("ray", "Ray"),
            ("virtual", "Virtual"),
        ],
        default="agent",
    )
    state = models.CharField(max_length=20, choices=HostState, default=HostState.PENDING)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="hosts")
    labels = models.JSONField(default=dict, blank=True)
    address = models.CharField(max_length=45, blank=True)  # one of the host's; empty: the first
    facts = models.JSONField(default=dict, blank=True)  # runners.shared.facts.HostFacts
    planned = models.JSONField(default=dict, blank=True)  # virtual host: device, number, memory
    microbench = models.JSONField(default=dict, blank=True)  # runners.shared.facts.Microbench
    calibration = models.JSONField(default=dict, blank=True)  # planner HostCalibration
    last_beat = models.JSONField(default=dict, blank=True)  # runners.shared.messages.Beat
    credential_hash = models.CharField(max_length=64, blank=True)  # SHA-256 hex
    command_salt = models.CharField(max_length=64, blank=True)  # key = HMAC(site secret, salt)
    redis_secret_hash = models.CharField(max_length=64, blank=True)  # SHA-256 hex
    rotation_asked_at = models.DateTimeField(null=True, blank=True)
    checks = models.JSONField(default=dict, blank=True)  # webapp.hosts.services.Findings
    # What the Hub's cache keeps at most, in bytes: more is pruned. Null: everything.
    keep_models_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    protocol_version = models.PositiveIntegerField(default=1)
    agent_version = models.CharField(max_length=40, blank=True)
    boot_id = models.CharField(max_length=64, blank=True)
    clock_offset_ms = models.BigIntegerField(null=True, blank=True)
    enrolled_at = models.DateTimeField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    epoch_seen = models.PositiveBigIntegerField(default=0)  # highest epoch with a valid proof
    contact = models.CharField(max_length=16, default="unknown")  # as of the last contact sweep
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def has_scheduler(self) -> bool:
        """Whether a scheduler owns the machines on which its jobs run."""
        return self.kind in SCHEDULERS


class Device(UlidModel):
    """A unit that a job holds while it runs: a GPU, a GPU-less host's CPU, or a slot.

    A slot is the right to have one job in the scheduler that a host submits to.
    """

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="devices")
    index = models.PositiveIntegerField()
    kind = models.CharField(
        max_length=8, choices=[("gpu", "GPU"), ("cpu", "CPU"), ("slot", "Slot")]
    )
    uuid = models.CharField(max_length=80)  # from NVML; "cpu" for a processor
    name = models.CharField(max_length=NAME_LENGTH)
    memory_bytes = models.PositiveBigIntegerField()
    is_present = models.BooleanField(default=True)  # in the host's last facts
    # Hardware identity, the same from every host that sees it: GPU uuid, or CPU's machine id.
    hardware = models.CharField(max_length=80, blank=True, db_index=True)
    unix_user = models.PositiveBigIntegerField(null=True, blank=True)  # user id of the agent
    cordoned_at = models.DateTimeField(null=True, blank=True)
    cordoned_by = models.CharField(max_length=80, blank=True)
    cordon_reason = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["host", "index", "id"]
        constraints = [models.UniqueConstraint(fields=["host", "uuid"], name="one_device_uuid")]

    def __str__(self) -> str:
        return f"{self.kind} {self.index} of {self.host_id}"


class HostModel(UlidModel):
    """A model in the Hub's cache of a host, as the host last reported it; commit "": unfinished.

    Other tools may have downloaded it.
    """

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="models")
    repository = models.CharField(max_length=200)
    commit = models.CharField(max_length=40, blank=True)
    size_bytes = models.PositiveBigIntegerField()
    num_files = models.PositiveBigIntegerField()
    used_at = models.DateTimeField(null=True, blank=True)  # as the file system recorded it
    is_complete = models.BooleanField()  # the weights that a job reads are all there
    pinned_by = models.CharField(max_length=150, blank=True)  # user name; empty: not pinned

    class Meta:
        ordering = ["host", "repository", "commit"]
        constraints = [
            models.UniqueConstraint(
                fields=["host", "repository", "commit"], name="one_row_per_cached_model"
            )
        ]
        indexes = [models.Index(fields=["repository", "commit"], name="hosts_with_model")]

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:12]}"

    @property
    def key(self) -> str:
        """Return how orders to the host name it."""
        return f"{self.repository}@{self.commit}"


class ModelCopy(UlidModel):
    """A model on its way over the site into the Hub's cache of a host.

    ``source``: the host that sends it; null: a person, from a folder. The site holds a file from
    its first byte until the receiving host has verified it.
    """

    class State(models.TextChoices):
        """``ACTIVE`` until both ends have done their part, or one cannot."""

        ACTIVE = "active", "Active"
        DONE = "done", "Done"
        FAILED = "failed", "Failed"
        STOPPED = "stopped", "Stopped"

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="copies")
    source = models.ForeignKey(
        Host, null=True, blank=True, on_delete=models.CASCADE, related_name="copies_sent"
    )
    repository = models.CharField(max_length=200)
    commit = models.CharField(max_length=40)
    revision = models.CharField(max_length=255, blank=True)  # that stands for the commit
    files = models.JSONField(default=list, blank=True)  # runners.shared.messages.CopyFile each
    there = models.JSONField(default=list, blank=True)  # numbers of files that the host has
    state = models.CharField(max_length=10, choices=State, default=State.ACTIVE)
    problem = models.TextField(blank=True)
    asked_by = models.CharField(max_length=150)  # user name
    created_at = models.DateTimeField(auto_now_add=True)
    moved_at = models.DateTimeField(auto_now_add=True)  # bytes came, or a file was taken
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["host", "repository", "commit"],
                condition=models.Q(state="active"),
                name="one_active_copy",
            )
        ]

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:12]}"

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return sum(each["size_bytes"] for each in self.files)

    @property
    def there_bytes(self) -> int:
        """The bytes of the files that the receiving host has."""
        return sum(self.files[number]["size_bytes"] for number in self.there)


class Distinction(models.Model):
    """An operator's statement that a host that looks like the same machine is another one."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="distinctions")
    other = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="+")
    said_by = models.CharField(max_length=80)
    said_at = models.DateTimeField()

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["host", "other"], name="one_word_about_a_host")
        ]

    def __str__(self) -> str:
        return f"{self.host_id} is not {self.other_id}"


class EnrolmentToken(TeamOwned):
    """A one-time right to become a host: hashed at rest, at most an hour old, revocable."""

    name = models.CharField(max_length=80)
    pool = models.CharField(max_length=40, default="default")  # slug; created if missing
    labels = models.JSONField(default=dict, blank=True)
    token_hash = models.CharField(max_length=64, unique=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    host = models.ForeignKey(Host, null=True, blank=True, on_delete=models.SET_NULL)

    def __str__(self) -> str:
        return f"token for {self.name}"


class Epoch(models.Model):
    """The site's epoch and the highest epoch that its hosts have seen; one row."""

    number = models.PositiveBigIntegerField(default=1)
    highest_seen = models.PositiveBigIntegerField(default=0)  # above number: restored backup

    def __str__(self) -> str:
        return f"epoch {self.number}"


class RefusedMessage(models.Model):
    """A message of a host that the server rejected, counted by reason, for operators."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="refused_messages")
    kind = models.CharField(
        max_length=16,
        choices=[("heartbeat", "Heartbeat"), ("event", "Event"), ("stream", "Stream entry")],
    )
    reason = models.CharField(max_length=300)
    attempt_id = models.CharField(max_length=64, blank=True)  # of the last message
    excerpt = models.CharField(max_length=500, blank=True)  # beginning of the last message
    count = models.PositiveBigIntegerField(default=1)
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()

    class Meta:
        ordering = ["-last_at", "-id"]
        constraints = [
            models.UniqueConstraint(fields=["host", "kind", "reason"], name="one_row_per_refusal")
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.host_id}: {self.reason}"

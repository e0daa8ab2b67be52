"""GPU hosts in their pools, their devices, and the one-time tokens that enrol them."""

from django.conf import settings
from django.db import models

from webapp.accounts.models import Team, TeamOwned
from webapp.core.ids import UlidModel

RUNS_JOBS = ("agent", "slurm")  # kinds of hosts
# What is large and what loops over all hosts leave in the database.
DOCUMENTS = ("facts", "planned", "microbench", "calibration", "last_beat", "checks")


class HostState(models.TextChoices):
    """Where a host is in its life; contact is judged apart, from ``last_seen_at``."""

    PENDING = "pending-enrolment", "Pending enrolment"
    CHECKING = "checking", "Checking"
    READY = "ready", "Ready"
    DRAINING = "draining", "Draining"
    MAINTENANCE = "maintenance", "Maintenance"
    RETIRED = "retired", "Retired"


class Pool(TeamOwned):
    """Hosts that take jobs from one queue."""

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
    """A machine that runs jobs (``agent``), hands them to Slurm, or is only planned for."""

    name = models.CharField(max_length=80)
    slug = models.SlugField(max_length=80, unique=True)
    kind = models.CharField(
        max_length=16,
        choices=[("agent", "Agent"), ("slurm", "Slurm"), ("virtual", "Virtual")],
        default="agent",
    )
    state = models.CharField(max_length=20, choices=HostState, default=HostState.PENDING)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="hosts")
    labels = models.JSONField(default=dict, blank=True)
    address = models.CharField(max_length=45, blank=True)  # chosen of those it has; empty: first
    facts = models.JSONField(default=dict, blank=True)  # runners.facts.HostFacts
    planned = models.JSONField(default=dict, blank=True)  # of a virtual host: device, how many
    microbench = models.JSONField(default=dict, blank=True)  # runners.facts.Microbench
    calibration = models.JSONField(default=dict, blank=True)  # planner HostCalibration
    last_beat = models.JSONField(default=dict, blank=True)  # runners.messages.Beat
    credential_hash = models.CharField(max_length=64, blank=True)  # SHA-256 hex
    command_salt = models.CharField(max_length=64, blank=True)  # key = HMAC(site secret, salt)
    redis_secret_hash = models.CharField(max_length=64, blank=True)  # SHA-256 hex
    rotation_asked_at = models.DateTimeField(null=True, blank=True)
    checks = models.JSONField(default=dict, blank=True)  # webapp.hosts.findings.Findings
    protocol_version = models.PositiveIntegerField(default=1)
    agent_version = models.CharField(max_length=40, blank=True)
    boot_id = models.CharField(max_length=64, blank=True)
    clock_offset_ms = models.BigIntegerField(null=True, blank=True)
    enrolled_at = models.DateTimeField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    epoch_seen = models.PositiveBigIntegerField(default=0)  # the highest it showed with its proof
    contact = models.CharField(max_length=16, default="unknown")  # as the last sweep announced it
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Device(UlidModel):
    """What a job holds while it runs: a GPU, the processor of a host without one, or a slot.

    A slot is the right to have one job in the scheduler that a host hands its jobs to.
    """

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="devices")
    index = models.PositiveIntegerField()
    kind = models.CharField(
        max_length=8, choices=[("gpu", "GPU"), ("cpu", "CPU"), ("slot", "Slot")]
    )
    uuid = models.CharField(max_length=80)  # NVML's; a processor's is "cpu"
    name = models.CharField(max_length=120)
    memory_bytes = models.PositiveBigIntegerField()
    is_present = models.BooleanField(default=True)  # as the host's last facts say
    # What it is, whichever host it is seen through: a GPU's uuid, a processor's machine.
    hardware = models.CharField(max_length=80, blank=True, db_index=True)
    unix_user = models.PositiveBigIntegerField(null=True, blank=True)  # whose agent sees it
    cordoned_at = models.DateTimeField(null=True, blank=True)
    cordoned_by = models.CharField(max_length=80, blank=True)
    cordon_reason = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["host", "index", "id"]
        constraints = [models.UniqueConstraint(fields=["host", "uuid"], name="one_device_uuid")]

    def __str__(self) -> str:
        return f"{self.kind} {self.index} of {self.host_id}"


class Distinction(models.Model):
    """An operator's word that another host, which looks like the same machine, is another one."""

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
    pool = models.CharField(max_length=40, default="default")  # slug; made where there is none
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
    """How far this site has come, and the highest that its hosts were told by it; one row."""

    number = models.PositiveBigIntegerField(default=1)
    highest_seen = models.PositiveBigIntegerField(default=0)  # above the number: a backup's

    def __str__(self) -> str:
        return f"epoch {self.number}"

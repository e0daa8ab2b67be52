"""Jobs, their numbered attempts, and everything that an attempt leaves behind.

States change only through ``webapp/jobs/transitions.py``; this module has no behaviour.
"""

from django.conf import settings
from django.db import models

from webapp.accounts.models import TeamOwned
from webapp.core.ids import UlidModel
from webapp.hosts.models import Device, Host, Pool
from webapp.plans.models import Plan


class JobState(models.TextChoices):
    """The states of a job; the last five are final."""

    DRAFT = "draft", "Draft"
    QUEUED = "queued", "Queued"
    PREFLIGHT = "preflight", "Preflight"
    STARTING = "starting", "Starting"
    RUNNING = "running", "Running"
    STOPPING = "stopping", "Stopping"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    ERROR = "error", "Error"
    STOPPED = "stopped", "Stopped"
    EXPIRED = "expired", "Expired"


FINAL_STATES = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.ERROR, JobState.STOPPED, JobState.EXPIRED}
)
LIVE_STATES = frozenset(
    {JobState.PREFLIGHT, JobState.STARTING, JobState.RUNNING, JobState.STOPPING}
)


class Priority(models.IntegerChoices):
    """Which jobs of a pool get their turn first."""

    LOW = -1, "Low"
    NORMAL = 0, "Normal"
    HIGH = 1, "High"


class Job(TeamOwned):
    """One thing that a person asked a pool of hosts to run."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=120)
    kind = models.CharField(max_length=24)  # the spec's kind: train, compress, evaluate, benchmark
    model_name = models.CharField(max_length=120, blank=True)
    spec = models.JSONField()  # runners.jobspec.JobSpec
    plan = models.ForeignKey(
        Plan, null=True, blank=True, on_delete=models.SET_NULL, related_name="jobs"
    )
    plan_request = models.JSONField(default=dict, blank=True)  # the plan's, as it was launched
    estimate = models.JSONField(default=dict, blank=True)  # planner Estimate of this job
    prediction = models.JSONField(default=dict, blank=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="jobs")
    requested_host = models.ForeignKey(  # null: any host of the pool will do
        Host, null=True, blank=True, on_delete=models.PROTECT, related_name="requested_jobs"
    )
    host = models.ForeignKey(  # where it runs or ran, of a gang its leader; null: not yet given
        Host, null=True, blank=True, on_delete=models.PROTECT, related_name="jobs"
    )
    num_hosts = models.PositiveIntegerField(default=1)
    devices_per_host = models.PositiveIntegerField(null=True, blank=True)  # null: all of a host
    priority = models.SmallIntegerField(choices=Priority, default=Priority.NORMAL)
    queue_rank = models.PositiveIntegerField(null=True, blank=True)  # set by hand; null comes last
    state = models.CharField(max_length=16, choices=JobState, default=JobState.DRAFT)
    reason = models.CharField(max_length=40, blank=True)
    current_attempt = models.ForeignKey(
        "Attempt", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    idempotency_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    max_duration_seconds = models.FloatField(null=True, blank=True)
    max_retries = models.PositiveSmallIntegerField(default=0)  # after its host failed it
    num_retries = models.PositiveSmallIntegerField(default=0)
    progress_done = models.FloatField(null=True, blank=True)
    progress_total = models.FloatField(null=True, blank=True)
    progress_unit = models.CharField(max_length=24, blank=True)
    eta_seconds = models.FloatField(null=True, blank=True)
    phase = models.CharField(max_length=80, blank=True)
    result = models.JSONField(default=dict, blank=True)  # runners.messages.ResultBody
    created_at = models.DateTimeField(auto_now_add=True)
    queued_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(fields=["team", "-created_at"]),
            models.Index(fields=["state", "host"]),
            models.Index(fields=["pool", "state"], name="jobs_job_pool_state"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_shared_out(self) -> bool:
        """Tell whether it runs as several ranks, on devices of one host or of several."""
        is_divided = self.kind in {"train", "generate"} and (self.devices_per_host or 1) > 1
        return self.num_hosts > 1 or is_divided or self.processes_per_host > 1

    @property
    def processes_per_host(self) -> int:
        """Return how many ranks share the processor of each host; one that has GPUs has more."""
        return int((self.spec.get("parallel") or {}).get("processes_per_host") or 1)

    @property
    def shown_host(self) -> Host | None:
        """Return where it runs or ran, else the one host that it waits for."""
        return self.host or self.requested_host

    @property
    def place(self) -> str:
        """Return the name of that host, else of the pool."""
        return self.shown_host.name if self.shown_host else f"pool {self.pool.name}"


class Attempt(UlidModel):
    """One try of a job on one host; ``fence`` is what a host must show to act for it.

    A job on several hosts has one row for each under one number: ``node_rank`` 0 leads.
    """

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    node_rank = models.PositiveIntegerField(default=0)
    leader = models.ForeignKey(  # null for the leader itself
        "self", null=True, blank=True, on_delete=models.CASCADE, related_name="members"
    )
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="attempts")
    fence = models.CharField(max_length=32)
    address = models.CharField(max_length=45, blank=True)  # by which the gang's others reach it
    master_port = models.PositiveIntegerField(null=True, blank=True)  # reserved on the leader's
    taken_ports = models.JSONField(default=list, blank=True)  # reserved before, but not free there
    claim_id = models.CharField(max_length=64, blank=True)
    claimed_at = models.DateTimeField(null=True, blank=True)
    boot_id = models.CharField(max_length=64, blank=True)
    acked_seq = models.PositiveBigIntegerField(default=0)
    dropped_duplicates = models.PositiveBigIntegerField(default=0)
    refused_gaps = models.PositiveBigIntegerField(default=0)
    stale_transitions = models.PositiveIntegerField(default=0)  # reports that came too late
    missed_beats = models.PositiveIntegerField(default=0)  # claimed, but its host knows it not
    stop_reason = models.CharField(max_length=40, blank=True)  # set: the host is told to stop it
    stop_requested_at = models.DateTimeField(null=True, blank=True)
    exit_record = models.JSONField(default=dict, blank=True)  # runners.messages.ExitRecord
    facts = models.JSONField(default=dict, blank=True)  # the host as it was at the claim
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["number", "node_rank"]
        constraints = [
            models.UniqueConstraint(fields=["job", "number", "node_rank"], name="attempt_number"),
            models.UniqueConstraint(
                fields=["host", "master_port"],
                condition=models.Q(master_port__isnull=False, ended_at__isnull=True),
                name="one_gang_per_port",
            ),
        ]

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.job_id}"

    @property
    def head(self) -> "Attempt":
        """Return the attempt that leads this one's gang: itself where it is alone."""
        return self.leader or self


class Allocation(models.Model):
    """A device that an attempt holds from when it was chosen until it has ended."""

    device = models.ForeignKey(Device, on_delete=models.PROTECT, related_name="allocations")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="allocations")
    taken_at = models.DateTimeField()
    released_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(
                fields=["device"],
                condition=models.Q(released_at__isnull=True),
                name="one_holder_per_device",
            )
        ]

    def __str__(self) -> str:
        return f"{self.device_id} for {self.attempt_id}"


class AttemptEvent(models.Model):
    """One stored event of an attempt; metric points go to the metric store instead."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="events")
    seq = models.PositiveBigIntegerField()
    t_ms = models.BigIntegerField()
    received_at = models.DateTimeField(auto_now_add=True)
    kind = models.CharField(max_length=16)
    body = models.JSONField()

    class Meta:
        ordering = ["seq"]
        constraints = [models.UniqueConstraint(fields=["attempt", "seq"], name="one_seq")]
        indexes = [models.Index(fields=["attempt", "kind", "seq"])]

    def __str__(self) -> str:
        return f"{self.attempt_id} #{self.seq} {self.kind}"


class Event(models.Model):
    """What happened, who did it and why: the outbox that pages, audit and webhooks read."""

    at = models.DateTimeField(db_index=True)
    team_id = models.CharField(max_length=26, db_index=True)
    kind = models.CharField(max_length=40)  # "job.state", "host.state", "host.enrolled", ...
    subject = models.CharField(max_length=26, db_index=True)  # id of the job or host
    attempt_id = models.CharField(max_length=26, blank=True)
    from_state = models.CharField(max_length=24, blank=True)
    to_state = models.CharField(max_length=24, blank=True)
    reason = models.CharField(max_length=40, blank=True)
    actor = models.CharField(max_length=80)  # a user name, "host:<slug>" or "system:<part>"
    detail = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject} {self.to_state}"


class Command(UlidModel):
    """A doorbell to ring at a host; rung again until a beat, claim or event proves it heard."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="commands")
    kind = models.CharField(max_length=16)  # start, stop, ping
    attempt = models.ForeignKey(Attempt, null=True, on_delete=models.CASCADE, related_name="+")
    state = models.CharField(
        max_length=8,
        choices=[("new", "New"), ("sent", "Sent"), ("acked", "Acked"), ("dead", "Dead")],
        default="new",
    )
    tries = models.PositiveIntegerField(default=0)
    next_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [models.Index(fields=["state", "next_at"])]

    def __str__(self) -> str:
        return f"{self.kind} to {self.host_id}"


class Artefact(UlidModel):
    """A folder or file that an attempt made; complete when every byte arrived with its digest."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="artefacts")
    name = models.CharField(max_length=80)
    kind = models.CharField(max_length=16)  # model, adapter, report
    total_bytes = models.PositiveBigIntegerField()
    files = models.JSONField(default=dict)  # relative path -> bytes
    sha256 = models.JSONField(default=dict)  # relative path -> hex digest
    facts = models.JSONField(default=dict, blank=True)
    is_complete = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "name"], name="artefact_name")]

    def __str__(self) -> str:
        return self.name


class Measurement(models.Model):
    """One measured figure beside its prediction: what calibrates the planner for a host."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="measurements")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="measurements")
    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="measurements")
    metric = models.CharField(max_length=60)
    unit = models.CharField(max_length=24)
    predicted = models.FloatField()
    predicted_low = models.FloatField(null=True)
    predicted_high = models.FloatField(null=True)
    measured = models.FloatField()
    ratio = models.FloatField()  # measured / predicted
    is_excluded = models.BooleanField(default=False)
    measured_at = models.DateTimeField()

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["attempt", "metric"], name="one_measurement")
        ]

    def __str__(self) -> str:
        return f"{self.metric} {self.ratio:.2f}"

"""Database models of jobs, their attempts, and the data that attempts produce."""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import F, Index, Q
from django.db.models.lookups import IsNull

from runners.jobspec.base import NAME_LENGTH
from runners.jobspec.kinds import KINDS
from webapp.accounts.models import AccessToken, Team, TeamOwned
from webapp.core.ids import UlidModel
from webapp.hosts.models import Device, Host, Pool
from webapp.plans.models import Plan

MOST_JOB_ID = 255  # characters of a scheduler's id of a job

# Database indexes of jobs: each covers one page's query without reading the wide rows.
#
# SQLite also needs the columns of an index's condition in the index; tests on both databases check
# which index serves which query.


# Jobs without a rank sort after ranked ones, on every database.
IN_TURN = (
    F("priority").desc(),
    IsNull(F("queue_rank"), True),  # noqa: FBT003 -- the lookup's own signature
    F("queue_rank"),
    F("queued_at"),
    F("id"),
)

OF_JOBS = [
    Index(  # the list's filters
        fields=[
            "team",
            "-created_at",
            "-id",
            "state",
            "kind",
            "owner",
            "host",
            "requested_host",
            "name",
            "model_name",
            "deleted_at",
        ],
        condition=Q(deleted_at=None),
        name="jobs_listed",
    ),
    Index(  # the newest jobs of a host, and of those queued for it
        fields=["host", "-created_at", "-id", "team", "requested_host", "deleted_at"],
        condition=Q(deleted_at=None),
        name="jobs_of_host",
    ),
    Index(  # latest failures, and counts by state
        fields=["state", "ended_at", "team", "id", "deleted_at"],
        condition=Q(deleted_at=None),
        name="jobs_ended",
    ),
    Index(  # jobs running on hosts or queued for them
        fields=["state", "host", "requested_host", "deleted_at"], name="jobs_at_host"
    ),
    Index(  # counts per pool, and the durations of recent similar jobs
        fields=[
            "pool",
            "state",
            "kind",
            "model_name",
            "-ended_at",
            "started_at",
            "deleted_at",
        ],
        name="jobs_of_pool",
    ),
    Index(fields=["plan", "deleted_at"], name="jobs_of_plan"),
    Index(  # jobs whose measurements no longer count
        fields=["team", "id", "deleted_at"],
        condition=Q(deleted_at__isnull=False),
        name="jobs_deleted",
    ),
    Index(  # each team's part of a queue, in order
        F("pool"),
        F("team"),
        *IN_TURN,
        F("deleted_at"),
        F("state"),
        condition=Q(state="queued", deleted_at=None),
        name="jobs_waiting",
    ),
]

OF_ATTEMPTS = [
    Index(  # running parts of gangs
        fields=["leader", "ended_at", "job", "host"],
        condition=Q(ended_at=None, leader__isnull=False),
        name="attempts_of_gangs",
    ),
]


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
RESUMABLE_KINDS = frozenset(each.name for each in KINDS.values() if each.is_resumable)
RANKED_KINDS = frozenset(each.name for each in KINDS.values() if each.has_ranks)
LIVE_STATES = frozenset(
    {JobState.PREFLIGHT, JobState.STARTING, JobState.RUNNING, JobState.STOPPING}
)


class Priority(models.IntegerChoices):
    """Scheduling priority of a job within its pool."""

    LOW = -1, "Low"
    NORMAL = 0, "Normal"
    HIGH = 1, "High"


DOCUMENTS = ("spec", "plan_request", "estimate", "prediction", "result")  # not read by lists


class Job(TeamOwned):
    """A unit of work that a person submitted to a pool of hosts."""

    # No index of its own: with both, SQLite may choose this one over the composite index.
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="+", db_index=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=NAME_LENGTH)
    kind = models.CharField(max_length=24)  # the spec's kind: train, compress, evaluate, benchmark
    model_name = models.CharField(max_length=NAME_LENGTH, blank=True)
    spec = models.JSONField()  # runners.jobspec.JobSpec
    plan = models.ForeignKey(  # its index is ``jobs_of_plan``
        Plan,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="jobs",
        db_index=False,
    )
    plan_request = models.JSONField(default=dict, blank=True)  # the plan's request at launch
    estimate = models.JSONField(default=dict, blank=True)  # planner Estimate for this job
    prediction = models.JSONField(default=dict, blank=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="jobs")
    requested_host = models.ForeignKey(  # null: any host of the pool
        Host, null=True, blank=True, on_delete=models.PROTECT, related_name="requested_jobs"
    )
    host = models.ForeignKey(  # assigned host (a gang: its leader's); null: not assigned yet
        Host, null=True, blank=True, on_delete=models.PROTECT, related_name="jobs"
    )
    num_hosts = models.PositiveIntegerField(default=1)
    devices_per_host = models.PositiveIntegerField(null=True, blank=True)  # null: all of a host
    # Memory of its one device that it asks for, beside other such jobs; null: the device alone.
    shared_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    priority = models.SmallIntegerField(choices=Priority, default=Priority.NORMAL)
    queue_rank = models.PositiveIntegerField(null=True, blank=True)  # set by hand; null sorts last
    state = models.CharField(max_length=16, choices=JobState, default=JobState.DRAFT)
    reason = models.CharField(max_length=40, blank=True)
    current_attempt = models.ForeignKey(
        "Attempt", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    idempotency_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    max_duration_seconds = models.FloatField(null=True, blank=True)
    max_retries = models.PositiveSmallIntegerField(default=0)  # after failures of the host
    num_retries = models.PositiveSmallIntegerField(default=0)
    progress_done = models.FloatField(null=True, blank=True)
    progress_total = models.FloatField(null=True, blank=True)
    progress_unit = models.CharField(max_length=24, blank=True)
    progress_at = models.DateTimeField(null=True, blank=True)  # when the last one was received
    eta_seconds = models.FloatField(null=True, blank=True)
    phase = models.CharField(max_length=80, blank=True)
    result = models.JSONField(default=dict, blank=True)  # runners.shared.messages.ResultBody
    created_at = models.DateTimeField(auto_now_add=True)
    queued_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]
        indexes = OF_JOBS

    def __str__(self) -> str:
        return self.name

    @property
    def is_shared_out(self) -> bool:
        """Return whether the job runs as several ranks, on one host or on several."""
        is_divided = self.kind in RANKED_KINDS and (self.devices_per_host or 1) > 1
        return self.num_hosts > 1 or is_divided or self.processes_per_host > 1

    @property
    def processes_per_host(self) -> int:
        """Return the number of ranks per CPU host; jobs on GPUs run one rank per GPU."""
        return int((self.spec.get("parallel") or {}).get("processes_per_host") or 1)

    @property
    def keeps_checkpoint(self) -> bool:
        """Return whether the job, once stopped, leaves something that another can go on from."""
        return self.kind in RESUMABLE_KINDS

    @property
    def shown_host(self) -> Host | None:
        """Return the host it runs or ran on, else the requested host."""
        return self.host or self.requested_host

    @property
    def place(self) -> str:
        """Return the name of ``shown_host``, else of the pool."""
        return self.shown_host.name if self.shown_host else f"pool {self.pool.name}"


class RepositoryUse(models.Model):
    """A repository of the Hub that a submitted job names; ``revision`` as in its spec."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="repositories")
    repository = models.CharField(max_length=200)
    revision = models.CharField(max_length=255, blank=True)  # a commit, where the site knew it

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(
                fields=["job", "repository", "revision"], name="one_use_per_repository"
            )
        ]
        indexes = [models.Index(fields=["repository", "job"], name="jobs_by_repository")]

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision} of {self.job_id}"


class Attempt(UlidModel):
    """One try of a job on one host; a host must present ``fence`` to act for the attempt.

    A job on several hosts has one row per host under the same number; ``node_rank`` 0 is the
    leader.
    """

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    node_rank = models.PositiveIntegerField(default=0)
    leader = models.ForeignKey(  # null on the leader itself
        "self", null=True, blank=True, on_delete=models.CASCADE, related_name="members"
    )
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="attempts")
    fence = models.CharField(max_length=32)
    address = models.CharField(max_length=45, blank=True)  # for the gang's other hosts
    master_port = models.PositiveIntegerField(null=True, blank=True)  # reserved on the leader
    taken_ports = models.JSONField(default=list, blank=True)  # reserved earlier, but in use
    claim_id = models.CharField(max_length=64, blank=True)
    claimed_at = models.DateTimeField(null=True, blank=True)
    boot_id = models.CharField(max_length=64, blank=True)
    acked_seq = models.PositiveBigIntegerField(default=0)
    dropped_duplicates = models.PositiveBigIntegerField(default=0)
    refused_gaps = models.PositiveBigIntegerField(default=0)
    stale_transitions = models.PositiveIntegerField(default=0)  # reports that arrived too late
    missed_beats = models.PositiveIntegerField(default=0)  # heartbeats without this attempt
    stop_reason = models.CharField(max_length=40, blank=True)  # set: the host must stop it
    stop_requested_at = models.DateTimeField(null=True, blank=True)
    exit_record = models.JSONField(default=dict, blank=True)  # runners.shared.messages.ExitRecord
    # What it keeps on its host's disk, as reported after its end; null: not reported yet.
    checkpoint_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    output_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    facts = models.JSONField(default=dict, blank=True)  # the host's facts at the time of the claim
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["number", "node_rank"]
        indexes = OF_ATTEMPTS
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
        """Return the leader of the attempt's gang: the attempt itself if it has no leader."""
        return self.leader or self


class Allocation(models.Model):
    """A device held by an attempt from its selection until the attempt has ended.

    With ``shared_bytes`` it holds a part of the memory, and others that do so hold the device too.
    """

    device = models.ForeignKey(Device, on_delete=models.PROTECT, related_name="allocations")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="allocations")
    shared_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    taken_at = models.DateTimeField()
    released_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(
                fields=["device"],
                condition=models.Q(released_at__isnull=True, shared_bytes__isnull=True),
                name="one_holder_per_device",
            )
        ]

    def __str__(self) -> str:
        return f"{self.device_id} for {self.attempt_id}"


class AttemptEvent(models.Model):
    """A stored event of an attempt; metric points are in the metric store instead."""

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


class Command(UlidModel):
    """A wake-up sent to a host, repeated until a heartbeat, claim or event acknowledges it."""

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
    """A folder or file made by an attempt; complete once all bytes arrived and digests match."""

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
    """A measured figure with its prediction; the input of a host's calibration."""

    # The job's team, stored here so that the index measurements_latest needs no join with jobs.
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="+", db_index=False)
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
    # Excluded from calibration and accuracy: by a person's decision, else if it is invalid.
    is_excluded = models.BooleanField(default=False)
    validity = models.JSONField(default=dict, blank=True)  # webapp.jobs.results.Evidence
    invalid_reason = models.CharField(max_length=300, blank=True)  # "": no objection
    held_back = models.CharField(max_length=300, blank=True)  # by the last calibration
    decision = models.CharField(
        max_length=8,
        choices=[("", "None"), ("excluded", "Excluded"), ("included", "Included")],
        blank=True,
    )
    decision_reason = models.CharField(max_length=200, blank=True)
    decided_by = models.CharField(max_length=150, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    measured_at = models.DateTimeField()

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["attempt", "metric"], name="one_measurement")
        ]
        indexes = [
            models.Index(
                fields=["team", "-measured_at", "job", "metric", "ratio", "is_excluded"],
                condition=models.Q(is_excluded=False),
                name="measurements_latest",
            )
        ]

    def __str__(self) -> str:
        return f"{self.metric} {self.ratio:.2f}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Store the row with the team of its job."""
        self.team_id = self.job.team_id
        super().save(*args, **kwargs)


class CalibrationChange(models.Model):
    """Change of a host's calibration factors by a run or by a person's decision."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="calibration_changes")
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="calibration_changes")
    at = models.DateTimeField()
    cause = models.CharField(
        max_length=8,
        choices=[("run", "Run"), ("excluded", "Excluded"), ("included", "Included")],
    )
    actor = models.CharField(max_length=150)
    before = models.JSONField(default=dict, blank=True)  # operator class -> CalibrationFactor
    after = models.JSONField(default=dict, blank=True)
    why = models.CharField(max_length=400, blank=True)  # why nothing changed

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["job", "id"])]

    def __str__(self) -> str:
        return f"{self.cause} {self.job_id} on {self.host_id}"


# Jobs of a host's scheduler that somebody else started.


class ObservedJob(TeamOwned):
    """A job that somebody else gave to a host's scheduler; Slipway only reads what it is told."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="+")
    job_id = models.CharField(max_length=MOST_JOB_ID)  # of the scheduler, or a pod's name
    plan = models.ForeignKey(
        Plan, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    report = models.JSONField(default=dict, blank=True)  # runners.shared.observed
    reported_at = models.DateTimeField(null=True, blank=True)
    has_ended = models.BooleanField(default=False)  # its host is not asked any more

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["team", "-created_at", "-id"], name="observed_jobs_listed"),
            models.Index(fields=["host", "has_ended"], name="observed_jobs_of_host"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["host", "job_id"], name="one_observed_job"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Return its name in the scheduler with its id, or the id alone."""
        given = str(((self.report or {}).get("facts") or {}).get("name") or "")
        return f"{given} ({self.job_id})" if given and given != self.job_id else self.job_id


# Launches by tokens with a budget, and those that wait for a person.


class TokenLaunch(models.Model):
    """A job that a token with a budget launched, and the GPU-hours that it may take."""

    token = models.ForeignKey(AccessToken, on_delete=models.CASCADE, related_name="launches")
    job = models.OneToOneField(Job, on_delete=models.CASCADE, related_name="token_launch")
    gpu_hours = models.FloatField()  # its devices times its time limit

    class Meta:
        verbose_name_plural = "token launches"

    def __str__(self) -> str:
        return f"{self.gpu_hours:g} GPU-hours of {self.token_id}"


class LaunchRequest(TeamOwned):
    """A launch that somebody, usually an agent, asks a person of the team to approve."""

    plan = models.ForeignKey(Plan, on_delete=models.CASCADE, related_name="launch_requests")
    document = models.JSONField(default=dict)  # runners.plans.launch.Launch
    reason = models.CharField(max_length=400, blank=True)  # of the one who asks
    asked_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    token_name = models.CharField(max_length=60, blank=True)
    asked_at = models.DateTimeField()
    state = models.CharField(
        max_length=9,
        choices=[
            ("waiting", "Waiting"),
            ("approved", "Approved"),
            ("denied", "Denied"),
            ("withdrawn", "Withdrawn"),
        ],
        default="waiting",
    )
    decided_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="+",
    )
    decided_at = models.DateTimeField(null=True, blank=True)
    answer = models.CharField(max_length=400, blank=True)  # why it was denied or withdrawn
    job = models.ForeignKey(
        Job, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta:
        ordering = ["-asked_at", "-id"]

    def __str__(self) -> str:
        return f"launch of {self.plan_id}, {self.state}"

"""The operations of the API, written by ``manage.py client`` from its schema."""

# ruff: noqa: E501, F403, F405, PLR0913, W505
# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from planner.specs.estimate import (
    Estimate,
    EstimateRequest,
    InverseAnswer,
    InverseRequest,
    PlanAnswer,
    PlanRequest,
)
from runners.client.operation import JsonObject, event_stream, operation
from runners.client.replies.base import *
from runners.client.replies.cached_models import *
from runners.client.replies.deployments import *
from runners.client.replies.hosts import *
from runners.client.replies.jobs import *
from runners.client.replies.launches import *
from runners.client.replies.library import *
from runners.client.replies.model_copies import *
from runners.client.replies.observed_jobs import *
from runners.client.replies.plans import *
from runners.client.replies.remote_code import *
from runners.client.replies.servers import *
from runners.client.replies.stored_files import *
from runners.client.replies.team import *
from runners.client.replies.tunings import *
from runners.client.replies.workflows import *
from runners.client.requests import *
from runners.client.transport import AsyncCaller, Caller, Event
from runners.plans.launch import Launch


class Operations:
    """Every operation of the API, as both clients have it."""

    @operation("GET", "/plans")
    def list_plans(self, *, limit: int = 50, cursor: str = "", q: str = "") -> PlanPage:
        """Return the teams' saved plans and the caller's own drafts, the last saved first."""

    @operation("POST", "/plans")
    def create_plan(
        self, body: JsonObject, *, keep: bool = True, idempotency_key: str | None = None
    ) -> PlanReply:
        """Make a plan from a document, plan it, and save it as its first version.

        What the document leaves out has the wizard's default. A plan that nothing fits is saved too:
        its answer holds the reasons. One that the planner refuses stays a draft.
        """

    @operation("POST", "/plans/from-request")
    def create_plan_from_request(
        self,
        body: PlannerRequest | JsonObject,
        *,
        keep: bool = True,
        idempotency_key: str | None = None,
    ) -> PlanReply:
        """Make a plan from a planner's request, such as the one of a plan that was made offline.

        ``notes`` names what the wizard has no field for.
        """

    @operation("POST", "/plans/import")
    def import_plan(
        self, body: Pasted | JsonObject, *, keep: bool = True, idempotency_key: str | None = None
    ) -> Imported:
        """Make a draft of a command line of an engine or a trainer, or of one of their files."""

    @operation("GET", "/plans/schema")
    def get_plan_schema(self) -> dict[str, Any]:
        """Return the JSON schema of plans and of workflows, for editors of ``job.yaml``."""

    @operation("GET", "/plans/{plan_id}")
    def get_plan(self, plan_id: str) -> PlanReply:
        """Return a plan with the planner's answer."""

    @operation("PATCH", "/plans/{plan_id}")
    def change_plan(
        self, plan_id: str, body: JsonObject, *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Change a plan's document by a JSON merge patch, plan it, and save the next version.

        A draft that the planner refuses stays a draft; a plan that was saved stays as it is, and the
        reply is its next version.
        """

    @operation("DELETE", "/plans/{plan_id}")
    def delete_plan(
        self, plan_id: str, *, all_versions: bool = False, idempotency_key: str | None = None
    ) -> None:
        """Delete a draft, or a saved plan with all its versions; its jobs remain.

        One version of several cannot be deleted alone: without ``all_versions=true`` that is refused
        with 409 ``has_versions``, which names the versions.
        """

    @operation("POST", "/plans/{plan_id}/compute")
    def compute_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> PlanReply:
        """Plan again with the host's current measurements; a changed answer is the next version."""

    @operation("POST", "/plans/{plan_id}/suggestions/{number}")
    def apply_suggestion(
        self, plan_id: str, number: int, *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Apply one of the plan's suggestions, plan it, and save the next version."""

    @operation("POST", "/plans/{plan_id}/clone")
    def clone_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> PlanReply:
        """Return a draft copy, to be saved as a separate plan."""

    @operation("POST", "/plans/{plan_id}/save")
    def save_plan(
        self, plan_id: str, body: Saving | JsonObject, *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Save a draft as a version; a saved plan is returned unchanged."""

    @operation("GET", "/plans/{plan_id}/versions")
    def list_plan_versions(
        self, plan_id: str, *, limit: int = 50, cursor: str = ""
    ) -> VersionPage:
        """Return every version of a saved plan, newest first."""

    @operation("GET", "/plans/{plan_id}/exports")
    def list_exports(self, plan_id: str) -> PlanFormats:
        """Return the formats that a plan can be exported to."""

    @operation("GET", "/plans/{plan_id}/exports/{key}")
    def export_plan(self, plan_id: str, key: str) -> ExportReply:
        """Return a plan in one format, with its notes and the script that measures it."""

    @operation("GET", "/plans/{plan_id}/limits/{question}")
    def get_plan_limit(
        self,
        plan_id: str,
        question: Literal[
            "longest_context",
            "largest_batch",
            "most_users",
            "longest_sequence",
            "largest_model",
            "fewest_devices",
            "cheapest_instance",
        ],
    ) -> dict[str, Any]:
        """Return a limit of a plan, such as ``longest_context`` or ``most_users``."""

    @operation("GET", "/jobs/{job_id}/post-mortem")
    def get_post_mortem(self, job_id: str) -> PostMortem:
        """Return what is known of a job's failure, and what would fit."""

    @operation("POST", "/jobs/{job_id}/plan")
    def plan_from_job(
        self, job_id: str, body: PlanFromJob | JsonObject, *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Make a draft plan from a job."""

    @operation("POST", "/plans/{plan_id}/launch")
    def launch_plan(
        self,
        plan_id: str,
        body: Launch | JsonObject,
        *,
        dry_run: bool = False,
        idempotency_key: str | None = None,
    ) -> Launched:
        """Launch a plan as a job; with an ``Idempotency-Key`` a repetition launches nothing more.

        A token with a budget launches only what its rest suffices for.
        """

    @operation("POST", "/plans/{plan_id}/launch-requests")
    def request_launch(
        self,
        plan_id: str,
        body: LaunchToApprove | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> LaunchRequestReply:
        """Ask a person of the team to approve a launch; they decide on the page Approvals."""

    @operation("POST", "/launch-requests")
    def request_launch_of_document(
        self, body: DocumentToApprove | JsonObject, *, idempotency_key: str | None = None
    ) -> LaunchRequestReply:
        """Plan a document, save the plan, and ask a person to approve its launch.

        It is done as a whole or not at all: a request that is refused keeps no plan.
        """

    @operation("GET", "/launch-requests")
    def list_launch_requests(self, *, limit: int = 50, cursor: str = "") -> LaunchRequestPage:
        """Return the teams' launches that wait for an approval, the oldest first."""

    @operation("GET", "/launch-requests/{request_id}")
    def get_launch_request(self, request_id: str) -> LaunchRequestReply:
        """Return a request with its decision, and the job of an approved one."""

    @operation("POST", "/launch-requests/{request_id}/withdraw")
    def withdraw_launch_request(
        self, request_id: str, body: Withdrawal | JsonObject, *, idempotency_key: str | None = None
    ) -> LaunchRequestReply:
        """Withdraw a launch that waits for an approval; only the account that asked may."""

    @operation("POST", "/templates/classification")
    def launch_classification(
        self, body: TwoJobs | JsonObject, *, idempotency_key: str | None = None
    ) -> list[JobReply]:
        """Launch the same classifier with DDP and with ZeRO on one host, to be compared."""

    @operation("POST", "/planner/plan")
    def ask_plan(
        self, body: PlanRequest | JsonObject, *, idempotency_key: str | None = None
    ) -> PlanAnswer:
        """Answer a planner question in the planner's own contract."""

    @operation("POST", "/planner/estimate")
    def ask_estimate(
        self, body: EstimateRequest | JsonObject, *, idempotency_key: str | None = None
    ) -> Estimate:
        """Return the estimate of one strategy."""

    @operation("POST", "/planner/inverse")
    def ask_inverse(
        self, body: InverseRequest | JsonObject, *, idempotency_key: str | None = None
    ) -> InverseAnswer:
        """Return a limit, such as the longest context or the cheapest instance."""

    @operation("GET", "/jobs")
    def list_jobs(
        self,
        *,
        limit: int = 50,
        cursor: str = "",
        state: str = "",
        kind: str = "",
        host: str = "",
        owner: str = "",
        plan: str = "",
        q: str = "",
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        sort: Literal["-created_at", "created_at"] = "-created_at",
    ) -> JobPage:
        """Return the teams' jobs, newest first unless ``sort`` says otherwise."""

    @operation("POST", "/jobs")
    def launch_document(
        self, body: JsonObject, *, dry_run: bool = False, idempotency_key: str | None = None
    ) -> Launched:
        """Plan a document, save the plan, and launch it as its field ``launch`` says.

        It is done as a whole or not at all: a launch that is refused keeps no plan.
        """

    @operation("GET", "/jobs/{job_id}")
    def get_job(self, job_id: str) -> JobDetail:
        """Return a job with its spec, its attempts and why it waits or ended."""

    @operation("DELETE", "/jobs/{job_id}")
    def delete_job(self, job_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete an ended job from the history; its measurements still calibrate its host.

        Its hosts delete its checkpoints, and its output unless that is a model of the team.
        """

    @operation("POST", "/jobs/{job_id}/stop")
    def stop_job(self, job_id: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Stop a job; its supervisor lets it save its results first."""

    @operation("POST", "/jobs/{job_id}/run-again")
    def run_job_again(self, job_id: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Queue a job with the same spec, owned by the caller, that runs from the start."""

    @operation("POST", "/jobs/{job_id}/resume")
    def resume_job(
        self, job_id: str, *, num_hosts: int | None = None, idempotency_key: str | None = None
    ) -> JobDetail:
        """Queue a job that goes on from the checkpoint of an ended one, on its hosts.

        Of a batch generation the finished answers are kept, of a compression the finished layers. A
        training on several hosts goes on on as many, or on ``num_hosts``: each keeps the checkpoint.
        """

    @operation("POST", "/jobs/{job_id}/abandon")
    def abandon_job(
        self, job_id: str, body: Abandoning | JsonObject, *, idempotency_key: str | None = None
    ) -> JobDetail:
        """Count the devices of a job's unreachable hosts as free, and end the job.

        With ``elsewhere`` a copy of it starts on another host; the reply is then the copy.
        """

    @operation("GET", "/jobs/{job_id}/log")
    def get_job_log(
        self,
        job_id: str,
        *,
        after: int | None = None,
        limit: int = 200,
        q: str = "",
        rank: int = 0,
    ) -> LogReply:
        """Return the last lines of a job's log, or those after an event, in order."""

    @operation("GET", "/jobs/{job_id}/series")
    def get_job_series(
        self,
        job_id: str,
        *,
        metrics: str = "",
        since: datetime | None = None,
        until: datetime | None = None,
        points: int = 600,
        rank: int = 0,
    ) -> JobSeries:
        """Return metrics of a job's current attempt between two instants, down-sampled.

        The reply lists the names of all metrics that it has reported, whichever are requested.
        """

    @operation("GET", "/jobs/{job_id}/figures")
    def get_job_figures(self, job_id: str) -> JobFiguresReply:
        """Return a job's predicted and measured figures, as shown on its page."""

    @operation("GET", "/jobs/{job_id}/events")
    def list_job_events(
        self, job_id: str, *, after: int = 0, kind: str = "", rank: int = 0
    ) -> JobEvents:
        """Return events of the current attempt after a sequence number, at most 1000 or 256 KiB.

        Request again after ``last_seq`` until the list is empty.
        """

    @operation("GET", "/jobs/{job_id}/artefacts")
    def list_artefacts(self, job_id: str, *, limit: int = 50, cursor: str = "") -> ArtefactPage:
        """Return the artefacts of a job's current attempt."""

    @operation("GET", "/jobs/{job_id}/artefacts/{name}")
    def download_artefact(self, job_id: str, name: str, sink: BinaryIO) -> int:
        """Return a complete artefact as a .tar file."""

    @event_stream("/jobs/{job_id}/stream")
    def follow_job(
        self, job_id: str, *, kinds: str = "log,state", after: int = 0, rank: int = 0
    ) -> Iterator[Event]:
        """Return a job's events as they come, until it ends; ``Last-Event-ID`` resumes the log."""

    @operation("GET", "/tickets")
    def get_ticket(self, *, topics: str) -> Ticket:
        """Return a new ticket for those of the comma-separated topics that the caller may see."""

    @operation("GET", "/hosts/{slug}/files")
    def list_host_files(self, slug: str, *, limit: int = 50, cursor: str = "") -> StoredFilesPage:
        """Return what ended jobs keep on a host's disk, the largest first."""

    @operation("GET", "/jobs/{job_id}/files")
    def list_job_files(self, job_id: str, *, limit: int = 50, cursor: str = "") -> StoredFilesPage:
        """Return what an ended job keeps on its hosts' disks, its last attempt first."""

    @operation("DELETE", "/jobs/{job_id}/files")
    def delete_job_files(
        self,
        job_id: str,
        *,
        part: Literal["checkpoint", "all"],
        idempotency_key: str | None = None,
    ) -> StoredFilesPage:
        """Order the hosts of an ended job to delete its checkpoints, or all that it keeps there.

        A host does so after its next heartbeat. Log, measurements and uploaded artefacts stay.
        """

    @operation("GET", "/hosts")
    def list_hosts(self, *, limit: int = 200, cursor: str = "", q: str = "") -> HostPage:
        """Return the teams' hosts by name."""

    @operation("POST", "/hosts/enrolments")
    def add_host(
        self, body: NewHost | JsonObject, *, idempotency_key: str | None = None
    ) -> EnrolmentReply:
        """Make a one-time token, valid for an hour, with which a machine enrols itself."""

    @operation("GET", "/hosts/enrolments/{token_id}")
    def get_enrolment(self, token_id: str) -> EnrolmentState:
        """Return what is known of a host that is being enrolled, check by check."""

    @operation("DELETE", "/hosts/enrolments/{token_id}")
    def revoke_enrolment(self, token_id: str, *, idempotency_key: str | None = None) -> None:
        """Revoke an unused enrolment token; a used or revoked one stays as it is."""

    @operation("POST", "/hosts/virtual")
    def add_virtual_host(
        self, body: NewVirtualHost | JsonObject, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Make a planning-only host, on which no job runs."""

    @operation("GET", "/hosts/{slug}")
    def get_host(self, slug: str) -> HostDetail:
        """Return a host with its devices, facts and measurements."""

    @operation("PATCH", "/hosts/{slug}")
    def change_host(
        self, slug: str, body: HostChanges | JsonObject, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Change a host's labels, and the address at which a job's other hosts reach it."""

    @operation("POST", "/hosts/{slug}/actions/{action}")
    def act_on_host(
        self,
        slug: str,
        action: Literal[
            "drain", "undrain", "recheck", "rotate", "revoke", "maintenance", "retire"
        ],
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Change a host, as an operator.

        ``drain``: it finishes its jobs and takes no new ones; ``undrain``: it takes jobs again;
        ``recheck``: it reports new facts; ``rotate``: it replaces its secrets; ``revoke``: its
        credential ends until it is enrolled again; ``maintenance`` and ``retire``: it is taken out.
        """

    @operation("POST", "/hosts/{slug}/apart")
    def mark_host_apart(
        self, slug: str, body: Alike | JsonObject, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Say that a host that looks like the same machine is another one, or undo it."""

    @operation("POST", "/hosts/{slug}/validate")
    def validate_host(self, slug: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Queue a validation of every device of a host; the reply is its job."""

    @operation("PUT", "/hosts/{slug}/devices/{device_id}/cordon")
    def cordon_device(
        self,
        slug: str,
        device_id: str,
        body: Cordon | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Cordon a device: it takes no new jobs."""

    @operation("DELETE", "/hosts/{slug}/devices/{device_id}/cordon")
    def uncordon_device(
        self, slug: str, device_id: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Uncordon a device: it takes jobs again."""

    @operation("PUT", "/hosts/{slug}/environments/{name}")
    def build_environment(
        self, slug: str, name: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Let a host build an environment, such as vllm, before a job needs it."""

    @operation("DELETE", "/hosts/{slug}/environments/{name}")
    def remove_environment(
        self, slug: str, name: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Let a host delete an environment that no job runs in."""

    @operation("GET", "/hosts/{slug}/models")
    def list_host_models(self, slug: str, *, limit: int = 50, cursor: str = "") -> CachedModelPage:
        """Return the models in the Hub's cache of a host, the largest first."""

    @operation("POST", "/hosts/{slug}/models")
    def pin_host_model(
        self, slug: str, body: ModelPin | JsonObject, *, idempotency_key: str | None = None
    ) -> CachedModelPage:
        """Pin a model of a host's cache, so that it stays there, or unpin it."""

    @operation("DELETE", "/hosts/{slug}/models")
    def delete_host_model(
        self, slug: str, *, model: str, idempotency_key: str | None = None
    ) -> CachedModelPage:
        """Let a host delete a model from its cache, unless it is pinned or a job needs it."""

    @operation("PUT", "/hosts/{slug}/models/rule")
    def set_models_rule(
        self, slug: str, body: ModelsRule | JsonObject, *, idempotency_key: str | None = None
    ) -> CachedModelPage:
        """Set how much a host's cache keeps: of more, the longest unused models are deleted."""

    @operation("GET", "/hosts/{slug}/copies")
    def list_model_copies(self, slug: str, *, limit: int = 50, cursor: str = "") -> ModelCopyPage:
        """Return the copies of models to a host, the newest first."""

    @operation("POST", "/hosts/{slug}/copies")
    def copy_model(
        self, slug: str, body: NewModelCopy | JsonObject, *, idempotency_key: str | None = None
    ) -> ModelCopyDetail:
        """Begin to copy a model into the cache of a host, or return the copy that is under way.

        Of files that the caller sends, in parts by ``send_model_part``, each goes on at the
        ``received_bytes`` of the reply.
        """

    @operation("GET", "/hosts/{slug}/copies/{copy_id}")
    def get_model_copy(self, slug: str, copy_id: str) -> ModelCopyDetail:
        """Return a copy with its files and where each is."""

    @operation("DELETE", "/hosts/{slug}/copies/{copy_id}")
    def stop_model_copy(
        self, slug: str, copy_id: str, *, idempotency_key: str | None = None
    ) -> ModelCopyDetail:
        """Stop a copy; what the host has received stays there for the next one."""

    @operation("PUT", "/hosts/{slug}/copies/{copy_id}/files/{number}")
    def send_model_part(
        self, slug: str, copy_id: str, number: int, body: bytes, *, offset: int
    ) -> PartReply:
        """Append a part to a file of a copy; the reply says where to go on.

        429 with the code ``copy_waits``: the server has no room until the host took other files.
        """

    @operation("GET", "/pools")
    def list_pools(self, *, limit: int = 200, cursor: str = "") -> PoolPage:
        """Return the pools in which the caller's teams may launch."""

    @operation("GET", "/pools/{pool_id}")
    def get_queue(self, pool_id: str) -> QueueReply:
        """Return a pool's queue in order, with the reason and forecast of each wait."""

    @operation("PATCH", "/pools/{pool_id}/jobs/{job_id}")
    def reorder_queue(
        self,
        pool_id: str,
        job_id: str,
        body: QueueMove | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> QueueReply:
        """Move a queued job by one turn, or change its priority, as an operator of the pool's team."""

    @operation("GET", "/workflows")
    def list_workflows(self, *, limit: int = 50, cursor: str = "") -> WorkflowPage:
        """Return the teams' workflows, the newest first."""

    @operation("POST", "/workflows")
    def start_workflow(
        self,
        body: WorkflowDocument | JsonObject,
        *,
        dry_run: bool = False,
        idempotency_key: str | None = None,
    ) -> WorkflowStarted:
        """Plan steps as a whole, and start the first; each next one starts when it has ended.

        A later step starts from the model that the last one made. It is done as a whole or not at
        all: where a step cannot be planned, nothing is started.
        """

    @operation("GET", "/workflows/{workflow_id}")
    def get_workflow(self, workflow_id: str) -> WorkflowReply:
        """Return a workflow with its steps: what was planned, and what its jobs measured."""

    @operation("DELETE", "/workflows/{workflow_id}")
    def delete_workflow(self, workflow_id: str, *, idempotency_key: str | None = None) -> None:
        """Take an ended workflow out of the lists; its jobs, models and plans stay."""

    @operation("POST", "/workflows/{workflow_id}/stop")
    def stop_workflow(
        self, workflow_id: str, *, idempotency_key: str | None = None
    ) -> WorkflowReply:
        """Stop the jobs of a workflow that run, and start none of those that wait."""

    @operation("POST", "/workflows/{workflow_id}/resume")
    def resume_workflow(
        self, workflow_id: str, *, idempotency_key: str | None = None
    ) -> WorkflowReply:
        """Go on with a failed or stopped workflow: what has succeeded stays."""

    @operation("POST", "/plans/{plan_id}/tunings")
    def start_tuning(
        self,
        plan_id: str,
        body: TuningOptions | JsonObject,
        *,
        dry_run: bool = False,
        idempotency_key: str | None = None,
    ) -> TuningReply:
        """Measure a plan's best strategies on its host, one job after another.

        The plan's own choice comes first. The best one becomes the plan's next version if it is
        better in repeated measurements.
        """

    @operation("GET", "/tunings")
    def list_tunings(self, *, limit: int = 50, cursor: str = "", plan: str = "") -> TuningPage:
        """Return the teams' tunings, the newest first."""

    @operation("GET", "/tunings/{tuning_id}")
    def get_tuning(self, tuning_id: str) -> TuningReply:
        """Return a tuning with its candidates: what was planned, and what its jobs measured."""

    @operation("DELETE", "/tunings/{tuning_id}")
    def delete_tuning(self, tuning_id: str, *, idempotency_key: str | None = None) -> None:
        """Take an ended tuning out of the list; its jobs and its version of the plan stay."""

    @operation("POST", "/tunings/{tuning_id}/stop")
    def stop_tuning(self, tuning_id: str, *, idempotency_key: str | None = None) -> TuningReply:
        """Stop the trial of a tuning that runs, and start no other; what was measured stays."""

    @operation("GET", "/deployments")
    def list_deployments(self, *, limit: int = 50, cursor: str = "") -> DeploymentPage:
        """Return the teams' deployments, the newest first."""

    @operation("POST", "/deployments")
    def create_deployment(
        self, body: NewDeployment | JsonObject, *, idempotency_key: str | None = None
    ) -> DeploymentReply:
        """Make a deployment: it sleeps until the first request, unless it is kept awake."""

    @operation("GET", "/deployments/{deployment_id}")
    def get_deployment(self, deployment_id: str) -> DeploymentReply:
        """Return a deployment with the jobs that serve it."""

    @operation("PATCH", "/deployments/{deployment_id}")
    def change_deployment(
        self,
        deployment_id: str,
        body: ChangedDeployment | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> DeploymentReply:
        """Change a deployment; another plan is rolled out without a failed request."""

    @operation("DELETE", "/deployments/{deployment_id}")
    def delete_deployment(self, deployment_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete a deployment: its jobs stop, its name is free again, its usage stays."""

    @operation("GET", "/deployments/{deployment_id}/draft")
    def get_deployment_draft(self, deployment_id: str) -> DeploymentDraftReply:
        """Return the draft of a deployment's change, against what counts now; 404: there is none."""

    @operation("PUT", "/deployments/{deployment_id}/draft")
    def keep_deployment_draft(
        self,
        deployment_id: str,
        body: ChangedDeployment | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> DeploymentDraftReply:
        """Keep a change as the deployment's draft, in place of the one before; nothing runs of it."""

    @operation("DELETE", "/deployments/{deployment_id}/draft")
    def discard_deployment_draft(
        self, deployment_id: str, *, idempotency_key: str | None = None
    ) -> None:
        """Discard the draft of a deployment's change."""

    @operation("POST", "/deployments/{deployment_id}/draft/roll-out")
    def roll_out_deployment_draft(
        self, deployment_id: str, body: RollOut | JsonObject, *, idempotency_key: str | None = None
    ) -> DeploymentReply:
        """Change the deployment as its draft says; what runs is replaced without a failed request."""

    @operation("POST", "/deployments/{deployment_id}/wake")
    def wake_deployment(
        self, deployment_id: str, *, idempotency_key: str | None = None
    ) -> DeploymentReply:
        """Load a deployment's model now; a paused one is resumed."""

    @operation("POST", "/deployments/{deployment_id}/sleep")
    def sleep_deployment(
        self, deployment_id: str, *, idempotency_key: str | None = None
    ) -> DeploymentReply:
        """Stop the jobs of a deployment; the next request wakes it."""

    @operation("GET", "/serving-keys")
    def list_serving_keys(self, *, limit: int = 50, cursor: str = "") -> KeyPage:
        """Return the caller's keys, the newest first; an operator gets the team's."""

    @operation("POST", "/serving-keys")
    def make_serving_key(
        self, body: KeyOptions | JsonObject, *, idempotency_key: str | None = None
    ) -> MadeKey:
        """Make a key with which clients use the team's deployments."""

    @operation("POST", "/serving-keys/{key_id}/rotate")
    def rotate_serving_key(
        self, key_id: str, body: Rotation | JsonObject, *, idempotency_key: str | None = None
    ) -> MadeKey:
        """Give a key a new secret; the present one still opens for the hours of the overlap."""

    @operation("DELETE", "/serving-keys/{key_id}")
    def revoke_serving_key(self, key_id: str, *, idempotency_key: str | None = None) -> None:
        """Revoke a key; gateways end its streams within a second."""

    @operation("GET", "/usage")
    def list_usage(
        self, *, limit: int = 200, cursor: str = "", days: int = 30, month: str | None = None
    ) -> UsagePage:
        """Return what the caller's keys used, by day, key and deployment; an operator gets all."""

    @operation("GET", "/servers")
    def list_servers(self, *, limit: int = 50, cursor: str = "") -> ServerPage:
        """Return the teams' observed servers, the newest first."""

    @operation("POST", "/servers")
    def add_server(
        self, body: NewServer | JsonObject, *, idempotency_key: str | None = None
    ) -> ServerDetail:
        """Watch a server that somebody else started; nothing of it is changed."""

    @operation("GET", "/servers/{server_id}")
    def get_server(self, server_id: str) -> ServerDetail:
        """Return an observed server, as of the last look, with what its plan says."""

    @operation("PATCH", "/servers/{server_id}")
    def change_server(
        self,
        server_id: str,
        body: ChangedServer | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> ServerDetail:
        """Change what a server is called and what stands beside it."""

    @operation("DELETE", "/servers/{server_id}")
    def remove_server(self, server_id: str, *, idempotency_key: str | None = None) -> None:
        """Watch a server no longer, and delete its points; the server runs on."""

    @operation("GET", "/observed-jobs")
    def list_observed_jobs(self, *, limit: int = 50, cursor: str = "") -> ObservedJobPage:
        """Return the teams' observed jobs, the newest first."""

    @operation("POST", "/observed-jobs")
    def observe_job(
        self, body: NewObservedJob | JsonObject, *, idempotency_key: str | None = None
    ) -> ObservedJobDetail:
        """Observe a job that somebody else gave to a host's scheduler; nothing of it is changed.

        Sent again, it changes the plan beside the job.
        """

    @operation("GET", "/observed-jobs/{observed_id}")
    def get_observed_job(self, observed_id: str) -> ObservedJobDetail:
        """Return an observed job as its host read it last, with what its plan says."""

    @operation("DELETE", "/observed-jobs/{observed_id}")
    def remove_observed_job(self, observed_id: str, *, idempotency_key: str | None = None) -> None:
        """Observe a job no longer; the job runs on."""

    @operation("GET", "/models")
    def list_models(self, *, limit: int = 50, cursor: str = "", q: str = "") -> ModelPage:
        """Return the teams' models, newest first, then the catalog's."""

    @operation("POST", "/models")
    def add_model(
        self, body: NewModel | JsonObject, *, idempotency_key: str | None = None
    ) -> ModelDetail:
        """Register a model of the team by its config, or by a repository, whose weights jobs load.

        422 with the code ``hub_unreachable``: the server does not reach the hub, and needs the config.
        """

    @operation("GET", "/models/{model_id}")
    def get_model(self, model_id: str) -> ModelDetail:
        """Return a model of the team by its id, or one of the catalog by any of its names."""

    @operation("PATCH", "/models/{model_id}")
    def change_model(
        self, model_id: str, body: ModelChanges | JsonObject, *, idempotency_key: str | None = None
    ) -> ModelDetail:
        """Rename a model of the team; plans and jobs keep the name that they were made with."""

    @operation("DELETE", "/models/{model_id}")
    def delete_model(
        self, model_id: str, *, files: bool = False, idempotency_key: str | None = None
    ) -> None:
        """Delete a model from the team's models; jobs that ran with it stay in the history."""

    @operation("POST", "/evaluations/{model_id}")
    def evaluate_model(
        self,
        model_id: str,
        body: EvaluationRequest | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> JobDetail:
        """Queue an evaluation of one of the team's models; the reply is its job."""

    @operation("POST", "/publications/{model_id}")
    def publish_model(
        self,
        model_id: str,
        body: PublishRequest | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> JobDetail:
        """Queue the push of a model that a job made to a repository of the Hub; the reply is its job.

        Its card has base model, data, method and the measured figures. The team's secret HF_TOKEN is
        checked first: it must be able to write to the repository's owner.
        """

    @operation("GET", "/data")
    def list_data(self, *, limit: int = 50, cursor: str = "") -> DatasetPage:
        """Return the teams' uploaded files, newest first."""

    @operation("POST", "/data")
    def add_data(self, file: Path, *, idempotency_key: str | None = None) -> DatasetReply:
        """Upload a file of training data: JSON, Parquet, CSV or text; it is checked at once."""

    @operation("GET", "/data/{dataset_id}")
    def get_data(self, dataset_id: str) -> DatasetReply:
        """Return one uploaded file's facts."""

    @operation("DELETE", "/data/{dataset_id}")
    def delete_data(self, dataset_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete an uploaded file, unless a job that has not ended uses it."""

    @operation("GET", "/devices")
    def list_devices(self, *, limit: int = 200, cursor: str = "", q: str = "") -> DevicePage:
        """Return the devices of the hardware catalog."""

    @operation("GET", "/techniques")
    def list_techniques(self, *, limit: int = 200, cursor: str = "") -> TechniquePage:
        """Return every technique that the planner knows."""

    @operation("GET", "/techniques/{key}")
    def get_technique(self, key: str) -> TechniqueReply:
        """Return one technique."""

    @operation("GET", "/search")
    def search(self, *, limit: int = 50, cursor: str = "", q: str) -> SearchPage:
        """Return plans, jobs, hosts, models and techniques whose name contains ``q``.

        At most 1000 of each kind are found: the newest plans, jobs and models.
        """

    @operation("GET", "/compare")
    def compare_jobs(self, *, job: list[str]) -> Comparison:
        """Compare the figures and settings of two or more jobs."""

    @operation("GET", "/jobs/{job_id}/measurements")
    def list_measurements(
        self, job_id: str, *, limit: int = 50, cursor: str = ""
    ) -> MeasurementPage:
        """Return the measurements of a job that calibrate its host, or were excluded."""

    @operation("PUT", "/jobs/{job_id}/measurements/{measurement_id}")
    def decide_measurement(
        self,
        job_id: str,
        measurement_id: int,
        body: Decision | JsonObject,
        *,
        idempotency_key: str | None = None,
    ) -> MeasurementReply:
        """Exclude a measurement from the calibration of its host, or include it again."""

    @operation("GET", "/trusted-code")
    def list_trusted_code(self, *, limit: int = 50, cursor: str = "") -> TrustedCodePage:
        """Return the repositories and commits whose own code the current team's jobs may run."""

    @operation("POST", "/trusted-code")
    def allow_code(
        self, body: AllowedCode | JsonObject, *, idempotency_key: str | None = None
    ) -> TrustedCodeReply:
        """Let the team's jobs run the own code of a repository, at this commit alone, as an admin."""

    @operation("DELETE", "/trusted-code/{code_id}")
    def forbid_code(self, code_id: str, *, idempotency_key: str | None = None) -> None:
        """Withdraw the permission; jobs that have not started no longer get the code."""

    @operation("GET", "/me")
    def get_me(self) -> MeReply:
        """Return who calls: for a token its account, scope, team and what is left of its budget."""

    @operation("GET", "/team/members")
    def list_members(self, *, limit: int = 200, cursor: str = "") -> MemberPage:
        """Return the members of the current team; an administrator of the site changes them."""

    @operation("GET", "/tokens")
    def list_tokens(self, *, limit: int = 50, cursor: str = "") -> TokenPage:
        """Return the caller's tokens in the current team, newest first; an admin gets the team's."""

    @operation("POST", "/tokens")
    def make_token(
        self, body: NewToken | JsonObject, *, idempotency_key: str | None = None
    ) -> MadeToken:
        """Make an access token of at most the caller's own scope."""

    @operation("DELETE", "/tokens/{token_id}")
    def revoke_token(self, token_id: str, *, idempotency_key: str | None = None) -> None:
        """Revoke a token: an own one, or another's as an admin of the team.

        With a token of a lower scope than admin it can be that token alone.
        """

    @operation("GET", "/secrets")
    def list_secrets(self, *, limit: int = 200, cursor: str = "") -> SecretPage:
        """Return the names of the current team's secrets."""

    @operation("PUT", "/secrets/{name}")
    def set_secret(
        self, name: str, body: SecretValue | JsonObject, *, idempotency_key: str | None = None
    ) -> SecretReply:
        """Store a secret under a name, or replace its value."""

    @operation("DELETE", "/secrets/{name}")
    def delete_secret(self, name: str, *, idempotency_key: str | None = None) -> None:
        """Delete a secret of the current team; jobs that name it no longer start."""

    @operation("GET", "/sessions")
    def list_sessions(self, *, limit: int = 50, cursor: str = "") -> SessionPage:
        """Return the browsers in which the caller is logged in, the last used first."""

    @operation("GET", "/team/limits")
    def get_limits(self) -> QuotaReply:
        """Return the limits of the current team."""

    @operation("PATCH", "/team/limits")
    def change_limits(
        self, body: QuotaChanges | JsonObject, *, idempotency_key: str | None = None
    ) -> QuotaReply:
        """Change the limits of the current team, as an operator."""

    @operation("GET", "/audit")
    def list_audit(
        self,
        *,
        limit: int = 50,
        cursor: str = "",
        kind: str = "",
        actor: str = "",
        subject: str = "",
        since: date | None = None,
        until: date | None = None,
    ) -> EventPage:
        """Return the history of the current team, newest first, for its admins."""


class Slipway(Operations, Caller):
    """The client of a server, one request after the other."""


class AsyncSlipway(Operations, AsyncCaller):
    """The client of a server for asyncio: the same methods, to be awaited."""

"""Reconciles the attempts on disk with the server's state: claim, launch, stop, forget.

Level-triggered: ``apply`` every ten seconds is enough, and messages may be lost or repeated.
Each step reads the folder first and does nothing if it is already done.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from runners import launch, preflight, secret_files
from runners.attempts import ID, AttemptFolder, Claim, Verdict, attempt_folders
from runners.client import RefusedError, ServerClient, ServerError
from runners.config import HostConfig, HostDir
from runners.fetching import Fetcher
from runners.jobspec import JobSpec
from runners.launch import LaunchRefusedError
from runners.launchers import choose
from runners.launchers.base import Launcher
from runners.messages import (
    AttemptPhase,
    AttemptStatus,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    RunRequest,
    StopOrder,
    Wanted,
)
from runners.preflight_messages import Needs
from runners.reasons import Reason
from runners.spool import SpoolReader
from runners.supervision import record
from runners.takeover import take_over

log = logging.getLogger(__name__)

Render = Callable[[JobSpec, Path], list[str]]
_PHASES: dict[Verdict, AttemptPhase] = {
    Verdict.CLAIMING: "claimed",
    Verdict.NEVER_STARTED: "claimed",
    Verdict.WAITING: "claimed",
    Verdict.RUNNING: "running",
    Verdict.SUPERVISOR_LOST: "running",
    Verdict.HOST_REBOOTED: "running",
    Verdict.FINISHED: "exited",
}
GONE = frozenset({409, 410})  # this host will never run the attempt
MOST_PORTS = 20  # occupied ports reported per claim at most


class Reconciler:
    """The attempts of one host."""

    def __init__(
        self,
        host_dir: HostDir,
        config: HostConfig,
        client: ServerClient,
        *,
        boot_id: str,
        render: Render = launch.render_argv,
    ) -> None:
        self.host_dir = host_dir
        self.config = config
        self.boot_id = boot_id
        self.launcher: Launcher = choose.launcher(config, boot_id)
        self.problems: list[str] = []
        self._client = client
        self._render = render
        self._fetcher = Fetcher(client)
        self._readers: dict[str, SpoolReader] = {}

    # Actual state

    def verdicts(self) -> dict[str, Verdict]:
        """Return the state of every live attempt by id; quarantine damaged folders."""
        verdicts: dict[str, Verdict] = {}
        folders = attempt_folders(self.host_dir.attempts)
        self.launcher.refresh(folders)
        for folder in folders:
            verdict = self.launcher.verdict_of(folder)
            if verdict is Verdict.DAMAGED:
                self._quarantine(folder)
            elif verdict not in (Verdict.TOMBSTONE, Verdict.FORGOTTEN):
                verdicts[folder.attempt_id] = verdict
        return verdicts

    def reap(self) -> dict[str, Verdict]:
        """Write missing exit records, and return the resulting states by attempt id."""
        verdicts = self.verdicts()
        for attempt_id, verdict in list(verdicts.items()):
            folder = self._folder(attempt_id)
            end = self.launcher.unrecorded_end(folder, verdict)
            if end is None and (verdict is not Verdict.FINISHED or folder.is_settled):
                continue
            if end:
                log.warning("attempt %s: %s %s", attempt_id, end.reason, end.explanation)
            try:
                folder.settle(*(end or (Reason.INTERNAL,)))
                verdicts[attempt_id] = Verdict.FINISHED
            except ValueError:  # the files on disk are damaged
                self._quarantine(folder)
                del verdicts[attempt_id]
        return verdicts

    def statuses(self) -> tuple[AttemptStatus, ...]:
        """Return the attempts' statuses for a heartbeat."""
        reports = []
        for attempt_id, verdict in self.verdicts().items():
            folder = self._folder(attempt_id)
            claim = folder.claim()
            if claim is None:
                continue
            reader = self._readers.setdefault(attempt_id, SpoolReader(folder.spool))
            status = AttemptStatus(
                attempt_id=attempt_id,
                fence=claim.fence,
                phase=_PHASES[verdict],
                last_seq=reader.last_seq(),
                acked_seq=folder.acked_seq(),
                waits_for=self.launcher.waits_for(folder) if verdict is Verdict.WAITING else "",
            )
            reports.append(status)
        return tuple(reports)

    def running(self) -> list[AttemptFolder]:
        """Return the attempts whose supervisor runs."""
        verdicts = self.verdicts()
        return [
            self._folder(key) for key, verdict in verdicts.items() if verdict is Verdict.RUNNING
        ]

    # Desired state

    def apply(self, reply: BeatReply) -> None:
        """Apply a heartbeat reply: stop, claim and forget attempts."""
        for order in reply.stop:  # first: a claimed attempt that must stop never starts
            self.stop(order)
        for wanted in reply.wanted:
            self.claim(wanted)
        for attempt_id in reply.forget:
            if (folder := self._existing_folder(attempt_id)) and folder.is_settled:
                folder.forget()
                self._readers.pop(attempt_id, None)

    def retry_claims(self) -> None:
        """Repeat the claims that were not answered."""
        for attempt_id, verdict in self.verdicts().items():
            claim = self._folder(attempt_id).claim()
            if verdict is Verdict.CLAIMING and claim:
                self.claim(Wanted(attempt_id=attempt_id, fence=claim.fence))

    def claim(self, wanted: Wanted) -> None:
        """Claim an attempt and start it, unless it is already claimed."""
        if not ID.fullmatch(wanted.attempt_id):
            log.error("the server requested an attempt with the id %r", wanted.attempt_id)
            return
        folder = self._folder(wanted.attempt_id)
        if folder.path.exists() and self.launcher.verdict_of(folder) is not Verdict.CLAIMING:
            return
        claim = folder.make_claim(wanted.fence, self.boot_id, wanted.needs)
        needs = claim.needs
        for _ in range(MOST_PORTS):
            reply = self._claim(folder, claim, needs)
            if reply is None:
                return
            if reply.may_start:
                self._start(folder, reply)
                return
            ports = _own_ports(reply.request)
            if needs is None or not ports or needs.ports == ports:
                return  # other hosts have not claimed yet: retried at the next heartbeat
            needs = needs.model_copy(update={"ports": ports})  # the previous port was occupied

    def _claim(
        self, folder: AttemptFolder, claim: Claim, needs: Needs | None
    ) -> ClaimReply | None:
        """Return the server's reply to a claim, or None; mark the folder if it was rejected."""
        place = preflight.Place(
            self.host_dir, self.config, self._model_roots(), self._stopping_attempts()
        )
        claim_request = ClaimRequest(
            fence=claim.fence,
            claim_id=claim.claim_id,
            boot_id=self.boot_id,
            checks=preflight.run_checks(needs, place) if needs else (),
        )
        try:
            return self._client.claim(folder.attempt_id, claim_request)
        except RefusedError as refusal:
            log.warning("%s", refusal)
            if refusal.status in GONE:
                folder.mark_claim_rejected()
        except ServerError as error:
            log.info("the claim of %s waits: %s", folder.attempt_id, error)
        return None

    def _start(self, folder: AttemptFolder, reply: ClaimReply) -> None:
        request = reply.request
        values = {name: value.get_secret_value() for name, value in reply.secrets.items()}
        try:
            if not self._fetcher.has_all(folder, request.spec):
                return  # retried at the next heartbeat
            launch.refuse_missing(request.spec.secrets, values)
            self._check_disk()
            spec = launch.confine(request.spec, self._model_roots(), self.host_dir.attempts)
            argv, env = launch.gang_command(request, spec, self._render(spec, folder.path))
            env |= secret_files.write(folder.path, values)
            document = self.launcher.adapt(self._document(folder, request, argv, env), request)
        except LaunchRefusedError as refusal:
            record.write_json(folder.spec, request.model_dump(mode="json"))
            folder.settle(refusal.reason, str(refusal))
            return
        folder.output.mkdir(mode=0o700, exist_ok=True)
        take_over(folder, request, attempt_folders(self.host_dir.attempts))
        record.write_json(folder.path / record.LAUNCH, document)
        resolved = request.model_copy(update={"spec": spec})
        record.write_json(folder.spec, resolved.model_dump(mode="json"))
        try:
            self.launcher.launch(folder)
        except LaunchRefusedError as refusal:
            folder.settle(refusal.reason, str(refusal))

    def _document(
        self, folder: AttemptFolder, request: RunRequest, argv: list[str], env: dict[str, str]
    ) -> dict[str, object]:
        """Return the supervisor's launch document."""
        return {
            "attempt_id": folder.attempt_id,
            "argv": argv,
            "env": launch.render_env(
                self.host_dir.path,
                len(self.running()) + 1,
                self.config.model_roots,
                request.devices,
            )
            | env,
            "max_duration_seconds": request.max_duration_seconds,
            "memory_limit_bytes": self.config.job_memory_bytes,
            "inherit": launch.inherited_variables(request.spec),
        }

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.host_dir.path).free
        if free < self.config.min_free_bytes:
            raise LaunchRefusedError(
                Reason.DISK_FULL,
                f"{free / 2**30:.1f} GiB are free on this host, "
                f"{self.config.min_free_bytes / 2**30:.1f} GiB are required; "
                f'free some space, or lower "min_free_bytes" in config.json',
            )

    def _stopping_attempts(self) -> list[preflight.StoppingAttempt]:
        """Return the running attempts with a stop order, and the GPUs of each."""
        return [
            preflight.StoppingAttempt(folder.attempt_id, _gpus_of(folder))
            for folder in self.running()
            if (folder.path / record.STOP).exists()
        ]

    def _model_roots(self) -> tuple[Path, ...]:
        return (self.host_dir.models, *self.config.model_roots, self.host_dir.attempts)

    def stop(self, order: StopOrder) -> None:
        """Order an attempt's supervisor to end it; a claimed attempt never starts."""
        folder = self._existing_folder(order.attempt_id)
        if folder is None or (folder.path / record.STOP).exists():
            return
        document = {"reason": order.reason, "grace_seconds": order.grace_seconds}
        record.write_json(folder.path / record.STOP, document)
        self.launcher.stop(folder)

    def _existing_folder(self, attempt_id: str) -> AttemptFolder | None:
        folder = self._folder(attempt_id)
        return folder if ID.fullmatch(attempt_id) and folder.path.is_dir() else None

    def _folder(self, attempt_id: str) -> AttemptFolder:
        return AttemptFolder(self.host_dir.attempts / attempt_id)

    def _quarantine(self, folder: AttemptFolder) -> None:
        place = folder.quarantine(self.host_dir.quarantine)
        sentence = f"the folder of attempt {folder.attempt_id} is damaged; it was moved to {place}"
        log.error("%s", sentence)
        self.problems.append(sentence)


def _own_ports(request: RunRequest) -> tuple[int, ...]:
    """Return the gang's port if it is reserved on this host, else an empty tuple."""
    gang = request.gang
    return (gang.master_port,) if gang and gang.node_rank == 0 else ()


def _gpus_of(folder: AttemptFolder) -> frozenset[str]:
    request = folder.request()
    return frozenset(device.uuid for device in request.devices) if request else frozenset()

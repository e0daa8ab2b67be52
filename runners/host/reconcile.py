"""Reconciles the attempts on disk with the server's state: claim, fetch, launch, stop, forget."""

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from runners.host import preflight
from runners.host.schedulers import SCHEDULERS
from runners.host.shipping import RefusedError, ServerClient, ServerError, UnknownOptionsError
from runners.jobspec import JobSpec, TrainSpec, UploadedData
from runners.jobspec.base import resume_from_of, uploads_of
from runners.launchers import attempts, launch
from runners.launchers.attempts import (
    ID,
    AttemptFolder,
    Claim,
    Verdict,
    attempt_folders,
    with_checkpoint,
)
from runners.launchers.launch import Launcher, LaunchRefusedError, LocalLauncher
from runners.shared.config import HostConfig, HostDir
from runners.shared.messages import (
    AttemptPhase,
    AttemptStatus,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    Needs,
    RunRequest,
    StopOrder,
    WantedAttempt,
)
from runners.shared.reasons import Reason
from runners.shared.spool import SpoolReader
from runners.shared.timing import STOP_ALL_SECONDS, STOP_GRACE_SECONDS, SUPERVISOR_END_SECONDS
from runners.supervision import child, procfs

# Lets an attempt go on from the files of an earlier one on this host: of its own job, else of the
# job that it resumes.
#
# Checkpoint, answers or finished layers may be several times as large as the model. Within a job
# they are moved. Of another job they are copied, so that it can be resumed again: a training's by
# hard links, because each checkpoint is written into a new folder and no file of an old one
# changes. A retry on another host starts from scratch; of a job on several hosts, each keeps the
# checkpoint, and sends it to those that are new.


log = logging.getLogger(__name__)


def take_over_checkpoint(
    folder: AttemptFolder, request: RunRequest, others: Iterable[AttemptFolder]
) -> AttemptFolder | None:
    """Take over what the newest earlier attempt left; return that attempt, or None.

    Skips attempts whose supervisor runs. ``None``: there was nothing to take over.
    """
    if any(folder.checkpoint.glob("*")):
        return None  # already taken over before the agent restarted
    known = [other for other in others if other.attempt_id != folder.attempt_id]
    own = [
        other
        for other in with_checkpoint(known, request.job_id)
        if _number(other) < request.number
    ]
    resumed = resume_from_of(request.spec)
    for earlier in [*own, *(with_checkpoint(known, resumed) if resumed else [])]:
        try:
            with child.locked(earlier.lock, SUPERVISOR_END_SECONDS):
                if folder.checkpoint.is_dir():
                    folder.checkpoint.rmdir()  # empty, as checked above
                if earlier in own:
                    earlier.checkpoint.rename(folder.checkpoint)
                else:
                    links = isinstance(request.spec, TrainSpec)
                    _copy(earlier.checkpoint, folder.checkpoint, links=links)
        except (child.LockedError, OSError) as error:
            log.warning("what %s left is not taken over: %s", earlier.attempt_id, error)
            continue
        log.info("attempt %s goes on from %s", folder.attempt_id, earlier.attempt_id)
        return earlier
    return None


def _copy(source: Path, target: Path, *, links: bool) -> None:
    """Copy a checkpoint folder whole or not at all, with hard links where that is asked for."""
    building = target.with_name(f"{target.name}.copied")
    shutil.rmtree(building, ignore_errors=True)
    shutil.copytree(source, building, copy_function=_link if links else shutil.copy2)
    building.rename(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _number(folder: AttemptFolder) -> int:
    request = folder.request()
    return request.number if request else 0


# Downloads the files of an attempt's spec from the server before the attempt starts.
#
# Runs in a separate thread, so that a large file does not delay heartbeats: the claim is repeated
# with each heartbeat until every file is present, as for a gang that waits for its other hosts.


DOWNLOAD_WAIT_SECONDS = 1.0  # a small file arrives in this time, and its attempt starts at once


class Fetcher:
    """The downloads for the attempts of one host."""

    def __init__(self, client: ServerClient) -> None:
        """Download from this client's server."""
        self._client = client
        self._downloads: dict[str, _Fetch] = {}

    def has_all(self, folder: AttemptFolder, spec: JobSpec) -> bool:
        """Return whether every file of a spec is present; start downloading missing ones.

        Raises:
            LaunchRefusedError: a file is not available, or has the wrong content.
        """
        uploads = uploads_of(spec.data) if isinstance(spec, TrainSpec) else ()
        missing = [each for each in uploads if not (folder.data / each.file_name).exists()]
        if not missing:
            return True
        fetch = self._downloads.get(folder.attempt_id)
        if fetch is None:
            fetch = self._downloads[folder.attempt_id] = _Fetch(self._client, folder, missing)
            fetch.start()
        fetch.join(DOWNLOAD_WAIT_SECONDS)
        if fetch.is_alive():
            return False
        del self._downloads[folder.attempt_id]
        if fetch.refusal is not None:
            raise fetch.refusal
        return fetch.is_done


class _Fetch(threading.Thread):
    """Downloads files of one attempt; ``refusal`` is the error if one is not available."""

    def __init__(
        self, client: ServerClient, folder: AttemptFolder, uploads: list[UploadedData]
    ) -> None:
        super().__init__(name=f"fetch-{folder.attempt_id}", daemon=True)
        self._client = client
        self._folder = folder
        self._uploads = uploads
        self.is_done = False
        self.refusal: LaunchRefusedError | None = None

    def run(self) -> None:
        try:
            self._folder.data.mkdir(mode=0o700, exist_ok=True)
            for each in self._uploads:
                self._download(each, self._folder.data / each.file_name)
            self.is_done = True
        except LaunchRefusedError as refusal:
            self.refusal = refusal
        except RefusedError as refused:
            if not refused.is_transient:
                self.refusal = LaunchRefusedError(
                    Reason.MODEL_OR_DATA_MISSING,
                    f"the server no longer has the training data: {refused}; upload it again",
                )
        except ServerError:
            return  # the server is unreachable: retried at the next heartbeat
        except OSError as error:
            self.refusal = LaunchRefusedError(
                Reason.DISK_FULL,
                f"the training data cannot be kept in {self._folder.data}: {error.strerror}; free "
                "some space, or correct the folder's owner",
            )

    def _download(self, upload: UploadedData, target: Path) -> None:
        partial = target.with_name(f".{target.name}.part")
        digest, size = hashlib.sha256(), 0
        with partial.open("wb") as sink:
            for piece in self._client.data(self._folder.attempt_id, upload.dataset_id):
                size += len(piece)
                if size > upload.size_bytes:
                    break
                digest.update(piece)
                sink.write(piece)
        if size != upload.size_bytes or digest.hexdigest() != upload.sha256:
            partial.unlink()
            raise LaunchRefusedError(
                Reason.MODEL_OR_DATA_MISSING,
                f"{upload.name} arrived with the SHA-256 {digest.hexdigest()[:12]} and {size} "
                f"bytes; the job was made for {upload.sha256[:12]} and {upload.size_bytes}: "
                "upload the file again and launch again",
            )
        partial.rename(target)


# Selects the launcher from the host's configuration.


def launcher(config: HostConfig, boot_id: str) -> Launcher:
    """Return the launcher of a host."""
    chosen = config.scheduler
    return SCHEDULERS[chosen.KIND].launcher(chosen) if chosen else LocalLauncher(boot_id)


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
FINAL_REFUSALS = frozenset({409, 410})  # this host will never run the attempt
MAX_PORTS = 20  # occupied ports reported per claim at most


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
        self.launcher: Launcher = launcher(config, boot_id)
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
                self.claim(WantedAttempt(attempt_id=attempt_id, fence=claim.fence))

    def claim(self, attempt: WantedAttempt) -> None:
        """Claim an attempt and start it, unless it is already claimed."""
        if not ID.fullmatch(attempt.attempt_id):
            log.error("the server requested an attempt with the id %r", attempt.attempt_id)
            return
        folder = self._folder(attempt.attempt_id)
        if folder.path.exists() and self.launcher.verdict_of(folder) is not Verdict.CLAIMING:
            return
        claim = folder.make_claim(attempt.fence, self.boot_id, attempt.needs)
        needs = claim.needs
        for _ in range(MAX_PORTS):
            reply = self._claim(folder, claim, needs)
            if reply is None:
                return
            if reply.may_start:
                self._start(folder, reply)
                return
            gang = reply.request.gang
            ports = (gang.master_port,) if gang and gang.node_rank == 0 else ()
            if needs is None or not ports or needs.ports == ports:
                return  # other hosts have not claimed yet: retried at the next heartbeat
            needs = needs.model_copy(update={"ports": ports})  # the previous port was occupied

    def _claim(
        self, folder: AttemptFolder, claim: Claim, needs: Needs | None
    ) -> ClaimReply | None:
        """Return the server's reply to a claim, or None; mark the folder if it was rejected."""
        stopping = [
            preflight.StoppingAttempt(each.attempt_id, _gpus_of(each))
            for each in self.running()
            if (each.path / child.STOP).exists()
        ]
        place = preflight.HostState(self.host_dir, self.config, self._model_roots(), stopping)
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
            if refusal.status in FINAL_REFUSALS:
                folder.mark_claim_rejected()
        except UnknownOptionsError as error:
            _settle_refused(folder, error.request, Reason.VERSION_INCOMPATIBLE, str(error))
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
            launch.refuse_unlisted_tracker(request.spec, self.config.tracker_urls)
            self._check_disk()
            spec = launch.confine(
                request.spec,
                self._model_roots(),
                self.host_dir.attempts,
                (self.host_dir.rewards, *self.config.reward_roots),
                self.config.object_stores,
            )
            argv, env = self.launcher.command(
                request, spec, self._render(spec, folder.path), folder.path
            )
            argv, hub = launch.after_download(spec, folder.path, argv)
            env |= hub | launch.tracker_env(spec) | attempts.write(folder.path, values)
            document = self.launcher.adapt(self._document(folder, request, argv, env))
        except LaunchRefusedError as refusal:
            _settle_refused(folder, request, refusal.reason, str(refusal))
            return
        folder.output.mkdir(mode=0o700, exist_ok=True)
        take_over_checkpoint(folder, request, attempt_folders(self.host_dir.attempts))
        resumed = resume_from_of(request.spec)
        is_alone = request.gang is None  # of several hosts, another may keep it
        if resumed and is_alone and not any(folder.checkpoint.glob("*")):
            reason = Reason.MODEL_OR_DATA_MISSING
            _settle_refused(folder, request, reason, preflight.nothing_to_resume(resumed))
            return
        child.write_json(folder.path / child.LAUNCH, document)
        resolved = request.model_copy(update={"spec": spec})
        child.write_json(folder.spec, resolved.model_dump(mode="json"))
        try:
            self.launcher.launch(folder)
        except LaunchRefusedError as refusal:
            folder.settle(refusal.reason, str(refusal))

    def _document(
        self, folder: AttemptFolder, request: RunRequest, argv: list[str], env: dict[str, str]
    ) -> dict[str, object]:
        return {
            "attempt_id": folder.attempt_id,
            "argv": argv,
            "env": launch.render_env(
                self.host_dir.path,
                len(self.running()) + 1,
                self.config.model_roots,
                request.devices,
                self.config.reward_roots,
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

    def _model_roots(self) -> tuple[Path, ...]:
        return (self.host_dir.models, *self.config.model_roots, self.host_dir.attempts)

    def stop(self, order: StopOrder) -> None:
        """Order an attempt's supervisor to end it; a claimed attempt never starts."""
        folder = self._existing_folder(order.attempt_id)
        if folder is None or (folder.path / child.STOP).exists():
            return
        document = {"reason": order.reason, "grace_seconds": order.grace_seconds}
        child.write_json(folder.path / child.STOP, document)
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


def _settle_refused(
    folder: AttemptFolder, request: RunRequest, reason: Reason, sentence: str
) -> None:
    """End an attempt that this host refuses to start."""
    child.write_json(folder.spec, request.model_dump(mode="json"))
    folder.settle(reason, sentence)


def _gpus_of(folder: AttemptFolder) -> frozenset[str]:
    request = folder.request()
    return frozenset(device.uuid for device in request.devices) if request else frozenset()


# Operations on a host's attempts that need neither agent nor server.


class StopResult(NamedTuple):
    """The result of ``stop_all``: attempts that ended, and those still running."""

    ended: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    why: str = ""  # why stop orders could not be written


def stop_all(
    host_dir: HostDir,
    grace_seconds: float = STOP_GRACE_SECONDS,
    reason: Reason = Reason.STOPPED_BY_OPERATOR,
    timeout_seconds: float = STOP_ALL_SECONDS,
) -> StopResult:
    """Stop every running attempt, including ones that start meanwhile, and wait for their end.

    Gives up after ``timeout_seconds``: attempts with a hanging supervisor count as running.
    """
    if not host_dir.attempts.is_dir():
        return StopResult()
    reconciler = Reconciler(
        host_dir, host_dir.config(), ServerClient("http://127.0.0.1"), boot_id=procfs.boot_id()
    )
    deadline = time.monotonic() + timeout_seconds
    stopped: dict[str, None] = {}
    why = ""
    while running := [folder.attempt_id for folder in reconciler.running()]:
        why = ""
        for attempt_id in running:
            order = StopOrder(attempt_id=attempt_id, reason=reason, grace_seconds=grace_seconds)
            try:
                reconciler.stop(order)
            except OSError as error:  # such as a full disk; retried until the deadline
                why = error.strerror or str(error)
        stopped |= dict.fromkeys(running)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    ended = tuple(attempt_id for attempt_id in stopped if attempt_id not in running)
    return StopResult(ended, tuple(running), why if running else "")


def summaries(host_dir: HostDir) -> Iterator[str]:
    """Yield one line per attempt on disk: id, state and end reason."""
    if not host_dir.attempts.is_dir():
        return
    boot_id = procfs.boot_id()
    for folder in attempt_folders(host_dir.attempts):
        verdict = folder.verdict(boot_id)
        ended = folder.exit_record()
        how = f"  {ended.reason}" if ended and verdict is not Verdict.RUNNING else ""
        yield f"{folder.attempt_id}  {verdict}{how}"

"""Downloads the files of an attempt's spec from the server before the attempt starts.

Runs in a separate thread, so that a large file does not delay heartbeats: the claim is repeated
with each heartbeat until every file is present, as for a gang that waits for its other hosts.
"""

import hashlib
import threading
from pathlib import Path

from runners.attempts import AttemptFolder
from runners.client import RefusedError, ServerClient, ServerError
from runners.jobspec import JobSpec, TrainSpec, UploadedData
from runners.jobspec.data import uploads_of
from runners.launch import LaunchRefusedError
from runners.reasons import Reason

PATIENCE_SECONDS = 1.0  # a small file arrives in this time, and its attempt starts at once


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
        fetch.join(PATIENCE_SECONDS)
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
        self._wanted = uploads
        self.is_done = False
        self.refusal: LaunchRefusedError | None = None

    def run(self) -> None:
        try:
            self._folder.data.mkdir(mode=0o700, exist_ok=True)
            for each in self._wanted:
                self._download(each, self._folder.data / each.file_name)
            self.is_done = True
        except LaunchRefusedError as refusal:
            self.refusal = refusal
        except RefusedError as refused:
            if not refused.is_passing:
                self.refusal = LaunchRefusedError(
                    Reason.MODEL_OR_DATA_MISSING,
                    f"the server no longer has the training data: {refused}; upload it again",
                )
        except ServerError:
            return  # the server is unreachable: retried at the next heartbeat
        except OSError as error:
            self.refusal = LaunchRefusedError(
                Reason.DISK_FULL, f"the training data cannot be kept: {error.strerror}"
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

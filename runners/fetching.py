"""Brings the files that an attempt's spec names from the server, before the attempt starts.

A thread of its own does it, so that a large file holds up no beat: the claim is asked again with
each beat until everything is here, as that of a gang that waits for its other hosts.
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

PATIENCE_SECONDS = 1.0  # a small file is here at once, and its attempt starts with this claim


class Fetcher:
    """What is on its way to the attempts of one host."""

    def __init__(self, client: ServerClient) -> None:
        """Fetch from this server."""
        self._client = client
        self._going: dict[str, _Fetch] = {}

    def has_all(self, folder: AttemptFolder, spec: JobSpec) -> bool:
        """Return whether every file of a spec is here; begin to fetch what is not.

        Raises:
            LaunchRefusedError: a file cannot be had, or is another one than was meant.
        """
        wanted = uploads_of(spec.data) if isinstance(spec, TrainSpec) else ()
        missing = [each for each in wanted if not (folder.data / each.file_name).exists()]
        if not missing:
            return True
        fetch = self._going.get(folder.attempt_id)
        if fetch is None:
            fetch = self._going[folder.attempt_id] = _Fetch(self._client, folder, missing)
            fetch.start()
        fetch.join(PATIENCE_SECONDS)
        if fetch.is_alive():
            return False
        del self._going[folder.attempt_id]
        if fetch.refusal is not None:
            raise fetch.refusal
        return fetch.is_done


class _Fetch(threading.Thread):
    """Fetches some files of one attempt; ``refusal`` says what cannot be had."""

    def __init__(
        self, client: ServerClient, folder: AttemptFolder, wanted: list[UploadedData]
    ) -> None:
        super().__init__(name=f"fetch-{folder.attempt_id}", daemon=True)
        self._client = client
        self._folder = folder
        self._wanted = wanted
        self.is_done = False
        self.refusal: LaunchRefusedError | None = None

    def run(self) -> None:
        try:
            self._folder.data.mkdir(mode=0o700, exist_ok=True)
            for each in self._wanted:
                self._bring(each, self._folder.data / each.file_name)
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
            return  # the server is away: the next beat asks again
        except OSError as error:
            self.refusal = LaunchRefusedError(
                Reason.DISK_FULL, f"the training data cannot be kept: {error.strerror}"
            )

    def _bring(self, wanted: UploadedData, target: Path) -> None:
        partial = target.with_name(f".{target.name}.part")
        digest, size = hashlib.sha256(), 0
        with partial.open("wb") as sink:
            for piece in self._client.data(self._folder.attempt_id, wanted.dataset_id):
                size += len(piece)
                if size > wanted.size_bytes:
                    break
                digest.update(piece)
                sink.write(piece)
        if size != wanted.size_bytes or digest.hexdigest() != wanted.sha256:
            partial.unlink()
            raise LaunchRefusedError(
                Reason.MODEL_OR_DATA_MISSING,
                f"{wanted.name} arrived with the SHA-256 {digest.hexdigest()[:12]} and {size} "
                f"bytes; the job was made for {wanted.sha256[:12]} and {wanted.size_bytes}: "
                "upload the file again and launch anew",
            )
        partial.rename(target)

"""Uploads the artefacts of ended attempts in parts; interrupted uploads are resumed."""

import logging
import os
from pathlib import Path, PurePosixPath

from runners.attempts import AttemptFolder
from runners.client import PART_BYTES, RefusedError, ServerClient
from runners.messages import ArtefactBody

log = logging.getLogger(__name__)


def upload_artefacts(folder: AttemptFolder, client: ServerClient, cap_bytes: int) -> int:
    """Upload an ended attempt's artefacts of at most ``cap_bytes`` each; return the bytes sent.

    Larger artefacts stay on the host. A file that changed or that the server rejects is skipped
    and logged.

    Raises:
        ServerError: the server is unreachable; a later call resumes the upload.
    """
    total = 0
    for artefact in folder.artefacts():
        if artefact.total_bytes > cap_bytes:
            log.info(
                "artefact %s of %s stays here: %d bytes are more than %d",
                artefact.name, folder.attempt_id, artefact.total_bytes, cap_bytes,
            )  # fmt: skip
            continue
        try:
            total += _upload(folder, artefact, client)
        except (RefusedError, OSError, ValueError) as error:
            if isinstance(error, RefusedError) and (error.is_passing or error.is_unauthorized):
                raise
            log.warning("artefact %s of %s: %s", artefact.name, folder.attempt_id, error)
    folder.mark_uploaded()
    return total


def _upload(folder: AttemptFolder, artefact: ArtefactBody, client: ServerClient) -> int:
    root = (folder.output / artefact.name).resolve()
    if not root.is_relative_to(folder.output.resolve()):
        raise ValueError(f"artefact {artefact.name!r} is not in the attempt's output")
    return sum(
        _upload_file(root, PurePosixPath(path), size, (folder.attempt_id, artefact.name, client))
        for path, size in artefact.files.items()
    )


def _upload_file(
    root: Path, path: PurePosixPath, size: int, target: tuple[str, str, ServerClient]
) -> int:
    attempt_id, name, client = target
    handle = _open_below(root, path)
    with os.fdopen(handle, "rb") as file:
        if os.fstat(handle).st_size != size:
            raise ValueError(f"{path} has {os.fstat(handle).st_size} bytes, announced were {size}")
        start = offset = client.received_bytes(attempt_id, name, path)
        while offset < size or size == 0:
            file.seek(offset)
            received = client.send_part(attempt_id, name, path, offset, file.read(PART_BYTES))
            if received <= offset:
                break
            offset = received
    return offset - start


def _open_below(root: Path, path: PurePosixPath) -> int:
    """Open a file below ``root`` without following links.

    Raises:
        ValueError: the path is outside of ``root``.
    """
    place = root / path
    is_file_itself = root.is_file() and str(path) == root.name
    if is_file_itself:
        place = root
    if path.is_absolute() or ".." in path.parts or place.resolve() != place:
        raise ValueError(f"{path} does not lie in the artefact")
    return os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

"""Digests of what a job reads, so that a resumed one goes on with the same data and weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from runners.jobs.adapters import weights_digest
from runners.jobs.model_files import opened_model
from runners.jobs.runtime import BadInputError
from runners.jobspec import ArtefactModel, FolderModel, ModelRef

DIGEST_CHARACTERS = 12  # that are shown
READ_BESIDE = ("config.json", "tokenizer.json")
UNCHECKED = (
    "whether data and weights are the same could not be checked: what an older version of Slipway "
    "left has no digests of them"
)


def model_digest(folder: Path) -> str:
    """Return a digest of a model folder: its config, its tokenizer and samples of its weights."""
    digest = hashlib.sha256(weights_digest(folder).encode())
    for name in READ_BESIDE:
        path = folder / name
        digest.update(f"{name} ".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def digest_of_model(ref: ModelRef, host_dir: Path) -> str:
    """Return the digest of a referenced model; empty if the spec itself describes it.

    Raises:
        MissingModelError: the folder is absent, incomplete or outside the model roots.
    """
    if not isinstance(ref, FolderModel | ArtefactModel):
        return ""
    return model_digest(opened_model(ref, host_dir))


def check_unchanged(where: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a remark if what the checkpoint was made of is unknown, else nothing.

    ``where`` names the checkpoint; both mappings have a digest by what was read.

    Raises:
        BadInputError: the job would go on with other data or another model than it began with.
    """
    if not before:
        return UNCHECKED if now else ""
    changed = [
        f"{name} (sha256 {_short(before.get(name))}, now {_short(now.get(name))})"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if not changed:
        return ""
    msg = (
        f"{' and '.join(changed)} changed since {where}; put it back as it was and resume again, "
        "or run the job again from the start"
    )
    raise BadInputError(msg)


def _short(digest: str | None) -> str:
    return digest[:DIGEST_CHARACTERS] if digest else "none"

"""Resolves a spec's model or adapter to a complete folder below this host's roots.

Without torch: engines in other environments use it too.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from runners.jobs.model_files import pinned
from runners.jobs.runtime import MissingModelError
from runners.jobspec import ArtefactModel, FolderModel

MODEL_FILES = ("config.json", "*.safetensors")
MODEL_ROOTS_VARIABLE = "SLIPWAY_MODEL_ROOTS"


def model_folder(
    ref: FolderModel | ArtefactModel, host_dir: Path, needed: Sequence[str] = MODEL_FILES
) -> Path:
    """Return a reference's folder with the ``needed`` files, links resolved.

    Raises:
        MissingModelError: it is outside the roots, absent, or incomplete.
    """
    if isinstance(ref, ArtefactModel):
        root = (host_dir / "attempts").resolve()
        folder = (root / ref.attempt_id / "output" / ref.name).resolve()
        _check_inside(folder, [root], "artefact")
    else:
        roots = model_roots(host_dir)
        folder = (roots[0] / ref.path).resolve()  # an absolute path replaces the root
        _check_inside(folder, roots, "folder")
    _check_complete(folder, needed)
    return folder


def opened_model(
    ref: FolderModel | ArtefactModel,
    host_dir: Path,
    needed: Sequence[str] = MODEL_FILES,
    owner: int | None = None,
) -> Path:
    """Return a private folder of a reference's opened model files.

    ``owner``: this process's pid, if a child process reads the folder.

    Raises:
        MissingModelError: it is outside the roots, absent, or incomplete.
        BadInputError: a file is not a regular file, or the config is invalid.
    """
    roots = [(host_dir / "attempts").resolve(), *model_roots(host_dir)]
    return pinned(model_folder(ref, host_dir, needed), roots, owner)


def model_roots(host_dir: Path) -> list[Path]:
    """Return the root folders of models, the host's own first."""
    configured = os.environ.get(MODEL_ROOTS_VARIABLE, "")
    extra = [Path(part) for part in configured.split(os.pathsep) if part]
    return [path.resolve() for path in (host_dir / "models", host_dir / "attempts", *extra)]


def _check_inside(folder: Path, roots: list[Path], what: str) -> None:
    if not any(folder != root and folder.is_relative_to(root) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        msg = (
            f"model {what} {folder} lies outside {allowed}; move it there, or add its parent "
            f"to {MODEL_ROOTS_VARIABLE} on this host"
        )
        raise MissingModelError(msg)


def _check_complete(folder: Path, needed: Sequence[str]) -> None:
    if not folder.is_dir():
        msg = f"no model folder {folder} on this host; check the path, or copy the model there"
        raise MissingModelError(msg)
    if missing := [each for each in needed if not any(folder.glob(each))]:
        pickles = ", ".join(each.name for each in folder.glob("*.bin"))
        also = f" ({pickles} is pickle, which is never read)" if pickles else ""
        msg = f"{folder} lacks {' and '.join(missing)}{also}; give a complete Hugging Face folder"
        raise MissingModelError(msg)

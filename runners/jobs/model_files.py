"""Resolves a spec's model to a complete folder of this host, and opens its files safely."""

import atexit
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import ArtefactModel, FolderModel

DATA_SUFFIXES = frozenset({".json", ".jinja", ".model", ".safetensors", ".txt"})
MAX_FILES = 4096
MAX_CONFIG_BYTES = 1024**2
MAX_DEPTH = 20
MAX_ITEMS = 100_000
MAX_SIZE = 2**31  # larger values are only meant to break a reader
# Fields that are loop counts: a reader creates one object for each.
MAX_COUNTS = {
    "num_hidden_layers": 2048, "num_layers": 2048, "n_layer": 2048, "n_layers": 2048,
    "num_experts": 4096, "num_local_experts": 4096, "n_routed_experts": 4096,
    "encoder_layers": 2048, "decoder_layers": 2048,
}  # fmt: skip
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def pin_folder(folder: Path, roots: Sequence[Path], owner: int | None = None) -> Path:
    """Return a private folder with links to the opened files of a model folder.

    The links use the reader's own handles, so that forked ranks have them too; with ``owner``,
    this process's pid, a child that inherits no handles can also read them.

    Raises:
        MissingModelError: the folder, or a file that it links to, is outside the roots.
        BadInputError: a file is not a regular file, has a hard link, or the config is invalid.
    """
    place = Path(tempfile.mkdtemp(prefix="slipway-model-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    private = place / folder.name
    private.mkdir()
    handle = _open_below(folder, roots)
    try:
        for name in _data_names(handle):
            file = _open_file(folder, handle, name, roots)
            (private / name).symlink_to(f"/proc/{owner or 'self'}/fd/{file}")
    finally:
        os.close(handle)
    if (private / "config.json").exists():
        check_config(read_config(private / "config.json"), str(folder))
    return private


def _open_below(path: Path, roots: Sequence[Path]) -> int:
    """Return a handle of a folder below a root, opened without following links."""
    root = next((root for root in roots if path.is_relative_to(root)), None)
    if root is None:
        msg = f"{path} is outside of this host's model folders; move it into one of them"
        raise MissingModelError(msg)
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in path.relative_to(root).parts:
        try:
            below = os.open(part, _DIRECTORY, dir_fd=handle)
        except OSError as error:
            raise MissingModelError(f"{path} cannot be opened: {error.strerror}") from None
        finally:
            os.close(handle)
        handle = below
    return handle


def _data_names(handle: int) -> Iterator[str]:
    with os.scandir(handle) as entries:
        names = [entry.name for entry in entries if Path(entry.name).suffix in DATA_SUFFIXES]
    if len(names) > MAX_FILES:
        raise BadInputError(f"the model folder has {len(names)} files; the limit is {MAX_FILES}")
    yield from sorted(names)


def _open_file(folder: Path, handle: int, name: str, roots: Sequence[Path]) -> int:
    """Return a handle of a regular file; a link is followed once, to a file below a root."""
    try:
        file = os.open(name, _FILE, dir_fd=handle)
    except OSError:
        file = _open_target(folder / name, roots)
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
        raise BadInputError(f"{folder / name} is not a regular file; copy the model again")
    if info.st_nlink > 1:
        raise BadInputError(
            f"{folder / name} has {info.st_nlink} hard links, and one may be outside of the "
            "model folders; copy the file instead of linking it"
        )
    return file


def open_file(path: Path, roots: Sequence[Path]) -> int:
    """Return a handle of a regular file below a root, opened without following links.

    Raises:
        MissingModelError: the file is outside of the roots, missing, or not a regular file.
    """
    handle = _open_target(path, roots)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise MissingModelError(f"{path} is not a regular file; copy it again")
    return handle


def _open_target(link: Path, roots: Sequence[Path]) -> int:
    target = link.resolve()
    handle = _open_below(target.parent, roots)
    try:
        return os.open(target.name, _FILE, dir_fd=handle)
    except OSError as error:
        raise MissingModelError(f"{link} cannot be opened: {error.strerror}") from None
    finally:
        os.close(handle)


# Config parsing with limits


def read_config(path: Path) -> dict[str, Any]:
    """Return the object in a config.json.

    Raises:
        BadInputError: the file is too long, nested too deep, or not a JSON object.
    """
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise BadInputError(f"config.json is longer than {MAX_CONFIG_BYTES} bytes")
    _check_depth(data)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"config.json is not valid JSON: {str(error)[:200]}; copy it again"
        ) from None
    if not isinstance(document, dict):
        raise BadInputError("config.json is not a JSON object; copy it again")
    return document


def _check_depth(data: bytes) -> None:
    """Reject deeply nested JSON before parsing it."""
    depth = deepest = 0
    is_text = is_escaped = False
    for byte in data:
        if is_text:
            is_text = is_escaped or byte != ord('"')
            is_escaped = byte == ord("\\") and not is_escaped
        elif byte == ord('"'):
            is_text = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise BadInputError(f"config.json is nested {deepest} deep; {MAX_DEPTH} is the limit")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Reject implausible sizes before a model is built from them.

    Raises:
        BadInputError: a size exceeds its limit; the message names field, value and limit.
    """
    for number, (name, value) in enumerate(_numbers(config)):
        if number > MAX_ITEMS:
            raise BadInputError(f"{where}: config.json has more than {MAX_ITEMS} values")
        limit = MAX_COUNTS.get(name.rpartition(".")[2], MAX_SIZE)
        if isinstance(value, int) and not -limit <= value <= limit:
            shown = str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
            raise BadInputError(f"{where}: config.json: {name} is {shown}; {limit} is the limit")


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a document with its dotted name; the depth is already bounded."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    else:
        yield name, value


# Resolves a spec's model or adapter to a complete folder below this host's roots.
#
# Without torch: engines in other environments use it too.


MODEL_FILES = ("config.json", "*.safetensors")
MODEL_ROOTS_VARIABLE = "SLIPWAY_MODEL_ROOTS"


def model_folder(
    ref: FolderModel | ArtefactModel, host_dir: Path, needed: Sequence[str] = MODEL_FILES
) -> Path:
    """Return a reference's folder with the ``needed`` files, links resolved.

    Raises:
        MissingModelError: the folder is outside the roots, absent, or incomplete.
    """
    if isinstance(ref, ArtefactModel):
        root = (host_dir / "attempts").resolve()
        folder = (root / ref.attempt_id / "output" / ref.name).resolve()
        _check_inside(folder, [root], "artefact")
    else:
        roots = model_roots(host_dir)
        folder = (roots[0] / ref.path).resolve()  # an absolute path replaces the root
        _check_inside(folder, roots, "folder")
    if not folder.is_dir():
        msg = f"no model folder {folder} on this host; check the path, or copy the model there"
        raise MissingModelError(msg)
    if missing := [each for each in needed if not any(folder.glob(each))]:
        pickles = ", ".join(each.name for each in folder.glob("*.bin"))
        also = f" ({pickles} is pickle, which is never read)" if pickles else ""
        msg = f"{folder} lacks {' and '.join(missing)}{also}; give a complete Hugging Face folder"
        raise MissingModelError(msg)
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
        MissingModelError: the folder is outside the roots, absent, or incomplete.
        BadInputError: a file is not a regular file, or the config is invalid.
    """
    roots = [(host_dir / "attempts").resolve(), *model_roots(host_dir)]
    return pin_folder(model_folder(ref, host_dir, needed), roots, owner)


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

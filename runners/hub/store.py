"""The Hub's cache on this host: what of a repository is there, how large it is, when it was used.

The layout is huggingface_hub's: ``models--org--name``, of data ``datasets--org--name``, with
``blobs`` named by digest, ``snapshots`` of links to them by commit, and ``refs`` from branch to
commit. What any tool has downloaded into it is found, and what is downloaded here they find.
"""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from runners.datasets.repositories import DATA_SETS
from runners.datasets.text import MAX_CONFIG_DEPTH, read_json, read_text
from runners.hub.errors import HubError
from runners.hub.listing import (
    CONFIG,
    ETAG,
    MAIN,
    MAX_CONFIG_BYTES,
    SHA256_DIGITS,
    HubFile,
    Listing,
)
from runners.hub.repository import COMMIT
from runners.hub.selection import INDEX, MAX_INDEX_BYTES, needed_files, shard_names
from runners.hub.settings import HubSettings, source_of_ref

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo

COPIED = "copied/"  # before the digits of a commit among the refs
UNFINISHED = ".incomplete"  # the suffix by which huggingface_hub, too, finds them


@dataclass(frozen=True)
class StoredModel:
    """A repository, of a model or of a data set, at a commit in the cache.

    ``bytes`` are those of its files; of blobs that another commit has too, both count them. A
    download that has not come to a commit's files has the commit "".
    """

    repository: str
    commit: str
    bytes: int
    last_used: float  # Unix time of the last reading that the file system recorded, in s
    num_files: int
    revisions: tuple[str, ...]  # branches and tags that stand for the commit
    folder: Path
    is_complete: bool = False  # the weights that a job reads are all there; of data: a split is


def repository_folder(settings: HubSettings, repository: str) -> Path:
    """Return the folder of a repository in the cache."""
    return settings.repository_folder(repository)


def snapshot_folder(settings: HubSettings, repository: str, commit: str) -> Path:
    """Return the folder of a repository's files at a commit, there or not."""
    return repository_folder(settings, repository) / "snapshots" / commit


def blob_path(settings: HubSettings, repository: str, file: HubFile) -> Path:
    """Return where a file's bytes lie."""
    return repository_folder(settings, repository) / "blobs" / file.etag


def has_blob(settings: HubSettings, listing: Listing, file: HubFile) -> bool:
    """Return whether a file's bytes are there, as a blob or in the snapshot itself.

    A blob gets its name when its digest is right; its size finds one that was cut off later.
    """
    link = snapshot_folder(settings, listing.repository, listing.commit) / file.path
    places = (blob_path(settings, listing.repository, file), link)
    return any(_size(path) == file.size for path in places)


def missing(
    listing: Listing, files: Sequence[HubFile], settings: HubSettings
) -> tuple[HubFile, ...]:
    """Return the files whose bytes are not there, each digest once."""
    found = {file.etag: file for file in files if not has_blob(settings, listing, file)}
    return tuple(found.values())


def is_complete(listing: Listing, files: Sequence[HubFile], settings: HubSettings) -> bool:
    """Return whether all files are there under their names, for any tool."""
    folder = snapshot_folder(settings, listing.repository, listing.commit)
    return all(_size(folder / file.path) == file.size for file in files)


def _size(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return None


def stored_listing(repository: str, commit: str, settings: HubSettings) -> Listing | None:
    """Return what the cache has of a repository at a commit, for a host without a network.

    ``needed_files`` of it says what lacks. None if there is nothing.
    """
    folder = snapshot_folder(settings, repository, commit)
    files = _files_of(folder)
    if not files:
        return None
    config: object = {}
    with contextlib.suppress(OSError, ValueError):
        data = (folder / CONFIG).read_bytes()[: MAX_CONFIG_BYTES + 1]
        config = read_json(read_text(data), max_depth=MAX_CONFIG_DEPTH, may_be_infinite=True)
    has_code = isinstance(config, dict) and bool(config.get("auto_map"))
    return Listing(repository, commit, files, revision="", needs_remote_code=has_code)


def _files_of(folder: Path) -> tuple[HubFile, ...]:
    """Return the files of a snapshot, without reading them."""
    files = [
        HubFile(path.relative_to(folder).as_posix(), path.stat().st_size, _etag(path, folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return tuple(
        replace(each, sha256=each.etag * (len(each.etag) == SHA256_DIGITS)) for each in files
    )


def _etag(path: Path, folder: Path) -> str:
    """Return the name of a file's blob; without links its path stands for it."""
    target = path.readlink().name if path.is_symlink() else ""
    return target if ETAG.fullmatch(target) else quote(str(path.relative_to(folder)), safe="")


def resolve_offline(repository: str, revision: str, settings: HubSettings) -> str | None:
    """Return the commit in the cache that a revision stands for, None if there is none.

    Without a revision it is what the cache calls main, or its only snapshot, unless that is of
    another hub, whose repository of the same name may be another model.
    """
    folder = repository_folder(settings, repository)
    stated = revision or settings.main
    if COMMIT.fullmatch(stated):
        is_there = (folder / "snapshots" / stated).is_dir()
        is_of_other = _is_named_of_other(repository, stated, settings)
        return stated if is_there and not is_of_other else None
    if source_of_ref(settings.ref(stated)) is not settings.source:
        return None
    with contextlib.suppress(OSError, ValueError):
        commit = (folder / "refs" / settings.ref(stated)).read_text("ascii").strip()
        if COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir():
            return commit
    with contextlib.suppress(OSError):
        commits = [each.name for each in (folder / "snapshots").iterdir()]
        is_only = len(commits) == 1 and COMMIT.fullmatch(commits[0])
        if not revision and is_only and not _is_of_other_hub(repository, commits[0], settings):
            return commits[0]
    return None


def _is_of_other_hub(repository: str, commit: str, settings: HubSettings) -> bool:
    """Return whether a commit is of another hub: names of it stand there, and none of this one.

    A commit without a name is the usual hub's, whose tools write none for one that was asked for
    by its digits; those of other sources are always named, and so are copies, of any hub.
    """
    if not _names(repository, commit, settings):
        return bool(settings.source.ref_prefix)
    return _is_named_of_other(repository, commit, settings)


def _is_named_of_other(repository: str, commit: str, settings: HubSettings) -> bool:
    names = [each for each in _names(repository, commit, settings) if not each.startswith(COPIED)]
    return bool(names) and all(source_of_ref(each) is not settings.source for each in names)


def revision_of(repository: str, commit: str, settings: HubSettings) -> str:
    """Return a branch or tag that stands for a commit in the cache, main first; "" if none."""
    every = _names(repository, commit, settings)
    named = [each for each in every if not each.startswith(COPIED)]
    return MAIN if MAIN in named else next(iter(named), "")


def _names(repository: str, commit: str, settings: HubSettings) -> list[str]:
    """Return the refs of the cache that stand for a commit, sorted."""
    refs = repository_folder(settings, repository) / "refs"
    return [
        path.relative_to(refs).as_posix()
        for path in sorted(refs.rglob("*"))
        if path.is_file() and path.read_text("ascii", "replace").strip() == commit
    ]


def scan(settings: HubSettings) -> tuple[StoredModel, ...]:
    """Return what the cache holds, the most recently used first; damaged ones are left out.

    A repository of which only a part has arrived is one, too.
    """
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(settings.cache)
    except (CacheNotFound, ValueError):  # there is none, or it is a file
        return ()
    models = [
        StoredModel(
            repository=repository,
            commit=revision.commit_hash,
            bytes=revision.size_on_disk,
            last_used=_last_used(revision.files),
            num_files=revision.nb_files,
            revisions=tuple(sorted(each for each in revision.refs if not each.startswith(COPIED))),
            folder=revision.snapshot_path,
            is_complete=each.repo_type == "dataset"
            or _has_weights(settings, repository, revision.commit_hash),
        )
        for each in found.repos
        if (prefix := {"model": "", "dataset": DATA_SETS}.get(each.repo_type)) is not None
        if (repository := f"{prefix}{each.repo_id}")
        for revision in each.revisions
    ]
    known = {model.repository for model in models}
    for repository in cached_repositories(settings.cache):
        folder = repository_folder(settings, repository)
        if repository not in known and (arrived := _files_below(folder / "blobs")):
            models.append(
                StoredModel(
                    repository=repository,
                    commit="",
                    bytes=sum(_bytes_on_disk(each) for each in arrived),
                    last_used=max(each.st_mtime for each in arrived),
                    num_files=len(arrived),
                    revisions=(),
                    folder=folder,
                )
            )
    return tuple(sorted(models, key=lambda model: (-model.last_used, model.repository)))


def _last_used(files: Iterable["CachedFileInfo"]) -> float:
    """Return when a snapshot's files were read last, in Unix time.

    What is read to know the model, as by this package, does not count as its use.
    """
    read = {file.file_name: file.blob_last_accessed for file in files}
    used = [at for name, at in read.items() if name not in {CONFIG, INDEX}]
    return max(used or read.values(), default=0.0)


def cached_repositories(cache: Path) -> list[str]:
    """Return the repositories that have a folder in the cache, without reading the folders."""
    return [
        path.name.replace("--", "/", 2).removeprefix("models/")
        for path in repository_folders(cache, "*--*")
    ]


def repository_folders(cache: Path, names: str = "*") -> list[Path]:
    """Return the folders of models and data sets whose names have such an end."""
    return sorted(
        path for kind in ("models", "datasets") for path in cache.glob(f"{kind}--{names}")
    )


def _has_weights(settings: HubSettings, repository: str, commit: str) -> bool:
    """Return whether the weights of a commit are whole: every shard of its index, or a GGUF."""
    folder = snapshot_folder(settings, repository, commit)
    listing = Listing(repository, commit, _files_of(folder))
    try:
        shards: tuple[str, ...] = ()
        if INDEX in listing.paths:
            with (folder / INDEX).open("rb") as file:
                shards = shard_names(file.read(MAX_INDEX_BYTES + 1), repository)
        return bool(needed_files(listing, "safetensors", shards=shards, is_built_in=True))
    except (HubError, OSError):
        pass
    try:
        return bool(needed_files(listing, "gguf"))
    except HubError as error:
        return error.kind == "ambiguous"  # several whole ones


def cache_bytes(settings: HubSettings) -> int:
    """Return the bytes that the models of the cache take on the disk, each file once."""
    return sum(
        _bytes_on_disk(each)
        for folder in repository_folders(settings.cache)
        for each in _files_below(folder)
    )


def _files_below(folder: Path) -> list[os.stat_result]:
    """Return the status of each file below a folder; links are no files here."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append(status)
    return found


def _bytes_on_disk(status: os.stat_result) -> int:
    """Return what a file takes: of an unfinished one, which has holes, what has arrived."""
    return min(status.st_size, status.st_blocks * 512)


def mark_used(folder: Path) -> None:
    """Record that a snapshot's files are used now, also where reading does not record it."""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # of a cache that may only be read
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))


def delete(settings: HubSettings, repository: str, commit: str) -> int:
    """Delete a repository's files at a commit, and return the bytes that this frees.

    Blobs that another commit has stay. With its last commit goes all of a repository, unfinished
    downloads too.
    """
    from huggingface_hub import CacheNotFound, scan_cache_dir

    folder = repository_folder(settings, repository)
    unfinished = unfinished_bytes(settings, repository)
    if not commit:  # an unfinished download alone
        if any((folder / "snapshots").glob("*")):
            return 0
        size = sum(_bytes_on_disk(each) for each in _files_below(folder))
        shutil.rmtree(folder, ignore_errors=True)
        return size
    try:
        strategy = scan_cache_dir(settings.cache).delete_revisions(commit)
    except (CacheNotFound, ValueError):
        return 0
    strategy.execute()
    with contextlib.suppress(OSError):
        if not any((folder / "snapshots").iterdir()):
            shutil.rmtree(folder)
    return strategy.expected_freed_size + (0 if folder.exists() else unfinished)


def unfinished_bytes(settings: HubSettings, repository: str) -> int:
    """Return the bytes on the disk of a repository's unfinished downloads."""
    found = 0
    for path in (repository_folder(settings, repository) / "blobs").glob(f"*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            found += path.stat().st_blocks * 512
    return found


def link_files(settings: HubSettings, listing: Listing, files: Sequence[HubFile]) -> Path:
    """Give complete blobs their names in the snapshot of a commit, and return its folder.

    Afterwards the branch or tag that was requested stands for the commit; where a commit of
    another source was requested, a ref of its digits says whose it is.
    """
    folder = snapshot_folder(settings, listing.repository, listing.commit)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        path, blob = folder / file.path, blob_path(settings, listing.repository, file)
        if _size(path) != file.size:
            path.parent.mkdir(parents=True, exist_ok=True)
            same = (folder / each.path for each in files if each.etag == file.etag)
            _link(next(each for each in (blob, *same) if _size(each) == file.size), path, settings)
    if revision := listing.revision or (listing.commit if settings.source.ref_prefix else ""):
        with contextlib.suppress(OSError):  # a complete cache may be there to be read only
            ref = settings.ref(revision)
            _refer(repository_folder(settings, listing.repository), ref, listing.commit)
    return folder


def mark_copied(settings: HubSettings, listing: Listing) -> None:
    """Record that a commit came over the site or from a person's folder, of whichever hub."""
    with contextlib.suppress(OSError):
        folder = repository_folder(settings, listing.repository)
        _refer(folder, f"{COPIED}{listing.commit}", listing.commit)


def _refer(folder: Path, name: str, commit: str) -> None:
    """Let a branch or tag stand for a commit, for whoever reads it meanwhile too."""
    ref = folder / "refs" / name
    ref.parent.mkdir(parents=True, exist_ok=True)
    temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    temporary.write_text(commit, "ascii")
    temporary.replace(ref)


def _link(blob: Path, path: Path, settings: HubSettings) -> None:
    """Name a blob; where there are no symbolic links, the blob itself gets the name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    if settings.has_symlinks:
        with contextlib.suppress(OSError, NotImplementedError):
            temporary.symlink_to(os.path.relpath(blob, path.parent))
    if temporary.is_symlink():
        temporary.replace(path)
    elif blob.parent.name == "blobs":
        blob.replace(path)
    else:  # another file of the snapshot with the same bytes
        shutil.copyfile(blob, temporary)
        temporary.replace(path)

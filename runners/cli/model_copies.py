"""``slipway models push`` and ``copy``: a model's files into the Hub's cache of a host.

From a folder of this machine, or from another host, over the server: for hosts without a network.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runners.cli.errors import CliError, ExitCode
from runners.cli.output import OutputOption, binary_size
from runners.cli.server import complete_host, server, wrote

if TYPE_CHECKING:
    from runners.client.generated import Slipway
    from runners.client.replies.model_copies import ModelCopyDetail
    from runners.hub.listing import HubFile, Listing

PART_BYTES = 4 * 2**20
LOOK_SECONDS = 2.0  # between two looks at a copy
WAITS = "copy_waits"  # code of a server without room until the host has taken more
HostArgument = Annotated[
    str,
    typer.Argument(
        metavar="HOST", help="Slug of the host that gets it.", autocompletion=complete_host
    ),
]
DetachOption = Annotated[
    bool, typer.Option("--detach", "-d", help="Do not wait for the end of the copy.")
]


def model_push(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A model's folder, such as one of `hf download` or a cache's snapshot."
        ),
    ],
    host: HostArgument,
    name: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="ORG/NAME",
            help="The repository that jobs name; that of a cache's snapshot is known.",
        ),
    ] = "",
    revision: Annotated[
        str, typer.Option("--revision", help="Branch or commit of the repository.")
    ] = "main",
    output: OutputOption = "table",
) -> None:
    """Copy a model's folder into the cache of a host, where jobs find it by name."""
    listing, files = _listing(folder, name, revision)
    typer.echo(
        f"{listing.repository} at {listing.commit[:12]}: {len(files)} files, "
        f"{binary_size(sum(each.size for each in files))}",
        err=True,
    )
    begun = {
        "model": f"{listing.repository}@{listing.commit}",
        "files": [
            {"path": each.path, "size_bytes": each.size, "etag": each.etag} for each in files
        ],
    }
    if listing.revision:
        begun["revision"] = listing.revision
    with server() as client:
        copy = client.copy_model(host, begun)
        _follow(client, copy, output, folder)


def model_copy(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As org/name or org/name@commit.")],
    host: HostArgument,
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="HOST", help="The host that has it.", autocompletion=complete_host
        ),
    ],
    *,
    detach: DetachOption = False,
    output: OutputOption = "table",
) -> None:
    """Copy a model from the cache of one host to that of another, over the server."""
    with server() as client:
        copy = client.copy_model(host, {"model": model, "source": source})
        if not detach:
            _follow(client, copy, output)
        elif not wrote(copy, output):
            typer.echo(f"{copy.id}  {copy.repository}: {source} sends it at its next heartbeat.")


def _listing(folder: Path, name: str, revision: str) -> "tuple[Listing, tuple[HubFile, ...]]":
    """Return a folder's files as those of a repository at a commit.

    The Hub is asked whether they are those of its commit, if it is within reach.

    Raises:
        CliError: the folder is none of a model, or the repository is not named.
    """
    from planner.specs.base import PlannerError
    from runners.hub.errors import HubError
    from runners.hub.folders import folder_listing, repository_of
    from runners.hub.names import parse, reason_of
    from runners.hub.selection import needed_files, readable_files

    if not folder.is_dir():
        raise CliError(f"FOLDER is {str(folder)!r}: there is no such folder", field="FOLDER")
    try:
        repository = parse(name or repository_of(folder)).repository
    except PlannerError as error:
        if name:
            raise CliError(f"--as is {name!r}: {reason_of(error)}", field="--as") from None
        raise CliError(
            f"--as is missing: name the repository that jobs state for {folder}, as --as org/name",
            field="--as",
        ) from None
    listing = folder_listing(folder, repository)
    try:
        needed_files(listing, "safetensors", is_built_in=True)
    except HubError as error:
        try:
            needed_files(listing, "gguf")
        except HubError as other:
            if other.kind != "ambiguous":
                raise CliError(f"FOLDER is {str(folder)!r}: {error}", field="FOLDER") from None
    files = readable_files(listing)
    return _at_commit(listing, files, revision), files


def _at_commit(listing: "Listing", files: "Sequence[HubFile]", revision: str) -> "Listing":
    """Return a listing at the Hub's commit where it has the same files, else as it is."""
    import os
    from dataclasses import replace

    from runners.hub.errors import HubError
    from runners.hub.listing import look_up
    from runners.hub.repository import COMMIT, RepositoryName
    from runners.hub.settings import HubSettingsError, from_environment

    is_commit = bool(COMMIT.fullmatch(revision))
    named = replace(listing, revision="" if is_commit else revision)
    try:
        found = look_up(RepositoryName(listing.repository, revision), from_environment(os.environ))
    except (HubError, HubSettingsError, ValueError) as error:
        typer.echo(
            f"The Hub was not asked for its commit: {error}. The copy is named by "
            f"{listing.commit[:12]}.",
            err=True,
        )
        return named
    digests = {each.path: each.etag for each in found.files}
    other = [each.path for each in files if digests.get(each.path) != each.etag]
    if other:
        typer.echo(
            f"The Hub's {listing.repository} at {found.commit[:12]} has another {other[0]} "
            f"({len(other)} files differ): the copy is named by {listing.commit[:12]}.",
            err=True,
        )
        return named
    return replace(named, commit=found.commit)


def _send(client: "Slipway", copy: "ModelCopyDetail", folder: Path) -> None:
    """Send the parts that the server and the host lack.

    Raises:
        CliError: a file of the folder became shorter.
    """
    for number, file in enumerate(copy.files):
        offset = file.received_bytes
        while not file.is_there and (offset < file.size_bytes or not file.size_bytes):
            with (folder / file.path).open("rb") as source:
                source.seek(offset)
                data = source.read(min(PART_BYTES, file.size_bytes - offset))
            if not data and file.size_bytes:
                raise CliError(f"{folder / file.path} became shorter while it was sent")
            offset = _send_part(client, copy, number, offset, data)
            if not file.size_bytes:
                break
            _show(file.path, offset, file.size_bytes)


def _send_part(
    client: "Slipway", copy: "ModelCopyDetail", number: int, offset: int, data: bytes
) -> int:
    """Send one part, also when the server has no room for a while."""
    from runners.client.transport import ApiError

    is_told = False
    while True:
        try:
            return client.send_model_part(
                copy.host, copy.id, number, data, offset=offset
            ).received_bytes
        except ApiError as error:
            if error.code != WAITS:
                raise
            if not is_told:
                typer.echo(error.detail, err=True)
            is_told = True
        time.sleep(LOOK_SECONDS)


def _show(path: str, done: int, total: int) -> None:
    import sys

    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        typer.echo(
            f"\r{path}  {done / total:4.0%} of {binary_size(total)}{end}", nl=False, err=True
        )


def _follow(
    client: "Slipway", copy: "ModelCopyDetail", output: str, folder: Path | None = None
) -> None:
    """Wait for the end of a copy; from a folder send what lacks, and again what came damaged.

    Raises:
        CliError: the copy failed or was stopped.
    """
    shown = ""
    while copy.state == "active":
        if folder:
            _send(client, copy, folder)
        words = f"{binary_size(copy.there_bytes)} of {binary_size(copy.size_bytes)} on {copy.host}"
        if words != shown:
            typer.echo(words, err=True)
            shown = words
        time.sleep(LOOK_SECONDS)
        copy = client.get_model_copy(copy.host, copy.id)
    if copy.state != "done":
        raise CliError(
            f"{copy.repository} was not copied to {copy.host}: {copy.problem}",
            code=f"copy_{copy.state}",
            exit_code=ExitCode.FAILED,
        )
    if not wrote(copy, output):
        typer.echo(f"{copy.repository} at {copy.commit} is in the cache of {copy.host}.")

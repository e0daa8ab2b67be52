"""What lies at an address of an object store, as a repository at a commit.

The commit is a digest of paths, sizes and ETags: what was replaced is another one. A file is
verified by the digest that its store keeps, if it keeps one (``s3_program``); where it does not,
its size and its ETag are all that is checked.
"""

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from runners.datasets.records import SUFFIXES
from runners.hub.errors import DownloadStoppedError, HubError
from runners.hub.listing import HubFile, Listing
from runners.hub.object_store import S3
from runners.hub.repository import GGUF, is_safe_path, store_repository
from runners.hub.s3_program import NOT_ASKED, NOT_REACHED, TOO_MANY
from runners.hub.settings import HubSettings
from runners.shared.object_stores import ObjectStore

PROGRAM = "runners.hub.s3_program"
# Of a model or of data; the rest below a prefix is neither asked for nor downloaded.
READABLE = (".safetensors", GGUF, ".json", ".jinja", ".txt", ".model", ".tiktoken", *SUFFIXES)
SECONDS = 300.0
POLL_SECONDS = 0.5  # between two looks whether the job is to stop
COMMIT_DIGITS = 40
# Of a key, which stores say with 400 too.
# Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_KEY_ENDED = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
_KEY_REFUSED = _KEY_ENDED | {"InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_NO_ACCESS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_BUSY = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
OUT_OF_REACH = (
    "connect the host to it, correct {variable}, which is {endpoint}, or copy the files to a "
    "folder of the host"
)


class StoreAddress(NamedTuple):
    """An address of an object store, and the store that it is of."""

    url: str
    store: ObjectStore


def settings_of(address: StoreAddress, settings: HubSettings) -> HubSettings:
    """Return the settings of downloads from a store: those of the host's hub, elsewhere."""
    endpoint = address.store.endpoint or S3.endpoint
    return replace(settings, endpoint=endpoint, token="", hub="s3", link=S3.link, is_offline=False)


class StoreReader(NamedTuple):
    """Who asks a store: the interpreter of the environment ``s3``, and its variables.

    ``env`` has the credentials and the variables of the network. ``should_stop`` ends a question.
    """

    python: Path
    env: Mapping[str, str]
    should_stop: Callable[[], bool] = lambda: False

    def look_up(self, address: StoreAddress, settings: HubSettings) -> Listing:
        """Return what lies at an address; digests are asked of what is selected of it.

        Raises:
            HubError: offline, unauthorised, absent, mirror, refused or unusable.
            DownloadStoppedError: ``should_stop``.
        """
        found = self._answer({"suffixes": READABLE}, address, settings)
        if not found["files"]:
            raise HubError(
                "unusable",
                f"{address.url} has {found['num_objects']:,} objects, and none that a job reads "
                f"({', '.join(READABLE)}): name the prefix of a model, or a file of data",
            )
        return listing_of(address.url, found["files"])

    def with_digests(
        self, files: Sequence[HubFile], address: StoreAddress, settings: HubSettings
    ) -> tuple[HubFile, ...]:
        """Return files with the digests that the store keeps of them.

        Raises:
            HubError, DownloadStoppedError: as of ``look_up``.
        """
        asked = [{"key": each.key, "size": each.size, "etag": each.version} for each in files]
        found = self._answer({"files": asked}, address, settings)["files"]
        return tuple(
            replace(
                file,
                etag=digest.get("sha256") or file.etag,
                sha256=digest.get("sha256", ""),
                md5=digest.get("md5", ""),
                part_bytes=int(digest.get("part_bytes", 0)),
            )
            for file, digest in zip(files, found, strict=True)
        )

    def _answer(
        self, question: Mapping[str, Any], address: StoreAddress, settings: HubSettings
    ) -> dict[str, Any]:
        store = address.store.model_dump(include={"endpoint", "region", "is_public"})
        line = json.dumps({"suffixes": (), **question, **store, "url": address.url}) + "\n"
        out, err, code = self._run(line, address, settings)
        try:
            found: dict[str, Any] = json.loads(out)
        except ValueError:
            words = err.strip().rpartition("\n")[2][:200] or f"code {code}"
            words = f"asking it failed: {words}"
            raise _refusal(0, NOT_ASKED, words, address, settings) from None
        if "files" not in found:
            raise _refusal(found["status"], found["code"], found["words"], address, settings)
        return found

    def _run(
        self, line: str, address: StoreAddress, settings: HubSettings
    ) -> tuple[str, str, int]:
        """Return the output, the messages and the exit status of a process that asks."""
        until = time.monotonic() + SECONDS
        with subprocess.Popen(
            [str(self.python), "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(self.env),
        ) as process:
            given: str | None = line
            while True:
                try:
                    out, err = process.communicate(given, timeout=POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    given = None  # communicate has it
                else:
                    return out, err, process.returncode
                if self.should_stop():
                    process.kill()
                    raise DownloadStoppedError
                if time.monotonic() > until:
                    process.kill()
                    words = f"no answer within {SECONDS:g} s"
                    raise _refusal(0, NOT_REACHED, words, address, settings)


def listing_of(url: str, found: Sequence[Mapping[str, Any]]) -> Listing:
    """Return objects as the files of a commit.

    Raises:
        HubError: unusable: a key would leave the folder.
    """
    files = tuple(
        _hub_file_of(url, each) for each in sorted(found, key=lambda each: str(each["path"]))
    )
    content = "".join(f"{each.path} {each.size} {each.version}\n" for each in files)
    commit = hashlib.sha256(content.encode()).hexdigest()[:COMMIT_DIGITS]
    return Listing(store_repository(url), commit, files, address=url)


def _hub_file_of(url: str, found: Mapping[str, Any]) -> HubFile:
    path, size, version = str(found["path"]), int(found["size"]), str(found["etag"])
    if not is_safe_path(path):
        raise HubError(
            "unusable", f"{url} has an object {path!r:.100}, which is no path of a file: rename it"
        )
    name = hashlib.sha256(f"{path}\n{size}\n{version}".encode()).hexdigest()[:COMMIT_DIGITS]
    return HubFile(
        path,
        size,
        name,
        url=str(found["url"]),
        version=version,
        key=str(found["key"]),
    )


def _refusal(
    status: int, code: str, words: str, address: StoreAddress, settings: HubSettings
) -> HubError:
    """Return the error of a store that refuses, or is not reached.

    Only of one that is not reached, or too busy to answer, may a copy in the cache stand for the
    answer: any other answer is one about the address or the key.
    """
    bucket = address.url.removeprefix("s3://").partition("/")[0]
    said = words.strip().rstrip(".")[:200]
    answers = f"{settings.endpoint} answers {code or status} for {address.url} ({said})"
    endpoint = S3.endpoint_variable
    if code == TOO_MANY:
        return HubError("unusable", f"{address.url}: {said} that has one model, or one data set")
    if status == HTTPStatus.NOT_FOUND:
        absent = f"{settings.endpoint} has nothing at {address.url} ({said}): correct it"
        if code == "NoSuchBucket":
            absent = (
                f"{settings.endpoint} has no bucket {bucket!r} ({said}): correct the address, or "
                f"{endpoint}"
            )
        return HubError("absent", absent)
    if status in _NO_ACCESS or code in _KEY_REFUSED:
        refused = f"{settings.endpoint} refuses {address.url} ({code or status}: {said})"
        return HubError("unauthorised", f"{refused}: {_of_key(code, address.store)}")
    if status in _BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return HubError("mirror", f"{answers}: try again, or correct {endpoint}")
    if code != NOT_REACHED:
        names = ", ".join(S3.secrets)
        way_out = f'correct {endpoint}, its "region", or the team\'s secrets {names}'
        return HubError("refused", f"{answers}: {way_out}")
    way_out = OUT_OF_REACH.format(variable=endpoint, endpoint=settings.endpoint)
    return HubError("offline", f"{settings.endpoint} is not reached ({said}): {way_out}")


def _of_key(code: str, store: ObjectStore) -> str:
    """Return what makes a store take the key."""
    names = ", ".join(S3.secrets)
    if store.is_public:
        return 'its operator marked that prefix as "is_public" in config.json, and it is not'
    if code in _KEY_ENDED:
        return f"the key was a temporary one: renew it in the team's secrets {names}"
    return f"store a key that may list and read it as the team's secrets {names}"

"""What the Hub says of a repository at a revision: its commit, its files, who may have them.

One request each, none for what the cache has; nothing is written.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import quote, urljoin, urlsplit

import httpx

from runners.datasets.records import SUFFIXES
from runners.datasets.repositories import DATA_SETS
from runners.datasets.text import MAX_CONFIG_DEPTH, TextError, read_json, read_text
from runners.hub.errors import HubError, refusal, renamed, shown, unreachable, unusual
from runners.hub.repository import COMMIT, RepositoryName, is_safe_path
from runners.hub.settings import HubSettings
from runners.hub.source import AnswerError, Ask

CONFIG = "config.json"
TIMEOUT_SECONDS = 10.0
MAX_LISTING_BYTES = 64 * 2**20  # 100,000 files
MAX_CONFIG_BYTES = 1024**2  # as jobs read it
MAX_REDIRECTS = 5
SHA1_DIGITS, SHA256_DIGITS = 40, 64
ETAG = re.compile(rf"[0-9a-f]{{{SHA1_DIGITS}}}|[0-9a-f]{{{SHA256_DIGITS}}}")
MAIN = "main"
REDIRECTS = {301, 302, 303, 307, 308}
# Addresses of this machine are asked without the proxy of the environment.
BY_ITSELF = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
NO_DIGEST = "none"  # of a store that keeps none
CODE_TAG = "custom_code"  # of a repository whose config has an auto_map


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    ``etag`` names its blob in the cache: the SHA-256 of a large file, as ``sha256``, and git's
    SHA-1 of a small one, which has no ``sha256``. A file of an object store has a signed ``url``,
    the ``version`` that is to be read (its ETag there), and instead of SHA-1 the ``md5`` of its
    bytes, of parts of ``part_bytes`` that of their MD5s with the number of parts, or none.
    """

    path: str
    size: int  # bytes
    etag: str
    sha256: str = ""
    url: str = field(default="", repr=False)
    version: str = ""
    md5: str = ""
    part_bytes: int = 0
    key: str = ""  # of the object, in its bucket

    @property
    def digest(self) -> str:
        """Return what the digest of its bytes is, by ``new_digest``."""
        if self.url and not self.sha256:
            return self.md5 or NO_DIGEST
        return self.etag


@dataclass(frozen=True)
class Listing:
    """A repository at one commit. ``revision`` is the branch or tag that was requested."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]
    revision: str = MAIN
    licence: str = ""
    gated: str = ""  # "auto" or "manual": access is granted at once, or by a person
    is_private: bool = False
    needs_remote_code: bool = False
    library: str = ""
    tags: tuple[str, ...] = ()
    address: str = ""  # in an object store, where it is no repository

    def shown(self, path: str = "") -> str:
        """Return what was requested, as messages name it."""
        if self.address:
            return f"{self.address.rstrip('/')}/{path}".rstrip("/")
        return shown(self.repository, self.revision, path)

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all files."""
        return frozenset(file.path for file in self.files)

    def file(self, path: str) -> HubFile | None:
        """Return the file at a path."""
        return next((file for file in self.files if file.path == path), None)


def look_up(
    name: RepositoryName, settings: HubSettings, timeout: float = TIMEOUT_SECONDS
) -> Listing:
    """Return what a repository holds, at the commit that its revision is now.

    Raises:
        HubError: offline, proxy, tls, unauthorised, absent, rate_limited or mirror.
    """
    revision = name.revision or settings.main
    kind = "" if name.repository.startswith(DATA_SETS) else "models/"
    url = (
        f"{settings.endpoint}/api/{kind}{name.repository}/revision/{quote(revision, safe='')}"
        "?blobs=true"
    )
    requested = shown(name.repository, name.revision)
    _check_online(requested, settings)
    with _client(settings, timeout) as client:

        def ask(address: str) -> object:
            data = _get(
                client, address, requested, settings, MAX_LISTING_BYTES, repository=name.repository
            )
            try:
                return read_json(data.decode())
            except ValueError:
                raise unusual("no JSON", requested, address, settings) from None

        if settings.source.document is None:
            document = ask(url)
        else:
            document = _own_document(name.repository, revision, requested, settings, ask)
    if not isinstance(document, dict):
        raise unusual("no JSON object", requested, url, settings)
    listing = _listing(document, name, settings, url)
    is_fixed = COMMIT.fullmatch(revision) is not None
    return replace(listing, revision="" if is_fixed else revision)


def _own_document(
    repository: str,
    revision: str,
    requested: str,
    settings: HubSettings,
    ask: Ask,
) -> object:
    """Return the Hub's document of a repository, made of what another source says of it."""
    try:
        make = settings.source.document
        return make(settings.endpoint, repository, revision, ask) if make else None
    except AnswerError as error:
        raise HubError(
            "absent",
            f"{settings.endpoint} has no {requested}, and says “{error}”: correct the name or the "
            f"revision, as on {settings.page(repository)}",
        ) from None
    except (LookupError, TypeError, AttributeError):
        raise unusual("no list of files", requested, settings.endpoint, settings) from None


def _listing(
    document: Mapping[str, Any], name: RepositoryName, settings: HubSettings, url: str
) -> Listing:
    """Return what the Hub's document of a repository says.

    Source of the fields: huggingface_hub, hf_api.py: ModelInfo and RepoSibling.
    """
    requested = shown(name.repository, name.revision)
    commit, siblings = document.get("sha"), document.get("siblings")
    if (
        not isinstance(commit, str)
        or not COMMIT.fullmatch(commit)
        or not isinstance(siblings, list)
    ):
        raise unusual("no commit or no list of files", requested, url, settings)
    files = tuple(_file(each, requested, url, settings) for each in siblings)
    tags = tuple(tag for tag in document.get("tags") or () if isinstance(tag, str))
    card = document.get("cardData")
    licence = card.get("license") if isinstance(card, dict) else None
    tagged = next((tag.partition(":")[2] for tag in tags if tag.startswith("license:")), "")
    config = document.get("config")
    has_code = isinstance(config, dict) and bool(config.get("auto_map"))
    return Listing(
        repository=name.repository,
        commit=commit,
        files=files,
        licence=licence if isinstance(licence, str) else tagged,
        gated=str(document.get("gated") or "").lower().replace("true", "manual"),
        is_private=bool(document.get("private")),
        needs_remote_code=has_code or CODE_TAG in tags,
        library=str(document.get("library_name") or ""),
        tags=tags,
    )


def _file(each: object, requested: str, url: str, settings: HubSettings) -> HubFile:
    """Return a file of a listing.

    Raises:
        HubError: it lacks size or digest, or its path would leave the folder.
    """
    entry = each if isinstance(each, dict) else {}
    large = entry.get("lfs")
    large = large if isinstance(large, dict) else {}
    path, size = entry.get("rfilename"), large.get("size", entry.get("size"))
    sha256 = str(large.get("sha256") or "")
    etag = sha256 or str(entry.get("blobId"))
    digits = SHA256_DIGITS if sha256 else SHA1_DIGITS
    if not isinstance(path, str) or not is_safe_path(path):
        raise unusual(f"a file named {path!r:.100}", requested, url, settings)
    is_digest = ETAG.fullmatch(etag) and len(etag) == digits
    if not isinstance(size, int) or size < 0 or not is_digest:
        raise unusual(f"neither size nor digest of {path!r}", requested, url, settings)
    return HubFile(path, size, etag, sha256)


def check_access(
    listing: Listing, settings: HubSettings, timeout: float = TIMEOUT_SECONDS
) -> None:
    """Check that this token may have the files; the listing of a gated repository is public.

    Raises:
        HubError: gated, unauthorised, or any of ``look_up``.
    """
    if not listing.files:
        return
    path = min(listing.files, key=_gated_first).path
    url = file_url(listing, path, settings)
    requested = listing.shown(path)
    with _client(settings, timeout) as client:
        _get(client, url, requested, settings, 0)


def _gated_first(file: HubFile) -> tuple[bool, bool, int]:
    """Order what is certainly gated first: config.json of a model, the files of a data set."""
    return file.path != CONFIG, not file.path.endswith(SUFFIXES), file.size


def read_config(
    listing: Listing, settings: HubSettings, timeout: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Return the config.json of a repository, for planning one that the catalog lacks.

    Raises:
        HubError: absent, if it has none; mirror, if it is damaged; or any of ``check_access``.
    """
    requested = listing.shown(CONFIG)
    data = read_file(listing, CONFIG, settings, MAX_CONFIG_BYTES, timeout)
    try:
        document = read_json(read_text(data), max_depth=MAX_CONFIG_DEPTH, may_be_infinite=True)
    except TextError as error:
        raise HubError(
            "unusable", f"{requested}: {error.of_file(CONFIG)}; choose another repository"
        ) from None
    if not isinstance(document, dict):
        raise HubError("unusable", f"{requested} is no JSON object; choose another repository")
    return document


def with_code_stated(
    listing: Listing, settings: HubSettings, timeout: float = TIMEOUT_SECONDS
) -> Listing:
    """Return a listing that says whether the model needs code of its own, of any source.

    Where a source's documents do not say so, the config.json is read.

    Raises:
        HubError: any of ``read_config``.
    """
    if settings.source.tells_code or CONFIG not in listing.paths:
        return listing
    has_code = bool(read_config(listing, settings, timeout).get("auto_map"))
    return replace(listing, needs_remote_code=has_code)


def read_file(
    listing: Listing,
    path: str,
    settings: HubSettings,
    limit: int,
    timeout: float = TIMEOUT_SECONDS,
) -> bytes:
    """Return the verified bytes of a small file of a repository, of the cache if it has them.

    Raises:
        HubError: absent, unusable if longer than ``limit`` bytes, wrong_digest, or any of
            ``check_access``.
    """
    requested = listing.shown(path)
    file = listing.file(path)
    if file is None:
        raise HubError(
            "absent", f"{settings.endpoint} has no {requested}; choose another repository"
        )
    if file.size > limit:
        raise HubError(
            "unusable",
            f"{requested} has {file.size:,} bytes, and at most {limit:,} are read; choose another "
            "repository",
        )
    if (stored := _stored(listing, file, settings)) is not None:
        return stored
    _check_online(requested, settings)
    with _client(settings, timeout) as client:
        data = _get(client, file_url(listing, path, settings), requested, settings, limit)
    digest = new_digest(file)
    digest.update(data)
    if digest.hexdigest() != file.digest:
        raise HubError(
            "wrong_digest",
            f"{requested} arrived with digest {digest.hexdigest()[:12]}…, and its listing says "
            f"{file.digest[:12]}…: try again, or use another hub than {settings.endpoint}",
        )
    return data


def _stored(listing: Listing, file: HubFile, settings: HubSettings) -> bytes | None:
    """Return the bytes of a file that the cache has, which were verified when they came."""
    folder = settings.repository_folder(listing.repository)
    for path in (folder / "blobs" / file.etag, folder / "snapshots" / listing.commit / file.path):
        with suppress(OSError):
            if path.stat().st_size == file.size:
                return path.read_bytes()
    return None


def file_url(listing: Listing, path: str, settings: HubSettings) -> str:
    """Return the address of a file at a listing's commit."""
    if (file := listing.file(path)) and file.url:
        return file.url
    return settings.source.file_url(settings.endpoint, listing.repository, listing.commit, path)


class Digest(Protocol):
    """The beginning of a digest."""

    def update(self, data: bytes, /) -> None:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of the bytes so far."""


class _OfParts:
    """The MD5 of the MD5s of parts, and the number of parts, as S3 has it as an ETag."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes, self._room = part_bytes, part_bytes
        self._part = hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []

    def update(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            if not self._room:
                self._end_part()
            taken, view = view[: self._room], view[self._room :]
            self._part.update(taken)
            self._room -= len(taken)

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part, self._room = hashlib.md5(usedforsecurity=False), self._part_bytes

    def hexdigest(self) -> str:
        parts = [*self._parts, self._part.digest()]
        whole = hashlib.md5(b"".join(parts), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(parts)}"


class _NoDigest:
    """Of a store that keeps none."""

    def update(self, data: bytes, /) -> None:
        """Look at nothing."""

    def hexdigest(self) -> str:
        return NO_DIGEST


def new_digest(file: HubFile) -> Digest:
    """Return the beginning of a file's digest: SHA-256, or git's SHA-1 of a small one.

    Of an object store's file MD5, or none.
    """
    if file.sha256:
        return hashlib.sha256()
    if file.url:
        if file.part_bytes:
            return _OfParts(file.part_bytes)
        return hashlib.md5(usedforsecurity=False) if file.md5 else _NoDigest()
    # The name of a blob in git, which the Hub gives as the only digest of small files.
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _check_online(requested: str, settings: HubSettings) -> None:
    if settings.is_offline:
        raise HubError(
            "offline",
            f"{requested} is not looked up: HF_HUB_OFFLINE is set on the host; unset it, or use a "
            "model that is there",
        )


@contextmanager
def _client(settings: HubSettings, timeout: float) -> Iterator[httpx.Client]:
    with httpx.Client(verify=settings.tls(), timeout=timeout, mounts=BY_ITSELF) as client:
        yield client


def _get(
    client: httpx.Client,
    url: str,
    requested: str,
    settings: HubSettings,
    limit: int,
    *,
    repository: str = "",
) -> bytes:
    """Return the body at a URL, at most ``limit`` bytes; 0: only whether there is one.

    Redirects are followed by hand, so that the token goes to the Hub alone. With ``repository``
    a redirect to the document of another one is a renamed repository.
    """
    total = client.timeout.read or TIMEOUT_SECONDS
    until = time.monotonic() + 3 * total
    for _ in range(MAX_REDIRECTS):
        try:
            with client.stream("GET", url, headers=settings.headers(url)) as response:
                if response.status_code in REDIRECTS:
                    url = urljoin(url, response.headers.get("location", ""))
                    new_name = _repository_of(url, settings)
                    if repository and new_name and new_name != repository:
                        raise renamed(repository, new_name)
                    continue
                if response.status_code != HTTPStatus.OK:
                    raise refusal(response.status_code, response.headers, requested, url, settings)
                return _body(response, limit, until) if limit else b""
        except _TooLongError:
            raise unusual(f"more than {limit:,} bytes", requested, url, settings) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise unreachable(error, url, settings) from None
    raise unusual("redirects without end", requested, url, settings)


class _TooLongError(Exception):
    """A body is longer than its limit."""


def _body(response: httpx.Response, limit: int, until: float) -> bytes:
    data = bytearray()
    for part in response.iter_bytes():
        data += part
        if len(data) > limit:
            raise _TooLongError
        if time.monotonic() > until:  # a server that sends a byte now and then
            raise httpx.ReadTimeout("no answer in time")
    return bytes(data)


def _repository_of(url: str, settings: HubSettings) -> str:
    """Return the repository whose document a URL of the Hub is, "" if it is no such URL."""
    path = urlsplit(url).path.removeprefix(urlsplit(settings.endpoint).path)
    match = re.match(rf"/api/(?:models/|(?={DATA_SETS}))((?:{DATA_SETS})?[^/]+/[^/]+)", path)
    return match[1] if match and settings.is_own(url) else ""

"""A small hub: what downloads and uploads use of the Hugging Face Hub's HTTP API, over a folder.

Each ``FOLDER/org/name`` is a repository, ``FOLDER/datasets/org/name`` one of data; its commit is
the digest of its content. In tests::

    with Hub(folder) as hub:
        settings = HubSettings(endpoint=hub.url, ...)

and for a developer without a network::

    python -m tests.hub.hub_server FOLDER --port 8080
    HF_ENDPOINT=http://127.0.0.1:8080 ...

Faults are attributes. ``log`` has every answer with the bytes of its body that were sent.
Sources: huggingface_hub, hf_api.py and file_download.py; answers of huggingface.co, 2026.
"""

import argparse
import base64
import hashlib
import json
import mmap
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin", ".pt", ".model")
LARGE_BYTES = 2**20  # as .gitattributes of the Hub's own repositories roughly have it
KEPT_BYTES = 2**20  # smaller files are kept for commits that are no longer there
CHUNK_BYTES = 16 * 2**10
SEND_BUFFER = 32 * 2**10  # small, so that what was sent has nearly arrived
IGNORED = {".cache", ".git"}
CARD = "card.json"  # beside the files: fields of the repository's document, such as "tags"


@dataclass
class StoredFile:
    """A file of a commit."""

    path: Path
    size: int
    sha256: str
    git_sha1: str
    is_large: bool
    kept: bytes | None

    def read(self) -> bytes | mmap.mmap:
        return _mapped(self.path) if self.kept is None else self.kept

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.git_sha1


def _mapped(path: Path) -> mmap.mmap:
    """Return a file's content without reading it: every range of a large file is a request."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def stored(path: Path) -> StoredFile:
    data = _mapped(path) if path.stat().st_size > KEPT_BYTES else path.read_bytes()
    sha1 = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    sha1.update(data)
    return StoredFile(
        path=path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        git_sha1=sha1.hexdigest(),
        is_large=path.suffix in LARGE or len(data) >= LARGE_BYTES,
        kept=data if isinstance(data, bytes) else None,
    )


@dataclass
class Answer:
    """One line of the log."""

    method: str
    path: str
    status: int
    host: str
    authorization: str
    range: str
    sent: int = 0  # bytes of the body


@dataclass
class Hub:
    """The server and its faults; every fault of a file goes by its name."""

    folder: Path
    port: int = 0
    certificate: tuple[Path, Path] | None = None  # certificate and key: https
    tokens: set[str] = field(default_factory=set)  # valid ones
    private: set[str] = field(default_factory=set)
    gated: dict[str, str] = field(default_factory=dict)  # repository: auto or manual
    admitted: set[str] = field(default_factory=set)  # tokens with access to gated ones
    renamed: dict[str, str] = field(default_factory=dict)
    limited: list[str] = field(default_factory=list)  # Retry-After of the next answers
    failing: list[int] = field(default_factory=list)  # status of the next answers
    corrupted: Counter[str] = field(default_factory=Counter)  # how often a file has a wrong byte
    truncated: Counter[str] = field(default_factory=Counter)  # how often a body ends halfway
    expired: int = 0  # signed addresses that are refused
    branches: dict[str, str] = field(default_factory=dict)  # repository@branch: its content's
    has_ranges: bool = True
    storage_host: str = "localhost"  # of the addresses that large files are redirected to
    bytes_per_second: float = 0.0
    hold_at: int = -1  # bytes of large bodies in all, after which they wait for ``go_on``
    page: bytes = b""  # instead of every document: a captive portal
    writers: dict[str, dict[str, Any]] = field(default_factory=dict)  # token: name, role, orgs
    cut_uploads: int = 0  # large bodies that are received halfway and answered with 500
    log: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._commits: dict[str, dict[str, StoredFile]] = {}
        self._states: dict[str, tuple[tuple[object, ...], str]] = {}
        self.large_sent = 0
        self.uploaded: dict[str, bytes] = {}  # by SHA-256, until a commit names them
        self.held = threading.Event()
        self.go_on = threading.Event()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        if self.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "https" if self.certificate else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.storage = f"{scheme}://{self.storage_host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()

    # What is stored

    def has(self, repository: str) -> bool:
        parts = repository.split("/")
        count = 2 + (parts[0] == "datasets")
        return len(parts) == count and ".." not in parts and (self.folder / repository).is_dir()

    def commit(self, repository: str) -> str:
        """Return the commit of a repository's present content, "" if there is none."""
        root = self.folder / repository
        if not self.has(repository):
            return ""
        paths = sorted(
            path
            for path in root.rglob("*")
            if path.is_file() and path.name != CARD and not IGNORED & set(path.parts)
        )
        state = tuple((path, (info := path.stat()).st_size, info.st_mtime_ns) for path in paths)
        with self._lock:
            known = self._states.get(repository)
            if known is None or known[0] != state:
                files = {path.relative_to(root).as_posix(): stored(path) for path in paths}
                content = "".join(f"{name} {file.sha256}\n" for name, file in files.items())
                commit = hashlib.sha1(
                    f"{repository}\n{content}".encode(), usedforsecurity=False
                ).hexdigest()
                self._commits[f"{repository}@{commit}"] = files
                self._states[repository] = known = (state, commit)
            return known[1]

    def files(self, repository: str, revision: str) -> tuple[str, dict[str, StoredFile] | None]:
        """Return the commit of a revision and its files, None if there is no such revision."""
        if (source := self.branches.get(f"{repository}@{revision}")) is not None:
            commit, content = self.files(source, "main")
            self._commits[f"{repository}@{commit}"] = content or {}
            return commit, content
        found = self._commits.get(f"{repository}@{revision}")
        if found is not None:
            return revision, found
        head = self.commit(repository)
        commit = head if revision == "main" else revision
        return commit, self._commits.get(f"{repository}@{commit}")

    def large(self, sha256: str) -> StoredFile | None:
        every = (file for files in list(self._commits.values()) for file in files.values())
        return next((file for file in every if file.sha256 == sha256 and file.is_large), None)

    def document(
        self, repository: str, commit: str, files: dict[str, StoredFile]
    ) -> dict[str, Any]:
        """Return the document of /api/models."""
        card = self.folder / repository / CARD
        stated = json.loads(card.read_text()) if card.exists() else {}
        siblings = [
            {"rfilename": name, "size": file.size, "blobId": file.git_sha1}
            | (
                {"lfs": {"sha256": file.sha256, "size": file.size, "pointerSize": 134}}
                if file.is_large
                else {}
            )
            for name, file in files.items()
        ]
        config = {}
        if "config.json" in files:
            with suppress(ValueError):
                read = json.loads(files["config.json"].read())
                config = {
                    key: read[key]
                    for key in ("architectures", "model_type", "auto_map")
                    if key in read
                }
        tags = ["transformers", *(["custom_code"] if "auto_map" in config else [])]
        return {
            "_id": commit[:24], "id": repository, "modelId": repository, "sha": commit,
            "private": repository in self.private, "gated": self.gated.get(repository, False),
            "disabled": False, "library_name": "transformers", "tags": tags, "config": config,
            "cardData": {"license": "apache-2.0"}, "siblings": siblings,
        } | stated  # fmt: skip

    # What was sent

    def sent(self, part: str = "") -> int:
        """Return the bytes of bodies of addresses that hold a text."""
        return sum(each.sent for each in self.log if part in each.path)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:  # a client that was killed, or trusts us not
        pass


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    server_version = "hub"

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        super().setup()

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        self.line = Answer(
            self.command, self.path, 0, self.headers.get("host", ""),
            self.headers.get("authorization", ""), self.headers.get("range", ""),
        )  # fmt: skip
        hub.log.append(self.line)
        segments = [unquote(each) for each in parts.path.strip("/").split("/")]
        if "datasets" in segments[:2]:
            at = segments.index("datasets")
            segments[at : at + 2] = ["models"] * at + [f"datasets/{segments[at + 1]}"]
        if hub.page:
            self._send(200, hub.page, {"Content-Type": "text/html"})
        elif hub.limited:
            self._send(429, b"", {"Retry-After": hub.limited.pop(0)})
        elif hub.failing:
            self._send(hub.failing.pop(0), b"")
        elif self.command in {"POST", "PUT"}:
            self._write(segments)
        elif segments[:3] == ["api", "v1", "models"]:
            self._modelscope("/".join(segments[3:5]), segments[5:], parse_qs(parts.query))
        elif segments == ["api", "whoami-v2"]:
            self._whoami()
        elif segments[:2] == ["api", "models"] and len(segments) in {4, 6}:
            revision = segments[5] if len(segments) == 6 else "main"
            answer = self._tree if segments[4:5] == ["tree"] else self._model
            answer("/".join(segments[2:4]), revision)
        elif segments[0] == "lfs" and len(segments) == 2:
            self._storage(segments[1], parts.query)
        elif len(segments) >= 5 and segments[2] == "resolve":
            self._resolve("/".join(segments[:2]), segments[3], "/".join(segments[4:]))
        else:
            self._send(404, b"")

    # Documents

    def _token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def _refused(self, repository: str) -> bool:
        """Answer if the repository is not there, or not for this token."""
        token = self._token()
        if token and token not in self.hub.tokens:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif (new := self.hub.renamed.get(repository)) is not None:
            self._send(307, b"", {"Location": self.path.replace(repository, new, 1)})
        elif not self.hub.has(repository) or (repository in self.hub.private and not token):
            # Without a token what is private and what is not there look alike.
            self._error(404 if token else 401, "RepoNotFound", "Repository not found")
        else:
            return False
        return True

    def _model(self, repository: str, revision: str) -> None:
        if self._refused(repository):
            return
        commit, files = self.hub.files(repository, revision)
        if files is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        document = self.hub.document(repository, commit, files)
        if "blobs" not in parse_qs(urlsplit(self.path).query):
            document["siblings"] = [
                {"rfilename": each["rfilename"]} for each in document["siblings"]
            ]
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _tree(self, repository: str, revision: str) -> None:
        """Answer what snapshot_download asks for: all files in one list."""
        if self._refused(repository):
            return
        _, files = self.hub.files(repository, revision)
        if files is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        entries = [
            {"type": "file", "path": name, "size": file.size, "oid": file.git_sha1}
            | (
                {"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134}}
                if file.is_large
                else {}
            )
            for name, file in files.items()
        ]
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    # ModelScope. Sources: as of runners/hub/modelscope.py; 200 with another "Code" is a refusal.

    def _modelscope(self, repository: str, place: list[str], query: dict[str, list[str]]) -> None:
        hub, token = self.hub, self._token()
        revision = query.get("Ref", query.get("Revision", ["master"]))[0]
        closed = repository in hub.private or (place == ["repo"] and repository in hub.gated)
        if token and (
            token not in hub.tokens or f"m_session_id={token}" not in self.headers["cookie"]
        ):
            self._json({"Code": 401, "Message": "invalid token", "Success": False}, 401)
            return
        if not hub.has(repository) or (closed and token not in hub.admitted):
            self._json(
                {"Code": 404, "Message": "not found", "Success": False}, 403 if closed else 404
            )
            return
        commit, files = hub.files(repository, "main" if revision == "master" else revision)
        path = query.get("FilePath", [""])[0]
        if files is None:
            message = f"no revision {revision}"
            self._json({"Code": 10010205001, "Message": message, "Success": False})
        elif place == ["revisions"]:
            own = [at.partition("@")[2] for at in hub.branches if at.startswith(f"{repository}@")]
            names = [{"Revision": each} for each in ("master", *own)]
            self._json({"Code": 200, "Data": {"RevisionMap": {"Branches": names, "Tags": None}}})
        elif place == ["commits"]:
            self._json({"Code": 200, "Data": {"Commit": [{"Id": commit, "ShortId": commit[:8]}]}})
        elif place == ["repo", "files"]:
            # As there: folders are in the list, and of another spelling what is in them is not.
            names = (
                files if query.get("Recursive") == ["True"] else [n for n in files if "/" not in n]
            )
            folders = {name.rpartition("/")[0] for name in files} - {""}
            entries = [{"Path": each, "Size": 0, "Sha256": "", "Type": "tree"} for each in folders]
            entries += [{"Path": each, "Name": Path(each).name, "Size": files[each].size, "Type": "blob",
                         "Sha256": files[each].sha256, "IsLFS": files[each].is_large,
                         "Revision": commit} for each in names]  # fmt: skip
            self._json({"Code": 200, "Data": {"Files": entries}, "Success": True})
        elif place == ["repo"] and path in files:
            file = files[path]
            if file.is_large:
                location = f"{hub.storage}/lfs/{file.sha256}?signature=1&name={Path(path).name}"
                self._send(302, b"", {"Location": location})
            else:
                self._body(file, {}, path)
        else:
            self._send(404, b"")

    # Writing. Sources: huggingface_hub 2.4, hf_api.py, lfs.py and _commit_api.py.

    def _json(self, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self._send(status, body, {"Content-Type": "application/json"})

    def _whoami(self) -> None:
        writer = self.hub.writers.get(self._token())
        if writer is None:
            self._error(401, "", "Invalid credentials in Authorization header")
            return
        orgs = [{"name": each} for each in writer.get("orgs", ())]
        token = {"displayName": "t", "role": writer["role"]}
        self._json({"type": "user", "name": writer["name"], "orgs": orgs,
                    "auth": {"type": "access_token", "accessToken": token}})  # fmt: skip

    def _write(self, segments: list[str]) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if segments[0] == "lfs-upload":
            self._receive_large(segments[1], body)
            return
        writer = self.hub.writers.get(self._token())
        if writer is None or writer["role"] == "read":
            self._error(403 if writer else 401, "", "This token may not write")
        elif segments == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif segments == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif segments[:2] == ["api", "models"] and segments[4:5] == ["preupload"]:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if Path(each["path"]).suffix in LARGE else "regular",
                    "shouldIgnore": False,
                }
                for each in files
            ]
            self._json({"files": modes})
        elif segments[2:] == ["info", "lfs", "objects", "batch"]:
            self._json({"objects": [self._object(each) for each in json.loads(body)["objects"]]})
        elif segments[:2] == ["api", "models"] and segments[4:5] == ["commit"]:
            self._commit("/".join(segments[2:4]), body)
        else:
            self._send(404, b"")

    def _create(self, wanted: dict[str, Any]) -> None:
        name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
        if self.hub.has(name):
            error = "You already created this model repo"
            self._json({"error": error, "url": f"{self.hub.url}/{name}"}, 409)
            return
        (self.hub.folder / name).mkdir(parents=True)
        if wanted.get("private") or wanted.get("visibility") == "private":
            self.hub.private.add(name)
        self._json({"url": f"{self.hub.url}/{name}"})

    def _object(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.hub.uploaded or self.hub.large(wanted["oid"]):
            return wanted
        href = f"{self.hub.storage}/lfs-upload/{wanted['oid']}"
        return wanted | {"actions": {"upload": {"href": href}}}

    def _receive_large(self, sha256: str, body: bytes) -> None:
        if self.hub.cut_uploads:
            self.hub.cut_uploads -= 1
            self._send(400, b"<Error>RequestTimeout</Error>")
        elif hashlib.sha256(body).hexdigest() != sha256:
            self._send(400, b"<Error>BadDigest</Error>")
        else:
            self.hub.uploaded[sha256] = body
            self._send(200, b"")

    def _commit(self, repository: str, body: bytes) -> None:
        for line in body.splitlines():
            each = json.loads(line)
            value = each["value"]
            if each["key"] == "header":
                continue
            path = self.hub.folder / repository / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if each["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            else:
                known = self.hub.uploaded.pop(value["oid"], None)
                path.write_bytes(known if known is not None else path.read_bytes())
        commit = self.hub.commit(repository)
        url = f"{self.hub.url}/{repository}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url})

    # Files

    def _resolve(self, repository: str, revision: str, path: str) -> None:
        hub = self.hub
        if self._refused(repository):
            return
        if repository in hub.gated and self._token() not in hub.admitted:
            self._error(403 if self._token() else 401, "GatedRepo", f"{repository} is gated")
            return
        commit, files = hub.files(repository, revision)
        if files is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif (file := files.get(path)) is None:
            self._error(404, "EntryNotFound", "Entry not found")
        elif file.is_large:
            self._send(302, b"", {
                "Location": f"{hub.storage}/lfs/{file.sha256}?signature=1&name={Path(path).name}",
                "X-Repo-Commit": commit, "X-Linked-Size": str(file.size),
                "X-Linked-Etag": f'"{file.sha256}"', "ETag": f'"{file.sha256}"',
            })  # fmt: skip
        else:
            self._body(file, {"X-Repo-Commit": commit, "ETag": f'"{file.git_sha1}"'}, path)

    def _storage(self, sha256: str, query: str) -> None:
        hub, file = self.hub, self.hub.large(sha256)
        if file is None or "signature" not in query:
            self._send(403, b"")
        elif hub.expired:
            hub.expired -= 1
            self._send(403, b"<Error>Request has expired</Error>")
        else:
            # The storage's own tag, which is not the Hub's.
            self._body(file, {"ETag": f'"{sha256[:32]}"'}, parse_qs(query)["name"][0])

    def _body(self, file: StoredFile, headers: dict[str, str], path: str) -> None:
        name, data = Path(path).name, file.read()
        if self.hub.corrupted[name]:
            self.hub.corrupted[name] -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        headers = headers | {"Accept-Ranges": "bytes"}
        wanted = self.headers.get("range", "").removeprefix("bytes=")
        if not wanted or not self.hub.has_ranges:
            self._send(200, data, headers, name, is_large=file.is_large)
            return
        first, _, last = wanted.partition("-")
        start, end = int(first), min(int(last) + 1 if last else file.size, file.size)
        if start >= file.size:
            self._send(416, b"", {"Content-Range": f"bytes */{file.size}"})
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
        self._send(206, memoryview(data)[start:end], headers, name, is_large=file.is_large)

    def _send(
        self, status: int, data: bytes | memoryview | mmap.mmap, headers: dict[str, str] | None = None, name: str = "",
        *, is_large: bool = False,
    ) -> None:  # fmt: skip
        hub, self.line.status, data = self.hub, status, memoryview(data)
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name and hub.truncated[name]:
            hub.truncated[name] -= 1
            data = data[: len(data) // 2]
            self.close_connection = True
        with suppress(OSError):
            for at in range(0, len(data), CHUNK_BYTES):
                chunk = data[at : at + CHUNK_BYTES]
                if is_large and 0 <= hub.hold_at <= hub.large_sent:
                    hub.held.set()
                    hub.go_on.wait()
                if is_large and hub.bytes_per_second:
                    time.sleep(len(chunk) / hub.bytes_per_second)
                self.line.sent += len(chunk)  # before its reader can ask how much was sent
                try:
                    self.connection.sendall(chunk)
                except OSError:
                    self.line.sent -= len(chunk)
                    raise
                if is_large:
                    with hub._lock:
                        hub.large_sent += len(chunk)
            return
        self.close_connection = True


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Serve folders org/name as repositories of a hub."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument(
        "--token", action="append", default=[], help="A valid one; may be repeated."
    )
    parser.add_argument("--gated", action="append", default=[], metavar="org/name")
    parser.add_argument("--bytes-per-second", type=float, default=0.0)
    options = parser.parse_args()
    hub = Hub(
        options.folder.resolve(), options.port, tokens=set(options.token),
        admitted=set(options.token), gated=dict.fromkeys(options.gated, "manual"),
        bytes_per_second=options.bytes_per_second,
    )  # fmt: skip
    with hub:
        sys.stdout.write(f"HF_ENDPOINT={hub.url}\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()

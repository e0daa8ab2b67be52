"""A small object store: what downloads use of S3's HTTP API, over a folder of buckets.

``FOLDER/bucket/key`` is an object. Every request must be signed with one of ``keys`` (AWS
Signature 4, checked here by its definition), unless the bucket is public. In tests::

    with Store(folder, keys={"AKIA": "secret"}) as store:
        ... endpoint=store.url ...

Faults are attributes; ``log`` has every answer with the bytes of its body that were sent. Sources:
https://docs.aws.amazon.com/AmazonS3/latest/API/ (ListObjectsV2, HeadObject, GetObject) and
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
"""

import base64
import hashlib
import hmac
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

CHUNK_BYTES = 16 * 2**10
PAGE = 3  # objects of a listing's page


@dataclass
class Sent:
    """One line of the log."""

    method: str
    key: str
    status: int
    range: str
    sent: int = 0  # bytes of the body


@dataclass
class Store:
    """The server and its faults; an object goes by ``bucket/key``."""

    folder: Path
    keys: dict[str, str] = field(default_factory=dict)  # access key: secret
    public: set[str] = field(default_factory=set)  # buckets that need no signature
    unreadable: set[str] = field(default_factory=set)  # objects that may be listed, not read
    busy: set[str] = field(default_factory=set)  # objects whose bytes come not now: 503
    tells_parts: bool = True  # of an object that was uploaded in parts, their sizes
    parts: dict[str, int] = field(
        default_factory=dict
    )  # objects uploaded in parts of so many bytes
    checksums: set[str] = field(default_factory=set)  # objects stored with their SHA-256
    encrypted: set[str] = field(default_factory=set)  # by KMS: the ETag is no digest
    corrupted: Counter[str] = field(
        default_factory=Counter
    )  # how often an object has a wrong byte
    cut: Counter[str] = field(default_factory=Counter)  # how often a body ends halfway
    # Status of the next answers, and the code that the body of each has.
    failing: list[tuple[int, str]] = field(default_factory=list)
    hold_at: int = -1  # bytes of bodies in all, after which they wait for ``go_on``
    log: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent = 0
        self.lock = threading.Lock()
        self.held, self.go_on = threading.Event(), threading.Event()
        store = self

        class Handler(_Handler):
            pass

        Handler.store = store
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
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

    def etag(self, name: str, data: bytes) -> str:
        if name in self.encrypted:
            return hashlib.md5(b"encrypted" + data, usedforsecurity=False).hexdigest()
        if (size := self.parts.get(name)) is None:
            return hashlib.md5(data, usedforsecurity=False).hexdigest()
        digests = [
            hashlib.md5(data[at : at + size], usedforsecurity=False).digest()
            for at in range(0, len(data), size)
        ]
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        return f"{whole}-{len(digests)}"


def signature(secret: str, scope: str, at: str, request: str) -> str:
    """Return the signature of a canonical request, by the definition of AWS Signature 4."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    digest = hashlib.sha256(request.encode()).hexdigest()
    return hmac.digest(key, f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{digest}".encode(), "sha256").hex()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qsl(parts.query, keep_blank_values=True)
        name = unquote(parts.path).lstrip("/")
        bucket, _, key = name.partition("/")
        if self.store.failing:
            return self._refuse(*self.store.failing.pop(0), name)
        if bucket not in self.store.public and (code := self._wrong_signature(parts.path, query)):
            return self._refuse(403, code, name)
        folder = self.store.folder / bucket
        if not folder.is_dir():
            return self._refuse(404, "NoSuchBucket", name)
        if not key:
            return self._list(bucket, dict(query))
        return self._object(name, folder / key, dict(query))

    def _wrong_signature(self, path: str, query: list[tuple[str, str]]) -> str:
        given = dict(query)
        headers = {key.lower(): value for key, value in self.headers.items()}
        if "X-Amz-Signature" in given:
            credential, names = given["X-Amz-Credential"], given["X-Amz-SignedHeaders"]
            sent, at, payload = given["X-Amz-Signature"], given["X-Amz-Date"], "UNSIGNED-PAYLOAD"
        elif (text := headers.get("authorization", "")).startswith("AWS4-HMAC-SHA256 "):
            fields = dict(each.split("=", 1) for each in text.split(" ", 1)[1].split(", "))
            credential, names = fields["Credential"], fields["SignedHeaders"]
            sent, at = fields["Signature"], headers["x-amz-date"]
            payload = headers["x-amz-content-sha256"]
        else:
            return "AccessDenied"
        user, _, scope = credential.partition("/")
        if user not in self.store.keys:
            return "InvalidAccessKeyId"
        canonical_query = "&".join(
            f"{quote(key, safe='-_.~')}={quote(value, safe='-_.~')}"
            for key, value in sorted(query)
            if key != "X-Amz-Signature"
        )
        lines = "".join(f"{name}:{headers[name].strip()}\n" for name in names.split(";"))
        request = f"{self.command}\n{path}\n{canonical_query}\n{lines}\n{names}\n{payload}"
        right = signature(self.store.keys[user], scope, at, request)
        return "" if hmac.compare_digest(right, sent) else "SignatureDoesNotMatch"

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        folder, prefix = self.store.folder / bucket, query.get("prefix", "")
        keys = sorted(
            key
            for path in folder.rglob("*")
            if path.is_file() and (key := path.relative_to(folder).as_posix()).startswith(prefix)
        )
        at = int(query.get("continuation-token", 0))
        rows = []
        for key in keys[at : at + PAGE]:
            data = (folder / key).read_bytes()
            etag = self.store.etag(f"{bucket}/{key}", data)
            rows.append(
                f"<Contents><Key>{escape(quote(key))}</Key><Size>{len(data)}</Size>"
                f"<ETag>&quot;{etag}&quot;</ETag></Contents>"
            )
        more = at + PAGE < len(keys)
        token = f"<NextContinuationToken>{at + PAGE}</NextContinuationToken>" * more
        body = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult '
            'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}"
            "</ListBucketResult>"
        )
        self._send(200, f"{bucket}/", body.encode(), {"Content-Type": "application/xml"})

    def _object(self, name: str, path: Path, query: dict[str, str]) -> None:
        if not path.is_file():
            return self._refuse(404, "NoSuchKey", name)
        if fault := self._fault(name, query):
            return self._refuse(*fault, name)
        data = path.read_bytes()
        etag = self.store.etag(name, data)
        headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if name in self.store.encrypted:
            headers["x-amz-server-side-encryption"] = "aws:kms"
        if name in self.store.checksums and self.headers.get("x-amz-checksum-mode"):
            digest = hashlib.sha256(data).digest()
            headers["x-amz-checksum-sha256"] = base64.b64encode(digest).decode()
        wanted = self.headers.get("If-Match", "")
        if wanted and wanted.strip('"') != etag:
            return self._refuse(412, "PreconditionFailed", name)
        if self.command == "GET" and self.store.corrupted[name]:
            self.store.corrupted[name] -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        if number := int(query.get("partNumber", 0)):
            size = self.store.parts.get(name, len(data))
            return self._send(206, name, data[(number - 1) * size : number * size], headers)
        if asked := self.headers.get("Range", ""):
            start, end = (int(each) for each in asked.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self._send(206, name, data[start : end + 1], headers)
        return self._send(200, name, data, headers)

    def _fault(self, name: str, query: dict[str, str]) -> tuple[int, str] | None:
        if self.command == "GET" and name in self.store.unreadable:
            return 403, "AccessDenied"
        if self.command == "GET" and name in self.store.busy:
            return 503, "SlowDown"
        is_untold = "partNumber" in query and not self.store.tells_parts
        return (501, "NotImplemented") if is_untold else None

    def _refuse(self, status: int, code: str, name: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code} of {escape(name)}</Message></Error>"
        self._send(status, name, body.encode(), {"Content-Type": "application/xml"})

    def _send(self, status: int, name: str, body: bytes, headers: dict[str, str]) -> None:
        line = Sent(self.command, name, status, self.headers.get("Range", ""))
        self.store.log.append(line)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        is_cut = status < 300 and self.store.cut[name] > 0
        if is_cut:
            self.store.cut[name] -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        for at in range(0, len(body), CHUNK_BYTES):
            if 0 <= self.store.hold_at <= self.store.sent:
                self.store.held.set()
                self.store.go_on.wait(60)
            part = body[at : at + CHUNK_BYTES]
            try:
                self.wfile.write(part)
            except OSError:
                self.close_connection = True
                return
            with self.store.lock:
                self.store.sent += len(part)
                line.sent += len(part)

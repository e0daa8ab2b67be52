"""What lies at an address of an S3 store: one question on stdin, one JSON line as the answer.

``python -m runners.hub.s3_program`` runs in the environment ``s3``, which has Amazon's library:
it signs, and knows where a host's own credentials are. It reads ``{"url", "endpoint", "region",
"is_public", "suffixes"}``, with ``files`` for their digests, and of the environment the
credentials. A process of its own: the library is in no other environment.

The digests are those that the store keeps. SHA-256 where it was stored with the object; else MD5,
which the ETag of an object is unless it was uploaded in parts or is encrypted with KMS or a
customer's key; of parts the MD5 of their MD5s, for which the size of the parts is asked.
Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html (ETag), and
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html.
"""

import base64
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

MAX_OBJECTS = 20_000
SIGNED_SECONDS = 7 * 24 * 3600  # the longest that S3 allows; temporary credentials end sooner
CONNECT_SECONDS, READ_SECONDS = 10, 30
REQUESTS_AT_ONCE = 8
# Codes of this program, beside those of stores.
NO_CREDENTIALS, NOT_REACHED, NOT_ASKED = "NoCredentials", "NotReached", "NotAsked"
TOO_MANY = "TooManyObjects"
PARTS = re.compile(r"[0-9a-f]{32}-(\d+)")
MD5 = re.compile(r"[0-9a-f]{32}")


Document = dict[str, Any]
Returned = TypeVar("Returned")


class Client(Protocol):
    """What is used of the library's client."""

    def head_object(self, **arguments: object) -> Document:
        """Return what the store says of an object."""

    def list_objects_v2(self, **arguments: object) -> Document:
        """Return a page of objects."""

    def generate_presigned_url(self, method: str, **arguments: object) -> str:
        """Return an address that is signed for a request."""


class AnswerError(Exception):
    """The store refuses, or is not reached: a status, 0 of what is no answer, and words."""

    def __init__(self, status: int, code: str, words: str) -> None:
        super().__init__(words)
        self.status, self.code = status, code


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects at an address, or the status, code and words of a refusal.

    Each of ``files`` has ``path`` below the address, ``key``, ``size``, ``etag`` and ``url``,
    where the bytes may be had for a week. Of ``files`` in the question it is ``sha256``, ``md5``
    and ``part_bytes``, as far as the store keeps them: one request a file, three of one in parts.
    """
    bucket, _, key = question["url"].removeprefix("s3://").rstrip("/").partition("/")
    try:
        client = _call(_client, question=question)
        if "files" in question:
            with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
                digests = pool.map(
                    lambda each: _stored_digests(client, bucket, each), question["files"]
                )
                return {"files": list(digests)}
        found = _objects(client, bucket, key)
        wanted = [each for each in found if each["path"].lower().endswith(question["suffixes"])]
        files = [each | {"url": _signed(client, bucket, each["key"])} for each in wanted]
    except AnswerError as error:
        return {"status": error.status, "code": error.code, "words": str(error)}
    return {"files": files, "num_objects": len(found)}


def _client(question: Mapping[str, Any]) -> Client:
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import get_session

    endpoint = question["endpoint"] or None
    config = Config(
        signature_version=UNSIGNED if question["is_public"] else "s3v4",
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=REQUESTS_AT_ONCE,
        # Stores other than Amazon's have seldom a name for each bucket.
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    made: Client = get_session().create_client(
        "s3", endpoint_url=endpoint, region_name=question["region"] or None, config=config
    )
    return made


def _call(method: Callable[..., Returned], **arguments: object) -> Returned:
    """Return what a call of the library returns.

    Raises:
        AnswerError: it refuses, is not reached, or there are no credentials.
    """
    from botocore import exceptions as of

    try:
        return method(**arguments)
    except of.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = error.response.get("Error", {})
        words = str(said.get("Message") or said.get("Code") or error)
        raise AnswerError(int(status), str(said.get("Code", "")), words) from None
    except of.NoCredentialsError as error:
        words = f"neither the team nor this host has a key ({error})"
        raise AnswerError(403, NO_CREDENTIALS, words) from None
    except (of.ConnectionError, of.HTTPClientError) as error:
        raise AnswerError(0, NOT_REACHED, f"{type(error).__name__}: {error}") from None
    except of.BotoCoreError as error:  # such as half a key, or a region that is none
        raise AnswerError(0, NOT_ASKED, f"{type(error).__name__}: {error}") from None


def _objects(client: Client, bucket: str, key: str) -> list[dict[str, Any]]:
    """Return the object of a key, else those below it as a prefix."""
    try:
        head = _call(client.head_object, Bucket=bucket, Key=key)
    except AnswerError as error:
        # Without the right to list, a store says 403 of what is not there, too; and only the
        # answer of a listing has a body, which says why a key is refused.
        if not 300 <= error.status < 500 or error.code == NO_CREDENTIALS:  # noqa: PLR2004 -- HTTP
            raise
    else:
        name = key.rpartition("/")[2]
        return [_object(name, key, head["ContentLength"], head["ETag"])]
    found = list(_below(client, bucket, f"{key}/"))
    if not found:
        raise AnswerError(404, "NoSuchKey", f"nothing lies at {key!r} in the bucket {bucket!r}")
    return found


def _below(client: Client, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    count = 0
    while True:
        page = _call(client.list_objects_v2, Bucket=bucket, Prefix=prefix, **after)
        for each in page.get("Contents", ()):
            path = each["Key"].removeprefix(prefix)
            if path and not path.endswith("/"):  # the markers of consoles for folders
                yield _object(path, each["Key"], each["Size"], each["ETag"])
        count += len(page.get("Contents", ()))
        if count > MAX_OBJECTS:
            words = f"more than {MAX_OBJECTS:,} objects lie below {prefix!r}: name a prefix below"
            raise AnswerError(0, TOO_MANY, words)
        if not page.get("IsTruncated"):
            return
        after = {"ContinuationToken": page["NextContinuationToken"]}


def _object(path: str, key: str, size: int, etag: str) -> dict[str, Any]:
    return {"path": path, "key": key, "size": size, "etag": etag.strip('"')}


def _signed(client: Client, bucket: str, key: str) -> str:
    """Return an address that is signed for an object, which takes no request."""
    at = {"Bucket": bucket, "Key": key}
    return client.generate_presigned_url("get_object", Params=at, ExpiresIn=SIGNED_SECONDS)


def _stored_digests(client: Client, bucket: str, found: Mapping[str, Any]) -> dict[str, Any]:
    at = {"Bucket": bucket, "Key": found["key"]}
    head = _call(client.head_object, **at, ChecksumMode="ENABLED")
    checksum = str(head.get("ChecksumSHA256") or "")
    if checksum and "-" not in checksum:  # of parts it is another figure
        return {"sha256": base64.b64decode(checksum).hex()}
    is_content = "aws:kms" not in str(head.get("ServerSideEncryption", "")) and not head.get(
        "SSECustomerAlgorithm"
    )
    etag, size = str(found["etag"]), int(found["size"])
    if is_content and MD5.fullmatch(etag):
        return {"md5": etag}
    if is_content and (match := PARTS.fullmatch(etag)):
        count = int(match[1])
        try:
            first, last = (
                int(_call(client.head_object, **at, PartNumber=number)["ContentLength"])
                for number in (1, count)
            )
        except AnswerError:  # of a store that does not tell parts: size and ETag are checked
            return {}
        if first and (count - 1) * first + last == size:
            return {"md5": etag, "part_bytes": first}
    return {}


def main() -> None:
    """Answer the question on stdin."""
    question = json.loads(sys.stdin.readline())
    question["suffixes"] = tuple(question["suffixes"])
    sys.stdout.write(json.dumps(answer(question)) + "\n")


if __name__ == "__main__":
    main()

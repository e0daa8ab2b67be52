"""The object stores of which jobs on this host may read models and data; part of config.json."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from runners.jobspec.base import BUCKET, STORE_SCHEME


def _check_prefix(prefix: str) -> str:
    bucket, _, key = prefix.removeprefix(STORE_SCHEME).partition("/")
    is_plain = key.isprintable() and not {".", ".."}.intersection(key.split("/"))
    if not (prefix.startswith(STORE_SCHEME) and BUCKET.fullmatch(bucket) and is_plain):
        raise ValueError(f"{prefix!r:.200} is no prefix such as s3://BUCKET or s3://BUCKET/models")
    return prefix.rstrip("/")


class ObjectStore(BaseModel):
    """A prefix of a store that speaks S3, below which jobs may read, and where that store is.

    ``endpoint``: its address; empty: Amazon's. ``region``: empty: the usual one. ``is_public``:
    requests are not signed, whatever secrets the team has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: Annotated[str, AfterValidator(_check_prefix), Field(max_length=400)]
    endpoint: str = Field(default="", max_length=400, pattern=r"^(https?://[^\s?#@]+)?$")
    region: str = Field(default="", pattern=r"^[a-z0-9-]{0,40}$")
    is_public: bool = False

    def has(self, url: str) -> bool:
        """Return whether an address lies below the prefix.

        >>> ObjectStore(prefix="s3://lab/models").has("s3://lab/models-of-others/a")
        False
        """
        return url == self.prefix or url.startswith(f"{self.prefix}/")


def store_of(url: str, stores: Sequence[ObjectStore]) -> ObjectStore | None:
    """Return the store of which an address may be read, by the longest prefix; None: of none."""
    found = [each for each in stores if each.has(url)]
    return max(found, key=lambda each: len(each.prefix), default=None)

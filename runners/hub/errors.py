"""What goes wrong between this host and the Hub: one error, its kind, and what to do about it."""

import re
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Literal
from urllib.parse import urlsplit

import httpx

from runners.hub.settings import HUGGING_FACE, HubSettings

Kind = Literal[
    "offline",  # no route, no such name, refused, no answer in time
    "proxy",
    "tls",
    "unauthorised",  # the token is not taken
    "gated",  # access must be requested on the repository's page
    "absent",  # the repository, revision or file; ``new_name`` of a renamed repository
    "rate_limited",  # ``retry_after`` seconds
    "mirror",  # an answer that the Hub would not give
    "refused",  # a store that was reached, or a question that could not be asked
    "disk_full",
    "cache",  # the folder of the cache cannot be written
    "wrong_digest",
    "truncated",
    "pickle_only",
    "remote_code",
    "no_split",  # of a data set that is there, nor such a subset
    "ambiguous",  # several models, or subsets of data, in the repository, and none is named
    "unusable",  # nothing in it that a job reads
]
LONGEST_WAIT_SECONDS = 3600.0  # a server that asks for more is not waited for
_RESET = re.compile(r";\s*r\s*=\s*0\b.*?;\s*t\s*=\s*(\d+)|;\s*t\s*=\s*(\d+).*?;\s*r\s*=\s*0\b")


class HubError(Exception):
    """A repository cannot be looked up, downloaded or used; the message names the way out."""

    def __init__(
        self, kind: Kind, message: str, *, retry_after: float = 0.0, new_name: str = ""
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.retry_after = retry_after  # seconds, of "rate_limited"
        self.new_name = new_name  # of a renamed repository

    @property
    def is_out_of_reach(self) -> bool:
        """Return whether the hub said nothing of the repository, so that a copy may be used."""
        return self.kind in {"offline", "proxy", "tls", "mirror", "rate_limited"}


class DownloadStoppedError(Exception):
    """The download was stopped by its caller; what arrived is kept."""


def shown(repository: str, revision: str = "", path: str = "") -> str:
    """Return what was requested, as messages name it."""
    file = f"file {path!r} of " if path else ""
    at = f" at revision {revision!r}" if revision else ""
    return f"{file}repository {repository!r}{at}"


def unreachable(error: Exception, url: str, settings: HubSettings) -> HubError:
    """Return the error of a request that got no answer."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    reasons = list(_causes(error))
    said = next((str(each) for each in reversed(reasons) if str(each)), type(error).__name__)
    if any(isinstance(each, ssl.SSLError) for each in reasons) or "CERTIFICATE" in said:
        return HubError(
            "tls",
            f"the certificate of {host} is not trusted, or the connection is no TLS ({said}): "
            "name your organisation's authorities in SSL_CERT_FILE on the host, or correct "
            f"{settings.endpoint_variable}, which is {settings.endpoint}",
        )
    if isinstance(error, httpx.ProxyError) or settings.proxy:
        return HubError(
            "proxy",
            f"{host} is not reached through {settings.proxy or 'the proxy of the environment'} "
            f"({said}): correct HTTPS_PROXY on the host, or name {host} in NO_PROXY",
        )
    if isinstance(error, httpx.TimeoutException):
        said = "no answer in time"
    return HubError(
        "offline",
        f"{host} is not reached ({said}): connect the host to the network, set "
        f"{settings.endpoint_variable} to a mirror that it reaches (it is {settings.endpoint}), "
        "or name a folder of a model, or a file of data, on the host",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, innermost last.

    What was handled while it was raised is none of its causes.
    """
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def refusal(
    status: int, headers: Mapping[str, str], requested: str, url: str, settings: HubSettings
) -> HubError:
    """Return the error of an answer that is none of the Hub's good ones.

    ``requested``: repository, revision and file in words; ``url``: the address that answered.
    The codes are those of huggingface_hub, ``utils/_http.py: hf_raise_for_status``.
    """
    if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        return HubError(
            "proxy",
            f"{settings.proxy or 'the proxy of the environment'} asks for a name and a password: "
            "write them into HTTPS_PROXY on the host, http://NAME:PASSWORD@PROXY",
        )
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        seconds = wait_seconds(headers)
        return HubError(
            "rate_limited",
            f"{settings.endpoint} takes no more requests for now: try again in {seconds:.0f} s; "
            f"with a token in {settings.token_name} more are allowed",
            retry_after=seconds,
        )
    if settings.source.secrets:
        return _of_store(status, requested, url, settings)
    if status in _NO_ACCESS or "x-error-code" in headers:
        return _no_access(status, headers.get("x-error-code", ""), requested, settings)
    return unusual(f"status {status}", requested, url, settings)


def _of_store(status: int, requested: str, url: str, settings: HubSettings) -> HubError:
    """Return the error of an object whose listing the store gave a moment ago."""
    if status == HTTPStatus.PRECONDITION_FAILED:
        return HubError(
            "wrong_digest",
            f"{requested} was replaced in the store while it was downloaded: run the job again, "
            "which lists it anew",
        )
    if status == HTTPStatus.NOT_FOUND:
        return HubError(
            "absent", f"{requested} was deleted from the store since it was listed: put it back"
        )
    if status in _NO_ACCESS or status == HTTPStatus.BAD_REQUEST:
        return HubError(
            "unauthorised",
            f"{settings.endpoint} lists {requested} and does not send it (status {status}): let "
            "the key of the team's secrets read objects, not only list them, or renew it if it "
            "was a temporary one; what arrived is kept",
        )
    return unusual(f"status {status}", requested, url, settings)


def _no_access(status: int, code: str, requested: str, settings: HubSettings) -> HubError:
    """Return the error of what is not there, or not for this token.

    Without a token the Hub says 401 of what is not there too, so that names of private
    repositories cannot be guessed.
    """
    page, name = page_of(requested, settings), settings.token_name
    is_unauthorised = status == HTTPStatus.UNAUTHORIZED
    if code == "GatedRepo":
        return _gated(requested, page, settings)
    if is_unauthorised and settings.token and code not in _ABSENT:
        return HubError(
            "unauthorised",
            f"{settings.endpoint} does not take the token of {name} for {requested}: it was "
            f"revoked, has expired, or is another hub's; write a valid one into the secret {name}",
        )
    is_closed = settings.token or not settings.source.forbids_absent
    if status == HTTPStatus.FORBIDDEN and code not in _ABSENT and is_closed:
        return HubError(
            "unauthorised",
            f"{settings.endpoint} refuses {requested}: the token of {name} may not read it, or it "
            f"is disabled; see {page}, or write another token into the secret {name}",
        )
    return _absent(code, requested, settings, may_be_private=not settings.token)


_NO_ACCESS = {401, 403, 404, 410}
_ABSENT = {"RepoNotFound": "", "RevisionNotFound": "revision", "EntryNotFound": "file"}


def _gated(requested: str, page: str, settings: HubSettings) -> HubError:
    name = settings.token_name
    way_out = (
        f"request access there with the account whose token the secret {name} holds"
        if settings.token
        else f"request access there, and write that account's token into the secret {name}"
    )
    return HubError(
        "gated", f"{_whole(requested)} is gated: {page} says who may read it; {way_out}"
    )


def _absent(code: str, requested: str, settings: HubSettings, *, may_be_private: bool) -> HubError:
    what = _ABSENT.get(code, "")
    way_out = {
        "revision": "name a branch, a tag or a commit that its page lists, or none",
        "file": "name a file that its page lists, or another revision",
    }.get(what, "correct its name, which is org/name as on its page")
    if not what and may_be_private:
        name = settings.token_name
        way_out += f"; if it is private, write a token that may read it into the secret {name}"
    lacking = requested if what == "file" else _whole(requested)
    return HubError("absent", f"{settings.endpoint} has no {lacking}: {way_out}")


def _whole(requested: str) -> str:
    """Return the repository, as messages name it, of what may be a file of it."""
    return requested.rpartition(" of ")[2]


def renamed(repository: str, new_name: str) -> HubError:
    """Return the error of a repository that has another name now."""
    return HubError(
        "absent",
        f"repository {repository!r} was renamed: it is {new_name!r} now; give that name",
        new_name=new_name,
    )


def unusual(what: str, requested: str, url: str, settings: HubSettings) -> HubError:
    """Return the error of an answer that the Hub would not give."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    is_hub = settings.endpoint == HUGGING_FACE.endpoint
    way_out = (
        "try again later, and see status.huggingface.co"
        if is_hub
        else f"correct {settings.endpoint_variable}, which is {settings.endpoint}, or unset it"
    )
    return HubError("mirror", f"{host} answers {what} for {requested}: {way_out}")


def page_of(requested: str, settings: HubSettings) -> str:
    """Return the address of the page of the repository in a text of ``shown``."""
    name = re.search(r"repository '([^']+)'", requested)
    return settings.page(name[1]) if name else settings.endpoint


def wait_seconds(headers: Mapping[str, str], default: float = 10.0) -> float:
    """Return the seconds that a server asks to wait: Retry-After, or the reset of its limit."""
    text = headers.get("retry-after", "").strip()
    if text.isdigit():
        return min(float(text), LONGEST_WAIT_SECONDS)
    if text:
        try:
            until = parsedate_to_datetime(text)
        except ValueError:
            until = None
        if until is not None:
            seconds = (
                until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)
            ).total_seconds()
            return min(max(seconds, 0.0), LONGEST_WAIT_SECONDS)
    if reset := _RESET.search(headers.get("ratelimit", "")):
        return min(float(reset[1] or reset[2]), LONGEST_WAIT_SECONDS)
    return default

"""Where the Hub is, where its files lie on this host, and how fast they may come.

The variables and their defaults are huggingface_hub's own (``constants.py``), so that what a
person has already downloaded is found.
"""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from runners.hub.modelscope import MODELSCOPE
from runners.hub.object_store import S3
from runners.hub.repository import folder_name
from runners.hub.source import Source
from runners.shared.addresses import proxy_of
from runners.shared.environment import AUTHORITIES, NETWORK

if TYPE_CHECKING:  # it is read before any package is installed
    from runners.hub.source import StoreName
    from runners.jobspec.base import HubName

HUB_TOKEN = "HF_TOKEN"  # noqa: S105 -- the name of the team's secret, and of the variable
HUGGING_FACE = Source(
    "huggingface",
    endpoint="https://huggingface.co",
    endpoint_variable="HF_ENDPOINT",
    token_name=HUB_TOKEN,
    link="hub",
    token_file="token",  # noqa: S106 -- of ``hf auth login``
)
SOURCES: Mapping["HubName", Source] = {"huggingface": HUGGING_FACE, "modelscope": MODELSCOPE}
STORES: Mapping["StoreName", Source] = {"s3": S3}  # whose addresses stand for folders and files
TOKENS = (
    *(each.token_name for each in SOURCES.values()),
    *(name for each in STORES.values() for name in each.secrets),
)
_BY_NAME: Mapping[str, Source] = {
    each.name: each for each in (*SOURCES.values(), *STORES.values())
}
TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads its switches
# What a job inherits so that it finds the same Hub and the same files: never the token, which is
# the team's secret.
PASSED = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE",
    "HF_HUB_DISABLE_SYMLINKS", *(each.endpoint_variable for each in SOURCES.values()),
    *(name for each in SOURCES.values() for name in each.usual_variables), *NETWORK,
)  # fmt: skip
DEFAULT_CONNECTIONS = 8
MARGIN_BYTES = 2**30  # that a download leaves free on the disk


class HubSettingsError(ValueError):
    """A variable of the environment cannot work; the message names it and the way out."""


@dataclass(frozen=True)
class HubSettings:
    """The Hub of this host, or another source of models.

    ``max_bytes_per_second`` limits all processes of the host whose folder is ``host_dir``, without
    one this process; 0: no limit. ``connections`` are those at once. ``link``: under which name
    that host notes how fast files came.
    """

    endpoint: str = HUGGING_FACE.endpoint
    cache: Path = field(default_factory=lambda: cache_folder(os.environ))
    token: str = field(default="", repr=False)
    max_bytes_per_second: float = 0.0
    connections: int = DEFAULT_CONNECTIONS
    margin_bytes: int = MARGIN_BYTES
    is_offline: bool = False  # HF_HUB_OFFLINE
    proxy: str = ""  # of the endpoint, as messages name it; httpx reads the variables itself
    authorities: Path | None = None  # a PEM file that counts instead of the usual ones
    has_symlinks: bool = True  # HF_HUB_DISABLE_SYMLINKS: the files themselves in snapshots
    host_dir: Path | None = None
    link: str = HUGGING_FACE.link
    hub: "HubName | StoreName" = "huggingface"

    @property
    def source(self) -> Source:
        """Return what this source of models has of its own."""
        return _BY_NAME[self.hub]

    @property
    def endpoint_variable(self) -> str:
        """Return the variable that names another endpoint."""
        return self.source.endpoint_variable

    @property
    def token_name(self) -> str:
        """Return the name of the team's secret, and of the variable, that has the token."""
        return self.source.token_name

    @property
    def main(self) -> str:
        """Return the branch that is meant where none is named."""
        return self.source.main

    def ref(self, revision: str) -> str:
        """Return how the cache names a branch or tag: two sources may have one of a name."""
        return f"{self.source.ref_prefix}{revision}"

    def page(self, repository: str) -> str:
        """Return the address of a repository's page."""
        return f"{self.endpoint}{self.source.page_path}/{repository}"

    def repository_folder(self, repository: str) -> Path:
        """Return the folder of a repository in the cache."""
        return self.cache / folder_name(repository)

    def is_own(self, url: str) -> bool:
        """Return whether a URL is the Hub's own, to which alone the token is sent."""
        return _origin(url) == _origin(self.endpoint)

    def headers(self, url: str) -> dict[str, str]:
        """Return the headers of a request: the token is for the Hub itself only."""
        headers = {"User-Agent": "slipway", "Accept-Encoding": "identity"}
        if self.token and self.is_own(url):
            headers |= self.source.credentials(self.token)
        return headers

    def tls(self) -> ssl.SSLContext | bool:
        """Return the authorities of https addresses; True: those that httpx uses by itself."""
        return _trusting(self.authorities) if self.authorities else True


def from_environment(
    variables: Mapping[str, str],
    *,
    hub: str = "huggingface",
    connections: int = DEFAULT_CONNECTIONS,
) -> HubSettings:
    """Return the settings of a hub that an environment states; "": of its usual one.

    Raises:
        HubSettingsError: the endpoint is no address, the token none, or a file of authorities
            cannot be read.
    """
    source = source_of(hub or usual_hub(variables))
    variable, token = source.endpoint_variable, source.token_name
    endpoint = _endpoint(variables.get(variable, ""), variable, source.endpoint)
    proxy = proxy_of(endpoint, variables)
    return HubSettings(
        endpoint=endpoint,
        cache=cache_folder(variables),
        token=_token(variables.get(token, ""), token),
        link=source.link,
        hub=hub_name(source),
        connections=max(1, connections),
        is_offline=any(
            variables.get(name, "").upper() in TRUE
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        ),
        proxy=str(proxy) if proxy else "",
        authorities=_authorities(variables),
        has_symlinks=variables.get("HF_HUB_DISABLE_SYMLINKS", "").upper() not in TRUE,
    )


def usual_hub(variables: Mapping[str, str]) -> "HubName":
    """Return the hub of names that state none, as vLLM and SGLang read it too."""
    for source in SOURCES.values():
        if any(variables.get(name, "").upper() in TRUE for name in source.usual_variables):
            return hub_name(source)
    return "huggingface"


def hub_name(source: Source) -> "HubName":
    """Return the name of a hub, which a store is none of."""
    return next(name for name, each in SOURCES.items() if each is source)


def source_of(hub: str) -> Source:
    """Return a source by its name; without one, or with an unknown one, the Hugging Face Hub."""
    return next((each for each in SOURCES.values() if each.name == hub), HUGGING_FACE)


def stated_endpoint(source: Source, variables: Mapping[str, str]) -> str:
    """Return the address of a source as it is stated, right or not, else the usual one."""
    return variables.get(source.endpoint_variable, "").strip() or source.endpoint


def source_of_ref(ref: str) -> Source:
    """Return the source whose branch or tag a name in the cache is."""
    named = (
        each for each in _BY_NAME.values() if each.ref_prefix and ref.startswith(each.ref_prefix)
    )
    return next(named, HUGGING_FACE)


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Return the folder of the Hub's cache, by huggingface_hub's own rule."""
    home = variables.get("HOME", "") or "~"
    usual = variables.get("XDG_CACHE_HOME", f"{home}/.cache")
    hub = f"{_expanded(variables.get('HF_HOME', f'{usual}/huggingface'), variables)}/hub"
    legacy = variables.get("HUGGINGFACE_HUB_CACHE", hub)
    return Path(_expanded(variables.get("HF_HUB_CACHE", legacy), variables)).absolute()


def existing_folder(folder: Path) -> Path:
    """Return the nearest folder that exists: of a cache that nothing was downloaded to yet."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _expanded(path: str, variables: Mapping[str, str]) -> str:
    """Return a path with ~ and $NAME replaced."""
    home = variables.get("HOME", "")
    if home and (path == "~" or path.startswith("~/")):
        path = home + path[1:]

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0])

    return re.sub(r"\$(?:(\w+)|\{([^}]*)\})", value, str(Path(path).expanduser()))


def _endpoint(text: str, variable: str, usual: str) -> str:
    """Return the address that a variable names; a mirror may lie below a path.

    Raises:
        HubSettingsError: it is no http address.
    """
    address = text.strip().rstrip("/")
    if not address:
        return usual
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname)
        has_more = bool(parts.query or parts.fragment or parts.username) or parts.port == 0
    except ValueError:
        is_address, has_more = False, True
    if not is_address or has_more or not address.isascii() or re.search(r"\s", address):
        bare = re.sub(r"//[^/]*@", "//", text)
        raise HubSettingsError(
            f"{variable} is {bare!r}: it must be the address of a hub without a user or a query, "
            f"such as {usual} or https://mirror.example.org/hub; correct or unset it"
        )
    return address


def _token(text: str, name: str) -> str:
    token = "".join(text.split())
    if not (token.isascii() and token.isprintable()):
        raise HubSettingsError(
            f"{name} has characters that no token has: copy the token again, without quotes"
        )
    return token


def _authorities(variables: Mapping[str, str]) -> Path | None:
    name = next((each for each in AUTHORITIES if variables.get(each, "").strip()), "")
    if not name:
        return None
    path = Path(variables[name].strip())
    try:
        _trusting(path)
    except (OSError, ValueError):
        raise HubSettingsError(
            f"{name} is {str(path)!r}, which is no readable PEM file of certificates: correct it, "
            "or unset it for the usual authorities"
        ) from None
    return path


def _trusting(path: Path) -> ssl.SSLContext:
    """Return a context that trusts a file's authorities: 25 ms once, until the file changes.

    Raises:
        OSError: the file cannot be read, or holds no certificate.
    """
    return _read_context(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_context(path: Path, _modified: int) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=path)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port

"""A source of models: what one has of its own, in a row; the rows are ``settings.py: SOURCES``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from runners.hub.repository import SCHEMES

if TYPE_CHECKING:
    from typing import Literal

    from runners.jobspec.base import HubName

    StoreName = Literal["s3"]  # of stores, whose addresses name folders and files, no repositories

Ask = Callable[[str], object]  # from an address to the JSON document there


class AnswerError(Exception):
    """A source says that it cannot answer; the message is its own."""


def bearer(token: str) -> dict[str, str]:
    """Return the headers of a token."""
    return {"Authorization": f"Bearer {token}"}


def resolve_url(endpoint: str, repository: str, commit: str, path: str) -> str:
    """Return the address of a file at a commit, as the Hugging Face Hub has it."""
    return f"{endpoint}/{repository}/resolve/{commit}/{quote(path)}"


@dataclass(frozen=True)
class Source:
    """A source of models; what is not stated is as the Hugging Face Hub has it.

    ``document`` takes an endpoint, a repository, a revision and how to ask, and returns the Hub's
    document of the repository; it raises ``AnswerError``, and ``LookupError`` or ``TypeError`` of
    an answer without the documented fields. ``usual_variables``: if one is set, names without a
    source are this one's. ``link``: under which name hosts note how fast files came.
    """

    name: "HubName | StoreName"
    endpoint: str
    endpoint_variable: str  # names another endpoint
    token_name: str  # of the variable, and of the team's secret
    link: str
    main: str = "main"  # the branch that is meant where none is named
    title: str = "the Hugging Face Hub"  # in sentences
    host_word: str = ""  # by which the host of a page's address is known
    sites: tuple[str, ...] = ()  # with repositories of their own, the usual one first
    page_path: str = ""  # before the repository in its page's address
    file_page: str = "/blob/"  # within the address of a file's page
    ref_prefix: str = ""  # of branches and tags in the cache: two sources may have one of a name
    token_file: str = ""  # beside the cache, where the host's user keeps a token
    usual_variables: tuple[str, ...] = ()
    tells_code: bool = True  # its document says whether a model needs code of its own
    runs_own_code: bool = True  # its commits fix what an administrator has read
    forbids_absent: bool = False  # without a token it says 403 of what is not there
    secrets: tuple[str, ...] = ()  # of the team, with which a store's addresses are signed
    credentials: Callable[[str], dict[str, str]] = bearer
    file_url: Callable[[str, str, str, str], str] = resolve_url
    document: Callable[[str, str, str, Ask], dict[str, Any]] | None = None

    @property
    def scheme(self) -> str:
        """Return what stands before a repository of this source where people type it."""
        return SCHEMES.get(self.name, "")

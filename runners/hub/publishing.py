"""A model's folder as a commit of a repository: the token checked first, large files before.

The upload is huggingface_hub's, by LFS: files that the repository has are not sent again, so that
a push which broke off goes on with the file at which it was.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from runners.hub.errors import HubError, refusal, unreachable
from runners.hub.listing import BY_ITSELF, MAIN, TIMEOUT_SECONDS
from runners.hub.repository import PICKLES
from runners.hub.settings import HUB_TOKEN, HubSettings

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

CARD = "README.md"
CODE = (".py", ".so", ".sh")
MAX_FILES = 20_000
VARIABLES = {  # which huggingface_hub reads when it is imported
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_XET": "1",  # plain bytes, as of downloads
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def check_token(settings: HubSettings, repository: str, timeout: float = TIMEOUT_SECONDS) -> str:
    """Return the account of a token that may write to the owner of a repository.

    Source of the reply's fields: huggingface_hub 2.4, _login.py and hf_api.py (whoami).

    Raises:
        HubError: unauthorised: there is no token, it may only read, or its account does not
            belong to the owner; or offline, proxy, tls, mirror.
    """
    owner = repository.partition("/")[0]
    if not settings.token:
        raise HubError(
            "unauthorised",
            f"a push to {repository} needs a token: store one that may write as the team's secret "
            f"{HUB_TOKEN}",
        )
    url = f"{settings.endpoint}/api/whoami-v2"
    try:
        with httpx.Client(verify=settings.tls(), timeout=timeout, mounts=BY_ITSELF) as client:
            answer = client.get(url, headers=settings.headers(url))
    except (httpx.HTTPError, OSError) as error:
        raise unreachable(error, url, settings) from None
    if answer.status_code != HTTPStatus.OK:
        raise refusal(answer.status_code, answer.headers, "the token's account", url, settings)
    account = _account(answer, settings)
    name = str(account.get("name", ""))
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise HubError(
            "unauthorised",
            f"the token of {name} may only read: store one that may write to {owner} as the "
            f"team's secret {HUB_TOKEN}",
        )
    orgs = [str(each.get("name")) for each in account.get("orgs") or () if isinstance(each, dict)]
    if owner not in {name, *orgs}:
        raise HubError(
            "unauthorised",
            f"the account {name} does not belong to {owner}: push to {name}/… or to one of "
            f"{', '.join(orgs) or 'its organisations (it has none)'}, or store another account's "
            f"token as the team's secret {HUB_TOKEN}",
        )
    return name


def _account(answer: httpx.Response, settings: HubSettings) -> Mapping[str, Any]:
    try:
        account = answer.json()
    except ValueError:
        account = None
    if not isinstance(account, dict):
        raise HubError(
            "mirror",
            f"{settings.endpoint} answered no JSON object about the token: a push needs the Hub "
            "itself or a hub that takes commits; correct HF_ENDPOINT on the host",
        )
    return account


def files_to_push(folder: Path) -> list[Path]:
    """Return what of a folder is pushed: no hidden files, links, pickles or code.

    Raises:
        HubError: unusable: nothing is left, or too many files.
    """
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.is_symlink()
        and not path.name.endswith((*PICKLES, *CODE))
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.relative_to(folder).as_posix() != CARD
    ]
    if not found or len(found) > MAX_FILES:
        raise HubError(
            "unusable",
            f"{folder} has {len(found):,} files to push; 1 to {MAX_FILES:,} can be pushed",
        )
    return found


def push(
    folder: Path,
    repository: str,
    card: str,
    settings: HubSettings,
    *,
    revision: str = "",
    is_private: bool = True,
    message: str = "Push a model",
    on_progress: Progress = lambda _done, _total: None,
) -> str:
    """Push a folder and its card as one commit, and return the commit's address.

    ``VARIABLES`` have to be set before huggingface_hub is imported.

    Raises:
        HubError: as ``check_token`` and ``files_to_push``, or any other refusal of the hub.
    """
    check_token(settings, repository)
    paths = files_to_push(folder)
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    no_answer: type[Exception] = HfHubHTTPError.__bases__[0]  # of the library's own httpx
    api = HfApi(endpoint=settings.endpoint, token=settings.token, library_name="slipway")
    total = sum(path.stat().st_size for path in paths)
    operations = [CommitOperationAdd(CARD, card.encode())]
    try:
        api.create_repo(repository, private=is_private, exist_ok=True)
        if revision and revision != MAIN:
            api.create_branch(repository, branch=revision, exist_ok=True)
        operations += _sent(api, folder, paths, repository, revision or MAIN, total, on_progress)
        made = api.create_commit(
            repository, operations, commit_message=message, revision=revision or MAIN
        )
    except (no_answer, RuntimeError, ValueError, OSError) as error:
        # RuntimeError: of an upload; ValueError: of an answer that is no hub's.
        raise _refused(error, repository, settings) from None
    return str(made.commit_url)


def _refused(error: BaseException, repository: str, settings: HubSettings) -> HubError:
    """Return the error of what the hub answered, or of no answer."""
    cause = error.__cause__ or error
    response = getattr(cause, "response", None)
    if response is None:
        found = cause if isinstance(cause, Exception) else RuntimeError(str(cause))
        return unreachable(found, settings.endpoint, settings)
    what = f"a push to {repository!r}"
    return refusal(response.status_code, response.headers, what, str(response.url), settings)


def _sent(
    api: "HfApi",
    folder: Path,
    paths: Sequence[Path],
    repository: str,
    revision: str,
    total: int,
    on_progress: Progress,
) -> "list[CommitOperationAdd]":
    """Send large files one after the other, and return the operations of the commit."""
    from huggingface_hub import CommitOperationAdd

    operations, done = [], 0
    for path in paths:
        operation = CommitOperationAdd(path.relative_to(folder).as_posix(), path)
        api.preupload_lfs_files(repository, [operation], revision=revision)
        operations.append(operation)
        done += path.stat().st_size
        on_progress(done, total)
    return operations

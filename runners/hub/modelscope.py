"""ModelScope as a source of models: its API's answers, as the Hub's documents.

Its own library is not used: it takes no commit as revision ("only branch and tag name is
supported", modelscope/hub/snapshot_download.py), has a cache of its own, and no lock by which two
jobs share a download. Sources: github.com/modelscope/modelscope at 1804ac6b (2026-06-05),
``modelscope/hub``: ``api.py: get_model_files, list_repo_commits``,
``file_download.py: get_file_download_url``, ``errors.py``; github.com/modelscope/modelscope_hub
0.1.8, ``_legacy_api.py``, for the credentials and ``list_revisions``.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from runners.hub.repository import COMMIT
from runners.hub.source import AnswerError, Ask, Source

SHA256_DIGITS = 64
OK = 200


def api(endpoint: str, repository: str) -> str:
    """Return the address of a repository of models in ModelScope's API."""
    return f"{endpoint}/api/v1/models/{quote(repository)}"


def file_url(endpoint: str, repository: str, commit: str, path: str) -> str:
    """Return the address of a file at a commit."""
    query = urlencode({"Revision": commit, "FilePath": path})
    return f"{api(endpoint, repository)}/repo?{query}"


def credentials(token: str) -> dict[str, str]:
    """Return the headers of a token; some addresses read the cookie, others the bearer."""
    return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"}


def document(endpoint: str, repository: str, revision: str, ask: Ask) -> dict[str, Any]:
    """Return what ModelScope says of a repository, as the Hub's document of it.

    Every file, small ones too, has the SHA-256 that ModelScope states.

    Raises:
        AnswerError: it refuses in an answer of status 200.
        LookupError, TypeError: an answer has not the documented fields.
    """
    address = api(endpoint, repository)
    if COMMIT.fullmatch(revision):
        _check_is_no_name(_data(ask(f"{address}/revisions"))["RevisionMap"], revision)
        commit = revision
    else:
        query = urlencode({"Ref": revision, "PageNumber": 1, "PageSize": 1})
        commit = _data(ask(f"{address}/commits?{query}"))["Commit"][0]["Id"]
    # "Recursive=true" is another word, for which folders are left out.
    query = urlencode({"Revision": commit, "Recursive": "True"})
    files = _data(ask(f"{address}/repo/files?{query}"))["Files"] or []
    siblings = [
        {
            "rfilename": each["Path"],
            "size": each["Size"],
            "lfs": {"sha256": str(each["Sha256"]).lower(), "size": each["Size"]},
        }
        for each in files
        if each.get("Type") != "tree"
    ]
    return {"sha": commit, "siblings": siblings}


def _check_is_no_name(names: Mapping[str, Any], commit: str) -> None:
    """Refuse 40 digits that a branch or tag has as its name: what they stand for may change."""
    for kind in ("Branches", "Tags"):
        if any(each["Revision"] == commit for each in names.get(kind) or []):
            raise AnswerError(f"{commit} is the name of one of its {kind.lower()}, and no commit")


def _data(answer: object) -> Mapping[str, Any]:
    if not isinstance(answer, dict):
        raise TypeError("no JSON object")
    if answer.get("Code") != OK:
        raise AnswerError(str(answer.get("Message") or f"code {answer.get('Code')}")[:200])
    data = answer["Data"]
    if not isinstance(data, dict):
        raise TypeError("no data")
    return data


MODELSCOPE = Source(
    "modelscope",
    endpoint="https://www.modelscope.cn",
    endpoint_variable="MODELSCOPE_ENDPOINT",
    token_name="MODELSCOPE_API_TOKEN",  # noqa: S106 -- the variable's name
    link="modelscope",
    main="master",
    title="ModelScope",
    host_word="modelscope",
    sites=("modelscope.cn", "modelscope.ai"),
    page_path="/models",
    file_page="/file/view/",
    ref_prefix="modelscope/",
    usual_variables=("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"),  # those of other tools
    tells_code=False,
    runs_own_code=False,
    forbids_absent=True,
    credentials=credentials,
    file_url=file_url,
    document=document,
)

"""A repository of the Hub as people name it: org/name, its page, a part of it.

Of models that part is a GGUF file or type, of data sets a split, also with its subset.
"""

import os
import re
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import unquote

from planner.catalog.gguf_names import TAG
from planner.catalog.model_names import ADDRESS
from planner.specs.base import BadRequestError, PlannerError
from runners.datasets.repositories import DATA_SETS
from runners.hub.repository import GGUF, RepositoryName, is_safe_path
from runners.hub.settings import SOURCES, stated_endpoint
from runners.hub.source import Source
from runners.jobspec.base import LONGEST_NAME, LONGEST_REVISION, PART, REVISION, SPLIT, owner_fault

FIELD = "repository"
FORMS = (
    "org/name, org/name@revision, the address of its page on huggingface.co, for GGUF files "
    "org/name:Q4_K_M or org/name/file.gguf, or of ModelScope ms://org/name"
)
DATA_FIELD = "data_repository"
DATA_FORMS = (
    "org/name, org/name@revision, org/name:split, or the address of its page on huggingface.co"
)
DATA_NAME = re.compile(
    r"(?P<repository>[^/@:]+/[^/@:]+)(?:@(?P<revision>refs/[\w-]+/[\w.-]+|[^/@:]+))?"
    r"(?::(?P<split>[^/@:]+)|/(?P<page>.*))?"
)
SPECIAL = re.compile(r"refs/(?:pr/\d+|convert/[\w.-]+)", re.ASCII)  # revisions with a slash
PLACES = {"blob", "resolve", "raw", "tree", "blame"}  # pages of a revision
OTHERS = {"datasets": "a data set", "spaces": "a space", "kernels": "a kernel"}


def parse(text: str, endpoint: str = "") -> RepositoryName:
    """Return the repository, revision and file that a text names.

    ``endpoint``: a mirror, whose addresses are read as the Hub's.

    Raises:
        BadRequestError: it names no repository of models; field, value and forms are in the
            message.

    >>> parse("https://huggingface.co/Qwen/Qwen3-8B/tree/main")
    RepositoryName(repository='Qwen/Qwen3-8B', revision='main', file='', hub='')
    >>> str(parse("hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M"))
    'unsloth/Qwen3-8B-GGUF:Q4_K_M'
    """
    name = text.strip()
    if len(name) > LONGEST_NAME:
        raise BadRequestError(
            f"{FIELD} has {len(name):,} characters and may have {LONGEST_NAME}: name it as "
            f"{FORMS}",
            FIELD,
        )
    if endpoint and name.startswith(f"{endpoint}/"):
        return _of_page(name.removeprefix(f"{endpoint}/").partition("?")[0], text)
    if name.lower().startswith("hf://"):
        return _of_plain(name[len("hf://") :].removeprefix("models/"), text)
    if address := ADDRESS.fullmatch(name):
        host = name[: address.start("path")].lower()
        if "ollama.com" in host:
            raise _refused(text, "it is an address of another library than the Hub")
        for hub, source in SOURCES.items():
            if host == source.scheme:
                return replace(_of_plain(address["path"], text), hub=hub)
            if source.host_word and source.host_word in host:
                if other := _other_site(source, host):
                    raise _refused(text, other)
                path = address["path"].replace(source.file_page, "/blob/", 1)
                return replace(_of_page(path, text), hub=hub)
        return _of_page(address["path"], text)
    if "://" in name:
        raise _refused(
            text,
            "it is an address of another site than the Hub; copy that model to a folder of the "
            "host, or of yours for `slipway models push`, or if a hub has it",
        )
    return _of_plain(name, text)


def _other_site(source: Source, host: str) -> str:
    """Return why a page is not of the site of its source that is asked, "" if it is."""
    site = next((each for each in source.sites if each in host), "")
    stated = stated_endpoint(source, os.environ)
    asked = next((each for each in source.sites if each in stated.lower()), source.sites[0])
    if site == asked:  # or its mirror's
        return ""
    return (
        f"{site or host} is another site than {stated}, which has the models of {source.title} "
        f"here: set {source.endpoint_variable}=https://www.{site or asked}, or give a page of "
        "that site"
    )


def _of_page(path: str, text: str) -> RepositoryName:
    """Return what the path of a page of the Hub names."""
    parts = [unquote(each) for each in path.strip("/").split("/")]
    if len(parts) < 3 or parts[2] not in PLACES:  # noqa: PLR2004 -- org, name, place
        if len(parts) > 2 and not parts[-1].lower().endswith(GGUF):  # noqa: PLR2004
            parts = parts[:2] if parts[0] not in OTHERS else parts  # discussions, commits, ...
        return _of_plain("/".join(parts), text)
    if len(parts) == 3:  # noqa: PLR2004
        return _checked(text, "/".join(parts[:2]))
    rest = "/".join(parts[3:])
    special = SPECIAL.match(rest)
    revision = special[0] if special else parts[3]
    file = rest.removeprefix(revision).strip("/")
    # The page of any other file stands for the repository.
    return _checked(text, "/".join(parts[:2]), revision, file * file.lower().endswith(GGUF))


def _of_plain(name: str, text: str) -> RepositoryName:
    """Return what ``org/name``, with ``@revision`` and ``:type`` or ``/file`` after it, names."""
    match = re.fullmatch(r"([^/@:]+/[^/@:]+)([/@:].*)?", name, re.DOTALL)
    if match is None:
        raise _refused(text, "it is empty" if not name else f"{name!r} has no owner before a name")
    owner = match[1].partition("/")[0]
    if owner in OTHERS:
        raise _refused(text, f"it is the address of {OTHERS[owner]}, and a model is needed")
    _check_repository(text, match[1])
    stated = _stated(match[2] or "", text)
    path = stated.get("/", "").strip("/")
    tag = stated.get(":", "")
    if path and not path.lower().endswith(GGUF):
        raise _refused(text, f"{path!r} is no {GGUF} file")
    if path and tag:
        raise _refused(text, f"it names both the type {tag!r} and the file {path!r}")
    file = path or ("" if tag == "latest" else tag)
    return _checked(text, match[1], stated.get("@", ""), file)


def _stated(rest: str, text: str) -> dict[str, str]:
    """Return the revision, the type and the path after a name, by the sign before each."""
    stated: dict[str, str] = {}
    while rest:
        sign, rest = rest[0], rest[1:]
        special = SPECIAL.match(rest) if sign == "@" else None
        value = special[0] if special else re.match(r"[^/@:]*", rest)[0]  # type: ignore[index]
        value = rest if sign == "/" else value
        if sign in stated or (not value and sign != "/"):
            raise _refused(text, f"what follows {sign!r} is missing or stands twice")
        stated[sign], rest = value, rest[len(value) :]
    return stated


def _checked(text: str, repository: str, revision: str = "", file: str = "") -> RepositoryName:
    _check_repository(text, repository)
    if revision and (len(revision) > LONGEST_REVISION or re.fullmatch(REVISION, revision) is None):
        raise _refused(text, f"the revision {revision!r} is no branch, tag or commit")
    if file.lower().endswith(GGUF):
        if not is_safe_path(file):
            raise _refused(text, f"the file {file!r} is no path in a repository")
    elif file and TAG.fullmatch(file) is None:
        raise _refused(text, f"{file!r} is no type of GGUF files, such as Q4_K_M")
    return RepositoryName(repository, revision, file)


def _check_repository(text: str, repository: str) -> None:
    if fault := _fault(repository):
        raise _refused(text, fault)


def _fault(repository: str) -> str:
    """Return what is wrong with the parts of owner/name, "" if nothing is."""
    if fault := owner_fault(repository):
        return fault
    owner, _, name = repository.partition("/")
    for what, part in (("owner", owner), ("name", name)):
        if re.fullmatch(PART, part) is None:
            return (
                f"the {what} {part!r} is not 1 to 96 letters, digits, '_', '-' and '.', without "
                "'--', '..', a '-' or '.' at an end, or .git"
            )
    return ""


def _refused(text: str, why: str, field: str = FIELD, forms: str = FORMS) -> BadRequestError:
    return BadRequestError(f"{field} is {text!r:.200}: {why}; name it as {forms}", field)


def reason_of(error: PlannerError) -> str:
    """Return why a name is refused, for a place that names the field by itself."""
    return error.message.removeprefix(f"{error.field} is ")


class DataName(NamedTuple):
    """A data set's repository, its revision, and what of it is named ("": not named)."""

    repository: str  # without "datasets/"
    revision: str = ""
    subset: str = ""
    split: str = ""


def parse_data(text: str) -> DataName:
    """Return the data set that a text names, and the revision, subset and split that it states.

    Raises:
        BadRequestError: it names none; field, value and forms are in the message.

    >>> parse_data("https://huggingface.co/datasets/tatsu-lab/alpaca/viewer/default/train")
    DataName(repository='tatsu-lab/alpaca', revision='', subset='default', split='train')
    >>> parse_data("HuggingFaceH4/ultrachat_200k:train_sft").split
    'train_sft'
    """

    def refused(why: str) -> BadRequestError:
        return _refused(text, why, DATA_FIELD, DATA_FORMS)

    name = text.strip()
    if len(name) > LONGEST_NAME:
        raise refused(f"it has {len(name):,} characters and may have {LONGEST_NAME}")
    address = ADDRESS.fullmatch(name)
    path = (unquote(address["path"]) if address else name).removeprefix("hf://").strip("/")
    if (address and not path.startswith(DATA_SETS)) or "://" in path:
        raise refused("it is no address of a data set's page on the Hub")
    match = DATA_NAME.fullmatch(path.removeprefix(DATA_SETS))
    if match is None:
        raise refused("it is empty" if not name else "it is no owner and name")
    if fault := _fault(match["repository"]):
        raise refused(fault)
    page, _, rest = (match["page"] or "").partition("/")
    revision, subset, split = match["revision"] or "", "", match["split"] or ""
    if page in PLACES:
        special = SPECIAL.match(rest)
        revision = special[0] if special else rest.partition("/")[0]
        if inner := rest.removeprefix(revision).strip("/"):
            whole = f"{match['repository']}{f'@{revision}' * bool(revision)}"
            raise refused(
                f"it is the address of {inner!r}, and the whole of a split is read: give "
                f"{whole}:SPLIT, or {whole} with data_split and, if it has several, data_subset"
            )
    elif page == "viewer":
        subset, _, shown = rest.partition("/")
        split = shown.partition("/")[0]
    elif page and not address:
        raise refused(f"{page!r} is no part of a name: a split follows a colon")
    if revision and (len(revision) > LONGEST_REVISION or re.fullmatch(REVISION, revision) is None):
        raise refused(f"the revision {revision!r} is no branch, tag or commit")
    if split and SPLIT.fullmatch(split) is None:
        raise refused(f"{split!r} is no split; the whole of one is read, such as train")
    return DataName(match["repository"], revision, subset, split)

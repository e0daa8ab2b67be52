"""What a host would download by name: one question on stdin, one JSON line as the answer.

``python -m runners.hub.query`` reads ``{"repository", "revision", "weights", "file", "hub",
"seconds"}``, of data ``subset``, ``split``, ``records`` and ``host_dir`` instead of weights;
``rule``, ``spared`` and ``trusted``, the keys of allowed code, may be there.
A process of its own, so that the agent stays small: the hub's library takes 60 MB.
"""

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from runners.hub.data_files import CARD, data_files, look_up_data
from runners.hub.errors import HubError
from runners.hub.listing import HubFile, Listing, look_up, with_code_stated
from runners.hub.pruning import PruneRule, prunable
from runners.hub.repository import RepositoryName
from runners.hub.selection import code_files, exact_files, some
from runners.hub.settings import HubSettings, HubSettingsError, from_environment
from runners.hub.splits import stored_split
from runners.hub.store import missing, resolve_offline, stored_listing
from runners.jobspec import HubData


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the commit and the bytes of a repository's files, or why they cannot be had.

    ``code``: of a model whose config names code of its own, what lets it run or forbids it.
    ``state``: "hub" where the hub answered, "cache" where it did not and the cache has the model,
    or the whole split of data, else "failed" with ``kind`` and ``problem``. ``total_bytes`` of all
    files that the job needs, ``missing_bytes`` of those that the cache lacks; ``prunable_bytes``
    of other models that may be deleted for it, by the ``rule`` of the question but never the
    ``spared`` ones. Of the first ``records`` of data these are of their first file, and
    ``most_bytes`` of the split.
    """
    repository, revision, code = question["repository"], question["revision"], ""
    most_bytes = 0
    try:
        # Data sets are Hugging Face's.
        hub = question.get("hub", "huggingface")
        settings = from_environment(os.environ, hub=hub)
    except HubSettingsError as error:
        return {"state": "failed", "kind": "offline", "problem": str(error)}
    try:
        name = RepositoryName(repository, revision)
        if "split" in question:
            listing = look_up_data(name, settings, question["seconds"])
            files = data_files(listing, question["subset"], question["split"], settings)
            most_bytes = sum(file.size for file in files)
            if question.get("records"):
                files = files[: 1 + (files[0].path == CARD)]
        else:
            listing = look_up(name, settings, question["seconds"])
            listing = with_code_stated(listing, settings, question["seconds"])
            # Whether the engine has the architecture itself is seen at the download.
            files = exact_files(
                listing, question["weights"], question["file"], settings, is_built_in=True
            )
            if listing.needs_remote_code and question["weights"] == "safetensors":
                modules, code = _own_code(listing, settings, question.get("trusted", ()))
                files = (*files, *modules)
    except HubError as error:
        commit = resolve_offline(repository, revision, settings)
        if error.is_out_of_reach and commit is not None and _has_split(question, commit, settings):
            code = _stored_code(question, commit, settings)
            return {"state": "cache", "commit": commit, "problem": str(error), "code": code}
        return {"state": "failed", "kind": error.kind, "problem": str(error)}
    missing_bytes = sum(file.size for file in missing(listing, files, settings))
    rule, spared = PruneRule.of(question.get("rule")), {repository, *question.get("spared", ())}
    others = prunable(settings, rule, spared.__contains__) if missing_bytes else ()
    return {
        "state": "hub",
        "commit": listing.commit,
        "total_bytes": sum(file.size for file in files),
        "most_bytes": most_bytes,
        "missing_bytes": missing_bytes,
        "prunable_bytes": sum(model.bytes for model in others),
        "cache": str(settings.cache),
        "link": settings.link,
        "code": code,
    }


def _own_code(
    listing: Listing, settings: HubSettings, trusted: Collection[str]
) -> tuple[tuple[HubFile, ...], str]:
    """Return the modules that a model may run, and what its plan should know of them.

    Raises:
        HubError: any of ``read_file``.
    """
    try:
        modules = code_files(listing, settings, trusted)
    except HubError as error:
        if error.kind != "remote_code":
            raise
        return (), f"Unless the engine has its architecture, the job will fail: {error}."
    return modules, f"Its own code is allowed: {some([file.path for file in modules])}."


def _stored_code(question: dict[str, Any], commit: str, settings: HubSettings) -> str:
    """Return what the plan should know of the code of a model that is in the cache."""
    listing = stored_listing(question["repository"], commit, settings)
    if listing is None or not listing.needs_remote_code or question.get("weights") == "gguf":
        return ""
    try:
        return _own_code(listing, settings, question.get("trusted", ()))[1]
    except HubError as error:
        return f"Its own code could not be looked at: {error}."


def _has_split(question: dict[str, Any], commit: str, settings: HubSettings) -> bool:
    """Return whether the cache has all of a split, if the question is of one."""
    if "split" not in question:
        return True
    names = ("repository", "subset", "split", "records")
    data = HubData(**{name: question[name] for name in names if name in question})
    return bool(stored_split(Path(question["host_dir"]), data, commit, settings))


def main() -> None:
    """Answer the question on stdin."""
    sys.stdout.write(json.dumps(answer(json.loads(sys.stdin.readline()))) + "\n")


if __name__ == "__main__":
    main()

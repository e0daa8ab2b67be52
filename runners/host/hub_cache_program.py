"""What the Hub's cache of a host holds: one order on stdin, one JSON line as the answer.

``python -m runners.host.hub_cache_program HOST_DIR`` reads ``{"delete": ["org/name@commit"],
"rule"}``, carries it out and lists what is there. A process of its own, so that the agent stays
small: the hub's library takes 60 MB.
"""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runners.hub.pruning import PruneRule, prune
from runners.hub.settings import HubSettings, HubSettingsError, from_environment
from runners.hub.store import StoredModel, delete, scan
from runners.jobspec.base import CACHED_REPOSITORY
from runners.launchers.model_uses import uses_on_host
from runners.shared.messages import MAX_CACHED

MAX_MS = 2**53


def carried_out(order: dict[str, Any], host_dir: Path) -> dict[str, Any]:
    """Delete what is ordered, prune by the rule, and return the models and the problems."""
    try:
        settings = from_environment(os.environ)
    except HubSettingsError as error:
        return {"problems": [f"The cache of the Hub cannot be read: {error}."]}
    problems = list(_delete(settings, order.get("delete") or (), host_dir))
    is_used = uses_on_host(host_dir / "attempts")
    prune(settings, PruneRule.of(order.get("rule")), is_used, host_dir=host_dir)
    models = [_document(each) for each in scan(settings) if _is_named(each)]
    return {"models": models[:MAX_CACHED], "problems": problems}


def _delete(settings: HubSettings, keys: Iterable[str], host_dir: Path) -> Iterable[str]:
    """Delete models, but none that a job or a copy uses; yield why one stays."""
    is_used = uses_on_host(host_dir / "attempts")
    for key in keys:
        repository, _, commit = key.partition("@")
        if not CACHED_REPOSITORY.fullmatch(repository):
            continue
        if is_used(repository):
            yield f"{repository} was not deleted: a job or a copy on this host uses it."
            continue
        try:
            delete(settings, repository, commit)
        except OSError as error:
            yield f"{repository} was not deleted: {error.strerror} ({settings.cache})."


def _is_named(model: StoredModel) -> bool:
    """Return whether a model's name is one that jobs can state."""
    return bool(CACHED_REPOSITORY.fullmatch(model.repository))


def _document(model: StoredModel) -> dict[str, Any]:
    return {
        "repository": model.repository,
        "commit": model.commit,
        "size_bytes": model.bytes,
        "num_files": model.num_files,
        "used_at_ms": min(max(0, int(model.last_used * 1000)), MAX_MS),
        "is_complete": model.is_complete,
    }


def main() -> None:
    """Carry out the order on stdin."""
    answer = carried_out(json.loads(sys.stdin.readline()), Path(sys.argv[1]))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

"""Which models leave the Hub's cache: the least recently used, until a host's rule is kept.

The rule comes from the site. It lies in the host's folder, where a job that is about to download
reads it. Nothing is pruned without a rule, and never what the rule names or a job here uses.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.hub.settings import HubSettings
from runners.hub.store import StoredModel, cache_bytes, delete, scan

RULE_FILE = "hub_cache.json"
PRUNED_FOLDER = "hub_pruned"  # one document for each model, until the site has heard of it


@dataclass(frozen=True)
class PruneRule:
    """How much the cache keeps; ``kept``: what never goes, as org/name@commit or org/name."""

    keep_bytes: int | None = None  # None: all
    kept: frozenset[str] = frozenset()

    def spares(self, model: StoredModel) -> bool:
        """Return whether a model stays whatever the cache holds."""
        return bool(self.kept & {model.repository, model_key(model.repository, model.commit)})

    @classmethod
    def of(cls, document: object) -> "PruneRule":
        """Return the rule that a JSON document states; one that prunes nothing if it states none.

        >>> PruneRule.of({"keep_bytes": 5, "kept": ["acme/tiny"]}).keep_bytes, PruneRule.of(None)
        (5, PruneRule(keep_bytes=None, kept=frozenset()))
        """
        if not isinstance(document, dict) or not isinstance(document.get("keep_bytes"), int):
            return cls()
        return cls(document["keep_bytes"], frozenset(map(str, document.get("kept") or ())))

    def document(self) -> dict[str, Any]:
        """Return the JSON document of the rule."""
        return {"keep_bytes": self.keep_bytes, "kept": sorted(self.kept)}


def model_key(repository: str, commit: str) -> str:
    """Return how orders and rules name a model: org/name@commit; an unfinished one ends with @."""
    return f"{repository}@{commit}"


def read_rule(host_dir: Path) -> PruneRule:
    """Return the rule of a host; one that prunes nothing where none can be read."""
    try:
        return PruneRule.of(json.loads((host_dir / RULE_FILE).read_bytes()))
    except (OSError, ValueError):
        return PruneRule()


def prunable(
    settings: HubSettings, rule: PruneRule, is_used: Callable[[str], bool]
) -> Iterator[StoredModel]:
    """Yield the models that may go, the least recently used first.

    ``is_used`` is asked when a model's turn comes: a job may have started meanwhile.
    """
    if rule.keep_bytes is None:
        return
    for model in sorted(scan(settings), key=lambda each: (each.last_used, each.repository)):
        if not rule.spares(model) and not is_used(model.repository):
            yield model


def prune(
    settings: HubSettings,
    rule: PruneRule,
    is_used: Callable[[str], bool],
    *,
    incoming_bytes: int = 0,
    lacking_bytes: int = 0,
    host_dir: Path,
) -> list[StoredModel]:
    """Delete models until the cache and what is to come keep the rule; return what was deleted.

    ``lacking_bytes``: what the disk must have free besides. If all that may go is too little, the
    rest of the excess stays: the rule holds no job back.
    """
    if rule.keep_bytes is None:
        return []
    excess = max(cache_bytes(settings) + incoming_bytes - rule.keep_bytes, lacking_bytes)
    deleted = []
    models = prunable(settings, rule, is_used) if excess > 0 else iter(())
    while excess > 0 and (model := next(models, None)) is not None:
        if freed := delete(settings, model.repository, model.commit):
            excess -= freed
            deleted.append(model)
            _record(host_dir, model, freed)
    return deleted


def _record(host_dir: Path, model: StoredModel, freed: int) -> None:
    """Leave word of a deletion for the agent's next report."""
    folder = host_dir / PRUNED_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    document = {
        "repository": model.repository,
        "commit": model.commit,
        "freed_bytes": freed,
        "at_ms": time.time_ns() // 1_000_000,
    }
    name = uuid.uuid4().hex
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(document))
    temporary.replace(folder / f"{name}.json")

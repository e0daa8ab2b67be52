"""A valid message of every shape that a host sends, for tests that damage it."""

from typing import Any

from tests.webapp.conftest import STARTED, make_beat, make_facts, make_microbench

GPU = {"uuid": "GPU-1", "memory_used_bytes": 5, "utilization": 0.5, "foreign_pids": [4]}
STATUS = {"attempt_id": "a", "fence": "f", "phase": "running", "last_seq": 5, "acked_seq": 4}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("started", STARTED),
    ("phase", {"name": "Training"}),
    ("progress", {"done": 3, "total": 10, "unit": "steps", "eta_seconds": 7.0}),
    ("metric", {"source": "job", "values": {"loss": 2.5, "tokens_per_second": 10.0}, "step": 3}),
    ("log", {"stream": "stdout", "text": "hello"}),
    ("result", {"measured": {"tokens_per_second": 10.0}, "notes": {"tokens_per_second": "mean"}}),
    (
        "artefact",
        {"name": "model", "kind": "model", "total_bytes": 3, "files": {"a": 3},
         "sha256": {"a": "0" * 64}, "facts": {"bits": 4}},
    ),
    ("endpoint", {"host": "127.0.0.1", "port": 8001, "model": "model", "has_keys": True}),
]  # fmt: skip


def heartbeat() -> dict[str, Any]:
    """Return a heartbeat that says everything that one can."""
    whole = make_beat(facts=make_facts(), microbench=make_microbench())
    said = whole.model_dump(mode="json", exclude_none=True)
    return said | {"gpus": [GPU], "attempts": [STATUS], "problems": ["a full disk"]}

"""Read what a generation left behind."""

import json
from typing import Any

from tests.system.jobs.harness import Finished


def outputs(run: Finished) -> list[dict[str, Any]]:
    """Return the lines of the outputs artefact."""
    path = run.folder / "output" / "outputs" / "outputs.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n") if line]

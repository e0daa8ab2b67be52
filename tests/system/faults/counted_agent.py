"""A host agent that counts heartbeats: ``python -m tests.system.faults.counted_agent work``.

It is the agent as it is; beside its folder stands how many heartbeats it sent, how many were
answered, the longest wait for an answer in seconds, and what refused ones were told.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from runners import __main__ as runners
from runners.host.shipping import ServerClient, ServerError
from runners.shared.messages import Beat, BeatReply

COUNTS = "heartbeats.json"


def count_into(path: Path) -> None:
    """Have every heartbeat of this process counted in a file."""
    counts: dict[str, Any] = {"sent": 0, "answered": 0, "slowest_seconds": 0.0, "told": []}
    original = ServerClient.beat

    def beat(self: ServerClient, said: Beat) -> BeatReply:
        started = time.monotonic()
        counts["sent"] += 1
        try:
            reply = original(self, said)
        except ServerError as error:
            counts["told"] = [*counts["told"], str(error)][-20:]
            raise
        else:
            counts["answered"] += 1
            return reply
        finally:
            waited = time.monotonic() - started
            counts["slowest_seconds"] = max(counts["slowest_seconds"], waited)
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(counts))
            unfinished.replace(path)

    ServerClient.beat = beat  # type: ignore[method-assign]


def counted(folder: Path) -> dict[str, Any]:
    """Return what a host's agent counted so far."""
    return dict(json.loads((folder / COUNTS).read_text()))


if __name__ == "__main__":
    count_into(Path(sys.argv[sys.argv.index("--dir") + 1]) / COUNTS)
    sys.exit(runners.run())

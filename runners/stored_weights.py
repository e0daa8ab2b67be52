"""The weights of a model folder: the bytes in its files, and the planner's count for its config.

Where both differ, the planner does not know the model's structure, and a plan's memory is off.
Files are read by their safetensors headers alone; the planner runs in a process of its own,
because the agent stays small.
"""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 4096
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_CONFIG_BYTES = 2**20
LENGTH_BYTES = 8
PLANNER_SECONDS = 30
CLOSE = 0.05  # relative difference up to which both counts agree
GIB = 2**30
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class StoredWeights(NamedTuple):
    """The bytes of a folder's weights: in its files, and counted from its config if possible."""

    stored_bytes: int
    counted_bytes: int | None

    @property
    def sentence(self) -> str:
        """Return both counts as a sentence."""
        stored = f"Its files hold {self.stored_bytes / GIB:.2f} GiB of weights"
        if self.counted_bytes is None:
            return f"{stored}; the planner cannot read its config.json."
        counted = f"the planner counts {self.counted_bytes / GIB:.2f} GiB for its config.json"
        if abs(self.counted_bytes / self.stored_bytes - 1) <= CLOSE:
            return f"{stored}, {counted}."
        return f"{stored}, but {counted}: the plan's memory may be off by the difference."


def weights_of(folder: Path, roots: Sequence[Path]) -> StoredWeights | None:
    """Return both counts of a folder, None if it has no readable safetensors files."""
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()][:MAX_FILES]
    inside = [path.resolve() for path in files]
    if not files or not all(any(path.is_relative_to(root) for root in roots) for path in inside):
        return None
    try:
        stored = sum(tensor_bytes(path) for path in inside)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return StoredWeights(stored, counted_bytes(folder)) if stored else None


def tensor_bytes(path: Path) -> int:
    """Return the bytes of all tensors of a safetensors file, from its header.

    Raises:
        OSError: the file cannot be read.
        TypeError, ValueError: it has no valid header, or is shorter than its header says.
    """
    with os.fdopen(os.open(path, _READ), "rb") as file:
        status = os.fstat(file.fileno())
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not stat.S_ISREG(status.st_mode) or not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has no header of safetensors")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise TypeError(f"{path.name} has a header that is no object")
    spans = [value["data_offsets"] for name, value in header.items() if name != "__metadata__"]
    if any(LENGTH_BYTES + length + end > status.st_size or start < 0 for start, end in spans):
        raise ValueError(f"{path.name} is shorter than its header says")
    return sum(end - start for start, end in spans)


def counted_bytes(folder: Path) -> int | None:
    """Return the bytes that the planner counts for a folder's config, None if it cannot."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
        question = {
            "model": config,
            "cluster": {"device": "h200-sxm-141gb"},
            "workload": {
                "kind": "generate", "input_tokens": 1, "output_tokens": 1, "batch_size": 1,
            },
        }  # fmt: skip
        answered = subprocess.run(
            [sys.executable, "-m", "planner", "estimate"],
            input=json.dumps(question) + "\n",
            capture_output=True,
            text=True,
            timeout=PLANNER_SECONDS,
            check=False,
        )
        weights = json.loads(answered.stdout)["memory"]["breakdown_bytes"]["weights"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    except subprocess.TimeoutExpired:
        return None
    return int(weights)

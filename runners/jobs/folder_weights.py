"""Counts a model folder's weights: the planner's count for its config, and its files' bytes.

The files are those that the index names, without one ``model.safetensors``: other files, such as
a consolidated copy of all weights, are not counted. The safetensors library checks each header.
"""

import json
import os
from collections.abc import Iterator

from pydantic import ValidationError

from planner.api import estimate
from planner.specs.base import PlannerError
from planner.specs.estimate import EstimateRequest
from runners.jobs.folder_query import Query, answer, start
from runners.jobs.model_files import MAX_FILES
from runners.jobs.runtime import BadInputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 64 * 2**20  # 640,000 tensors; Kimi-K2's has 14 MB
MAX_NAME_CHARACTERS = 255
LENGTH_BYTES = 8  # of the length before a header
WORKLOAD = {"kind": "generate", "input_tokens": 1, "output_tokens": 1, "batch_size": 1}
CLUSTER = {"device": "h200-sxm-141gb"}  # any: it does not change the weights


def main() -> None:
    """Answer a query with ``counted_bytes`` and ``stored_bytes``, or why there is none."""
    query = start()
    answer(reading="config.json")
    try:
        answer(counted_bytes=counted_bytes(query))
    except (BadInputError, PlannerError, ValidationError, RecursionError) as error:
        answer(counted_problem=_first_line(error))
    try:
        answer(stored_bytes=sum(_all_bytes(query)))
    except BadInputError as error:
        answer(stored_problem=_first_line(error))


def counted_bytes(query: Query) -> int:
    """Return the bytes that the planner counts for the weights of a folder's config."""
    question = {"model": query.config(), "cluster": CLUSTER, "workload": WORKLOAD}
    answered = estimate(EstimateRequest.model_validate(question))
    return int(answered.memory.breakdown_bytes["weights"])


def _all_bytes(query: Query) -> Iterator[int]:
    names = file_names(query)
    if len(names) > MAX_FILES:
        raise BadInputError(
            f"{INDEX} names {len(names)} files, and {MAX_FILES} are read; save the model in "
            "larger files"
        )
    for name in names:
        answer(reading=name)
        yield tensor_bytes(query, name)


def file_names(query: Query) -> list[str]:
    """Return the names of the files that hold a folder's weights.

    Raises:
        BadInputError: the index is damaged, too long, or there is neither index nor file.
    """
    if os.path.lexists(query.folder / INDEX):
        answer(reading=INDEX)
        return _indexed(query)
    if os.path.lexists(query.folder / SINGLE):
        return [SINGLE]
    raise BadInputError(
        f"the folder has neither {INDEX} nor {SINGLE}; save the model again with save_pretrained"
    )


def _indexed(query: Query) -> list[str]:
    with query.opened(INDEX) as path, path.open("rb") as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise BadInputError(f"{INDEX} is longer than {MAX_INDEX_BYTES // 2**20} MiB, the limit")
    try:
        names = set(json.loads(data)["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BadInputError(f"{INDEX} has no weight_map; copy the file again") from None
    for name in names:
        if not (isinstance(name, str) and _is_plain(name)):
            raise BadInputError(f"{INDEX} names {name!r:.80}, which is not a file in the folder")
    return sorted(names)


def _is_plain(name: str) -> bool:
    is_short = len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
    return is_short and "/" not in name and name.endswith(".safetensors")


def tensor_bytes(query: Query, name: str) -> int:
    """Return the bytes of all tensors of a safetensors file: those behind its header.

    Raises:
        BadInputError: the file is missing, outside of the roots, or not a complete safetensors
            file, or this host lacks the library.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise BadInputError("safetensors is not installed on this host") from None
    try:
        with (
            query.opened(name) as path,
            safe_open(path, framework="np"),  # refuses overlaps, holes and ends beyond the file
            path.open("rb") as file,
        ):
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            return file.seek(0, 2) - LENGTH_BYTES - length
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise BadInputError(
            f"{name} is not a complete safetensors file ({reason[:120]}); copy it again"
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:3])[:240]


if __name__ == "__main__":
    main()

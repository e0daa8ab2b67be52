"""What schemathesis draws, with true identifiers in half of it: loaded by its own program."""

import atexit
import json
import os
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import schemathesis

KNOWN: dict[str, dict[str, Any]] = json.loads(Path(os.environ["SLIPWAY_TEST_KNOWN"]).read_text())
PART, _, SHARE = os.environ["SLIPWAY_TEST_SHARE"].rpartition("/")  # such as 2/4
ANSWERS: dict[str, Counter[int]] = defaultdict(Counter)  # operation -> status -> number


def with_known(drawn: Any, known: dict[str, Any]) -> Any:
    """Return a drawn object with true values of the names that it has, or as it is.

    What was drawn decides, so that a case is made again from the same draw.
    """
    if not isinstance(drawn, dict) or len(repr(drawn)) % 2:
        return drawn
    return drawn | {name: value for name, value in known.items() if name in drawn}


@schemathesis.hook
def map_path_parameters(_context: Any, path_parameters: Any) -> Any:
    """Name things that exist in half of the addresses."""
    return with_known(path_parameters, KNOWN["path"])


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Show the fence, token and identifiers of things that exist in half of the bodies."""
    return with_known(body, KNOWN["body"])


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:
    """Leave out some coverage cases of bodies, which are many: what a body holds decides."""
    share = int(SHARE)
    if share == 1 or not is_of_coverage(case) or not isinstance(case.body, dict):
        return True
    return zlib.crc32(repr(case.body).encode()) % share == int(PART)


@schemathesis.hook
def map_case(_context: Any, case: Any) -> Any:
    """Do for the coverage phase, which draws nothing, what the hooks above do for the others."""
    if is_of_coverage(case):
        case.path_parameters = with_known(case.path_parameters, KNOWN["path"])
        case.body = with_known(case.body, KNOWN["body"])
    return case


def is_of_coverage(case: Any) -> bool:
    return case.meta is not None and case.meta.phase.name == "coverage"


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    """Count the answers of each operation."""
    ANSWERS[case.operation.label][response.status_code] += 1


@atexit.register
def keep_answers() -> None:
    Path(os.environ["SLIPWAY_TEST_ANSWERS"]).write_text(json.dumps(ANSWERS))

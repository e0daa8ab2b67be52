"""What schemathesis draws, with true identifiers in half of it: loaded by its own program."""

import json
import os
from pathlib import Path
from typing import Any

import schemathesis

KNOWN: dict[str, dict[str, Any]] = json.loads(Path(os.environ["SLIPWAY_TEST_KNOWN"]).read_text())


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

"""Runs a vendor's command and reads the JSON that it prints."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

TIMEOUT_SECONDS = 20.0  # xpu-smi starts its daemon first
_MAX_REASON = 200


class CommandUnavailableError(Exception):
    """A vendor's command is missing or failed; the text says which and why."""


def read_text(command: Sequence[str]) -> str:
    """Return what a command prints.

    Raises:
        CommandUnavailableError: it is missing, takes too long, or fails.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise CommandUnavailableError(f"{command[0]} is not installed") from None
    except PermissionError:
        raise CommandUnavailableError(f"no permission to run {command[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandUnavailableError(f"{command[0]} did not answer: {error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-_MAX_REASON:]
        raise CommandUnavailableError(f"{' '.join(command)} failed: {said or done.returncode}")
    return done.stdout


def read_json(command: Sequence[str]) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON that a command prints; some print warnings before it.

    Raises:
        CommandUnavailableError: it is missing, fails, or prints no JSON.
    """
    printed = read_text(command)
    starts = [at for at in (printed.find("{"), printed.find("[")) if at >= 0]
    try:
        return json.loads(printed[min(starts, default=0) :])
    except ValueError:
        raise CommandUnavailableError(f"{' '.join(command)} prints no JSON") from None

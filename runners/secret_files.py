"""A job's secrets as files: in the attempt's own folder, readable by their owner alone.

They come with the claim and go with the attempt. Neither the spec nor the command nor the
environment holds a value; the environment says where the files lie.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from runners.supervision import record

DIRECTORY_VARIABLE = "SLIPWAY_SECRETS_DIR"
# Where a library itself looks for a file: the Hugging Face Hub takes its token from one.
KNOWN_VARIABLES = {"HF_TOKEN": "HF_TOKEN_PATH"}


def write(attempt_dir: Path, values: Mapping[str, str]) -> dict[str, str]:
    """Write each value to a file of its own; return the variables that say where they lie."""
    if not values:
        return {}
    folder = attempt_dir / record.SECRETS
    record.remove_secrets(attempt_dir)
    folder.mkdir(mode=0o700)
    env = {DIRECTORY_VARIABLE: str(folder)}
    for name, value in values.items():
        path = folder / name
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(value)
        env[f"{name}_FILE"] = str(path)
        if name in KNOWN_VARIABLES:
            env[KNOWN_VARIABLES[name]] = str(path)
    return env

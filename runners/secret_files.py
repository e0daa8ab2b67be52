"""Writes a job's secrets to files in the attempt's folder, readable only by their owner.

They arrive with the claim and are deleted with the attempt. Spec, command and environment
contain no values; environment variables contain the files' paths.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from runners.supervision import record

DIRECTORY_VARIABLE = "SLIPWAY_SECRETS_DIR"
# Variables of libraries that read a secret from a file, such as the Hugging Face Hub's token.
KNOWN_VARIABLES = {"HF_TOKEN": "HF_TOKEN_PATH"}


def write(attempt_dir: Path, values: Mapping[str, str]) -> dict[str, str]:
    """Write each value to its own file; return the environment variables with the paths."""
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

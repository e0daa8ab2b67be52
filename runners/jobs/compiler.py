"""The compiler that torch.compile calls, and where its kernels are kept."""

import os
import shutil
from pathlib import Path

from runners.jobs.runtime import BadInputError

COMPILER = "g++"


def check_compiler(scratch: Path, asked: str) -> None:
    """Let compiled kernels be kept in a folder of the job's own.

    ``asked`` is the field that asks for them.

    Raises:
        BadInputError: this host has no compiler.
    """
    if shutil.which(COMPILER) is None:
        msg = f"{asked} needs {COMPILER}, which this host lacks; install it or leave it out"
        raise BadInputError(msg)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)

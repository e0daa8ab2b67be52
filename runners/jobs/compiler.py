"""Checks the compiler for torch.compile and sets its kernel cache."""

import os
import shutil
from pathlib import Path

from runners.jobs.runtime import BadInputError

COMPILER = "g++"


def check_compiler(scratch: Path, asked: str) -> None:
    """Set the kernel cache to a folder of the job.

    ``asked`` is the spec field that requests compiled kernels.

    Raises:
        BadInputError: this host has no compiler.
    """
    if shutil.which(COMPILER) is None:
        msg = f"{asked} needs {COMPILER}, which this host lacks; install it or leave it out"
        raise BadInputError(msg)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)

"""Checks the compiler for torch.compile and sets its kernel cache."""

import os
import shutil
from pathlib import Path

from runners.jobs.runtime import BadInputError
from runners.programs import compiler_name


def check_compiler(scratch: Path, asked: str) -> None:
    """Set the kernel cache to a folder of the job, unless the operator has named one.

    ``asked`` is the spec field that requests compiled kernels.

    Raises:
        BadInputError: this host has no compiler.
    """
    if shutil.which(compiler_name()) is None:
        msg = f"{asked} needs {compiler_name()}, which this host lacks; install it or leave it out"
        raise BadInputError(msg)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch))

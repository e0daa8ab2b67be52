"""Checks the compiler for torch.compile and sets its kernel cache."""

import os
import shutil
import tempfile
from pathlib import Path

from runners.jobs.runtime import BadInputError
from runners.programs import compiler_name

KERNEL_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# torch sets this default itself when parts of it are imported; all jobs of a user share it.
SHARED_PREFIX = "torchinductor_"


def check_compiler(scratch: Path, asked: str) -> None:
    """Set the kernel cache to a folder of the job, unless the operator has named one.

    A job that is killed while it compiles leaves a kernel that is cut short, which would fail
    every later job that shares the cache.

    ``asked`` is the spec field that requests compiled kernels.

    Raises:
        BadInputError: this host has no compiler.
    """
    if shutil.which(compiler_name()) is None:
        msg = f"{asked} needs {compiler_name()}, which this host lacks; install it or leave it out"
        raise BadInputError(msg)
    shared = str(Path(tempfile.gettempdir()) / SHARED_PREFIX)
    if os.environ.get(KERNEL_CACHE, shared).startswith(shared):
        os.environ[KERNEL_CACHE] = str(scratch)

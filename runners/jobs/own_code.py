"""Where transformers imports a model's own code from, and which folders name code.

It copies a model's modules into ``HF_MODULES_CACHE`` and imports them there. It writes each file
in place, under a lock of threads only: a process beside it may import half a module. So no two
processes of a job write into one folder at the same time. Source: transformers 5,
``dynamic_module_utils.py: get_cached_module_file``.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from runners.hub.repository import CONFIGS, MODULE, named_code
from runners.jobs.model_files import read_config
from runners.jobs.runtime import BadInputError


def fill_modules(folder: Path) -> None:
    """Copy a folder's modules before the processes of an engine start, which then only compare.

    Nothing of them is run. A module whose packages are missing is left to who imports it.
    """
    from transformers.dynamic_module_utils import get_cached_module_file

    for path in sorted(folder.glob(f"*{MODULE}")):
        with contextlib.suppress(ImportError):
            get_cached_module_file(str(folder), path.name, local_files_only=True)


def separate_modules() -> None:
    """Let this process, one of several ranks, copy modules into a folder of its own."""
    from transformers import dynamic_module_utils

    names = vars(dynamic_module_utils)
    shared, prefix = Path(names["HF_MODULES_CACHE"]), f"process-{os.getpid()}-"
    if not shared.name.startswith(prefix):
        shared.mkdir(parents=True, exist_ok=True)
        names["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix=prefix, dir=shared)


def check_no_code(field: str, folder: Path) -> None:
    """Refuse a model beside one whose own code may run, if it names code: the option is for all.

    Raises:
        BadInputError: a config of the folder has an auto_map, or cannot be read.
    """
    for name in sorted(CONFIGS):
        if (folder / name).exists() and (found := named_code(read_config(folder / name))):
            raise BadInputError(
                f"{field}: {name} of {folder.name} names code ({found[0][:120]}), and the engine "
                "would run it too, as the served model runs its own: choose one without auto_map"
            )

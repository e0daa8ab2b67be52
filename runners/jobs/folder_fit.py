"""Asks ``llama-fit-params`` of llama.cpp what a folder's GGUF file takes on this host's devices.

It loads no weights. Its first run prints the context and the layers on GPUs that fit into the
free memory; its second, with those, the memory of each device.
Source: https://github.com/ggml-org/llama.cpp, tools/fit-params and common/fit.cpp
(``--fit-print`` since pull request 22171 of April 2026).
"""

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from runners.jobs.folder_query import Query, answer, start
from runners.jobs.runtime import BadInputError, MissingModelError

TOOL = "llama-fit-params"
TOOL_SECONDS = 8.0
ARGUMENTS = {"-c": r"\d+", "-ngl": r"-?\d+", "-ts": r"[\d.,]+", "-ot": r".+"}
DEVICE = re.compile(r"^(\S+) +(\d+) +(\d+) +(\d+) *$")
MIB = 2**20


class DeviceMemory(NamedTuple):
    """The bytes of weights, context (KV cache and states) and compute buffers on a device."""

    device: str
    model: int
    context: int
    compute: int


def main() -> None:
    """Answer a query with the fitted arguments and each device's memory, or why there is none."""
    query = start()
    try:
        name = gguf_name(query.folder)
        answer(reading=name)
        with query.opened(name) as path:
            arguments = fitted_arguments(_run(path, _context(query)))
            answer(arguments=arguments)
            printed = _run(path, ["--fit", "off", "--fit-print", "on", *arguments])
            answer(devices=[list(each) for each in device_memory(printed)])
    except BadInputError as error:
        answer(problem=str(error)[:240])


def gguf_name(folder: Path) -> str:
    """Return the name of a folder's GGUF file.

    Raises:
        MissingModelError: the folder has none, or several.
    """
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if len(names) != 1:
        raise MissingModelError(f"the folder has {len(names)} .gguf files; keep one in it")
    return names[0]


def fitted_arguments(output: str) -> list[str]:
    """Return the arguments that the tool chose, of the options in ``ARGUMENTS``.

    Raises:
        BadInputError: the output has no such arguments.
    """
    line = next((line for line in output.splitlines() if line.startswith("-c ")), "")
    words = shlex.split(line)
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if not pairs or not all(re.fullmatch(ARGUMENTS.get(name, "$."), text) for name, text in pairs):
        raise BadInputError(f"{TOOL} printed no arguments; run it on the file by hand")
    return [word for pair in pairs for word in pair]


def device_memory(output: str) -> list[DeviceMemory]:
    """Return each device's memory from the table that the tool prints, the host's last.

    Raises:
        BadInputError: there is no table: releases before April 2026 have no ``--fit-print``.
    """
    found = [match for line in output.splitlines() if (match := DEVICE.match(line))]
    if not found:
        raise BadInputError(f"{TOOL} printed no memory; update llama.cpp")
    return [DeviceMemory(each[1], *(int(each[n]) * MIB for n in (2, 3, 4))) for each in found]


def _context(query: Query) -> list[str]:
    return ["-c", str(query.context_tokens)] if query.context_tokens else []


def _run(path: Path, arguments: list[str]) -> str:
    """Return the tool's standard output.

    Raises:
        BadInputError: the tool failed (with its last error line) or took too long.
    """
    try:
        ended = subprocess.run(
            [TOOL, "-m", str(path), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
            check=False,
            pass_fds=(int(path.name),),  # a path below /proc/self/fd
        )
    except subprocess.TimeoutExpired:
        raise BadInputError(f"{TOOL} took longer than {TOOL_SECONDS:g} s") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"code {ended.returncode}"])[-1]
        raise BadInputError(f"{TOOL} failed: {last[:160]}; run it on the file by hand")
    return ended.stdout


if __name__ == "__main__":
    main()

"""Answers one query about a model folder: ``python -m runners.jobs.folder_query SUBJECT``.

The query is a line of JSON on stdin, the answer lines of JSON. The subjects are ``weights``, the
bytes of its weights; ``parameters``, what transformers builds for its config; and ``fit``, what
llama.cpp takes for its GGUF file. Whoever can write to a model folder chooses what such a process
reads. Its memory is therefore limited here and its time by ``runners.host.preflight_weights``,
which starts it; the libraries of another subject stay unloaded.
"""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from planner.specs.units import MIB
from runners.jobs.model_files import (
    HEAD_BYTES,
    INDEX,
    LENGTH_BYTES,
    MAX_INDEX_BYTES,
    check_config,
    check_gguf,
    disguise,
    gguf_files,
    open_file,
    read_config,
    weight_names,
)
from runners.jobs.runtime import BadInputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Query(NamedTuple):
    """The folder, the roots that its files must be below, and the tokens of a KV cache (or 0)."""

    folder: Path
    roots: tuple[Path, ...]
    context_tokens: int = 0

    @contextmanager
    def open_path(self, name: str) -> Iterator[Path]:
        """Yield a path of this process to one of the folder's files, opened safely.

        Raises:
            MissingModelError: the file is missing, not a regular file, or outside of the roots.
        """
        handle = open_file(self.folder / name, self.roots)
        try:
            yield Path(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)

    def config(self) -> dict[str, Any]:
        """Return the folder's config.json.

        Raises:
            BadInputError: the file is too long, too deep, implausible, or not a JSON object.
            MissingModelError: the file is missing, not a regular file, or outside of the roots.
        """
        with self.open_path("config.json") as path:
            config = read_config(path, "config.json")
        check_config(config, str(self.folder))
        return config


def start() -> Query:
    """Return this process's query, and limit its memory to the bytes that the query names.

    ``RLIMIT_DATA`` counts private writable memory, so a mapped file of any size is allowed.
    """
    query = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_DATA, (query["memory_bytes"], query["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    roots = tuple(Path(root).resolve() for root in query["roots"])
    return Query(Path(query["folder"]), roots, query["context_tokens"])


def answer(**fields: object) -> None:
    """Print a part of the answer."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


# The bytes of the weights: the planner's count for the config, and those of the files.
#
# The files are those that jobs read (``weight_names``): others, such as a consolidated copy of all
# weights, are not counted. The safetensors library checks each header.


WORKLOAD = {"kind": "generate", "input_tokens": 1, "output_tokens": 1, "batch_size": 1}
CLUSTER = {"device": "h200-sxm-141gb"}  # any: it does not change the weights


def weights() -> None:
    """Answer a query with ``counted_bytes`` and ``stored_bytes``, or why there is none."""
    from planner.api import estimate
    from planner.specs.base import PlannerError
    from planner.specs.estimate import EstimateRequest

    query = start()
    answer(reading="config.json")
    try:
        question = {"model": query.config(), "cluster": CLUSTER, "workload": WORKLOAD}
        counted = estimate(EstimateRequest.model_validate(question)).memory.breakdown_bytes
        answer(counted_bytes=int(counted["weights"]))
    except (BadInputError, PlannerError, ValidationError, RecursionError) as error:
        answer(counted_problem=_first_line(error))
    try:
        answer(stored_bytes=sum(_all_bytes(query)))
    except BadInputError as error:
        answer(stored_problem=_first_line(error))


def _all_bytes(query: Query) -> Iterator[int]:
    for name in file_names(query):
        answer(reading=name)
        yield tensor_bytes(query, name)


def file_names(query: Query) -> list[str]:
    """Return the names of the files that hold a folder's weights.

    Raises:
        BadInputError: the index is damaged, too long, names a file that is not there, or there
            is neither index nor file.
    """

    def read_index() -> bytes:
        answer(reading=INDEX)
        with query.open_path(INDEX) as path, path.open("rb") as file:
            return file.read(MAX_INDEX_BYTES + 1)

    return weight_names({path.name for path in query.folder.iterdir()}, read_index, "the folder")


def tensor_bytes(query: Query, name: str) -> int:
    """Return the bytes of all tensors of a safetensors file: those behind its header.

    Raises:
        BadInputError: the file is missing, outside of the roots, or not a complete safetensors
            file, or this host lacks the library.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise BadInputError("safetensors is not installed on this host") from None
    try:
        with query.open_path(name) as path, path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if head and (what := disguise(head)):
                raise BadInputError(f"{name} {what}")
            with safe_open(path, framework="np"):  # refuses overlaps, holes, ends beyond the file
                length = int.from_bytes(head[:LENGTH_BYTES], "little")
                return file.seek(0, 2) - LENGTH_BYTES - length
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise BadInputError(
            f"{name} is not a complete safetensors file ({reason[:120]}); copy it again"
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:3])[:240]


# The parameters that transformers builds for the config, on the meta device.
#
# Nothing is loaded, no code of the folder runs, and no GPU is used. Any environment with torch and
# transformers can run it.


def parameters() -> None:
    """Answer a query with the parameters and their bytes by dtype, or why there are none."""
    import transformers
    from transformers.models.auto import modeling_auto  # noqa: F401 - with torch, before the limit

    query = start()
    answer(version=transformers.__version__)
    try:
        answer(**counts(query.config()))
    except BadInputError as error:
        answer(problem=str(error)[:240])
    except Exception as error:  # noqa: BLE001 - a model's own code, which raises anything
        answer(problem=f"{type(error).__name__}: {str(error).strip()[:200]}")


def counts(document: dict[str, object]) -> dict[str, object]:
    """Return the number of parameters of a config.json, and the bytes of each dtype.

    A quantised checkpoint's config is built without its quantisation, so only its number counts.

    Raises:
        BadInputError: transformers has no such model.
    """
    import torch
    from transformers import AutoConfig

    fields = {**document, "quantization_config": None}
    model_type = str(fields.pop("model_type", ""))
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = _auto_class(config).from_config(config, trust_remote_code=False)
    num_bytes: Counter[str] = Counter()
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        num_bytes[name] += parameter.numel() * parameter.element_size()
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "bytes_by_dtype": dict(num_bytes),
        "is_quantised": document.get("quantization_config") is not None,
    }


def _auto_class(config: "PretrainedConfig") -> Any:  # noqa: ANN401 - an automatic class
    """Return the automatic class whose model the config names, or the first that has one."""
    from transformers.models.auto import modeling_auto as auto

    classes = (
        (auto.AutoModelForCausalLM, auto.MODEL_FOR_CAUSAL_LM_MAPPING),
        (auto.AutoModelForImageTextToText, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (auto.AutoModelForSeq2SeqLM, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        (auto.AutoModelForSequenceClassification, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    )
    known: list[tuple[Any, Any]] = [
        (each, models[type(config)]) for each, models in classes if type(config) in models
    ]
    if not known:
        raise BadInputError(f"transformers has no language model of type {config.model_type!r}")
    architectures = set(getattr(config, "architectures", None) or [])
    for each, models in known:
        listed = models if isinstance(models, tuple) else (models,)
        if architectures & {getattr(model, "__name__", "") for model in listed}:
            return each
    return known[0][0]


# What ``llama-fit-params`` of llama.cpp says that the folder's GGUF file takes on this host.
#
# It loads no weights. Its first run prints the context and the layers on GPUs that fit into the
# free memory; its second, with those, the memory of each device.
# Source: https://github.com/ggml-org/llama.cpp, tools/fit-params and common/fit.cpp
# (``--fit-print`` since pull request 22171 of April 2026).


TOOL = "llama-fit-params"
TOOL_SECONDS = 8.0
ARGUMENTS = {"-c": r"\d+", "-ngl": r"-?\d+", "-ts": r"[\d.,]+", "-ot": r".+"}
DEVICE = re.compile(r"^(\S+) +(\d+) +(\d+) +(\d+) *$")


class DeviceMemory(NamedTuple):
    """The bytes of weights, context (KV cache and states) and compute buffers on a device."""

    device: str
    model: int
    context: int
    compute: int


def fit() -> None:
    """Answer a query with the fitted arguments and each device's memory, or why there is none."""
    query = start()
    try:
        names = [path.name for path in gguf_files(query.folder)]
        answer(reading=names[0])
        with ExitStack() as stack:
            # llama.cpp finds the parts of a model by their names beside the first one.
            links = Path(stack.enter_context(TemporaryDirectory()))
            for name in names:
                opened = stack.enter_context(query.open_path(name))
                check_gguf(opened, name)
                (links / name).symlink_to(opened)
            path = links / names[0]
            context = ["-c", str(query.context_tokens)] if query.context_tokens else []
            arguments = fitted_arguments(_run(path, context))
            answer(arguments=arguments)
            printed = _run(path, ["--fit", "off", "--fit-print", "on", *arguments])
            answer(devices=[list(each) for each in device_memory(printed)])
    except BadInputError as error:
        answer(problem=str(error)[:240])


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


def _run(path: Path, arguments: list[str]) -> str:
    """Return the tool's standard output about a file, a link to a descriptor of this process.

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
            pass_fds=[int(each.readlink().name) for each in path.parent.iterdir()],
        )
    except subprocess.TimeoutExpired:
        raise BadInputError(f"{TOOL} took longer than {TOOL_SECONDS:g} s") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"code {ended.returncode}"])[-1]
        raise BadInputError(f"{TOOL} failed: {last[:160]}; run it on the file by hand")
    return ended.stdout


SUBJECTS = {"weights": weights, "parameters": parameters, "fit": fit}

if __name__ == "__main__":
    SUBJECTS[sys.argv[1]]()

"""Preflight's checks of a model's size: files, planner and engine. They never fail."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from planner.specs.units import GIB, MIB
from runners.environments.builder import PinsError, Store
from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.engines import Engine, MemoryLine, in_environment
from runners.launchers import launch
from runners.launchers.attempts import AttemptFolder, attempt_folders
from runners.shared.config import HostDir
from runners.shared.log_text import last_line
from runners.shared.messages import MAIN, MAX_SENTENCE, PreflightCheck, yes
from runners.shared.timing import scale_duration
from runners.supervision.output import HEAD_BYTES

# What an engine logged about its memory at an earlier start with a model folder on this host.
#
# vLLM profiles its memory at every start and has no command that does only this. An attempt's
# folder keeps its output, so the newest start that got as far is read.


_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_ATTEMPTS = 200  # the newest are looked through
WORDS: Mapping[MemoryLine, str] = {
    "weights": "{} GiB of weights",
    "cache": "{} GiB for the KV cache",
    "tokens": "a KV cache of {} tokens",
    "requests": "room for {1} requests of {0} tokens",
}


def last_start(engine: Engine, folder: Path, attempts_dir: Path) -> str:
    """Return a sentence on an engine's newest start with a model folder, "" if there was none."""
    for attempt in _starts(engine, folder, attempts_dir):
        found = memory_in(engine, _head(attempt.path / "stderr.log"))
        if found:
            return (
                f"{engine.title}'s last start with it here, {attempt.attempt_id}, logged per "
                f"device: {found}. Its settings may have been others."
            )
    return ""


def memory_in(engine: Engine, log: str) -> str:
    """Return the memory in an engine's log in words, "" if it does not hold the KV cache's."""
    lines = engine.memory_log.items()
    found = {name: match for name, line in lines if (match := re.search(line, log))}
    if not found.keys() & {"cache", "tokens"}:
        return ""
    return ", ".join(WORDS[name].format(*match.groups()) for name, match in found.items())


def _starts(engine: Engine, folder: Path, attempts_dir: Path) -> Iterator[AttemptFolder]:
    """Yield the attempts that served a model folder with an engine, the newest first."""
    newest = sorted(attempt_folders(attempts_dir), key=_changed_at, reverse=True)
    for attempt in newest[:MAX_ATTEMPTS]:
        request = attempt.request()
        if request is None or not isinstance(request.spec, ServeSpec):
            continue
        spec = request.spec
        if spec.engine == engine.name and spec.model == FolderModel(path=str(folder)):
            yield attempt


def _changed_at(attempt: AttemptFolder) -> float:
    try:
        return attempt.spec.stat().st_mtime
    except OSError:  # not started yet
        return 0.0


def _head(path: Path) -> str:
    try:
        with os.fdopen(os.open(path, _READ), "rb") as file:
            return file.read(HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


# Starts processes that answer one query about a model folder, under limits of time and memory.
#
# The agent never parses what a model folder holds: a safetensors header of 95 MB took 850 MiB.


MAX_ANSWER_CHARACTERS = 2**23
OUT_OF_MEMORY = ("MemoryError", "memory allocation of", "std::bad_alloc", "DefaultCPUAllocator")
# One thread: each thread of a BLAS library allocates buffers at import.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class FolderQuery(NamedTuple):
    """A model folder below one of the roots, and what a query about it needs to know."""

    folder: Path
    roots: tuple[Path, ...]
    host_dir: Path
    context_tokens: int = 0  # of a KV cache; 0: unknown


class QueryOutput(NamedTuple):
    """The fields that a process printed, and why it ended early, if so."""

    fields: dict[str, Any]
    failure: str = ""


def run_query(
    query: FolderQuery,
    argv: Sequence[str],
    *,
    seconds: float,
    memory_bytes: int,
    env: Mapping[str, str] | None = None,
) -> QueryOutput:
    """Return what a query process answers within ``seconds``; its parts so far if it ends early.

    The process limits its private memory to ``memory_bytes``.
    """
    document = {
        "folder": str(query.folder),
        "roots": [str(root) for root in query.roots],
        "context_tokens": query.context_tokens,
        "memory_bytes": memory_bytes,
    }
    base = launch.render_env(query.host_dir, 1, query.roots)
    try:
        ended = subprocess.run(
            argv,
            input=json.dumps(document) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={**base, **ONE_THREAD, **(env or {})},
        )
    except subprocess.TimeoutExpired as expired:
        return QueryOutput(
            _fields(expired.stdout), f"it took longer than {seconds:g} s, the limit"
        )
    except OSError as error:
        return QueryOutput({}, f"its reader {argv[0]} does not start: {error.strerror}")
    return QueryOutput(_fields(ended.stdout), _failure(ended, memory_bytes))


def _fields(output: bytes | str | None) -> dict[str, Any]:
    """Return the fields of all complete lines; a later line replaces an earlier one's."""
    text = os.fsdecode(output or "")[:MAX_ANSWER_CHARACTERS]
    fields: dict[str, Any] = {}
    for line in text.split("\n")[:-1]:
        try:
            fields |= json.loads(line)
        except (ValueError, TypeError):  # a library's own output
            continue
    return fields


def _failure(ended: subprocess.CompletedProcess[str], memory_bytes: int) -> str:
    if not ended.returncode:
        return ""
    if any(word in ended.stderr for word in OUT_OF_MEMORY):
        return f"it needs more than {memory_bytes // MIB} MiB of memory, the limit"
    if ended.returncode < 0:
        return f"its reader was ended by {signal.Signals(-ended.returncode).name}"
    words = last_line(ended.stderr, f"code {ended.returncode}, no message")
    return f"its reader failed: {words}"


# The weights of a model folder: the bytes in its files, and the planner's count for its config.
#
# Where both differ, the planner does not know the model's structure, and a plan's memory is off. A
# process under limits reads both (``runners.jobs.folder_query``), because the agent stays small.


MODULE = "runners.jobs.folder_query"
COUNT_SECONDS = 20.0
MEMORY_BYTES = 512 * 2**20  # of the process; a header of 50 MB fits, the largest known have 20
CLOSE = 0.05  # relative difference up to which two counts agree
SUFFIX = ".safetensors"


class StoredWeights(NamedTuple):
    """The bytes of a folder's weights: in its files, and counted from its config, if possible."""

    stored_bytes: int | None
    counted_bytes: int | None
    stored_problem: str = ""
    counted_problem: str = ""

    @property
    def sentence(self) -> str:
        """Return both counts as a sentence, with what prevented either."""
        stored, counted = self.stored_bytes, self.counted_bytes
        planner = f"the planner counts {size_text(counted or 0)} for its config.json"
        if counted is None:
            planner = f"the planner cannot read its config.json: {self.counted_problem}"
        if stored is None:
            return f"Its files were not counted: {self.stored_problem}; {planner}."
        files = f"Its files hold {size_text(stored)} of weights"
        if counted is None:
            return f"{files}; {planner}."
        return f"{files}, {'but ' if self.remedy else ''}{planner}."

    @property
    def remedy(self) -> str:
        """Return what to do where both counts differ, "" where they agree or one is absent."""
        stored, counted = self.stored_bytes, self.counted_bytes
        if stored is None or counted is None or not differ(counted, stored):
            return ""
        return (
            "The plan's memory may be off by the difference: plan with the config.json that "
            "belongs to these files."
        )


def size_text(count: int) -> str:
    """Return bytes in GiB, or in MiB below one GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def differ(one: int, other: int) -> bool:
    """Return whether two counts of bytes differ by more than 5 %."""
    return abs(one - other) > CLOSE * other


def weights_of(query: FolderQuery) -> StoredWeights:
    """Return both counts of a folder with safetensors files."""
    argv = [sys.executable, "-m", MODULE, "weights"]
    return _weights(run_query(query, argv, seconds=COUNT_SECONDS, memory_bytes=MEMORY_BYTES))


def _weights(answer: QueryOutput) -> StoredWeights:
    fields, reading = answer.fields, answer.fields.get("reading", "the folder")
    failure = f"{reading}: {answer.failure or 'its reader said nothing'}"
    return StoredWeights(
        fields.get("stored_bytes"),
        fields.get("counted_bytes"),
        str(fields.get("stored_problem", failure)),
        str(fields.get("counted_problem", failure)),
    )


# What an engine itself counts for a model folder, beside the planner's count.
#
# transformers builds the config on the meta device, in the job's environment; llama.cpp's
# ``llama-fit-params`` reads the GGUF file. vLLM 0.31 has no command that counts without a full
# start (https://docs.vllm.ai/en/v0.31.0/cli/).


ENGINE_SECONDS = scale_duration(20.0, least=4.0)
META_PACKAGES = ("torch", "transformers")
META_MEMORY_BYTES = 4 * 2**30  # DeepSeek-V3 takes 0.5 on torch for the CPU
FIT_MEMORY_BYTES = 8 * 2**30
FIT_TOOL = "llama-fit-params"


class EngineCount(NamedTuple):
    """An engine's count as a sentence, and the bytes of all weights, if it has them."""

    sentence: str
    weight_bytes: int | None = None


def interpreter(environment: str, store: Store) -> Path | None:
    """Return the interpreter of a job's environment if it has transformers and torch, or None."""
    if environment == MAIN:
        return Path(sys.executable) if all(map(_is_installed, META_PACKAGES)) else None
    try:
        pins = store.pins(environment)
    except PinsError:
        return None
    names = {each.partition("==")[0].lower() for each in pins.packages}
    return store.python(pins) if names.issuperset(META_PACKAGES) and store.is_ready(pins) else None


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def transformers_count(query: FolderQuery, python: Path) -> EngineCount:
    """Return what transformers builds for a folder's config."""
    answer = run_query(
        query,
        [str(python), "-m", MODULE, "parameters"],
        seconds=ENGINE_SECONDS,
        memory_bytes=META_MEMORY_BYTES,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    fields = answer.fields
    library = f"transformers {fields.get('version', '')}".strip()
    if "parameters" not in fields:
        problem = fields.get("problem") or answer.failure or "it printed nothing"
        return EngineCount(f"{library} does not build its config.json: {problem}.")
    parameters = f"{library} builds {fields['parameters']:,} parameters"
    if fields["is_quantised"]:
        return EngineCount(f"{parameters} for its config.json, before quantisation.")
    by_dtype = sorted(fields["bytes_by_dtype"].items(), key=lambda each: -each[1])
    sizes = " and ".join(f"{num_bytes / GIB:.2f} GiB in {name}" for name, num_bytes in by_dtype)
    total = sum(fields["bytes_by_dtype"].values())
    return EngineCount(f"{parameters} for its config.json, {sizes}.", total)


def compare_counts(count: EngineCount, counted_bytes: int | None) -> str:
    """Return an engine's sentence, with a warning if it differs from the planner's count."""
    if count.weight_bytes is None or not counted_bytes:
        return count.sentence
    if not differ(counted_bytes, count.weight_bytes):
        return count.sentence
    return f"{count.sentence[:-1]}, unlike the planner: the plan's memory may be off."


def llama_count(query: FolderQuery) -> EngineCount:
    """Return the arguments and the memory that llama.cpp chooses for a folder's GGUF file."""
    argv = [sys.executable, "-m", MODULE, "fit"]
    answer = run_query(query, argv, seconds=ENGINE_SECONDS, memory_bytes=FIT_MEMORY_BYTES)
    fields = answer.fields
    if "arguments" not in fields:
        problem = fields.get("problem") or answer.failure or "it printed nothing"
        return EngineCount(f"{FIT_TOOL} counts nothing: {problem}.")
    chosen = f"{FIT_TOOL} chooses {_choice(fields['arguments'])}"
    if "devices" not in fields:
        return EngineCount(f"{chosen}; {fields.get('problem') or answer.failure}.")
    listed = "; ".join(
        f"{name} {model / GIB:.2f} + {context / GIB:.2f} + {compute / GIB:.2f}"
        for name, model, context, compute in fields["devices"]
    )
    total = sum(model for _, model, _, _ in fields["devices"])
    return EngineCount(f"{chosen}, with GiB of weights + context + buffers on {listed}.", total)


def _choice(arguments: list[str]) -> str:
    """Return the chosen context and layers on GPUs in words."""
    values = dict(zip(arguments[::2], arguments[1::2], strict=True))
    tokens = int(values["-c"])
    context = f"a context of {tokens:,} tokens" if tokens else "the model's own context"
    on_gpus = f"-ngl {values.get('-ngl', -1)}"
    moved = " and keeps some tensors in host memory" if "-ot" in values else ""
    return f"{context} and {on_gpus}{moved}"


KEPT_SECONDS = 600.0
NAMES = (".", "config.json", "model.safetensors.index.json", "model.safetensors")


class EngineNeeds(NamedTuple):
    """What of an attempt's needs decides which engine is queried, and on what host."""

    environment: str
    memory_bytes: int  # the predicted peak's lower bound, per device
    is_login_node: bool  # of Slurm, where no engine is queried: jobs run on other nodes


def checks(needs: EngineNeeds, query: FolderQuery) -> tuple[PreflightCheck, ...]:
    """Return what is known of a folder's size."""
    period = int(time.monotonic() / KEPT_SECONDS)
    try:
        return _checks(needs, query, _stamp(query.folder), period)
    except OSError:  # the folder is gone again; the job reports it
        return ()


def _stamp(folder: Path) -> tuple[int, ...]:
    """Return the times of change of a folder and of the files that describe its weights."""
    paths = [folder / name for name in NAMES]
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


@lru_cache(maxsize=32)
def _checks(needs: EngineNeeds, query: FolderQuery, *_: object) -> tuple[PreflightCheck, ...]:
    with os.scandir(query.folder) as entries:
        has_safetensors = any(entry.name.endswith(SUFFIX) for entry in entries)
    if has_safetensors:
        return (_safetensors(needs, query), *_earlier(needs, query))
    is_gguf = any("gguf" in engine.weights for engine in in_environment(needs.environment))
    can_fit = is_gguf and not needs.is_login_node and shutil.which(FIT_TOOL)
    return (_gguf(needs, query),) if can_fit else ()


def _safetensors(needs: EngineNeeds, query: FolderQuery) -> PreflightCheck:
    store = Store(HostDir(query.host_dir))
    has_engine = not needs.is_login_node and (query.folder / "config.json").is_file()
    python = interpreter(needs.environment, store) if has_engine else None
    built: Future[EngineCount] | None = None
    with ThreadPoolExecutor() as pool:
        if python is not None:
            built = pool.submit(transformers_count, query, python)
        weights = weights_of(query)
    sentence = weights.sentence
    if built is not None:
        sentence += f" {compare_counts(built.result(), weights.counted_bytes)}"
    check = yes("weights", printed(sentence), **_figures(weights, built))
    return check.model_copy(update={"remedy": weights.remedy})


def _figures(weights: StoredWeights, built: Future[EngineCount] | None) -> dict[str, float]:
    figures = {
        "stored_bytes": weights.stored_bytes,
        "counted_bytes": weights.counted_bytes,
        "engine_bytes": built.result().weight_bytes if built is not None else None,
    }
    return {name: float(value) for name, value in figures.items() if value}


def _earlier(needs: EngineNeeds, query: FolderQuery) -> Iterator[PreflightCheck]:
    """Yield what the engines of the environment logged at an earlier start with the folder."""
    for engine in filter(attrgetter("memory_log"), in_environment(needs.environment)):
        if message := last_start(engine, query.folder, HostDir(query.host_dir).attempts):
            yield yes(engine.title, printed(message))


def _gguf(needs: EngineNeeds, query: FolderQuery) -> PreflightCheck:
    count = llama_count(query)
    sentence = count.sentence
    if needs.memory_bytes:
        needed = needs.memory_bytes / GIB
        sentence += f" The planner predicts at least {needed:.2f} GiB for the job."
    figures = {"engine_bytes": count.weight_bytes, "needed_bytes": needs.memory_bytes}
    shown = {name: float(value) for name, value in figures.items() if value}
    return yes("llama.cpp", printed(sentence), **shown)


def printed(sentence: str) -> str:
    """Return a sentence that a message may hold: file names and errors may have any character."""
    shown = "".join(each if each.isprintable() else "?" for each in sentence)
    return shown if len(shown) <= MAX_SENTENCE else f"{shown[: MAX_SENTENCE - 1]}…"

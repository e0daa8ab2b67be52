"""The backend of endpoints whose engines are child processes with their own OpenAI API."""

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from runners.jobs.adapter_config import CONFIG_NAME, WEIGHTS_NAME
from runners.jobs.energy import GpuPeak, visible_sample
from runners.jobs.model_files import opened_model, read_config, runs_code, template_text
from runners.jobs.own_code import check_no_code, fill_modules
from runners.jobs.runtime import BadInputError, Job, job_telemetry
from runners.jobs.serve.contract import USUAL_TOKENS, EngineProcessError, Limits, longest_request
from runners.jobs.serve.endpoint import PeakUsage, serve
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.openai_requests import Document
from runners.jobs.serve.relayed.process import (
    MODELS,
    Command,
    ListenAddress,
    MetricNames,
    Scraper,
    ServerProcess,
    Starting,
    start_engine,
    start_engines,
)
from runners.jobs.serve.relayed.relay import (
    PARAMS,
    Engines,
    RelayEngine,
    RelayServingModel,
    prefill_body,
)
from runners.jobs.serve.reranking import RERANK, unranked
from runners.jobspec import ArtefactModel, FolderModel, ServeSpec
from runners.jobspec.call_parsers import CallParsing, call_parsing
from runners.jobspec.engine_args import EngineArgsError, check_engine_args
from runners.jobspec.engines import ENGINES, EngineName, names, refusal, serving
from runners.jobspec.serve import EngineOptions, PhaseSplit
from runners.shared.engine_commands import Phase

# The engines of a prefill/decode split, and the GPUs of each.


VISIBLE = "CUDA_VISIBLE_DEVICES"


class SplitEngine(NamedTuple):
    """One engine of several: its phase, its number from 1, and its GPU names."""

    phase: Phase
    number: int
    devices: tuple[str, ...]


def split_engines(
    split: PhaseSplit, options: EngineOptions, env: Mapping[str, str] = os.environ
) -> list[SplitEngine]:
    """Return the engines of a split, prefill first, each with its own GPUs.

    Raises:
        BadInputError: the job has fewer GPUs than the engines need.
    """
    names, each = _devices(options.num_devices, env), options.devices_each
    phases: list[tuple[Phase, int]] = [
        *(("prefill", number) for number in range(1, split.prefill_engines + 1)),
        *(("decode", number) for number in range(1, split.decode_engines + 1)),
    ]
    return [
        SplitEngine(phase, number, tuple(names[at * each : (at + 1) * each]))
        for at, (phase, number) in enumerate(phases)
    ]


def _devices(count: int, env: Mapping[str, str]) -> list[str]:
    """Return the job's GPU names; indices if ``CUDA_VISIBLE_DEVICES`` is not set."""
    if VISIBLE not in env:
        return [str(index) for index in range(count)]
    names = [part.strip() for part in env[VISIBLE].split(",") if part.strip()]
    if len(names) < count:
        msg = (
            f"engine_options.split: its engines take {count} GPUs, and the job was given "
            f"{len(names)}; give it {count}, or fewer engines or smaller parallel sizes"
        )
        raise BadInputError(msg)
    return names


# Transfer one small KV cache between every pair of engines before serving begins.
#
# The first transfer is the slowest, because the two engines exchange their memory addresses, and
# vLLM gives up on that after 5 s. A broken transfer is reported before a client needs it.


TRIES = 3
TRIAL_SECONDS = 120.0  # kernels may be compiled for the first request
PATH = "/v1/completions"
TOKENS = [1, 2, 3]  # token ids that every model has


def connect_kv_transfer(engines: Engines, model: str) -> None:
    """Make each decode engine fetch a prompt from each prefill engine.

    Raises:
        EngineProcessError: a transfer fails, with the engine's message; all are killed.
    """
    try:
        for reader in engines.prefill:
            for writer in engines.decode:
                _try(reader, writer, {"model": model, "prompt": TOKENS, "max_tokens": 2})
    except EngineProcessError:
        engines.kill()
        raise


def _try(reader: ServerProcess, writer: ServerProcess, document: Document) -> None:
    error_text = ""
    for _ in range(TRIES):
        try:
            prefill = _post(reader, prefill_body(document))
            answer = _post(writer, document | {PARAMS: prefill.json().get(PARAMS)})
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            error_text = repr(error)
            continue
        if prefill.is_success and answer.is_success:
            return
        error_text = (answer if prefill.is_success else prefill).text
    msg = f"{writer.title} does not fetch what {reader.title} read: {error_text[:300]}"
    raise EngineProcessError(msg)


def _post(engine: ServerProcess, document: Document) -> httpx.Response:
    return httpx.post(
        f"{engine.address}{PATH}",
        json=document,
        headers=engine.headers,
        timeout=TRIAL_SECONDS,
        trust_env=False,
    )


ADAPTER_FILES = (CONFIG_NAME, WEIGHTS_NAME)


class ModelPaths(NamedTuple):
    """The paths of a spec's model, adapters and draft, as the engine finds them."""

    model: Path
    config: dict[str, Any]
    adapters: dict[str, Path]  # by the name that clients request
    draft: Path | None = None


def checked(spec: ServeSpec) -> ServeSpec:
    """Return a spec whose ``engine_args`` the installed release of its engine takes.

    Raises:
        BadInputError: an argument is refused; the error names it and the way out.
    """
    if spec.engine_args:
        try:
            check_engine_args(spec.engine, spec.engine_args, release=_release(spec.engine))
        except EngineArgsError as error:
            raise BadInputError(f"engine_args: {error}") from error
    return spec


def _release(engine: EngineName) -> str | None:
    """Return the installed release; None: there is none, which the engine says itself."""
    for package in ENGINES[engine].packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def calls_of(spec: ServeSpec, placed: ModelPaths) -> CallParsing:
    """Return how the engine reads the model's tool calls and reasoning."""
    model_type = str(placed.config.get("model_type", ""))
    return call_parsing(spec.engine, spec.engine_args, model_type, template_text(placed.model))


class EngineAdapter(ABC):
    """An engine with its own OpenAI API."""

    title: str
    names: MetricNames

    @abstractmethod
    def command(self, spec: ServeSpec, placed: ModelPaths, listen: ListenAddress) -> Command:
        """Return the start command.

        Raises:
            BadInputError: the engine does not support this; the error names the field.
        """

    def part_command(
        self, spec: ServeSpec, placed: ModelPaths, listen: ListenAddress, part: SplitEngine
    ) -> Command:
        """Return the start command of one engine of a prefill/decode split.

        Raises:
            BadInputError: the engine does not support the split or these settings.
        """
        del placed, listen, part
        raise BadInputError(refusal("engine_options.split", spec.engine, "disaggregation"))

    def served_name(self, spec: ServeSpec, name: str) -> str:  # noqa: ARG002 - others have to know it
        """Return the engine's name for the model or adapter that clients request by ``name``."""
        return name


class RelayBackend:
    """Starts and restarts the engine of an endpoint."""

    def __init__(
        self, engine_adapter: EngineAdapter, gpu_peak: Callable[[], tuple[int, str] | None]
    ) -> None:
        self._engine_adapter = engine_adapter
        self._gpu_peak = gpu_peak
        self._placed: ModelPaths | None = None
        self._lives: list[Engines] = []

    def load(self, job: Job, spec: ServeSpec, figures: EndpointMetrics) -> RelayServingModel:
        """Start the engine and return the model ready for requests.

        Raises:
            BadInputError: the model cannot be served, or not with these settings.
            MissingModelError: a folder is missing or incomplete.
        """
        engine_adapter, placed = self._engine_adapter, self._placed or model_paths(job, spec)
        self._placed = placed
        longest_request(placed.config.get("max_position_embeddings"), spec)
        engines = self._started(spec, placed)
        self._lives.append(engines)
        length = _length(engines.decode[0]) or spec.max_length or USUAL_TOKENS
        limits = Limits(spec.max_concurrency, spec.queue_limit, length, frozenset())
        # With a split no engine sees a request from its start to its first token.
        names = (
            engine_adapter.names._replace(ttft="") if engines.is_split else engine_adapter.names
        )
        scraper = Scraper(names, figures, (engines.page() or "") if engines.is_split else "")
        writer = RelayEngine(engines, limits, scraper, job.stop_requested.is_set)
        called = partial(engine_adapter.served_name, spec)
        calls = calls_of(spec, placed)
        return RelayServingModel(
            writer,
            figures,
            spec.engine,
            called,
            calls.refusal,
            template=template_text(placed.model),
            ranking_refusal=ranking_refusal(spec.engine, engines.decode[0]),
        )

    def _started(self, spec: ServeSpec, placed: ModelPaths) -> Engines:
        engine_adapter, options = self._engine_adapter, spec.engine_options
        if options is None or options.split is None:
            server = start_engine(
                engine_adapter.title, lambda listen: engine_adapter.command(spec, placed, listen)
            )
            return Engines((server,))
        starts: list[tuple[str, Starting]] = [
            (
                f"{engine_adapter.title}'s {part.phase} engine {part.number}",
                partial(engine_adapter.part_command, spec, placed, part=part),
            )
            for part in split_engines(options.split, options)
        ]
        servers, readers = start_engines(starts), options.split.prefill_engines
        engines = Engines(servers[readers:], servers[:readers])
        connect_kv_transfer(engines, engine_adapter.served_name(spec, spec.served_name))
        return engines

    def peak_usage(self) -> PeakUsage:
        """Return the peak of the GPUs if there are any, else of the engine's processes."""
        if gpu_peak := self._gpu_peak():
            return PeakUsage(*gpu_peak, "cuda")
        peak = max((life.peak_bytes() for life in self._lives), default=0)
        title = self._engine_adapter.title
        return PeakUsage(peak, f"peak resident memory of {title}'s processes, summed", "cpu")

    def command_line(self) -> str:
        """Return the command line of each engine that runs; keys are in their environment."""
        return "\n".join(shlex.join(each.argv) for each in self._lives[-1].all)

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return the name of the engine."""
        return {"engine": spec.engine}


def model_paths(job: Job, spec: ServeSpec) -> ModelPaths:
    """Return a spec's files as private folders of opened files that a child process can read.

    Raises:
        BadInputError: the model has no folder, a file is not a regular file, or a draft or adapter
            names code beside a model whose own code runs.
        MissingModelError: a folder is missing or incomplete.
    """
    if not isinstance(spec.model, FolderModel | ArtefactModel):
        msg = (
            f"model: {spec.engine} serves a folder with safetensors, and a {spec.model.source} "
            "model has none; choose a trained model, or the engine "
            f"{names(serving('random'), 'or')}"
        )
        raise BadInputError(msg)
    model = opened_model(spec.model, job.host_dir, owner=os.getpid())
    adapters = {
        each.name: opened_model(each.adapter, job.host_dir, ADAPTER_FILES, os.getpid())
        for each in spec.adapters
    }
    draft_spec = spec.engine_options.draft if spec.engine_options else None
    draft = opened_model(draft_spec.model, job.host_dir, owner=os.getpid()) if draft_spec else None
    if runs_code(model):
        for name, folder in adapters.items():
            check_no_code(f"adapters: {name}", folder)
        if draft and not runs_code(draft):
            check_no_code("engine_options.draft", draft)
        fill_modules(model)
    return ModelPaths(model, read_config(model / "config.json"), adapters, draft)


def _length(process: ServerProcess) -> int | None:
    response = process.get(MODELS)
    cards = response.json().get("data") if response is not None and response.is_success else None
    return cards[0].get("max_model_len") if cards else None


def ranking_refusal(name: EngineName, process: ServerProcess) -> str:
    """Return why an engine ranks no documents with its model; "": it does.

    vLLM has the address only for a model that it pools, which then writes no text (0.33.0,
    ``vllm/entrypoints/pooling/factories.py``); a GET is refused there by another status.
    """
    engine = ENGINES[name]
    if not engine.ranks_documents:
        return unranked(engine)
    response = process.get(RERANK)
    if response is None or response.status_code == HTTPStatus.NOT_FOUND:
        return (
            f"{engine.title} ranks no documents with this model as it runs; serve one that it "
            "pools, with engine_args: --runner pooling"
        )
    return ""


# The endpoint job of an engine with its own OpenAI API.


def prepare() -> None:
    """Do nothing: the model is in the child process, not in this one."""


def serve_with(engine_adapter: EngineAdapter) -> Callable[[Job], None]:
    """Return the job function of an endpoint with this engine."""

    def work(job: Job) -> None:
        peak = GpuPeak(visible_sample())
        with job_telemetry(job, lambda: peak.sample):
            serve(job, RelayBackend(engine_adapter, peak.read))

    return work

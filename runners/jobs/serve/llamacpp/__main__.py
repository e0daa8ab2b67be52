"""One endpoint of llama.cpp: its GGUF file, tokenisation and limits.

``python -m runners.jobs.serve.llamacpp ATTEMPT_DIR`` starts it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from runners.jobs.adapter_config import CONFIG_NAME, WEIGHTS_NAME
from runners.jobs.chat_template import TemplateRefusedError, num_repeated_bos
from runners.jobs.model_files import (
    check_gguf,
    gguf_files,
    model_roots,
    opened_model,
    read_config,
)
from runners.jobs.runtime import (
    BadInputError,
    Job,
    MissingModelError,
    job_telemetry,
    no_gpus,
    num_threads,
    run_job,
)
from runners.jobs.serve.constraints import Constraint
from runners.jobs.serve.contract import (
    GenerationRequest,
    Limits,
    Turn,
    check_room,
    longest_request,
)
from runners.jobs.serve.endpoint import PeakUsage, serve
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.llamacpp.writer import (
    Answer,
    EngineProcess,
    EngineSettings,
    LlamaEngine,
    write_adapter,
)
from runners.jobs.serve.openai_requests import (
    RequestError,
    checked_token_ids,
    retry_after,
    unsupported,
)
from runners.jobs.serve.relayed.backend import checked
from runners.jobspec import ArtefactModel, FolderModel, ModelRef, ServeSpec
from runners.shared.engine_commands import EngineFiles, command_line, llamacpp_arguments

TOKENS_SECONDS = 60.0  # tokenisation that takes longer counts as a hung engine
Document = dict[str, Any]


def work(job: Job) -> None:
    """Run one endpoint attempt."""
    with job_telemetry(job, no_gpus):
        serve(job, LlamaBackend())


class LlamaServingModel:
    """A loaded GGUF file; llama.cpp generates and tokenises."""

    def __init__(
        self, engine: LlamaEngine, vocabulary: int, *, has_template: bool, template: str = ""
    ) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.template = template
        self._has_template = has_template
        self._bos: int | None = None  # the token that the model's file adds to a text

    async def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's token ids; ids sent by the client are validated.

        Raises:
            RequestError: a token id is outside the vocabulary, or the engine is down.
        """
        if isinstance(prompt, str):
            return await self._tokens(prompt, is_plain=True)
        return checked_token_ids(prompt, self.vocabulary)

    async def chat_ids(
        self, messages: Sequence[Turn], tools: Sequence[Document] | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, by the chat template or as plain lines.

        Raises:
            TemplateRefusedError: the chat template rejects these messages.
        """
        if not self._has_template:
            lines = [f"{each['role']}: {each['content']}\n" for each in messages]
            return await self._tokens("".join([*lines, "assistant:"]), is_plain=True)
        asked = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        rendered = await self._post_json("/apply-template", asked)
        return await self._tokens(_prompt_of(rendered), is_plain=False)

    async def _tokens(self, text: str, *, is_plain: bool) -> list[int]:
        ids = await self._tokenized(text, adds_special=is_plain)
        if not is_plain or ids[:1] != ids[1:2]:
            return ids
        if self._bos is None:
            self._bos = next(iter(await self._tokenized("", adds_special=True)), -1)
        return ids[num_repeated_bos(ids, self._bos) :]

    async def _tokenized(self, text: str, *, adds_special: bool) -> list[int]:
        body = {"content": text, "add_special": adds_special, "parse_special": True}
        return [int(each) for each in (await self._post_json("/tokenize", body)).get("tokens", ())]

    async def _post_json(self, path: str, body: Document) -> Document:
        try:
            answer: Document = (await self._post(path, body)).json()
        except (httpx.HTTPError, ValueError):
            message = "The engine is not there at the moment; try again in a few seconds."
            raise RequestError(503, message, code="loading", headers=retry_after(5)) from None
        return answer

    async def _post(self, path: str, body: Document) -> httpx.Response:
        return await self.engine.client.post(path, json=body, timeout=TOKENS_SECONDS)

    def token_text(self, token: int) -> str:
        """Return the text of a token that was reported with its logprob."""
        return self.engine.texts.get(token, "")

    @property
    def constraint_refusal(self) -> str:
        """Return why no answer is held to a schema: the engine is asked for none."""
        return "llama.cpp is asked for no grammar here"

    async def check_constraint(self, _constraint: Constraint) -> None:
        """Refuse every constraint.

        Raises:
            RequestError: always.
        """
        raise unsupported("response_format", self.constraint_refusal)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Queue all answers of one HTTP request.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        return self.engine.submit(requests)


class LlamaBackend:
    """Starts and restarts llama.cpp for an endpoint."""

    def __init__(self) -> None:
        self._lives: list[EngineProcess] = []
        self._command_line = ""

    def load(self, job: Job, spec: ServeSpec, figures: EndpointMetrics) -> LlamaServingModel:
        """Start llama.cpp and return the model ready for requests.

        Raises:
            BadInputError: the model or settings cannot be served, or an adapter does not fit.
            MissingModelError: the file does not exist.
        """
        path, *others = gguf_of(job, spec.model)
        longest = _longest(path.parent, spec)
        slots = _slots(spec, longest)
        adapters = adapters_of(job, spec, path.parent)
        words = checked(spec).engine_args
        process = EngineProcess(EngineSettings(path, slots, longest, adapters, words))
        process.start()
        self._lives.append(process)
        arguments = llamacpp_arguments(
            spec,
            EngineFiles(str(path), {str(each): str(each) for each in adapters}),
            process.address.rpartition(":")[2],
            slots=str(slots),
            context_tokens=str(slots * longest),
            threads=str(num_threads()),
        )
        self._command_line = command_line(spec.engine, arguments)
        sizes = {"held_weights_bytes": float(sum(each.stat().st_size for each in (path, *others)))}
        if adapters:
            sizes["held_adapters_bytes"] = float(sum(each.stat().st_size for each in adapters))
        job.emitter.metric(sizes)
        meta = _model_meta(process)
        max_length = min(longest, int(meta["n_ctx"]) or longest)
        limits = Limits(slots, spec.queue_limit, max_length, frozenset())
        writer = LlamaEngine(process, limits, figures)
        has_template = _has_template(path.parent)
        return LlamaServingModel(
            writer,
            int(meta["n_vocab"]),
            has_template=has_template,
            template=_template(process) if has_template else "",
        )

    def peak_usage(self) -> PeakUsage:
        """Return the peak memory of the engine's process."""
        peak = max((life.peak_bytes() for life in self._lives), default=0)
        return PeakUsage(peak, "peak resident memory of llama.cpp's process", "cpu")

    def command_line(self) -> str:
        """Return what llama.cpp runs with, as the command line of its server."""
        return self._command_line

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return the name of the engine."""
        return {"engine": spec.engine}


def gguf_of(job: Job, model: ModelRef) -> list[Path]:
    """Return the GGUF file of a model folder, or all parts of it; llama.cpp opens the first.

    Raises:
        BadInputError: the model is no folder, has several GGUF models, or a file is of another
            kind.
        MissingModelError: the folder is missing, or has no GGUF file or not all of its parts.
    """
    if isinstance(model, ArtefactModel):
        folder = job.host_dir / "attempts" / model.attempt_id / "output" / model.name
    elif isinstance(model, FolderModel):
        folder = Path(model.path)
    else:
        msg = f"llama.cpp serves a GGUF file, and a {model.source} model has none; compress first"
        raise BadInputError(msg)
    files = gguf_files(folder)
    roots = [folder.resolve(), *model_roots(job.host_dir)]  # a hub's cache links to its blobs
    for path in files:
        if not any(path.resolve().is_relative_to(root) for root in roots):
            msg = f"{path} leads out of the host's model folders; put the file itself there"
            raise MissingModelError(msg)
        check_gguf(path, path.name)
    return files


def adapters_of(job: Job, spec: ServeSpec, folder: Path) -> tuple[Path, ...]:
    """Convert an endpoint's adapters to GGUF files; return their paths.

    Raises:
        BadInputError: an adapter is damaged, of another kind, or does not fit the model.
        MissingModelError: an adapter does not exist.
    """
    config, paths = _document(folder / "config.json"), []
    for number, each in enumerate(spec.adapters):
        source = opened_model(each.adapter, job.host_dir, (CONFIG_NAME, WEIGHTS_NAME))
        paths.append(job.scratch_dir() / f"adapter-{number}.gguf")
        write_adapter(each.name, source, config, paths[-1])
    return tuple(paths)


def _longest(folder: Path, spec: ServeSpec) -> int:
    """Return the longest request, prompt and answer together."""
    model_positions = _document(folder / "config.json").get("max_position_embeddings")
    return longest_request(model_positions, spec)


def _slots(spec: ServeSpec, longest: int) -> int:
    """Return the number of parallel slots, each with room for a request of maximum length."""
    tokens = spec.kv_cache_tokens or spec.max_concurrency * longest
    check_room(tokens, longest)
    return min(spec.max_concurrency, tokens // longest)


def _model_meta(process: EngineProcess) -> Document:
    """Return the model metadata from llama.cpp: vocabulary and context size."""
    meta: Document = _got(process, "/v1/models")["data"][0]["meta"]
    return meta


def _template(process: EngineProcess) -> str:
    """Return the chat template that llama.cpp uses."""
    return str(_got(process, "/props").get("chat_template") or "")


def _got(process: EngineProcess, path: str) -> Document:
    headers = {"Authorization": f"Bearer {process.key}"}
    address = f"{process.address}{path}"
    document: Document = httpx.get(address, headers=headers, timeout=60.0, trust_env=False).json()
    return document


def _prompt_of(rendered: Document) -> str:
    """Return the rendered conversation in llama.cpp's answer.

    Raises:
        TemplateRefusedError: the answer is an error.
    """
    if "prompt" not in rendered:
        error = rendered.get("error")
        words = error.get("message", error) if isinstance(error, dict) else rendered
        raise TemplateRefusedError(str(words)[:1000])
    return str(rendered["prompt"])


def _has_template(folder: Path) -> bool:
    """Return whether the model has a chat template, according to the files next to it."""
    config = folder / "tokenizer_config.json"
    is_known = (folder / "chat_template.jinja").exists() or not config.exists()
    return is_known or bool(_document(config).get("chat_template"))


def _document(path: Path) -> Document:
    """Return a config beside the GGUF file, or nothing without one."""
    return read_config(path) if path.is_file() else {}


if __name__ == "__main__":
    run_job("serve", work, prepare=lambda: None)  # without torch there are no threads to configure

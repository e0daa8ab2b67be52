"""The model of an endpoint that llama.cpp serves: its GGUF file, its tokens, its limits."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from runners.jobs.adapter_config import CONFIG_NAME, WEIGHTS_NAME
from runners.jobs.model_folders import opened_model
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.serve.contract import Limits, TemplateRefusedError, Wish
from runners.jobs.serve.endpoint import Took, serve
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.lengths import check_room, longest_request
from runners.jobs.serve.llamacpp.adapters import write_adapter
from runners.jobs.serve.llamacpp.answers import Answer
from runners.jobs.serve.llamacpp.process import EngineProcess, Shape
from runners.jobs.serve.llamacpp.writer import LlamaWriter
from runners.jobs.serve.protocol import AskedError, known_ids
from runners.jobs.telemetry import job_telemetry, no_gpus
from runners.jobspec import ArtefactModel, FolderModel, ModelRef, ServeSpec

TOKENS_SECONDS = 60.0  # turning text into tokens takes no longer, or the engine hangs
Document = dict[str, Any]


def prepare() -> None:
    """Do nothing: there is no torch here whose threads are to be set."""


def work(job: Job) -> None:
    """Run one endpoint attempt."""
    with job_telemetry(job, no_gpus):
        serve(job, LlamaBackend())


class LlamaReady:
    """A loaded GGUF file: llama.cpp writes, and turns text into tokens."""

    def __init__(self, engine: LlamaWriter, vocabulary: int, *, has_template: bool) -> None:
        self.engine = engine
        self._vocabulary = vocabulary
        self._has_template = has_template

    async def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's tokens, checked where the client sent tokens.

        Raises:
            AskedError: the model has no such token, or the engine is gone.
        """
        if isinstance(prompt, str):
            return await self._tokens(prompt, is_plain=True)
        return known_ids(prompt, self._vocabulary)

    async def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return a conversation's tokens, by the model's template or as plain lines.

        Raises:
            TemplateRefusedError: the template takes no such messages.
        """
        if not self._has_template:
            lines = [f"{each['role']}: {each['content']}\n" for each in messages]
            return await self._tokens("".join([*lines, "assistant:"]), is_plain=True)
        found = await self._ask("/apply-template", {"messages": list(messages)})
        if "prompt" not in found:
            raise TemplateRefusedError(str(found.get("error", {}).get("message", found))[:300])
        return await self._tokens(str(found["prompt"]), is_plain=False)

    async def _tokens(self, text: str, *, is_plain: bool) -> list[int]:
        body = {"content": text, "add_special": is_plain, "parse_special": True}
        return [int(each) for each in (await self._ask("/tokenize", body)).get("tokens", ())]

    async def _ask(self, path: str, body: Document) -> Document:
        try:
            found: Document = (await self._post(path, body)).json()
        except (httpx.HTTPError, ValueError):
            message = "The engine is not there at the moment; try again in a few seconds."
            raise AskedError(503, message, code="loading", retry_after_seconds=5) from None
        return found

    async def _post(self, path: str, body: Document) -> httpx.Response:
        return await self.engine.client.post(path, json=body, timeout=TOKENS_SECONDS)

    def token_text(self, token: int) -> str:
        """Return the text of a token that was told with its probability."""
        return self.engine.texts.get(token, "")

    def ask(self, wishes: Sequence[Wish]) -> list[Answer]:
        """Have the answers of one request written.

        Raises:
            QueueFullError: too many wait already.
            EngineEndedError: it has ended, by a fault or because it was told to.
        """
        return self.engine.ask(wishes)


class LlamaBackend:
    """Starts llama.cpp for an endpoint, each time anew."""

    def __init__(self) -> None:
        self._lives: list[EngineProcess] = []

    def load(self, job: Job, spec: ServeSpec, figures: Figures) -> LlamaReady:
        """Return the model, ready to be asked.

        Raises:
            BadInputError: it cannot be served, or not as asked, or an adapter does not fit.
            MissingModelError: there is no such file.
        """
        path = gguf_of(job, spec.model)
        longest = _longest(path.parent, spec)
        slots = _slots(spec, longest)
        adapters = adapters_of(job, spec, path.parent)
        process = EngineProcess(Shape(path, slots, longest, adapters))
        process.start()
        self._lives.append(process)
        held = {"held_weights_bytes": float(path.stat().st_size)}
        if adapters:
            held["held_adapters_bytes"] = float(sum(each.stat().st_size for each in adapters))
        job.emitter.metric(held)
        said = _what_it_says(process)
        found = min(longest, int(said["n_ctx"]) or longest)
        limits = Limits(slots, spec.queue_limit, found, frozenset())
        writer = LlamaWriter(process, limits, figures)
        return LlamaReady(writer, int(said["n_vocab"]), has_template=_has_template(path.parent))

    def took(self) -> Took:
        """Return the peak of the engine's process."""
        peak = max((life.peak_bytes() for life in self._lives), default=0)
        return Took(peak, "peak resident memory of llama.cpp's process", "cpu")

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return who wrote the answers."""
        return {"engine": spec.engine}


def gguf_of(job: Job, model: ModelRef) -> Path:
    """Return the one GGUF file of a model folder.

    Raises:
        BadInputError: the model is no folder, or holds several files.
        MissingModelError: the folder is not there, or holds none.
    """
    if isinstance(model, ArtefactModel):
        folder = job.host_dir / "attempts" / model.attempt_id / "output" / model.name
    elif isinstance(model, FolderModel):
        folder = Path(model.path)
    else:
        msg = f"llama.cpp serves a GGUF file, and a {model.source} model has none; compress first"
        raise BadInputError(msg)
    found = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if not found:
        msg = f"{folder} holds no .gguf file; compress the model with the method gguf first"
        raise MissingModelError(msg)
    if len(found) > 1:
        msg = f"{folder} holds {len(found)} .gguf files; keep one in it"
        raise BadInputError(msg)
    if not found[0].resolve().is_relative_to(folder.resolve()):
        msg = f"{found[0]} leads out of its folder; put the file itself there"
        raise MissingModelError(msg)
    return found[0]


def adapters_of(job: Job, spec: ServeSpec, folder: Path) -> tuple[Path, ...]:
    """Return an endpoint's adapters as files for llama.cpp, written anew for the model's folder.

    Raises:
        BadInputError: one is damaged, of another kind, or of another shape of model.
        MissingModelError: one is not there.
    """
    config, found = _document(folder / "config.json"), []
    for number, each in enumerate(spec.adapters):
        source = opened_model(each.adapter, job.host_dir, (CONFIG_NAME, WEIGHTS_NAME))
        found.append(job.scratch_dir() / f"adapter-{number}.gguf")
        write_adapter(each.name, source, config, found[-1])
    return tuple(found)


def _longest(folder: Path, spec: ServeSpec) -> int:
    """Return the most tokens of prompt and answer together."""
    known = _document(folder / "config.json").get("max_position_embeddings")
    return longest_request(known, spec)


def _slots(spec: ServeSpec, longest: int) -> int:
    """Return how many are answered together: each has room for a request at its longest."""
    tokens = spec.kv_cache_tokens or spec.max_concurrency * longest
    check_room(tokens, longest)
    return min(spec.max_concurrency, tokens // longest)


def _what_it_says(process: EngineProcess) -> Document:
    """Return what llama.cpp found in the file: its vocabulary, and how long a request may be."""
    headers = {"Authorization": f"Bearer {process.key}"}
    asked = httpx.get(
        f"{process.address}/v1/models", headers=headers, timeout=60.0, trust_env=False
    )
    found: Document = asked.json()["data"][0]["meta"]
    return found


def _has_template(folder: Path) -> bool:
    """Return whether the model has a chat template, as far as the files beside it say."""
    config = folder / "tokenizer_config.json"
    is_known = (folder / "chat_template.jinja").exists() or not config.exists()
    return is_known or bool(_document(config).get("chat_template"))


def _document(path: Path) -> Document:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

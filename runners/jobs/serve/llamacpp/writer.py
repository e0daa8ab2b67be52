"""Write a GGUF file of a model folder, and of its adapters."""

import asyncio
import json
import os
import secrets
import struct
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import httpx

from runners.jobs.adapter_config import CONFIG_NAME, WEIGHTS_NAME, place_of, refuse, scale_of
from runners.jobs.model_files import read_config
from runners.jobs.runtime import BadInputError, num_threads
from runners.jobs.serve.contract import (
    Choice,
    EngineProcessError,
    FinishReason,
    GenerationRequest,
    Limits,
    Pending,
    StreamChunk,
    TokenLogprob,
)
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.process import OwnProcess, ProcessEngine
from runners.jobspec.serve import NO_ADAPTER
from runners.shared.event_streams import read_events

# ---------------------------------------------------------------------------
# The llama.cpp engine: its process, one running answer per slot, converted to stream chunks.
# ---------------------------------------------------------------------------


# Convert llama.cpp's completion events to stream chunks.


Event = Mapping[str, Any]


def completion_body(request: GenerationRequest, *, has_adapters: bool) -> dict[str, Any]:
    """Return the body for llama.cpp's ``/completion``, with its other samplers switched off.

    An adapter that is not named has no effect; with adapters loaded, one has to be named.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "prompt": list(request.prompt),
        "n_predict": sampling.max_tokens,
        "stop": list(sampling.stops),
        "stream": True,
        "ignore_eos": sampling.ignore_eos,
        "return_tokens": True,
        "timings_per_token": True,  # has the prompt tokens that the slot had cached
        "cache_prompt": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": [list(each) for each in sampling.logit_bias],
        "n_probs": 0 if sampling.top_logprobs is None else max(1, sampling.top_logprobs),
    }
    if sampling.shown_tokens:
        body["preserved_tokens"] = list(sampling.shown_tokens)
    if has_adapters:
        is_base = request.adapter == NO_ADAPTER
        body["lora"] = [{"id": max(0, request.adapter), "scale": 0.0 if is_base else 1.0}]
    return body if sampling.seed is None else {**body, "seed": sampling.seed % 2**32}


@dataclass(eq=False)
class Answer(Pending):
    """One answer that is being received."""

    request: GenerationRequest
    is_over: bool = False
    num_written: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # token texts as llama.cpp reported them
    _at: int = 0  # offset of the next token's text

    def take(self, event: Event) -> int:
        """Deliver the chunk of an event and return the number of new tokens."""
        text = str(event.get("content", ""))
        before = self.num_written
        self.num_written = max(before, int(event.get("tokens_predicted", before)))
        reason = _reason(event) if event.get("stop") else None
        logprobs = self._token_logprobs(event.get("completion_probabilities") or ())
        self.is_over = reason is not None
        if text or logprobs or reason:
            stop_text = str(event["stopping_word"]) if event.get("stop_type") == "word" else None
            cached = event.get("timings", {}).get("cache_n")
            chunk = StreamChunk(text, logprobs, reason, self.num_written, stop_text, cached)
            self.request.deliver(chunk)
        return self.num_written - before

    def fail(self) -> None:
        """Deliver an error unless the answer is complete."""
        if not self.is_over:
            self.is_over = True
            self.request.deliver(StreamChunk(finish_reason="error"))

    def touch(self) -> float:
        """Return the seconds since the last token, and reset the clock."""
        now = time.perf_counter()
        elapsed = now - (self.last_at or self.asked_at)
        self.last_at = now
        return elapsed

    def _token_logprobs(self, probabilities: Sequence[Event]) -> list[TokenLogprob]:
        if self.request.sampling.top_logprobs is None:
            return []
        logprobs = []
        for each in probabilities:
            top = each.get("top_logprobs") or ()
            for alternative in (each, *top):
                self.texts[int(alternative["id"])] = str(alternative["token"])
            pairs = [
                (int(alternative["id"]), float(alternative["logprob"])) for alternative in top
            ]
            reported = tuple(pairs[: self.request.sampling.top_logprobs])
            logprobs.append(
                TokenLogprob(Choice(int(each["id"]), float(each["logprob"]), reported), self._at)
            )
            self._at += len(str(each["token"]))
        return logprobs


def _reason(event: Event) -> FinishReason:
    return "length" if event.get("stop_type") == "limit" else "stop"


# Start llama.cpp's process and read its listening address.


LISTENING = "LISTENING "  # prefix of the line with the address
ARGUMENTS_REFUSED = "ARGUMENTS REFUSED: "
START_SECONDS = 600.0  # a large file from a slow disk
POLL_SECONDS = 0.05
_TEMPLATE_REFUSED = "chat template parsing error"
_REFUSALS = (
    "error loading model", "failed to load model", "invalid magic", "unknown model",
    "failed to apply lora adapter", "failed to load lora adapter",
)  # fmt: skip


class EngineSettings(NamedTuple):
    """The start settings of the engine."""

    path: Path
    slots: int  # sequences in parallel
    tokens_per_slot: int
    adapters: tuple[Path, ...] = ()  # GGUF files, by index
    arguments: tuple[str, ...] = ()  # further ones, for llama.cpp's own parser


class EngineProcess(OwnProcess):
    """One life of the llama.cpp process."""

    def __init__(self, shape: EngineSettings) -> None:
        self.key = secrets.token_urlsafe(24)
        self.address = ""
        self._shape = shape
        child = [sys.executable, "-m", "runners.jobs.serve.llamacpp.child"]
        super().__init__("llama.cpp", child)

    @property
    def has_adapters(self) -> bool:
        """Return whether requests may name adapters."""
        return bool(self._shape.adapters)

    def start(self) -> None:
        """Send the settings to the process and wait until it listens.

        Raises:
            BadInputError: the process cannot load the model.
            EngineProcessError: the process exited, or did not listen in time.
        """
        settings = {
            "path": str(self._shape.path),
            "key": self.key,
            "slots": self._shape.slots,
            "context_tokens": self._shape.slots * self._shape.tokens_per_slot,
            "adapters": [str(each) for each in self._shape.adapters],
            "arguments": list(self._shape.arguments),
            "threads": num_threads(),
            "parent": os.getpid(),
        }
        with suppress(OSError):  # it has exited already; the loop below raises
            self.stdin.write(json.dumps(settings) + "\n")
            self.stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while not self.address:
            if self.has_ended:
                self._raise_start_error()
            if time.monotonic() > deadline:
                self.kill()
                raise EngineProcessError(f"llama.cpp did not listen within {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _raise_start_error(self) -> None:
        """Raise the error that explains the failed start."""
        lines = self.last_output_lines()
        if refused := [line for line in lines if line.startswith(ARGUMENTS_REFUSED)]:
            words = [line for line in lines if line.startswith("error")] or refused
            raise BadInputError(f"engine_args: llama.cpp does not take them: {words[-1][:300]}")
        if any(_TEMPLATE_REFUSED in line for line in lines):
            words = [line for line in lines if line.startswith("Error: ")]
            msg = (
                f"llama.cpp does not start with the chat template of {self._shape.path.name}: "
                f"{(words or lines)[-1][:300]}; mend chat_template in the model's folder, and "
                "compress it again"
            )
            raise BadInputError(msg)
        error_line = next((line for line in lines if any(w in line for w in _REFUSALS)), "")
        if error_line:
            message = error_line.partition(": ")[2] or error_line
            msg = f"llama.cpp does not open {self._shape.path.name}: {message[:300]}"
            raise BadInputError(msg)
        raise EngineProcessError(f"llama.cpp did not start: {self.how()}")

    def handle_line(self, line: str) -> None:
        """Read the listening address; the process prints no other line."""
        if line.startswith(LISTENING):
            self.address = line.removeprefix(LISTENING).strip()


CONNECT_SECONDS = 10.0
# One connection per request: kept-alive connections have been dropped between requests.
CONNECTIONS = httpx.Limits(max_keepalive_connections=0)
DATA = b"data: "


class LlamaEngine(ProcessEngine):
    """One life of the engine, its running answers and its queue."""

    def __init__(self, process: EngineProcess, limits: Limits, figures: EndpointMetrics) -> None:
        super().__init__(process, limits)
        self.process = process
        self.texts: dict[int, str] = {}
        self._figures = figures
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._tasks: dict[Answer, asyncio.Task[None]] = {}
        self._running: set[Answer] = set()
        self._last_token_at = 0.0  # time of the last token, or of the first running answer
        self.client = httpx.AsyncClient(
            base_url=process.address,
            headers={"Authorization": f"Bearer {process.key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=CONNECTIONS,
            trust_env=False,
        )

    @property
    def num_open(self) -> int:
        """Return the number of answers that are running or queued."""
        return len(self._tasks)

    @property
    def step_began_at(self) -> float | None:
        """Return since when running answers have had no new token."""
        return self._last_token_at if self._running else None

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Queue the answers of one request.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        self.admit(len(requests))
        answers = [Answer(request, texts=self.texts) for request in requests]
        for answer in answers:
            self._tasks[answer] = asyncio.ensure_future(self._write(answer))
        self._count(0)
        return answers

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Cancel answers of disconnected clients; llama.cpp frees the slot with the connection."""
        for answer, task in list(self._tasks.items()):
            if answer in sequences:
                answer.is_cancelled = True
                task.cancel()

    def run(self) -> None:
        """Wait until the engine exits.

        Raises:
            EngineProcessError: the process exited without having been closed.
        """
        self.process.wait()
        self.ended()

    # One answer

    async def _write(self, answer: Answer) -> None:
        try:
            async with self._slots:
                if not self._running:
                    self._last_token_at = time.perf_counter()
                self._running.add(answer)
                self._count(0)
                async for event in self._events(answer.request):
                    self._take(answer, event)
        except (httpx.HTTPError, ValueError, KeyError):  # the engine is down or sends garbage
            pass
        finally:
            answer.fail()
            self._leave(answer)

    async def _events(self, request: GenerationRequest) -> AsyncIterator[Event]:
        body = completion_body(request, has_adapters=self.process.has_adapters)
        async with self.client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            async for event in read_events(response.aiter_bytes()):
                if event.startswith(DATA):
                    yield json.loads(event.removeprefix(DATA))

    def _take(self, answer: Answer, event: Event) -> None:
        is_first = not answer.num_written
        tokens = answer.take(event)
        if tokens:
            elapsed = answer.touch()
            if is_first:
                self._figures.first_token(elapsed, len(answer.request.prompt))
            for _ in range(tokens - is_first):
                self._figures.later_token(elapsed / tokens)
            self._count(tokens)
        if answer.is_over:
            self._figures.count("requests")

    def _leave(self, answer: Answer) -> None:
        if answer.is_cancelled:
            self._figures.count("cancelled")
        self._running.discard(answer)
        with self.changed:
            self._tasks.pop(answer, None)
            self.changed.notify_all()
        self._count(0)

    def _count(self, tokens: int) -> None:
        now = time.perf_counter()
        cached_tokens = sum(len(each.request.prompt) + each.num_written for each in self._running)
        gauges = {
            "running_requests": float(len(self._running)),
            "waiting_requests": float(len(self._tasks) - len(self._running)),
            "kv_cache_used_ratio": cached_tokens
            / (self.limits.max_concurrency * self.limits.max_length),
        }
        self._figures.step(now - self._last_token_at if tokens else 0.0, tokens, gauges)
        if tokens:
            self._last_token_at = now


# ---------------------------------------------------------------------------
# Convert a LoRA adapter in peft's format to a GGUF file for llama.cpp.
#
# Standard library only: the engine's environment has neither torch nor numpy. Numbers keep their
# stored width. peft's scale is written as the file's alpha, because llama.cpp computes alpha /
# rank; rows of q_proj and k_proj are permuted as in the base model.
#
# Sources: safetensors (the project's README: eight bytes of length, a JSON header, the data); GGUF
# (docs/gguf.md of ggml, version 3); llama.cpp, src/llama-adapter.cpp (names, alpha).
# ---------------------------------------------------------------------------


MAX_HEADER_BYTES = 100_000_000  # as in safetensors itself
LENGTH_BYTES = 8  # the file begins with the length of its header
ALIGNMENT = 32
FLOAT_32, TEXT = 6, 8  # GGUF's metadata type numbers
VERSION = 3
ARCHITECTURE = "llama"
READ_AS_LLAMA = ("llama", "mistral")  # as in our own GGUF writer
NAMES = {  # a linear layer's name within its decoder layer -> llama.cpp's
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
LAYERS = "model.layers."
Entry = Mapping[str, Any]  # of the header: dtype, shape, data_offsets


class NumberFormat(NamedTuple):
    """A number format: GGUF's type number, its size, and its exponent bits."""

    kind: int
    code: str  # array code of an unsigned integer of the same width
    exponent: int

    @property
    def bytes(self) -> int:
        """Return the bytes per number."""
        return array(self.code).itemsize


WIDTHS = {
    "F32": NumberFormat(0, "I", 0x7F80_0000),
    "F16": NumberFormat(1, "H", 0x7C00),
    "BF16": NumberFormat(30, "H", 0x7F80),
}


class StoredMatrix(NamedTuple):
    """One matrix in its stored, row-major form."""

    name: str
    width: NumberFormat
    shape: tuple[int, int]
    data: bytes


def write_adapter(name: str, folder: Path, config: Mapping[str, Any], path: Path) -> None:
    """Write a folder's adapter for the model with this config.

    Raises:
        BadInputError: the adapter is of another kind, damaged, or does not fit the model.
    """
    if (kind := config.get("model_type")) not in READ_AS_LLAMA:
        msg = (
            f"adapters on a model of type {str(kind)[:40]!r} are not written for llama.cpp, only "
            f"on {' and '.join(READ_AS_LLAMA)}; choose the engine slipway, or merge them"
        )
        raise BadInputError(msg)
    adapter_config = read_config(folder / CONFIG_NAME)
    scale, rank = scale_of(name, adapter_config), int(adapter_config["r"])
    matrices = list(_matrices(name, folder / WEIGHTS_NAME, config))
    if not matrices:
        refuse(name, "holds no matrix")
    _check_pairs(name, rank, matrices)
    with path.open("wb") as file:
        _write(file, scale * rank, matrices)


def _matrices(name: str, path: Path, config: Mapping[str, Any]) -> Iterator[StoredMatrix]:
    with path.open("rb") as file:
        header, begin = _header(name, file, path.stat().st_size)
        for key, entry in sorted(header.items()):
            module, side = place_of(name, key)
            layer, _, linear = module.removeprefix(LAYERS).partition(".")
            if not module.startswith(LAYERS) or not layer.isdecimal() or linear not in NAMES:
                refuse(name, f"changes {module[:120]}, which is not put on a GGUF file here")
            gguf_name = f"blk.{int(layer)}.{NAMES[linear]}"
            matrix = _read(name, key, file, begin, entry)
            if side and (heads := HEADS.get(gguf_name.partition("blk.")[2].partition(".")[2])):
                matrix = _permuted(name, matrix, int(config.get(heads) or 0))
            yield matrix._replace(name=f"{gguf_name}.weight.lora_{'ab'[side]}")


def _header(name: str, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its data."""
    start = file.read(LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        refuse(name, "is truncated or not a safetensors file (its header); copy it again")
    try:
        header = json.loads(file.read(length))
    except ValueError:
        refuse(name, "is not a safetensors file (its header is not valid JSON); copy it again")
    if not isinstance(header, dict):
        refuse(name, "is not a safetensors file (its header is not a JSON object); copy it again")
    header.pop("__metadata__", None)
    return header, LENGTH_BYTES + length


def _read(name: str, key: str, file: BinaryIO, begin: int, entry: Entry) -> StoredMatrix:
    """Return a matrix after checking its header and values."""
    try:
        width = WIDTHS[entry["dtype"]]
        rows, columns = map(int, entry["shape"])
        first, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        refuse(name, f"says nothing sound of {key[:120]}; it is of two sizes and 16 or 32 bits")
    count = rows * columns * width.bytes
    if min(rows, columns) < 1 or first < 0 or end - first != count:
        refuse(name, f"is damaged: {key[:120]} has {end - first} bytes of {count}; copy it again")
    file.seek(begin + first)
    data = file.read(count)
    if len(data) != count:
        refuse(name, f"is cut off within {key[:120]}; copy it again")
    bits = width.exponent
    if any(each & bits == bits for each in array(width.code, data)):
        refuse(name, f"has NaN or infinity in {key[:120]}; train it again")
    return StoredMatrix(key, width, (rows, columns), data)


def _permuted(name: str, matrix: StoredMatrix, heads: int) -> StoredMatrix:
    """Return the rows in llama.cpp's order: the halves of each head interleaved."""
    rows, columns = matrix.shape
    if heads < 1 or rows % (2 * heads):
        refuse(name, f"has {rows} rows in {matrix.name[:120]}, for a base of {heads} heads")
    half, size = rows // heads // 2, columns * matrix.width.bytes
    order = (
        (head * 2 + part) * half + at
        for head in range(heads)
        for at in range(half)
        for part in range(2)
    )
    data = b"".join(matrix.data[each * size : (each + 1) * size] for each in order)
    return matrix._replace(data=data)


def _check_pairs(name: str, rank: int, matrices: Sequence[StoredMatrix]) -> None:
    """Check that every matrix has its counterpart, and the stated rank."""
    names = {each.name for each in matrices}
    for each in matrices:
        stem, side = each.name[:-1], each.name[-1]
        if stem + "ba"[side == "b"] not in names:
            refuse(name, f"holds one of two matrices of {stem.removesuffix('.weight.lora_')}")
        if each.shape[side == "b"] != rank:
            refuse(name, f"has r {rank}, and {each.name} is {list(each.shape)}")


def _write(file: BinaryIO, alpha: float, matrices: Sequence[StoredMatrix]) -> None:
    """Write the metadata, the tensor table, and the data, each aligned to 32 bytes."""
    texts = {"general.type": "adapter", "general.architecture": ARCHITECTURE}
    texts["adapter.type"] = "lora"
    file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(matrices), len(texts) + 1))
    file.writelines(
        _text(key) + struct.pack("<I", TEXT) + _text(text) for key, text in texts.items()
    )
    file.write(_text("adapter.lora.alpha") + struct.pack("<If", FLOAT_32, alpha))
    offset = 0
    for each in matrices:
        rows, columns = each.shape  # GGUF names the inner dimension first
        file.write(
            _text(each.name) + struct.pack("<IQQIQ", 2, columns, rows, each.width.kind, offset)
        )
        offset += len(each.data) + _padding(len(each.data))
    file.write(bytes(_padding(file.tell())))
    for each in matrices:
        file.write(each.data + bytes(_padding(len(each.data))))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padding(count: int) -> int:
    return -count % ALIGNMENT

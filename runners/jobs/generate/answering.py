"""Prompts in, answers out: files of prompts, batches of answers, output files."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
import hashlib
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.datasets.conversations import NOTHING, ChatSample, DataError, Turn
from runners.datasets.preferences import Passage
from runners.datasets.records import LabelledSample, Sample, TextSample, left_out_words
from runners.datasets.text import (
    LongLineError,
    TextError,
    read_json,
    read_lines,
    read_text,
    storable,
)
from runners.jobs.adapters import MixedAdapters
from runners.jobs.chat_template import (
    TemplateRefusedError,
    num_repeated_bos,
    rendered_chat,
    repeated_bos_words,
)
from runners.jobs.data_files import open_source
from runners.jobs.evaluation import held_out_ids
from runners.jobs.events import Stages
from runners.jobs.generate.batching import (
    POLICIES,
    STEPS,
    Batch,
    CompiledStep,
    CostModel,
    DraftSource,
    FinishedAnswer,
    PagePlan,
    decode_speculatively,
    measured_cost,
    padding_ratio,
    run_continuous,
    warm_up,
)
from runners.jobs.generate.placement import PlacedModel
from runners.jobs.generate.stage_model import Chain
from runners.jobs.generate.static import (
    Answer,
    AnswerLimits,
    BatchRun,
    BatchSetup,
    Ids,
    StopRequestedError,
    run_batch,
)
from runners.jobs.inputs import UNCHECKED
from runners.jobs.loading import LoadedModel
from runners.jobs.memory import Peak, PeakMeter
from runners.jobs.model_files import model_roots, open_file
from runners.jobs.runtime import BadInputError, Job, MissingModelError, publish_folder
from runners.jobspec import (
    DemoPrompts,
    DownloadedData,
    FilePrompts,
    GenerateSpec,
    HubData,
    InlinePrompts,
    Prompts,
)
from runners.jobspec.serve import NO_ADAPTER

# ---------------------------------------------------------------------------
# The journal of answered prompts, the output artefact and a generation's metrics.
# ---------------------------------------------------------------------------


JOURNAL = "outputs.jsonl"
ARTEFACT = "outputs"
Record = dict[str, Any]


class Journal:
    """Answers by prompt position, with what they depend on.

    ``digest`` identifies prompts and settings, ``model`` the weights' folder (empty without one).
    """

    def __init__(self, path: Path, digest: str, model: str = "") -> None:
        self.path = path
        self.digest = digest
        self.model = model
        self.records: dict[int, Record] = {}
        self._num_others = self._num_unchecked = 0
        if not self._load(path):
            path.write_text(self._head)

    @property
    def _head(self) -> str:
        return _line({"digest": self.digest} | ({"model": self.model} if self.model else {}))

    def take_over(self, paths: Iterable[Path]) -> None:
        """Copy the answers of earlier attempts that depend on the same."""
        for path in paths:
            earlier = self._same(path) or {}
            self.add({at: each for at, each in earlier.items() if at not in self.records})

    def add(self, records: Mapping[int, Record]) -> None:
        """Append answers and sync them to disk."""
        with self.path.open("a") as file:
            file.writelines(_line({"at": at, **record}) for at, record in records.items())
            file.flush()
            os.fsync(file.fileno())
        self.records |= records

    def remark(self) -> str:
        """Return the sentences about earlier answers that are not used, or not known to fit."""
        others = unchecked = ""
        if self._num_others:
            others = (
                f"{self._num_others} earlier answers are to other prompts, or of other settings "
                "or weights: they are not used, and their prompts are answered again"
            )
        if self._num_unchecked:
            unchecked = f"{self._num_unchecked} earlier answers are used; {UNCHECKED}"
        return "; ".join(filter(None, (others, unchecked)))

    def _load(self, path: Path) -> bool:
        records = self._same(path)
        if records is None:
            return False
        lines = [_line({"at": at, **record}) for at, record in records.items()]
        path.write_text("".join([self._head, *lines]))  # drops a partial line
        self.records = records
        return True

    def _same(self, path: Path) -> dict[int, Record] | None:
        """Return a journal's records; None if it is missing, or depends on something else."""
        found = read_journal(path)
        if found is None:
            return None
        if found.digest != self.digest or found.model not in {None, self.model}:
            self._num_others += len(found.records)
            return None
        self._num_unchecked += len(found.records) if found.model is None and self.model else 0
        return found.records


class StoredJournal(NamedTuple):
    """The complete records of a journal file; an older one says nothing of the model."""

    digest: str
    model: str | None
    records: dict[int, Record]


def read_journal(path: Path) -> StoredJournal | None:
    """Return the content of a journal; None if it is missing or none."""
    try:
        head, *lines = path.read_bytes().split(b"\n")
        document = json.loads(head)
        digest, model = document["digest"], document.get("model")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    records = [json.loads(line) for line in lines[:-1]]  # the last one is empty or partial
    return StoredJournal(digest, model, {int(record.pop("at")): record for record in records})


def earlier_journals(job: Job) -> list[Path]:
    """Return the journals of other attempts of this job on this host."""
    specs = sorted((job.host_dir / "attempts").glob("*/spec.json"))
    return [
        spec.parent / "checkpoint" / JOURNAL
        for spec in specs
        if spec.parent != job.attempt_dir and _job_of(spec) == job.request.job_id
    ]


def publish_outputs(job: Job, records: Mapping[int, Record], facts: Mapping[str, Any]) -> None:
    """Write the answers in prompt order to ``output/outputs``, and announce them."""

    def write(building: Path) -> None:
        with (building / JOURNAL).open("w") as file:
            file.writelines(_line(records[at]) for at in sorted(records))

    publish_folder(job, ARTEFACT, "report", write, facts)


def _job_of(spec: Path) -> object:
    try:
        document = json.loads(spec.read_text())
    except (OSError, ValueError):
        return None
    return document.get("job_id") if isinstance(document, dict) else None


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


# The metrics of a generation, under the names that the planner predicts.


@dataclass
class Figures:
    """Sums over what this process generated; earlier attempts are not timed."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    wall_seconds: float = 0.0
    first_seconds: list[float] = field(default_factory=list)  # per prompt
    gap_seconds: list[float] = field(default_factory=list)  # mean time between tokens, per prompt
    prefill_seconds: float = 0.0  # of whole batches, if they have a separate prefill
    decode_seconds: float = 0.0
    decoded_tokens: int = 0
    kv_cache_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add_one(self, prompt: int, output: int, first: float, later: float) -> None:
        """Add one prompt: its tokens, and the seconds to the first token and of the later ones."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.first_seconds.append(first)
        if output > 1:
            self.gap_seconds.append(later / (output - 1))

    def add_batch(self, run: BatchRun, prompt_tokens: int) -> dict[str, float]:
        """Add one batch and return the speeds so far, by result name."""
        outputs = sum(len(each.ids) for each in run.answers)
        decoded = max(0, outputs - len(run.answers))
        seconds = run.prefill_seconds + run.decode_seconds
        self.prompt_tokens += prompt_tokens
        self.output_tokens += outputs
        self.wall_seconds += seconds
        self.first_seconds += [run.prefill_seconds] * len(run.answers)
        self.prefill_seconds += run.prefill_seconds
        self.decode_seconds += run.decode_seconds
        self.decoded_tokens += decoded
        self.kv_cache_bytes = max(self.kv_cache_bytes, run.kv_cache_bytes)
        if run.num_steps:
            self.gap_seconds += [run.decode_seconds / run.num_steps] * len(run.answers)
        return {name: value for name, value in self._speeds().items() if "per_second" in name}

    @property
    def tokens_per_second(self) -> float:
        """Return the output tokens per second so far."""
        return self.output_tokens / self.wall_seconds if self.wall_seconds else 0.0

    def result_metrics(self, peak: Peak, parameter_bytes: int) -> dict[str, float]:
        """Return the figures of the job's result."""
        figures = {
            "peak_memory_bytes": float(peak.bytes),
            "runtime_memory_bytes": float(peak.start_bytes),
            "parameter_bytes": float(parameter_bytes),
            "prompt_tokens": float(self.prompt_tokens),
            "output_tokens": float(self.output_tokens),
        }
        if self.kv_cache_bytes:
            figures["kv_cache_bytes"] = float(self.kv_cache_bytes)
        return figures | self._speeds() | self._speculation_figures()

    def _speeds(self) -> dict[str, float]:
        if not self.first_seconds:
            return {}
        speeds = {
            "tokens_per_second": self.tokens_per_second,
            "ttft_seconds": statistics.median(self.first_seconds),
        }
        if self.gap_seconds:
            speeds["tpot_seconds"] = statistics.median(self.gap_seconds)
        if self.prefill_seconds:
            speeds["prefill_tokens_per_second"] = self.prompt_tokens / self.prefill_seconds
        if self.decode_seconds and self.decoded_tokens:
            speeds["decode_tokens_per_second"] = self.decoded_tokens / self.decode_seconds
        return speeds

    def _speculation_figures(self) -> dict[str, float]:
        if not self.drafted_tokens:
            return {}
        return {
            "drafted_tokens": float(self.drafted_tokens),
            "accepted_tokens": float(self.accepted_tokens),
            "acceptance_ratio": self.accepted_tokens / self.drafted_tokens,
        }


def notes_of(peak: Peak, num_before: int) -> dict[str, str]:
    """Return notes on how the figures were measured."""
    notes = {
        "peak_memory_bytes": peak.how,
        "runtime_memory_bytes": "held before the model was loaded: interpreter and libraries",
        "tokens_per_second": "written tokens over the seconds of all prompts, prefill included",
        "ttft_seconds": "median over prompts, from when each was begun with",
        "tpot_seconds": "median over prompts of the mean between two of its tokens",
    }
    if num_before:
        notes["resumed"] = f"{num_before} prompts were answered before; they are not timed"
    return notes


# ---------------------------------------------------------------------------
# The prompts of a generation: from the job, from a host file, or from the host's own text.
# ---------------------------------------------------------------------------


MAX_PROMPTS = 100_000
MAX_LINE_BYTES = 1024**2
UNSAID = ""
# Values in a model's generation_config.json that would change an answer, and those that do not.
SAMPLING_SETTINGS = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "num_beams",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "guidance_scale", "stop_strings",
)  # fmt: skip
NEUTRAL: tuple[object, ...] = (None, False, 0, 1, [], {})
READ_FIELDS = frozenset({"prompt", "id", "adapter"})
UNSUPPORTED_FIELDS = frozenset({  # of a line; any other field is counted and left out
    "system", "messages", "history", "tools", "tool_choice", "response_format", "images", "image",
    "audio", "video", "max_tokens", "max_completion_tokens", "max_new_tokens", "output_tokens",
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "seed",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "model",
    "chat_template", "suffix",
})  # fmt: skip
MAX_ID_CHARACTERS = 200


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt; ``text`` is None if the model has no tokenizer."""

    name: str
    text: str | None
    ids: tuple[int, ...]
    adapter: int = NO_ADAPTER  # index of the adapter


class TextPrompt(NamedTuple):
    """A prompt of the job or a file; ``adapter``: a name, None for the base, or unspecified.

    ``turns``: of a conversation, which the model's chat template writes.
    """

    name: str
    text: str
    adapter: str | None = UNSAID
    unread: tuple[str, ...] = ()  # names of the line's other fields
    turns: tuple[Turn, ...] = ()


def read_texts(job: Job, source: Prompts) -> list[TextPrompt]:
    """Return the prompts of the job, a file or a data set; none for demo prompts.

    Raises:
        MissingModelError: the file is not in the host's model folders, or was not downloaded.
        BadInputError: the file is empty, or one of its lines is not a valid prompt.
    """
    if isinstance(source, InlinePrompts):
        return [TextPrompt(str(number), text) for number, text in enumerate(source.texts, 1)]
    if isinstance(source, FilePrompts):
        return _file_texts(source.path, model_roots(job.host_dir))
    if isinstance(source, HubData):  # runners.jobs.fetch puts its files in its place
        raise MissingModelError(f"the data set {source.name} was not downloaded")
    return _data_texts(job, source) if isinstance(source, DownloadedData) else []


def remarks_of(texts: Sequence[TextPrompt], model: PreTrainedModel) -> dict[str, str]:
    """Return notes on what of a prompts file and of the model's own settings is not applied."""
    notes = {}
    if unread := Counter(name for each in texts for name in each.unread):
        notes["prompts_file"] = left_out_words(unread)
    config = getattr(model, "generation_config", None)
    values = {name: getattr(config, name, None) for name in SAMPLING_SETTINGS}
    settings = [
        f"{name} {value}"
        for name, value in values.items()
        if value is True or value not in NEUTRAL  # True is 1
    ]
    if settings:
        notes["generation_config"] = (
            f"not applied, as answers are greedy: {', '.join(settings)[:400]}"
        )
    return notes


def tokenise_prompts(
    job: Job,
    loaded: LoadedModel,
    source: Prompts,
    texts: Sequence[TextPrompt],
    adapters: Sequence[str] = (),
) -> list[Prompt]:
    """Return the tokenised prompts, each with its adapter's index.

    Raises:
        MissingModelError: the model has no tokenizer for texts.
        BadInputError: a text has no token, or names an unknown adapter.
    """
    if isinstance(source, DemoPrompts):
        default_adapter = _adapter_index(TextPrompt("", ""), adapters)
        return [
            replace(each, adapter=default_adapter) for each in _demo_prompts(job, loaded, source)
        ]
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        msg = (
            "the model has no tokenizer.json, so it reads no text; add it to the folder, or "
            "choose the demo prompts"
        )
        raise MissingModelError(msg)
    texts = [_written(each, tokenizer) for each in texts]
    tokenised = [(each, tuple(tokenizer(each.text)["input_ids"])) for each in texts]
    prompts = [
        Prompt(
            each.name,
            each.text,
            ids[num_repeated_bos(ids, tokenizer.bos_token_id) :],
            _adapter_index(each, adapters),
        )
        for each, ids in tokenised
    ]
    num_begun = sum(num_repeated_bos(ids, tokenizer.bos_token_id) > 0 for _, ids in tokenised)
    if words := repeated_bos_words(num_begun, "prompts", tokenizer.bos_token):
        job.emitter.log(words)
    empty = next((each.name for each in prompts if not each.ids), None)
    if empty is not None:
        raise BadInputError(f"prompt {empty} has no tokens; give it some text, or remove it")
    return prompts


def _adapter_index(prompt: TextPrompt, adapters: Sequence[str]) -> int:
    """Return the index of a prompt's adapter: its own, else the only one there is."""
    if prompt.adapter == UNSAID:
        return 0 if len(adapters) == 1 else NO_ADAPTER
    if prompt.adapter is None:
        return NO_ADAPTER
    if prompt.adapter not in adapters:
        available = f"has {', '.join(adapters)}" if adapters else "was given none"
        msg = f"prompt {prompt.name} requests adapter {prompt.adapter}, and the job {available}"
        raise BadInputError(f"{msg}; name one of the job's, or launch it with this one")
    return adapters.index(prompt.adapter)


def check_lengths(prompts: Sequence[Prompt], output_tokens: int, positions: int | None) -> None:
    """Check that prompts and answers fit the model's positions.

    Raises:
        BadInputError: a prompt is too long; the message names it and both numbers.
    """
    for each in prompts:
        if positions is not None and len(each.ids) + output_tokens > positions:
            msg = (
                f"prompt {each.name} has {len(each.ids)} tokens and {output_tokens} are to be "
                f"written, but the model knows {positions} positions; shorten the prompt or lower "
                "output_tokens"
            )
            raise BadInputError(msg)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of the prompts in their order."""
    digest = hashlib.sha256()
    for each in prompts:
        adapter = [] if each.adapter == NO_ADAPTER else [each.adapter]
        digest.update(json.dumps([each.name, each.ids, *adapter]).encode())
    return digest.hexdigest()


# Prompts from a file


def _file_texts(name: str, roots: Sequence[Path]) -> list[TextPrompt]:
    path = (roots[0] / name).resolve()
    try:
        handle = open_file(path, roots)
    except MissingModelError as error:
        raise MissingModelError(f"prompts file {name}: {error}") from None
    with os.fdopen(handle, "rb") as file:
        lines = list(_lines(file.fileno(), name))
    texts = [_read_line(name, number, line, path.suffix) for number, line in lines]
    if not texts:
        raise BadInputError(f"prompts file {name} holds no prompt; give one a line")
    return texts


def _lines(handle: int, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each non-blank line, within limits."""
    count = 0
    with os.fdopen(os.dup(handle), "rb") as file:
        try:
            for number, line in read_lines(file, MAX_LINE_BYTES):
                if not line.strip():
                    continue
                count += 1
                if count > MAX_PROMPTS:
                    msg = f"prompts file {name} holds more than {MAX_PROMPTS} prompts; split it"
                    raise BadInputError(msg)
                yield number, line
        except LongLineError as error:
            msg = (
                f"prompts file {name}: line {error.line} is longer than {MAX_LINE_BYTES} bytes; "
                "split it"
            )
            raise BadInputError(msg) from None


def _read_line(name: str, number: int, line: bytes, suffix: str) -> TextPrompt:
    where = f"prompts file {name}: line {number}"
    try:
        text = read_text(line).strip("\r\n")
        if suffix != ".jsonl":
            return TextPrompt(str(number), storable(text, "prompt"))
        document = read_json(text)
    except TextError as error:
        way_out = ' Write {"prompt": "..."}, one object a line.' if suffix == ".jsonl" else ""
        raise BadInputError(f"{where}: {error}.{way_out}") from None
    prompt = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f'{where} has no text in "prompt"; write {{"prompt": "..."}}')
    adapter = document.get("adapter", UNSAID)
    if not (adapter is None or isinstance(adapter, str)):
        raise BadInputError(f'{where} has no name in "adapter"; write {{"adapter": "NAME"}}')
    others = {name for name, value in document.items() if value not in NOTHING} - READ_FIELDS
    if unsupported := sorted(others & UNSUPPORTED_FIELDS):
        raise BadInputError(
            f"{where}: “{unsupported[0]}” would change the answer and is not supported in a "
            "prompts file; write all of it into “prompt”, or set it in the plan"
        )
    label = document.get("id")
    if not isinstance(label, str | int | float | None) or len(str(label)) > MAX_ID_CHARACTERS:
        raise BadInputError(
            f"{where}: “id” is no text or number of at most {MAX_ID_CHARACTERS} characters; "
            "shorten it, or leave it out"
        )
    label = str(number if label in NOTHING else label)
    return TextPrompt(label, prompt, adapter, tuple(sorted(others)))


# Prompts from a data set


def _data_texts(job: Job, source: DownloadedData) -> list[TextPrompt]:
    """Return what stands before the answer of each record of a data set."""
    texts: list[TextPrompt] = []
    try:
        with open_source(job, source) as file:
            reader = file.reader()
            for record in file.records(reader):
                where = f"{reader.name}: record {record.line}"
                texts.append(_prompt_of(str(len(texts) + 1), record.sample, where))
                if len(texts) > MAX_PROMPTS:
                    msg = f"{source.name} holds more than {MAX_PROMPTS:,} prompts; give records"
                    raise BadInputError(msg)
    except DataError as error:
        raise BadInputError(str(error)) from None
    if not texts:
        raise BadInputError(f"{source.name} holds no prompt; choose another split")
    if reader.left_out:
        job.emitter.log(f"{source.name}: {left_out_words(reader.left_out)}")
    return texts


def _prompt_of(name: str, sample: Sample, where: str) -> TextPrompt:
    """Return the prompt of a record; of a text all of it, of a chat what is before the answer.

    Raises:
        BadInputError: nothing is asked, or the record offers tools, which no prompt has.
    """
    if isinstance(sample, ChatSample):
        if sample.tools:
            msg = f"{where} offers tools, which a batch does not call; choose other records"
            raise BadInputError(msg)
        turns = sample.turns
        is_answered = bool(turns) and turns[-1].role == "assistant"
        asked: Passage = turns[:-1] if is_answered else turns
    elif isinstance(sample, TextSample | LabelledSample):
        asked = sample.text
    else:
        asked = sample.prompt or ""  # preferences may have none of their own
    if not asked:
        raise BadInputError(
            f"{where} has nothing before its answer; choose other records, or a column that is "
            "the prompt by COLUMN=prompt"
        )
    return TextPrompt(name, asked) if isinstance(asked, str) else TextPrompt(name, "", turns=asked)


def _written(prompt: TextPrompt, tokenizer: PreTrainedTokenizerFast) -> TextPrompt:
    """Return a prompt with the text that the chat template makes of its turns."""
    if not prompt.turns:
        return prompt
    if not tokenizer.chat_template:
        raise BadInputError(
            f"prompt {prompt.name} is a conversation, and the model has no chat template; choose "
            "a model that has one, or a column of texts by COLUMN=prompt"
        )
    try:
        text = rendered_chat(
            tokenizer, [each.message() for each in prompt.turns], add_generation_prompt=True
        )
    except TemplateRefusedError as error:
        msg = f"prompt {prompt.name}: the model's chat template refuses it: {error}"
        raise BadInputError(msg) from None
    return prompt._replace(text=text)


# Prompts from the host's own text


def _demo_prompts(job: Job, loaded: LoadedModel, options: DemoPrompts) -> Iterator[Prompt]:
    seed = getattr(job.spec, "seed", 0)
    generator = np.random.default_rng(seed)
    shortest = options.shortest or options.input_tokens
    lengths = generator.integers(shortest, options.input_tokens + 1, options.count)
    stream = held_out_ids(job, loaded)
    for number, length in enumerate(lengths.tolist(), 1):
        if stream is None or loaded.tokenizer is None or len(stream) <= length:
            vocab_size = int(loaded.model.config.vocab_size)
            ids = generator.integers(0, vocab_size, length)
        else:
            begin = int(generator.integers(0, len(stream) - length))
            ids = stream[begin : begin + length]
        token_ids = tuple(int(each) for each in ids)
        text = loaded.tokenizer.decode(list(token_ids)) if loaded.tokenizer else None
        yield Prompt(str(number), str(text) if text is not None else None, token_ids)


# ---------------------------------------------------------------------------
# Answering of the open prompts: in padded or packed batches, continuously, or one by one.
# ---------------------------------------------------------------------------


Answering = Callable[[Sequence[Ids]], BatchRun]
NO_COST = CostModel(0.0, 1.0)  # for policies without a cost model
WARM_UP_TOKENS = 4  # a CUDA graph is run once, recorded, then replayed


@dataclass
class GenerationRun:
    """The state of an attempt once the model is loaded."""

    job: Job
    spec: GenerateSpec
    placed: PlacedModel
    prompts: list[Prompt]
    journal: Journal
    limits: AnswerLimits
    meter: PeakMeter
    stages: Stages
    draft_source: DraftSource | None = None
    adapters: MixedAdapters | None = None
    figures: Figures = field(default_factory=Figures)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def loaded(self) -> LoadedModel:
        """Return the model, or this process's part of it."""
        return self.placed.loaded

    @property
    def chain(self) -> Chain | None:
        """Return the chain that computes a divided model, if any."""
        return self.placed.chain

    @property
    def setup(self) -> BatchSetup:
        """Return the batch settings."""
        is_packed = self.spec.batching == "packed"
        return BatchSetup(self.spec.kv_cache, is_packed=is_packed, chain=self.chain)

    def through_adapters(self, batch: Sequence[int]) -> AbstractContextManager[None]:
        """Use each row's own adapter within the block."""
        if self.adapters is None:
            return nullcontext()
        owners = [[self.prompts[at].adapter] for at in batch]
        return self.adapters.serving(torch.tensor(owners))

    @property
    def open_positions(self) -> list[int]:
        """Return the positions of the prompts without an answer."""
        return [at for at in range(len(self.prompts)) if at not in self.journal.records]

    def keep(self, answers: Mapping[int, Answer], speeds: Mapping[str, float]) -> None:
        """Store answers by position, and report progress and speeds."""
        self.journal.add({at: record_of(self, at, each) for at, each in answers.items()})
        self.stages.advance(len(self.journal.records) / len(self.prompts))
        memory = {"peak_memory_bytes": float(self.meter.read().bytes)}
        self.job.emitter.metric({**speeds, **memory}, step=len(self.journal.records))

    def check_stop(self) -> None:
        """Raise StopRequestedError if the job was asked to stop."""
        if self.limits.should_stop():
            raise StopRequestedError


def record_of(run: GenerationRun, at: int, answer: Answer) -> Record:
    """Return the output record of an answered prompt."""
    prompt, tokenizer = run.prompts[at], run.loaded.tokenizer
    record: Record = {"id": prompt.name, "prompt": prompt.text}
    if tokenizer is None:
        record["output_ids"] = answer.ids
    else:
        record["text"] = tokenizer.decode(answer.ids)
    if run.adapters is not None:
        adapter = prompt.adapter
        record["adapter"] = None if adapter == NO_ADAPTER else run.adapters.names[adapter]
    return record | {
        "prompt_tokens": len(prompt.ids),
        "output_tokens": len(answer.ids),
        "finish_reason": answer.finish_reason,
    }


def answer_all(run: GenerationRun) -> None:
    """Answer every open prompt.

    Raises:
        StopRequestedError: the job is to stop; finished answers are stored.
    """
    positions = run.open_positions
    _warm_up(run, [run.prompts[at].ids for at in positions])
    if run.draft_source is not None:
        _one_by_one(run, positions, run.draft_source)
    elif run.spec.batching == "continuous":
        _continuously(run, positions)
    else:
        _in_batches(run, positions)


def _warm_up(run: GenerationRun, prompts: Sequence[Ids]) -> None:
    """Run the shortest prompt; an offload policy's figures start afterwards."""
    engine = run.placed.zigzag
    if engine is None:
        warm_up(run.loaded.model, prompts, BatchSetup(chain=run.chain))
        return
    engine.run_batch([min(prompts, key=len)], AnswerLimits(STEPS))
    engine.figures.begin()


def _in_batches(run: GenerationRun, positions: Sequence[int]) -> None:
    lengths = [len(run.prompts[at].ids) for at in positions]
    policy = run.spec.batching
    cost = _measured_cost(run, positions) if policy == "turbo" else NO_COST
    batches = POLICIES[policy](lengths, run.spec.batch_size, cost)
    padding = 0.0 if policy == "packed" else padding_ratio(batches, lengths)
    run.notes["batching"] = (
        f"{policy}: {len(batches)} batches of at most {run.spec.batch_size}, "
        f"{padding:.1%} of the prompts' tokens are padding"
    )
    answer_batch = _compiled(run, positions) if run.spec.compiled_step else _as_set_up(run)
    for batch in batches:
        run.check_stop()
        _one_batch(run, [positions[at] for at in batch], answer_batch)


def _as_set_up(run: GenerationRun) -> Answering:
    if zigzag := run.placed.zigzag:
        return lambda ids: zigzag.run_batch(ids, run.limits)
    return lambda ids: run_batch(run.loaded.model, ids, run.limits, run.setup)


def _compiled(run: GenerationRun, positions: Sequence[int]) -> Answering:
    """Return a function that answers batches with a compiled step, compiled before any timing."""
    longest = max(len(run.prompts[at].ids) for at in positions)
    began = time.perf_counter()
    length = longest + run.spec.output_tokens
    step = CompiledStep(run.loaded.model, run.spec.batch_size, length)
    warm_up = max(2, min(WARM_UP_TOKENS, run.spec.output_tokens))
    step.run_batch([run.prompts[positions[0]].ids], AnswerLimits(warm_up))
    if step.plain_reason:
        run.notes["compiled_step"] = f"not compiled, run plainly: {step.plain_reason}"
        run.job.emitter.log(f"the decode step is {run.notes['compiled_step']}")
        return lambda ids: step.run_batch(ids, run.limits)
    run.notes["compiled_step"] = (
        f"compiled for {run.spec.batch_size} prompts of {length} tokens in "
        f"{time.perf_counter() - began:.0f} s before the first batch"
    )
    return lambda ids: step.run_batch(ids, run.limits)


def _one_batch(run: GenerationRun, batch: Batch, answer_batch: Answering) -> None:
    ids = [run.prompts[at].ids for at in batch]
    with run.through_adapters(batch):
        done = answer_batch(ids)
    speeds = run.figures.add_batch(done, sum(map(len, ids)))
    run.keep(dict(zip(batch, done.answers, strict=True)), speeds)


def _measured_cost(run: GenerationRun, positions: Sequence[int]) -> CostModel:
    ids = [run.prompts[at].ids for at in positions]
    setup, spec = BatchSetup(chain=run.chain), run.spec
    cost = measured_cost(run.loaded.model, ids, spec.batch_size, spec.output_tokens, setup)
    run.notes["batching_cost"] = (
        f"{cost.fixed_seconds:.3g} s a batch + {cost.seconds_per_token:.3g} s a padded token, "
        "measured before the first batch"
    )
    return cost


def _continuously(run: GenerationRun, positions: Sequence[int]) -> None:
    ids = [run.prompts[at].ids for at in positions]
    pages = PagePlan.of([len(each) for each in ids], run.spec.output_tokens, run.spec.batch_size)
    run.figures.kv_cache_bytes = pages.bytes(run.loaded.model)
    run.notes["batching"] = (
        f"continuous: at most {pages.max_requests} prompts at once over {pages.num_blocks} "
        f"pages, at most {pages.max_batch_tokens} tokens a step"
    )
    began = time.perf_counter()

    def keep(done: FinishedAnswer) -> None:
        at, count = positions[done.at], len(done.answer.ids)
        figures = run.figures
        figures.add_one(len(ids[done.at]), count, done.first_seconds, done.later_seconds)
        figures.wall_seconds = time.perf_counter() - began
        run.keep({at: done.answer}, {"tokens_per_second": figures.tokens_per_second})

    run_continuous(run.loaded.model, ids, pages, run.limits, keep)


def _one_by_one(run: GenerationRun, positions: Sequence[int], draft_source: DraftSource) -> None:
    figures = run.figures
    for at in positions:
        run.check_stop()
        ids = run.prompts[at].ids
        with run.through_adapters([at]):
            done = decode_speculatively(run.loaded.model, ids, draft_source, run.limits)
        figures.add_one(len(ids), len(done.answer.ids), done.first_seconds, done.later_seconds)
        figures.wall_seconds += done.first_seconds + done.later_seconds
        figures.drafted_tokens += done.drafted
        figures.accepted_tokens += done.accepted
        speeds = {"tokens_per_second": figures.tokens_per_second}
        if figures.drafted_tokens:
            speeds["acceptance_ratio"] = figures.accepted_tokens / figures.drafted_tokens
        run.keep({at: done.answer}, speeds)

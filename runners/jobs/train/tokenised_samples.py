"""Training samples: text with the spans that have a loss, tokenised, cached, memory-mapped."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from runners.datasets.conversations import PASSED_ON, ChatSample, DataError
from runners.datasets.preferences import PreferenceSample, PromptSample, RatedSample
from runners.datasets.records import (
    CompletionSample,
    Record,
    Sample,
    digest_of,
    num_characters,
    too_few,
)
from runners.jobs.chat_template import TemplateRefusedError, num_repeated_bos, rendered_chat
from runners.jobs.corpus import HELD_OUT_ONE_IN, TokenIds, cached_folder, tokenizer_digest
from runners.jobs.data_files import DataFile
from runners.jobs.runtime import BadInputError

# Samples as text with the character spans that have a loss.
#
# Conversations are rendered with the tokenizer's chat template, as an endpoint will send them; a
# tokenizer without one gets a default template, which is saved with it.


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.


# ChatML, with the end of text after an answer, so that a model without an <|im_end|> token still
# learns where to stop.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' }}{% if message['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Span = tuple[int, int]


class RenderedSample(NamedTuple):
    """A text, and the character spans that have a loss."""

    text: str
    spans: tuple[Span, ...]
    is_chat: bool = False  # the template wrote all special tokens


class Renderer:
    """Renders samples for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Use the tokenizer's template; set the default one if it has none."""
        self._tokenizer = tokenizer
        self._tools: list[Any] | None = None  # of the conversation
        self.num_last_only = 0  # chats in which only the last answer has a loss
        self.left_out: Counter[str] = Counter()  # chats by the field that the template leaves out

    def render(self, sample: Sample, where: str) -> RenderedSample:
        """Return a sample's text; ``where`` names its file and line.

        Raises:
            BadInputError: the chat template rejects the conversation, or the record compares
                answers.
        """
        if isinstance(sample, PreferenceSample | RatedSample):
            raise BadInputError(
                f"{where}: its answers are compared, and no next token is learnt from them; "
                "choose engine trl with the objective dpo, kto, orpo or reward"
            )
        if isinstance(sample, PromptSample):
            raise BadInputError(
                f"{where}: it has a prompt and no answer, and no next token is learnt from it; "
                "choose engine trl with the objective grpo or distillation"
            )
        if isinstance(sample, ChatSample):
            return self._chat(sample, where)
        if isinstance(sample, CompletionSample):
            text = sample.prompt + sample.completion
            return RenderedSample(text, ((len(sample.prompt), len(text)),))
        return RenderedSample(sample.text, ((0, len(sample.text)),))

    def _chat(self, sample: ChatSample, where: str) -> RenderedSample:
        messages = [turn.message() for turn in sample.turns]
        self._tools = json.loads(sample.tools) if sample.tools else None
        try:
            text = self._render(messages)
            learnt = (at for at, turn in enumerate(sample.turns) if turn.is_learnt)
            answers = [at for at in learnt if messages[at]["role"] == "assistant"]
            spans = [self._span(messages, at, text) for at in answers]
        except TemplateRefusedError as error:
            raise BadInputError(
                f"{where}: the model's chat template refuses this conversation: {error}"
            ) from None
        self._check_rendered(messages, text, where)
        known_spans = tuple(span for span in spans if span is not None)
        if not known_spans:
            raise BadInputError(
                f"{where}: the model's chat template does not render an answer after its "
                "generation prompt, so no token has a loss; write prompt and completion instead"
            )
        self.num_last_only += len(known_spans) < len(spans)
        return RenderedSample(text, known_spans, is_chat=True)

    def _check_rendered(self, messages: list[dict[str, Any]], text: str, where: str) -> None:
        """Refuse tools and calls that are not in a rendered text; count its other losses."""
        calls = [("tool_calls", each) for turn in messages for each in turn.get("tool_calls", ())]
        for name, each in [*calls, *(("tools", tool) for tool in self._tools or ())]:
            if each.get("function", each)["name"] not in text:
                raise BadInputError(
                    f"{where}: the model's chat template writes no “{name}”, so they would not "
                    "be learnt; give a model whose template does, or leave these records out"
                )
        lost = {
            f"messages.{name}" if name in PASSED_ON else f"{turn['role']} messages"
            for turn in messages
            for name in ("content", "reasoning_content", "thinking", "name")
            if turn["role"] != "assistant" or name != "content"
            if turn.get(name, "").strip() not in text
        }
        self.left_out.update(lost)

    def _span(self, messages: list[dict[str, Any]], at: int, whole: str) -> Span | None:
        """Return an answer's span; None if later turns change how it is rendered."""
        prompt = self._render(messages[:at], add_generation_prompt=True)
        with_answer = self._render(messages[: at + 1]).rstrip()
        if not (with_answer.startswith(prompt) and whole.startswith(with_answer)):
            return None
        return len(prompt), len(with_answer)

    def _render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        return rendered_chat(
            self._tokenizer,
            messages,
            tools=self._tools,
            add_generation_prompt=add_generation_prompt,
        )


def set_default_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Set the default template if a tokenizer has none; return whether it has the default."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_TEMPLATE
    return bool(tokenizer.chat_template == DEFAULT_TEMPLATE)


LAYOUT_VERSION = 4  # raise when the meaning of the cached files changes
BATCH_CHARACTERS = 2**20
BATCH_RECORDS = 256
Learnt = npt.NDArray[np.uint8]


class Documents(NamedTuple):
    """Tokenised samples, concatenated.

    ``ids`` and ``learnt`` [tokens]: 1 where a token has a loss; ``offsets`` [samples + 1]: start
    of each sample.
    """

    ids: TokenIds
    learnt: Learnt
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.offsets) - 1


class TokenisedFile(NamedTuple):
    """The two parts of a file, and facts about reading it."""

    train: Documents
    held_out: Documents
    facts: dict[str, object]


def tokenised_file(
    data: DataFile, digest: str, tokenizer: PreTrainedTokenizerFast, cache_dir: Path
) -> TokenisedFile:
    """Return a tokenised file, from the cache if it is there.

    Raises:
        BadInputError: the file, or one of its records, is invalid.
    """
    try:
        reader = data.reader()
        is_template_ours = set_default_template(tokenizer)
        parts = [LAYOUT_VERSION, digest, reader.suffix, data.format, tokenizer.chat_template]
        parts += [data.columns, data.most_records] if data.columns or data.most_records else []
        key = json.dumps([*map(str, parts), tokenizer_digest(tokenizer)]).encode()
        folder = cached_folder(
            cache_dir,
            f"samples-{hashlib.sha256(key).hexdigest()[:24]}",
            lambda target: _write(data, tokenizer, target),
        )
    except DataError as error:
        raise BadInputError(str(error)) from None
    facts = json.loads((folder / "facts.json").read_text())
    facts["is_template_ours"] = is_template_ours and facts["num_chats"] > 0
    return TokenisedFile(_read(folder / "train"), _read(folder / "held_out"), facts)


def _read(folder: Path) -> Documents:
    return Documents(
        np.memmap(folder / "ids", dtype=np.int32, mode="r"),
        np.memmap(folder / "learnt", dtype=np.uint8, mode="r"),
        np.fromfile(folder / "offsets", dtype=np.int64),
    )


# The first pass: the held-out split


class Split:
    """The held-out split, by content only: equal samples are on the same side."""

    def __init__(self, digests: Iterator[bytes], name: str) -> None:
        """Read every sample once, so that each side gets at least one.

        Raises:
            DataError: there are no two different samples.
        """
        self._least, self._greatest = b"\xff" * 33, b""
        count, num_held_out = 0, 0
        for digest in digests:
            count += 1
            num_held_out += _is_sixteenth(digest)
            self._least, self._greatest = min(self._least, digest), max(self._greatest, digest)
        if count == 0 or self._least == self._greatest:
            raise DataError(too_few(name, count))
        self._takes_least = num_held_out == 0
        self._gives_greatest = num_held_out == count

    def is_held_out(self, digest: bytes) -> bool:
        """Return whether the sample with this digest is held out."""
        if self._takes_least:
            return digest == self._least
        return _is_sixteenth(digest) and not (self._gives_greatest and digest == self._greatest)


def _is_sixteenth(digest: bytes) -> bool:
    return int.from_bytes(digest[-4:]) % HELD_OUT_ONE_IN == 0


# The second pass: tokens


class _Writer:
    """Appends samples to one part's files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        opened = ((folder / name).open("wb") for name in ("ids", "learnt", "offsets"))
        self._ids, self._learnt, self._offsets = map(stack.enter_context, opened)
        self._end = 0
        self._offsets.write(np.int64(0).tobytes())

    def add(self, ids: list[int], learnt: Learnt) -> None:
        self._end += len(ids)
        self._ids.write(np.asarray(ids, dtype=np.int32).tobytes())
        self._learnt.write(learnt.tobytes())
        self._offsets.write(np.int64(self._end).tobytes())

    def finish(self) -> None:
        """Append one token to each file: an empty file cannot be mapped."""
        self._ids.write(np.int32(0).tobytes())
        self._learnt.write(np.uint8(0).tobytes())
        for file in (self._ids, self._learnt, self._offsets):
            file.flush()
            os.fsync(file.fileno())


class Encoder:
    """Tokenises records, with loss masks and their side of the split."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, split: Split, name: str) -> None:
        """Encode the records of the file ``name``."""
        self._tokenizer = tokenizer
        self._split = split
        self._name = name
        self._renderer = Renderer(tokenizer)
        self.counts = dict.fromkeys(
            ("num_records", "num_held_out", "num_chats", "num_repeated_bos"), 0
        )

    @property
    def num_last_only(self) -> int:
        """Return the number of chats of which only the last answer has a loss."""
        return self._renderer.num_last_only

    @property
    def left_out(self) -> Counter[str]:
        """Return the chats by the field that the chat template leaves out."""
        return self._renderer.left_out

    def encode(self, batch: list[Record]) -> Iterator[tuple[bool, list[int], Learnt]]:
        """Yield per record: whether it is held out, its tokens, and its loss mask."""
        rendered = [
            self._renderer.render(each.sample, f"{self._name}: line {each.line}") for each in batch
        ]
        is_chat = rendered[0].is_chat  # one file holds one format
        encoding = self._tokenizer(
            [each.text for each in rendered],
            add_special_tokens=not is_chat,
            return_offsets_mapping=True,
            verbose=False,
        )
        for at, record in enumerate(batch):
            ids = encoding["input_ids"][at]
            learnt = _loss_mask(encoding["offset_mapping"][at], rendered[at])
            if not is_chat:
                num_repeated = num_repeated_bos(ids, self._tokenizer.bos_token_id)
                self.counts["num_repeated_bos"] += num_repeated > 0
                ids = [*ids[:1], *ids[1 + num_repeated :]]  # the first one has no loss
                learnt = np.delete(learnt, slice(1, 1 + num_repeated))
                ids, learnt = _with_end_token(ids, learnt, self._tokenizer.eos_token_id)
            is_held_out = self._split.is_held_out(digest_of(record.sample))
            self.counts["num_held_out"] += is_held_out
            yield is_held_out, ids, learnt
        self.counts["num_records"] += len(batch)
        self.counts["num_chats"] += len(batch) * is_chat


def _write(data: DataFile, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    first = data.reader()
    split = Split((digest_of(each.sample) for each in data.records(first)), data.name)
    reader = data.reader(first.format)
    encoder = Encoder(tokenizer, split, data.name)
    with ExitStack() as stack:
        train, held_out = (_Writer(target / name, stack) for name in ("train", "held_out"))
        for batch in batched_records(data.records(reader)):
            for is_held_out, ids, learnt in encoder.encode(batch):
                (held_out if is_held_out else train).add(ids, learnt)
        train.finish()
        held_out.finish()
    facts = {
        "format": reader.format,
        "num_empty": reader.num_empty,
        "num_last_only": encoder.num_last_only,
        "left_out": reader.left_out,
        "not_rendered": encoder.left_out,
        **encoder.counts,
        "bos": tokenizer.bos_token,
    }
    (target / "facts.json").write_text(json.dumps(facts))


def _loss_mask(offsets: list[tuple[int, int]], rendered: RenderedSample) -> Learnt:
    """Return the loss mask: tokens that begin within a span with a loss."""
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(begins), dtype=np.uint8)
    for begin, end in rendered.spans:
        mask |= ((begins >= begin) & (begins < end) & (ends > begins)).astype(np.uint8)
    return mask


def _with_end_token(ids: list[int], learnt: Learnt, end: int | None) -> tuple[list[int], Learnt]:
    """Return a text's tokens with the end-of-text token, which has a loss too."""
    if end is None:
        return ids, learnt
    if ids and ids[-1] == end:
        ids, learnt = ids[:-1], learnt[:-1]
    return [*ids, end], np.append(learnt, np.uint8(1))


def batched_records(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yield non-empty batches of records of the size that a tokenizer takes at once."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += num_characters(record.sample)
        if len(batch) >= BATCH_RECORDS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

"""The prompts of a generation: from the job, from a host file, or from the host's own text."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runners.jobs.evaluation import held_out_ids
from runners.jobs.loading import LoadedModel
from runners.jobs.model_files import model_roots, open_file
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobspec import DemoPrompts, FilePrompts, InlinePrompts, Prompts
from runners.jobspec.serve import NO_ADAPTER

MAX_PROMPTS = 100_000
MAX_LINE_BYTES = 1024**2
MISSING = "cannot be opened"


UNSAID = ""


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt; ``text`` is None if the model has no tokenizer."""

    name: str
    text: str | None
    ids: tuple[int, ...]
    adapter: int = NO_ADAPTER  # index of the adapter


class Given(NamedTuple):
    """A prompt of the job or a file; ``adapter``: a name, None for the base, or unspecified."""

    name: str
    text: str
    adapter: str | None = UNSAID


def read_texts(job: Job, asked: Prompts) -> list[Given]:
    """Return the prompts of the job or a file; none for demo prompts.

    Raises:
        MissingModelError: the file is not in the host's model folders.
        BadInputError: the file is empty, or one of its lines is no valid prompt.
    """
    if isinstance(asked, InlinePrompts):
        return [Given(str(number), text) for number, text in enumerate(asked.texts, 1)]
    if isinstance(asked, FilePrompts):
        return _file_texts(asked.path, model_roots(job.host_dir))
    return []


def tokenised(
    job: Job,
    loaded: LoadedModel,
    asked: Prompts,
    texts: Sequence[Given],
    adapters: Sequence[str] = (),
) -> list[Prompt]:
    """Return the tokenised prompts, each with its adapter's index.

    Raises:
        MissingModelError: the model has no tokenizer for texts.
        BadInputError: a text has no token, or names an unknown adapter.
    """
    if isinstance(asked, DemoPrompts):
        default_adapter = _adapter_index(Given("", ""), adapters)
        return [
            replace(each, adapter=default_adapter) for each in _demo_prompts(job, loaded, asked)
        ]
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        msg = (
            "the model has no tokenizer.json, so it reads no text; add it to the folder, or "
            "choose the demo prompts"
        )
        raise MissingModelError(msg)
    prompts = [
        Prompt(
            each.name,
            each.text,
            tuple(tokenizer(each.text)["input_ids"]),
            _adapter_index(each, adapters),
        )
        for each in texts
    ]
    empty = next((each.name for each in prompts if not each.ids), None)
    if empty is not None:
        raise BadInputError(f"prompt {empty} has no token; give it some text, or leave it out")
    return prompts


def _adapter_index(prompt: Given, adapters: Sequence[str]) -> int:
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
        BadInputError: with the first prompt that does not, and both numbers.
    """
    for each in prompts:
        if positions is not None and len(each.ids) + output_tokens > positions:
            msg = (
                f"prompt {each.name} has {len(each.ids)} tokens and {output_tokens} are to be "
                f"written, but the model knows {positions} positions; shorten the prompt or lower "
                "output_tokens"
            )
            raise BadInputError(msg)


def pile_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of the prompts in their order."""
    digest = hashlib.sha256()
    for each in prompts:
        adapter = [] if each.adapter == NO_ADAPTER else [each.adapter]
        digest.update(json.dumps([each.name, each.ids, *adapter]).encode())
    return digest.hexdigest()


# Prompts from a file


def _file_texts(name: str, roots: Sequence[Path]) -> list[Given]:
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
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                msg = (
                    f"prompts file {name}: line {number} is longer than {MAX_LINE_BYTES} bytes; "
                    "split it"
                )
                raise BadInputError(msg)
            if not line.strip():
                continue
            count += 1
            if count > MAX_PROMPTS:
                msg = f"prompts file {name} holds more than {MAX_PROMPTS} prompts; split it"
                raise BadInputError(msg)
            yield number, line


def _read_line(name: str, number: int, line: bytes, suffix: str) -> Given:
    where = f"prompts file {name}: line {number}"
    try:
        text = line.decode().strip("\r\n")
    except UnicodeDecodeError:
        raise BadInputError(f"{where} is no UTF-8 text; save the file as UTF-8") from None
    if suffix != ".jsonl":
        return Given(str(number), text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInputError(f'{where} is no JSON; write {{"prompt": "..."}}') from None
    prompt = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f'{where} has no text in "prompt"; write {{"prompt": "..."}}')
    adapter = document.get("adapter", UNSAID)
    if not (adapter is None or isinstance(adapter, str)):
        raise BadInputError(f'{where} has no name in "adapter"; write {{"adapter": "NAME"}}')
    return Given(str(document.get("id", number))[:200], prompt, adapter and adapter[:200])


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

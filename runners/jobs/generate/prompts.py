"""The pile of prompts: from the job, from a file of the host, or from the host's own text."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runners.endpoint_spec import NO_ADAPTER
from runners.jobs.assessment import held_out_ids
from runners.jobs.loading import LoadedModel
from runners.jobs.model_files import open_file
from runners.jobs.model_folders import model_roots
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobspec import DemoPrompts, FilePrompts, InlinePrompts, Prompts

MAX_PROMPTS = 100_000
MAX_LINE_BYTES = 1024**2
MISSING = "cannot be opened"


UNSAID = ""


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given; ``text`` is None where a model knows no text."""

    name: str
    text: str | None
    ids: tuple[int, ...]
    adapter: int = NO_ADAPTER  # its number


class Given(NamedTuple):
    """A prompt of the job or of a file; ``adapter`` is a name, None for the base, or unsaid."""

    name: str
    text: str
    adapter: str | None = UNSAID


def read_texts(job: Job, asked: Prompts) -> list[Given]:
    """Return each prompt that the job or a file gives; none of the demo's.

    Raises:
        MissingModelError: the file is not below the host's model folders.
        BadInputError: the file is empty, or one of its lines cannot be a prompt.
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
    """Return the prompts in the model's tokens, each with the number of its adapter.

    Raises:
        MissingModelError: a text needs a tokenizer that the model does not have.
        BadInputError: a text has no token, or names an adapter that the job does not have.
    """
    if isinstance(asked, DemoPrompts):
        usual = _number_of(Given("", ""), adapters)
        return [replace(each, adapter=usual) for each in _demo_prompts(job, loaded, asked)]
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        msg = (
            "the model has no tokenizer.json, so it reads no text; add it to the folder, or "
            "choose the demo prompts"
        )
        raise MissingModelError(msg)
    found = [
        Prompt(
            each.name,
            each.text,
            tuple(tokenizer(each.text)["input_ids"]),
            _number_of(each, adapters),
        )
        for each in texts
    ]
    empty = next((each.name for each in found if not each.ids), None)
    if empty is not None:
        raise BadInputError(f"prompt {empty} has no token; give it some text, or leave it out")
    return found


def _number_of(given: Given, adapters: Sequence[str]) -> int:
    """Return which adapter a prompt goes through: its own, else the only one there is."""
    if given.adapter == UNSAID:
        return 0 if len(adapters) == 1 else NO_ADAPTER
    if given.adapter is None:
        return NO_ADAPTER
    if given.adapter not in adapters:
        known = f"has {', '.join(adapters)}" if adapters else "was given none"
        msg = f"prompt {given.name} asks for adapter {given.adapter}, and the job {known}"
        raise BadInputError(f"{msg}; name one of the job's, or launch it with this one")
    return adapters.index(given.adapter)


def check_lengths(prompts: Sequence[Prompt], output_tokens: int, positions: int | None) -> None:
    """Refuse prompts that the model has no positions for.

    Raises:
        BadInputError: with the first such prompt and both numbers.
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
        through = [] if each.adapter == NO_ADAPTER else [each.adapter]
        digest.update(json.dumps([each.name, each.ids, *through]).encode())
    return digest.hexdigest()


# A file


def _file_texts(name: str, roots: Sequence[Path]) -> list[Given]:
    path = (roots[0] / name).resolve()
    try:
        handle = open_file(path, roots)
    except MissingModelError as error:
        raise MissingModelError(f"prompts file {name}: {error}") from None
    with os.fdopen(handle, "rb") as file:
        lines = list(_lines(file.fileno(), name))
    found = [_read_line(name, number, line, path.suffix) for number, line in lines]
    if not found:
        raise BadInputError(f"prompts file {name} holds no prompt; give one a line")
    return found


def _lines(handle: int, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each line that is not blank, within limits."""
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


# The host's own text


def _demo_prompts(job: Job, loaded: LoadedModel, asked: DemoPrompts) -> Iterator[Prompt]:
    seed = getattr(job.spec, "seed", 0)
    generator = np.random.default_rng(seed)
    shortest = asked.shortest or asked.input_tokens
    lengths = generator.integers(shortest, asked.input_tokens + 1, asked.count)
    stream = held_out_ids(job, loaded)
    for number, length in enumerate(lengths.tolist(), 1):
        if stream is None or loaded.tokenizer is None or len(stream) <= length:
            vocab_size = int(loaded.model.config.vocab_size)
            ids = generator.integers(0, vocab_size, length)
        else:
            begin = int(generator.integers(0, len(stream) - length))
            ids = stream[begin : begin + length]
        found = tuple(int(each) for each in ids)
        text = loaded.tokenizer.decode(list(found)) if loaded.tokenizer else None
        yield Prompt(str(number), str(text) if text is not None else None, found)

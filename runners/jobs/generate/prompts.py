"""The pile of prompts: from the job, from a file of the host, or from the host's own text."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runners.jobs.assessment import held_out_ids
from runners.jobs.loading import LoadedModel, model_roots
from runners.jobs.model_files import open_file
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobspec import DemoPrompts, FilePrompts, InlinePrompts, Prompts

MAX_PROMPTS = 100_000
MAX_LINE_BYTES = 1024**2
MISSING = "cannot be opened"


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given; ``text`` is None where a model knows no text."""

    name: str
    text: str | None
    ids: tuple[int, ...]


def read_texts(job: Job, asked: Prompts) -> list[tuple[str, str]]:
    """Return name and text of each prompt that the job or a file gives; none of the demo's.

    Raises:
        MissingModelError: the file is not below the host's model folders.
        BadInputError: the file is empty, or one of its lines cannot be a prompt.
    """
    if isinstance(asked, InlinePrompts):
        return [(str(number), text) for number, text in enumerate(asked.texts, 1)]
    if isinstance(asked, FilePrompts):
        return _file_texts(asked.path, model_roots(job.host_dir))
    return []


def tokenised(
    job: Job, loaded: LoadedModel, asked: Prompts, texts: Sequence[tuple[str, str]]
) -> list[Prompt]:
    """Return the prompts in the model's tokens.

    Raises:
        MissingModelError: a text needs a tokenizer that the model does not have.
        BadInputError: a text has no token.
    """
    if isinstance(asked, DemoPrompts):
        return list(_demo_prompts(job, loaded, asked))
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        msg = "the model has no tokenizer.json, so it reads no text; choose the demo prompts"
        raise MissingModelError(msg)
    found = [Prompt(name, text, tuple(tokenizer(text)["input_ids"])) for name, text in texts]
    empty = next((each.name for each in found if not each.ids), None)
    if empty is not None:
        raise BadInputError(f"prompt {empty} has no token; give it some text, or leave it out")
    return found


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
        digest.update(json.dumps([each.name, each.ids]).encode())
    return digest.hexdigest()


# A file


def _file_texts(name: str, roots: Sequence[Path]) -> list[tuple[str, str]]:
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


def _read_line(name: str, number: int, line: bytes, suffix: str) -> tuple[str, str]:
    where = f"prompts file {name}: line {number}"
    try:
        text = line.decode().strip("\r\n")
    except UnicodeDecodeError:
        raise BadInputError(f"{where} is no UTF-8 text; save the file as UTF-8") from None
    if suffix != ".jsonl":
        return str(number), text
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInputError(f'{where} is no JSON; write {{"prompt": "..."}}') from None
    prompt = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f'{where} has no text in "prompt"; write {{"prompt": "..."}}')
    return str(document.get("id", number))[:200], prompt


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

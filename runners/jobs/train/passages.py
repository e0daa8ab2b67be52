"""Built-in labelled text: passages of Python's standard library, labelled by package."""

import io
import json
from collections.abc import Iterator

from runners.classification import PACKAGES
from runners.jobs.corpus import Corpus
from runners.jobs.runtime import BadInputError
from runners.jobs.train.samples import DataFile

PASSAGE_LINES = 8  # about 80 tokens, none of which contains the file's name
NAME = "passages of Python's library.jsonl"


def passages(corpus: Corpus) -> DataFile:
    """Return the passages as a labelled data file; the same Python gives the same file.

    Raises:
        BadInputError: this Python lacks one of the packages.
    """
    lines = list(_lines(corpus))
    if missing := sorted(set(PACKAGES) - {label for _, label in lines}):
        raise BadInputError(
            f"this host's Python has no files of {', '.join(missing)}, whose passages are to be "
            "told apart; give a file with “text” and “label” instead"
        )
    written = "".join(f"{json.dumps({'text': text, 'label': label})}\n" for text, label in lines)
    return DataFile(NAME, io.BytesIO(written.encode()), "classification")


def _lines(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Yield each passage with its package, in the corpus's order."""
    for document in corpus.documents:
        root, _, rest = document.name.partition("/")
        package = rest.partition("/")[0]
        if root != "python" or package not in PACKAGES:
            continue
        lines = [line for line in document.text.splitlines(keepends=True) if line.strip()]
        for at in range(0, len(lines) - PASSAGE_LINES + 1, PASSAGE_LINES):
            yield "".join(lines[at : at + PASSAGE_LINES]), package

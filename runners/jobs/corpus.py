"""The host's own text, available without a network, for training and evaluating demo models.

Python's standard library, the system's licence texts and the project's documentation. Ordered
by path and split by each file's content hash, so two hosts with the same Python train and
evaluate on the same text.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[2]
LICENCE_DIR = Path("/usr/share/common-licenses")
# Tables, generated text and tests: repetitive lines of little use for training.
SKIPPED_PARTS = frozenset(
    {
        "__pycache__",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
MAX_FILE_BYTES = 400_000
MIN_FILE_BYTES = 400
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Document:
    """One text file of the corpus."""

    name: str
    text: str

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def is_held_out(self) -> bool:
        """Return whether the document is held out from training; depends only on its content.

        Only Python files are held out: licences have versions that repeat each other, so training
        would leak into a held-out one.
        """
        return self.name.startswith("python/") and int(self.digest[:8], 16) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """Documents in their order, split by content."""

    documents: tuple[Document, ...]

    @cached_property
    def train(self) -> tuple[Document, ...]:
        """Return the training documents."""
        return tuple(each for each in self.documents if not each.is_held_out)

    @cached_property
    def held_out(self) -> tuple[Document, ...]:
        """Return the held-out documents."""
        return tuple(each for each in self.documents if each.is_held_out)

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the texts in their order."""
        joined = "".join(each.digest for each in self.documents)
        return hashlib.sha256(joined.encode()).hexdigest()


def load_corpus() -> Corpus:
    """Return the text of this machine without duplicates."""
    unique: dict[str, Document] = {}
    for name, path in _paths():
        text = _read(path)
        if len(text) >= MIN_FILE_BYTES:
            document = Document(name, text)
            unique.setdefault(document.digest, document)
    return Corpus(tuple(unique.values()))


def _paths() -> Iterator[tuple[str, Path]]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_python_files(stdlib)):
        yield f"python/{path.relative_to(stdlib).as_posix()}", path
    for folder, pattern in ((LICENCE_DIR, "*"), (PROJECT_DIR / "templates" / "docs", "**/*.md")):
        for path in sorted(folder.glob(pattern)):
            yield f"{folder.name}/{path.relative_to(folder).as_posix()}", path


def _python_files(top: Path) -> Iterator[Path]:
    """Yield the Python files below a folder without entering skipped folders.

    site-packages may have ten times as many files as the standard library.
    """
    for folder, subfolders, names in os.walk(top):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_PARTS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _read(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return ""
    return path.read_bytes().decode("utf-8", "replace")

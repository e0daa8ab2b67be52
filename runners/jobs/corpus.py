"""Text that every host has without a network: what the demo model learns and is judged on.

Python's own standard library, the licence texts of the system and the project's own
documentation. The order is by path, the split by each file's content hash, so two hosts with
the same Python train and evaluate on the same text.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[2]
LICENCE_DIR = Path("/usr/share/common-licenses")
# Tables, generated text and tests: long runs of near-equal lines that teach little.
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
        """Return whether the document is kept from training, by its content alone.

        Only Python files are: licences come in versions that repeat each other, so a held-out
        one would be half known from training.
        """
        return self.name.startswith("python/") and int(self.digest[:8], 16) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """Documents in their order, split by content."""

    documents: tuple[Document, ...]

    @cached_property
    def train(self) -> tuple[Document, ...]:
        """Return what a model may learn from."""
        return tuple(each for each in self.documents if not each.is_held_out)

    @cached_property
    def held_out(self) -> tuple[Document, ...]:
        """Return what a model is judged on."""
        return tuple(each for each in self.documents if each.is_held_out)

    @cached_property
    def digest(self) -> str:
        """Return one SHA-256 that names this text and order."""
        joined = "".join(each.digest for each in self.documents)
        return hashlib.sha256(joined.encode()).hexdigest()


def load_corpus() -> Corpus:
    """Return the text of this machine; equal texts are kept once."""
    seen: dict[str, Document] = {}
    for name, path in _paths():
        text = _read(path)
        if len(text) >= MIN_FILE_BYTES:
            document = Document(name, text)
            seen.setdefault(document.digest, document)
    return Corpus(tuple(seen.values()))


def _paths() -> Iterator[tuple[str, Path]]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if not SKIPPED_PARTS.intersection(relative.parts):
            yield f"python/{relative.as_posix()}", path
    for folder, pattern in ((LICENCE_DIR, "*"), (PROJECT_DIR / "templates" / "docs", "**/*.md")):
        for path in sorted(folder.glob(pattern)):
            yield f"{folder.name}/{path.relative_to(folder).as_posix()}", path


def _read(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return ""
    return path.read_bytes().decode("utf-8", "replace")

"""Text that jobs train on and evaluate with, and its domains."""

import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.runtime import BadInputError

# ---------------------------------------------------------------------------
# The host's own text and the demo model's tokenizer, available without a network.
# ---------------------------------------------------------------------------


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


# The demo model's tokenizer and tokenised text, built once per host and cached by digest.


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


END_OF_TEXT = "<|endoftext|>"
LAYOUT_VERSION = 1  # increase when the cache format changes

TokenIds = npt.NDArray[np.int32]


def demo_tokenizer(corpus: Corpus, vocab_size: int, cache_dir: Path) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of ``vocab_size`` entries, trained on the train text."""
    folder = cached_folder(
        cache_dir,
        f"tokenizer-{_digest(corpus.digest, vocab_size)}",
        lambda target: _train_tokenizer(corpus.train, vocab_size).save_pretrained(str(target)),
    )
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        str(folder), local_files_only=True
    )
    return tokenizer


def tokenize_documents(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document], key: str, cache_dir: Path
) -> TokenIds:
    """Return the documents as one stream of token ids, each ended by end-of-text.

    ``key`` identifies the text (for example corpus digest and split); the cache name also
    contains the tokenizer's digest.
    """
    name = f"tokens-{_digest(key, tokenizer_digest(tokenizer))}"
    folder = cached_folder(
        cache_dir, name, lambda target: _save_tokens(tokenizer, documents, target)
    )
    ids: TokenIds = np.load(folder / "tokens.npy", mmap_mode="r")
    return ids


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a digest of everything that determines how the tokenizer splits text."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def cached_folder(cache_dir: Path, name: str, build: Callable[[Path], object]) -> Path:
    """Return the cache folder ``name``; build it aside and rename it if absent.

    Two jobs may build it concurrently: the first rename wins, and the contents are equal.
    """
    final = cache_dir / name
    if final.is_dir():
        return final
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir))
    try:
        build(building)
        building.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final


def _train_tokenizer(documents: Iterable[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((each.text for each in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )


def _save_tokens(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document], target: Path
) -> None:
    texts = [each.text for each in documents]
    end = tokenizer.eos_token_id
    encoded = (
        tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    )
    ids = [token for text in encoded for token in (*text, *([end] if end is not None else []))]
    with (target / "tokens.npy").open("wb") as file:
        np.save(file, np.asarray(ids, dtype=np.int32))
        file.flush()
        os.fsync(file.fileno())


def _digest(*parts: object) -> str:
    text = json.dumps([LAYOUT_VERSION, *parts], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


# ---------------------------------------------------------------------------
# Samples text from domains with dynamic weights that follow each domain's excess loss.
#
# Source: Xia et al. 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.2, algorithm 1.
# ---------------------------------------------------------------------------


CODE, PROSE = "code", "prose"
VALIDATION_ONE_IN = 8  # the end of a domain's text, which is not trained on
VALIDATION_SEQUENCES = 8
Losses = Mapping[str, float]


def domain_of(document: Document) -> str:
    """Return a document's domain: code for Python files, prose for licences and manuals."""
    return CODE if document.name.startswith("python/") else PROSE


class Domains:
    """The host's text by domain, and the sampling weights."""

    def __init__(self, texts: Mapping[str, TokenIds], length: int, seed: int) -> None:
        """Start with weights in proportion to each domain's text.

        Raises:
            BadInputError: a domain has too little text for a training and a validation sequence.
        """
        self._length = length
        self.random = np.random.default_rng(seed)
        self._train: dict[str, TokenIds] = {}
        self._validation: dict[str, torch.Tensor] = {}
        for name, ids in texts.items():
            begin = len(ids) - max(len(ids) // VALIDATION_ONE_IN, length)
            if begin <= length:
                msg = (
                    f"the {name} text of this host has {len(ids)} tokens, and sequences of "
                    f"{length} tokens need at least {2 * length + 1}; use a host with more text"
                )
                raise BadInputError(msg)
            self._train[name] = ids[:begin]
            self._validation[name] = _spread(ids[begin:], length)
        sizes = np.array([len(each) for each in self._train.values()], dtype=np.float64)
        self.weights: dict[str, float] = dict(
            zip(self._train, (sizes / sizes.sum()).tolist(), strict=True)
        )

    def batch(self, count: int) -> torch.Tensor:
        """Return sequences [count, length], each from a domain sampled by weight."""
        names = list(self.weights)
        drawn = self.random.choice(len(names), size=count, p=list(self.weights.values()))
        return torch.from_numpy(np.stack([self._sample(names[each]) for each in drawn]))

    def _sample(self, name: str) -> npt.NDArray[np.int64]:
        ids = self._train[name]
        at = int(self.random.integers(0, len(ids) - self._length))
        piece: npt.NDArray[np.int64] = np.asarray(ids[at : at + self._length], dtype=np.int64)
        return piece

    @torch.no_grad()
    def losses(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the model's loss, in nats per token, on each domain's validation text."""
        by_domain = {}
        for name, ids in self._validation.items():
            here = ids.to(model.device)
            by_domain[name] = float(model(here, labels=here, use_cache=False).loss)
        return by_domain

    def follow(self, losses: Losses, reference: Losses) -> None:
        """Increase the weights of domains whose loss is further above its reference."""
        behind = [losses[name] - reference[name] for name in self.weights]
        grown = updated_weights(list(self.weights.values()), behind)
        self.weights = dict(zip(self.weights, grown, strict=True))


def updated_weights(weights: Sequence[float], behind: Sequence[float]) -> list[float]:
    """Return the updated weights, which sum to 1.

    Each is multiplied by the exponential of its loss's excess over its reference, ``behind`` in
    nats; a negative excess counts as 0. Without finite losses the weights do not change.
    """
    if not all(map(math.isfinite, behind)):
        return list(weights)
    above = [max(0.0, each) for each in behind]
    most = max(above)  # subtracted from the exponents to avoid overflow
    grown = [weight * math.exp(each - most) for weight, each in zip(weights, above, strict=True)]
    total = sum(grown)
    return [each / total for each in grown]


def domains_of(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    cache_dir: Path,
    length: int,
    seed: int,
) -> Domains:
    """Return the host's training text by domain, without the held-out text."""
    texts = {}
    for name in (CODE, PROSE):
        own = [each for each in corpus.train if domain_of(each) == name]
        texts[name] = tokenize_documents(
            tokenizer, own, f"{corpus.digest}/train/{name}", cache_dir
        )
    return Domains(texts, length, seed)


def _spread(ids: TokenIds, length: int) -> torch.Tensor:
    """Return sequences [count, length] spread evenly over a text."""
    count = min(VALIDATION_SEQUENCES, len(ids) // length)
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    pieces = np.stack([np.asarray(ids[at : at + length], dtype=np.int64) for at in starts])
    return torch.from_numpy(pieces)

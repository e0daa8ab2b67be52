"""The demo model's tokenizer and tokenised text, built once per host and cached by digest."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runners.jobs.corpus import Corpus, Document

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


def tokenized(
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

"""A data set as one text in a model's tokens, to evaluate a model on or to calibrate with."""

from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from runners.jobs.corpus import TokenIds
from runners.jobs.data_files import open_source
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.train.tokenised_samples import tokenised_file
from runners.jobspec import DownloadedData, HubData


class NamedTokens(NamedTuple):
    """The tokens of all records, one after the other; ``digest``: SHA-256 of the files."""

    ids: TokenIds
    name: str
    digest: str
    num_records: int

    @property
    def words(self) -> str:
        """Return what the tokens are of, for a sentence."""
        return f"{self.num_records:,} records of {self.name} (sha256 {self.digest[:12]})"


def tokens_of(
    job: Job, source: HubData | DownloadedData, tokenizer: PreTrainedTokenizerFast
) -> NamedTokens:
    """Return a data set as a training reads it: chats by the model's template, prompts too.

    Raises:
        MissingModelError: it was not downloaded.
        BadInputError: a record is invalid, or compares answers, which are no text.
    """
    if isinstance(source, HubData):  # runners.jobs.fetch puts its files in its place
        raise MissingModelError(f"the data set {source.name} was not downloaded")
    with open_source(job, source) as file:
        digest = file.digest()
        read = tokenised_file(file, digest, tokenizer, job.cache_dir)
    ids: TokenIds = np.concatenate([read.held_out.ids, read.train.ids])
    return NamedTokens(ids, file.name, digest, len(read.held_out) + len(read.train))


def check_long_enough(name: str, num_tokens: int, fewest: int) -> None:
    """Refuse a data set whose text is too short for what it is read for.

    Raises:
        BadInputError: it has fewer tokens; the message names both numbers.
    """
    if num_tokens < fewest:
        raise BadInputError(
            f"{name} has {num_tokens:,} tokens for this model, and at least {fewest:,} are read; "
            "choose another split, or more records"
        )

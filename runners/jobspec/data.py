"""Training data sources: the host's own text, files of the host, uploads, mixtures."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from runners.datasets.records import Format, suffix_of
from runners.jobspec.base import JobDocument

DATA_FOLDER = "data"  # the attempt's folder for files downloaded from the server
MAX_UPLOAD_BYTES = 256 * 1024**2
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DatasetId = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z]{1,26}$")]


class HostText(JobDocument):
    """The host's own text: Python's standard library, licences, manuals."""

    source: Literal["host"] = "host"


class FileData(JobDocument):
    """A .jsonl, .parquet or .txt file below a model folder; ``format`` None is detected."""

    source: Literal["file"] = "file"
    path: str = Field(min_length=1, max_length=1000)
    format: Format | None = None


class UploadedData(JobDocument):
    """A file uploaded to the server, which the host downloads before the job starts."""

    source: Literal["upload"] = "upload"
    dataset_id: DatasetId
    name: str = Field(max_length=200)
    sha256: Sha256
    size_bytes: int = Field(ge=1, le=MAX_UPLOAD_BYTES)
    format: Format | None = None

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        suffix_of(self.name)
        return self

    @property
    def file_name(self) -> str:
        """Return the file's name in the attempt's data folder."""
        return self.dataset_id + suffix_of(self.name)


OneSource = Annotated[HostText | FileData | UploadedData, Field(discriminator="source")]


class WeightedData(JobDocument):
    """One source of a mixture with its relative weight.

    ``reference_loss``, in nats per token, is the target loss of dynamic weights; None: the model's
    loss on the source before the first step.
    """

    data: OneSource
    weight: PositiveFloat
    reference_loss: float | None = Field(default=None, ge=0.0, le=20.0)


class MixedData(JobDocument):
    """A mixture of sources, sampled in proportion to their weights.

    Dynamic ``weights`` are updated every ``update_every_steps`` steps, including the first: a
    source's weight grows with the excess of its held-out loss over its reference.

    Source: Xia et al. 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.2, algorithm 1.
    """

    source: Literal["mixed"] = "mixed"
    parts: tuple[WeightedData, ...] = Field(min_length=2, max_length=16)
    weights: Literal["fixed", "dynamic"] = "fixed"
    update_every_steps: PositiveInt = Field(default=50, le=1_000_000)

    @model_validator(mode="after")
    def _references_are_followed(self) -> Self:
        for at, part in enumerate(self.parts):
            if self.weights == "fixed" and part.reference_loss is not None:
                msg = (
                    f"parts.{at}.reference_loss is {part.reference_loss:g} and weights are fixed, "
                    "which follow no loss; leave it out, or choose weights dynamic"
                )
                raise ValueError(msg)
        return self


TrainData = Annotated[
    HostText | FileData | UploadedData | MixedData, Field(discriminator="source")
]


class SampleOptions(JobDocument):
    """How samples become training rows.

    ``packed``: short samples share a row without attending to each other. ``padded``: one sample
    per row. Longer samples are ``cut`` (plain text into several pieces) or left out.
    """

    rows: Literal["packed", "padded"] = "packed"
    too_long: Literal["cut", "leave_out"] = "cut"


def sources_of(data: TrainData) -> tuple[HostText | FileData | UploadedData, ...]:
    """Return the individual sources."""
    if isinstance(data, MixedData):
        return tuple(part.data for part in data.parts)
    return (data,)


def weights_of(data: TrainData) -> tuple[float, ...]:
    """Return the sources' sampling shares, which sum to 1."""
    if not isinstance(data, MixedData):
        return (1.0,)
    total = sum(part.weight for part in data.parts)
    return tuple(part.weight / total for part in data.parts)


def uploads_of(data: TrainData) -> tuple[UploadedData, ...]:
    """Return the uploads among the sources."""
    return tuple(each for each in sources_of(data) if isinstance(each, UploadedData))

"""What a training reads: the host's own text, files of the host, uploads, or several of them."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from runners.datasets.records import Format, suffix_of
from runners.jobspec.base import JobDocument

DATA_FOLDER = "data"  # of an attempt: where its host puts what it fetched from the server
MAX_UPLOAD_BYTES = 256 * 1024**2
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DatasetId = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z]{1,26}$")]


class HostText(JobDocument):
    """The text that every host has: Python's own files, licences, manuals."""

    source: Literal["host"] = "host"


class FileData(JobDocument):
    """A .jsonl, .parquet or .txt file below the host's model folder; its first record says how."""

    source: Literal["file"] = "file"
    path: str = Field(min_length=1, max_length=1000)
    format: Format | None = None


class UploadedData(JobDocument):
    """A file that was handed to the server, and that the host fetches before the job starts."""

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
        """Return the name under which the file lies in the attempt's folder."""
        return self.dataset_id + suffix_of(self.name)


OneSource = Annotated[HostText | FileData | UploadedData, Field(discriminator="source")]


class WeightedData(JobDocument):
    """One of several sources, and its share of the rows against the others' weights.

    ``reference_loss``, in nats a token: what weights that move hold a source's loss against;
    None: what the model has on it before the first step.
    """

    data: OneSource
    weight: PositiveFloat
    reference_loss: float | None = Field(default=None, ge=0.0, le=20.0)


class MixedData(JobDocument):
    """Several sources, from which rows come in proportion to their weights.

    With ``weights`` dynamic they move every ``update_every_steps`` steps, the first among them:
    a source grows by how far its held-out loss is above its reference.

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
    """How samples become rows of a step.

    ``packed``: short ones share a row, and none sees another. ``padded``: one a row. What is
    longer than a row is ``cut`` - plain text into several pieces - or left out.
    """

    rows: Literal["packed", "padded"] = "packed"
    too_long: Literal["cut", "leave_out"] = "cut"


def sources_of(data: TrainData) -> tuple[HostText | FileData | UploadedData, ...]:
    """Return what a training reads, one by one."""
    if isinstance(data, MixedData):
        return tuple(part.data for part in data.parts)
    return (data,)


def weights_of(data: TrainData) -> tuple[float, ...]:
    """Return the share of the rows that each source gives; they sum to 1."""
    if not isinstance(data, MixedData):
        return (1.0,)
    total = sum(part.weight for part in data.parts)
    return tuple(part.weight / total for part in data.parts)


def uploads_of(data: TrainData) -> tuple[UploadedData, ...]:
    """Return the uploads among the sources."""
    return tuple(each for each in sources_of(data) if isinstance(each, UploadedData))

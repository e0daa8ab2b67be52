"""Replies about models, data, devices, techniques, comparisons, searches, measurements."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.specs.cluster import DeviceKind
from planner.specs.model import ModelSpec
from runners.client.replies.base import Open, PageReply, Reply
from runners.datasets.records import Format
from runners.host.abilities import Level


class ModelReply(Reply):
    """A model of the catalog, or of the team."""

    id: str
    name: str
    source: Open[Literal["catalog", "config", "hub", "folder", "job"]]
    num_parameters: int
    host: Annotated[str, Field(description="Slug of the host that has the weights; empty: none")]
    created_at: datetime | None


class ModelDetail(ModelReply):
    """A model with its shape."""

    shape: ModelSpec | None
    kv_bytes_per_token: Annotated[dict[str, float], Field(description="By dtype of the KV cache")]
    facts: Annotated[
        dict[str, Any], Field(description="Measured sizes and perplexity, and by whom")
    ]
    aliases: Annotated[list[str], Field(description="Other names in the catalog")]


class ModelPage(PageReply[ModelReply]):
    """A page of models."""


class DatasetReply(Reply):
    """An uploaded file of training data; ``note`` says what jobs do not learn from."""

    id: str
    name: str
    sha256: str
    size_bytes: int
    num_records: int
    format: Open[Format]
    uploaded_by: Annotated[str, Field(description="User name; empty if the account is deleted")]
    created_at: datetime
    note: Annotated[str, Field(description="What jobs do not learn from; empty: all is read")]


class DatasetPage(PageReply[DatasetReply]):
    """A page of uploaded files."""


class DeviceSummary(Reply):
    """A device of the hardware catalog."""

    id: str
    name: str
    vendor: str
    kind: Open[DeviceKind]
    memory_bytes: int
    price_usd_per_hour: float | None


class DevicePage(PageReply[DeviceSummary]):
    """A page of the hardware catalog."""


class TechniqueReply(Reply):
    """A technique, whether a job runs it here, and what proves that."""

    id: str
    title: str
    state: Annotated[Open[Level], Field(description="proven: runs, and a measured ratio holds")]
    headline: str
    phases: list[str]
    job_kind: Annotated[str, Field(description="Kind of job that runs it; empty: none")]
    library: Annotated[str, Field(description="Library that does it; empty: none")]


class TechniquePage(PageReply[TechniqueReply]):
    """A page of techniques."""


class SearchMatch(Reply):
    """One match of a search; ``id`` is what its kind's operations take."""

    kind: Open[Literal["plan", "job", "host", "model", "technique"]]
    id: str
    name: str


class SearchPage(PageReply[SearchMatch]):
    """A page of matches."""


class CellReply(Reply):
    """One figure of one job in base units; null where there is none."""

    predicted: float | None
    measured: float | None
    ratio: Annotated[float | None, Field(description="Measured / predicted")]
    change: Annotated[str, Field(description="Against the first job, such as +12 %")]
    state: Annotated[str, Field(description="Why it is not final, such as so far; empty: final")]


class ComparedFigure(Reply):
    """One figure of all jobs, in their order."""

    name: str
    label: str
    unit: str
    cells: list[CellReply]


class ComparedSetting(Reply):
    """One setting in which the jobs differ."""

    name: str
    values: list[str]


class Comparison(Reply):
    """Jobs side by side: their figures, and the settings in which they differ."""

    jobs: Annotated[list[str], Field(description="Ids, in the order of the request")]
    names: Annotated[list[str], Field(description="Of the jobs")]
    figures: list[ComparedFigure]
    settings: list[ComparedSetting]


class MeasurementReply(Reply):
    """A measured figure beside its prediction; whether it calibrates its host."""

    id: int
    metric: str
    predicted: float
    measured: float
    ratio: Annotated[float, Field(description="Measured / predicted")]
    host: Annotated[str, Field(description="Slug of the host")]
    is_counted: Annotated[bool, Field(description="Whether it calibrates the host")]
    may_decide: Annotated[bool, Field(description="Whether the caller may change that")]


class MeasurementPage(PageReply[MeasurementReply]):
    """A page of a job's measurements."""

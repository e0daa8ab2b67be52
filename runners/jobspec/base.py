"""What every job spec has, the data it names, and the types of their values."""

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from runners.datasets.records import READ, Format, suffix_of
from runners.datasets.repositories import DATA_SETS, STORE_PREFIX

# ---------------------------------------------------------------------------
# Types that job specs share: models, data parallelism, adapters, text samples.
# ---------------------------------------------------------------------------


ComputeDtype = Literal["fp32", "bf16", "fp16", "fp8"]

# Names of the Hub. A part of owner/name is as in huggingface_hub, utils/_validators.py:
# validate_repo_id. Python's $ alone would allow a line break after a name.
PART = r"(?![.-])(?!.*(?:--|\.\.))[A-Za-z0-9_.-]{1,96}(?<![.-])(?<!\.git)"
REPOSITORY = re.compile(rf"^{PART}/{PART}$(?!\n)")
REVISION = r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.+-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*"
LONGEST_NAME = 512  # characters, with a revision and a file
LONGEST_REVISION = 255
DATA_REPOSITORY = re.compile(rf"^{DATA_SETS}{PART}/{PART}$(?!\n)")
CACHED_REPOSITORY = re.compile(rf"^(?:{DATA_SETS})?{PART}/{PART}$(?!\n)")
SPLIT = re.compile(r"^[A-Za-z0-9_.-]{1,100}$(?!\n)")
SUBSET = re.compile(r"^[^/\x00-\x1f\x7f]{0,200}$(?!\n)")
USUAL_SPLIT = "train"


def owner_fault(repository: str) -> str:
    """Return why a repository is none of a hub, "" if it may be one.

    >>> owner_fault("Qwen/Qwen3-8B")
    ''
    """
    if not repository.startswith(STORE_PREFIX):
        return ""
    return (
        f"{repository!r:.200} is how the cache of a host names what came from an object store: "
        "give its address, s3://BUCKET/PREFIX"
    )


def _check_owner(repository: str) -> str:
    if fault := owner_fault(repository):
        raise ValueError(fault)
    return repository


Repository = Annotated[
    str,
    StringConstraints(pattern=REPOSITORY, max_length=200),
    AfterValidator(_check_owner),
]
CachedRepository = Annotated[str, StringConstraints(pattern=CACHED_REPOSITORY, max_length=200)]
RevisionText = Annotated[
    str,
    StringConstraints(
        pattern=re.compile(rf"^(?:{REVISION})?$(?!\n)"), max_length=LONGEST_REVISION
    ),
]


# An object, or all below a prefix, of a store that speaks S3. The bucket's name is as in
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
STORE_SCHEME = "s3://"
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
STORE_FORM = "s3://BUCKET/PREFIX"


def is_store_url(path: str) -> bool:
    """Return whether a path is the address of an object store, right or not."""
    return path.startswith(STORE_SCHEME)


def store_fault(path: str) -> str:
    """Return why a path is neither one of a host nor the address of an object, "" if it is.

    >>> store_fault("s3://models/qwen3"), store_fault("models/qwen3")
    ('', '')
    """
    if not is_store_url(path):
        if "://" in path:
            return f"{path!r:.200} is of a store that hosts do not read: give {STORE_FORM}"
        return ""
    bucket, _, key = path.removeprefix(STORE_SCHEME).partition("/")
    if BUCKET.fullmatch(bucket) is None or ".." in bucket:
        return (
            f"{path!r:.200} names the bucket {bucket!r:.80}, which is not 3 to 63 small letters, "
            f"digits, '.' and '-': give {STORE_FORM}"
        )
    parts = key.removesuffix("/").split("/")
    if not key.isprintable() or any(part in {"", ".", ".."} for part in parts):
        return (
            f"{path!r:.200} names no object below its bucket: what follows it is a key without "
            f"empty parts, '.' and '..': give {STORE_FORM}"
        )
    return ""


class JobDocument(BaseModel):
    """The base of all job specs: frozen; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{1,39}$")]


HubName = Literal["huggingface", "modelscope"]  # sources of models
SchedulerKind = Literal["slurm", "kubernetes", "ray"]
SchedulerOption = Literal["account", "partition", "qos", "reservation", "queue", "priority_class"]
# What a job may ask of each scheduler, in place of its host's own options.
SCHEDULER_OPTIONS: Mapping[SchedulerKind, tuple[SchedulerOption, ...]] = {
    "slurm": ("account", "partition", "qos", "reservation"),
    "kubernetes": ("queue", "priority_class"),
    "ray": ("partition",),
}
SchedulerValue = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:@+-]{1,100}$")]


class RunDocument(JobDocument):
    """Fields of every job kind; ``secrets`` are names, the values arrive with the claim.

    ``scheduler_options`` are what this job asks of its host's scheduler, in place of the host's
    own options.
    """

    secrets: tuple[SecretName, ...] = Field(default=(), max_length=16)
    scheduler_options: dict[SchedulerOption, SchedulerValue] = Field(default_factory=dict)


class ResumableDocument(RunDocument):
    """Fields of kinds whose jobs leave a checkpoint, finished answers or finished layers.

    ``resume_from``: the id of an ended job of the same spec that ran on this host. The job goes on
    from a copy of what that job left, and is refused where nothing is left.
    """

    resume_from: str = Field(default="", pattern=r"^([0-9A-Z]{26})?$")


def resume_from_of(spec: RunDocument) -> str:
    """Return the id of the job that a spec resumes, or an empty text."""
    return spec.resume_from if isinstance(spec, ResumableDocument) else ""


class DemoModel(JobDocument):
    """The small Llama-shaped model that is trained from scratch on the host's own text.

    The shape with the best perplexity after two minutes on two cores: 6.8 M parameters saw too
    few tokens (perplexity 345 against 207 after one minute), 1.8 M had too little capacity.
    """

    source: Literal["demo"] = "demo"
    hidden_size: PositiveInt = 192
    intermediate_size: PositiveInt = 512
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    vocab_size: PositiveInt = 4096
    max_position_embeddings: PositiveInt = 256


class FolderModel(JobDocument):
    """A folder on the host with config.json, safetensors and a tokenizer, below a model root.

    Or the address of one in an object store, s3://BUCKET/PREFIX, which the host downloads first.
    """

    source: Literal["folder"] = "folder"
    path: str


class ArtefactModel(JobDocument):
    """The model that an earlier attempt on this host left in its output folder."""

    source: Literal["artefact"] = "artefact"
    attempt_id: str
    name: str = "model"


class HubModel(JobDocument):
    """A repository of the Hugging Face Hub or of a mirror of it, which the host downloads.

    The host fetches the files that the job needs, unless its cache has them, and the job then
    reads their folder. ``revision``: a commit, or a branch, which is read when the job starts;
    empty: main. ``file``: of GGUF weights the type or the file, such as Q4_K_M; empty where the
    repository has one. ``hub``: which one has it; empty: the host's usual one.
    """

    source: Literal["hub"] = "hub"
    repository: Repository
    revision: RevisionText = ""
    weights: Literal["safetensors", "gguf"] = "safetensors"
    file: str = Field(default="", max_length=LONGEST_NAME)
    hub: Literal["", HubName] = ""


class RandomModel(JobDocument):
    """Random weights in the shape of a config.json: speed and memory are real, text is not."""

    source: Literal["random"] = "random"
    config: dict[str, object]


ModelRef = Annotated[
    DemoModel | FolderModel | ArtefactModel | HubModel | RandomModel, Field(discriminator="source")
]
# References to weights that exist: a folder, an earlier job's output, a repository.
StoredModel = FolderModel | ArtefactModel | HubModel
StoredModelRef = Annotated[StoredModel, Field(discriminator="source")]


NAME_LENGTH = 120  # characters of the names of jobs, plans, models, hosts and pools
START_SECONDS = 600.0  # loading torch and a model from a slow shared disk takes minutes


class DataParallel(JobDocument):
    """Failure policy of a training on several devices or hosts when a rank is lost.

    ``stop``: the job ends. ``shrink``: it resumes from its last checkpoint with the remaining
    ranks. ``restart``: all ranks restart from the last checkpoint, at most ``max_restarts`` times;
    an unreachable host has the start timeout to return.
    ``rank_timeout_seconds`` applies to training ranks; starting may take longer.
    ``processes_per_host`` ranks share the CPU of a host without a GPU for each.
    """

    on_lost_rank: Literal["stop", "restart", "shrink"] = "stop"
    max_restarts: int = Field(default=3, ge=1, le=100)  # for restart
    min_hosts: PositiveInt = 1  # for shrink: with fewer the job ends
    processes_per_host: int = Field(default=1, ge=1, le=64)
    rank_timeout_seconds: float = Field(default=300.0, ge=5.0, le=7200.0)

    @property
    def start_timeout_seconds(self) -> float:
        """Return the timeout of ranks for each other until the first step."""
        return max(START_SECONDS, self.rank_timeout_seconds)


# Encoders, demo model and demo classes of text classification, shared by web and jobs.


ENCODERS = ("distilbert",)  # architectures with a trainable classification head
# Classes of the host's own text: the standard library package that a passage comes from.
PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
MAX_CLASSES = 1000
# DistilBERT at a size that two CPU ranks train in minutes. No dropout, as everywhere in this
# trainer: a step is then the same on any number of ranks.
DEMO_ENCODER: Mapping[str, object] = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForSequenceClassification"],
    "dim": 192,
    "hidden_dim": 768,
    "n_layers": 4,
    "n_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "num_labels": len(PACKAGES),
}


# Adapter options: LoRA as in peft, merging, and quantised training.


LoraTargets = Literal["all", "query_value"]
BaseDtype = Literal["compute", "nf4"]


class LoraOptions(BaseModel):
    """Train low-rank matrices on top of frozen weights: W + (alpha / rank) * B A.

    ``targets`` "all" are all linear layers except the output, "query_value" those of the paper.
    With ``is_merged`` the job also saves the whole model with the merged adapter. ``base_dtype``
    "nf4" stores the frozen weights in 4 bits (QLoRA); the adapter is merged into the full-width
    weights. ``is_dora`` also trains the magnitude of each weight row (DoRA).

    Source: Hu et al. 2021, arXiv:2106.09685, section 4; Dettmers et al. 2023, arXiv:2305.14314;
    Liu et al. 2024, arXiv:2402.09353.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: PositiveInt = Field(default=8, le=1024)
    alpha: PositiveInt = Field(default=16, le=65_536)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: LoraTargets = "all"
    is_merged: bool = True
    base_dtype: BaseDtype = "compute"
    is_dora: bool = False


class QuantizedTraining(BaseModel):
    """Train with quantised weights: "alphatuning" only the scales, "qat" the rounded weights.

    ``group_size`` weights of a row share one scale.

    Source: Kwon et al. 2022, arXiv:2210.03858; Jacob et al. 2017, arXiv:1712.05877.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["alphatuning", "qat"]
    bits: Literal[4, 8] = 4
    group_size: PositiveInt = Field(default=32, multiple_of=2, le=4096)


# Options of text samples that a training generates to show its progress.


MOST_PROMPTS = 3
LONGEST_PROMPT = 500  # characters
Prompt = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_PROMPT, pattern=r"\S")]


class TextSamples(JobDocument):
    """Prompts, interval and length of the samples; default prompt: the held-out text's beginning.

    ``temperature`` 0 is greedy; otherwise tokens are sampled with ``seed``.
    """

    every_steps: PositiveInt = 100
    prompts: tuple[Prompt, ...] = Field(default=(), max_length=MOST_PROMPTS)
    max_tokens: int = Field(default=48, ge=1, le=256)
    temperature: float = Field(default=0.0, ge=0.0, le=5.0)
    seed: int = Field(default=17, ge=0, lt=2**63)


# ---------------------------------------------------------------------------
# Training data sources: the host's own text, files of the host, uploads, mixtures.
# ---------------------------------------------------------------------------


DATA_FOLDER = "data"  # the attempt's folder for files downloaded from the server
MAX_UPLOAD_BYTES = 256 * 1024**2
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DatasetId = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z]{1,26}$")]


class HostText(JobDocument):
    """The host's own text: Python's standard library, licences, manuals."""

    source: Literal["host"] = "host"


# A column that is read, and the field that it is read as if that is another: question=prompt.
COLUMN = re.compile(r"^(?P<column>[^=,\x00-\x1f\x7f]{1,100}?)(?:=(?P<field>\w{1,40}))?$(?!\n)")
MOST_COLUMNS_READ = 16
MOST_RECORDS = 10_000_000
Column = Annotated[str, StringConstraints(pattern=COLUMN)]


def check_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse columns that are read as a field of no format, or two as one.

    Raises:
        ValueError: names the column and the fields that there are.
    """
    fields = list(renames_of(columns).values())
    if unknown := [each for each in fields if each not in READ]:
        known = ", ".join(sorted(READ))
        msg = (
            f"{unknown[0]!r} is no field of a record; read a column as one by COLUMN=FIELD, "
            f"such as question=prompt, of the fields {known}"
        )
        raise ValueError(msg)
    if twice := [each for each in fields if fields.count(each) > 1]:
        msg = f"two columns are read as {twice[0]!r}; leave one of them out"
        raise ValueError(msg)
    return columns


def renames_of(columns: Iterable[str]) -> dict[str, str]:
    """Return the field of a record that each column is read as.

    >>> renames_of(("question=prompt", "answer"))
    {'question': 'prompt', 'answer': 'answer'}
    """
    parts = [each.partition("=") for each in columns]
    return {column: field or column for column, _, field in parts}


class DataOptions(JobDocument):
    """How records are read.

    ``columns``: none, all fields of the format; else these alone, ``question=prompt`` under
    another name. ``records``: only so many, from the first on; None: all.
    """

    format: Format | None = None  # None is detected
    columns: Annotated[
        tuple[Column, ...], Field(max_length=MOST_COLUMNS_READ), AfterValidator(check_columns)
    ] = ()
    records: PositiveInt | None = Field(default=None, le=MOST_RECORDS)


class FileData(DataOptions):
    """A file of training data below a model folder; ``format`` None is detected.

    Or the address of one in an object store, s3://BUCKET/KEY, which the host downloads first.
    """

    source: Literal["file"] = "file"
    path: str = Field(min_length=1, max_length=1000)


class HubData(DataOptions):
    """A split of a data set of the Hub or of a mirror of it, which the host downloads.

    Of a split with ``records`` the host downloads files until they hold as many.

    ``repository``: datasets/owner/name, as in the Hub's addresses and in its cache. ``revision``
    as of a ``HubModel``. ``subset``: one of the data set's configurations; empty: the usual one.
    """

    source: Literal["hub"] = "hub"
    repository: str = Field(pattern=DATA_REPOSITORY, max_length=200)
    revision: RevisionText = ""
    subset: str = Field(default="", pattern=SUBSET)
    split: str = Field(default=USUAL_SPLIT, pattern=SPLIT)

    @property
    def name(self) -> str:
        """Return the data set as people name it."""
        return self.repository.removeprefix(DATA_SETS)


class DownloadedData(DataOptions):
    """The files of a ``HubData`` in the host's cache, read one after the other.

    ``name`` stands for all of them, and ends as they do. Only a host writes it, into the job's
    own spec.
    """

    source: Literal["downloaded"] = "downloaded"
    name: str = Field(max_length=400)
    paths: tuple[str, ...] = Field(min_length=1)


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


Source = HostText | FileData | UploadedData | HubData | DownloadedData
# The text of an evaluation, and that which a compression calibrates on.
NamedText = Annotated[HostText | HubData | DownloadedData, Field(discriminator="source")]
OneSource = Annotated[Source, Field(discriminator="source")]


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
                    f"parts.{at}.reference_loss is {part.reference_loss:g} and weights is fixed, "
                    "which uses no loss; choose weights dynamic, or leave reference_loss out"
                )
                raise ValueError(msg)
        return self


TrainData = Annotated[Source | MixedData, Field(discriminator="source")]


PackingStrategy = Literal["bfd", "bfd_split", "wrapped"]


class SampleOptions(JobDocument):
    """How samples become training rows.

    ``packed``: short samples share a row without attending to each other. ``padded``: one sample
    per row. Longer samples are ``truncate`` (plain text into several pieces) or left out.
    ``packing_strategy``, of the engine trl alone, is how its rows are packed, in TRL's names:
    ``bfd`` cuts longer samples, ``bfd_split`` goes on with them in another row, ``wrapped`` fills
    rows with one text after the other, which then see each other.

    Source: huggingface/trl, trl/data_utils.py (pack_dataset), release 1.16.
    """

    rows: Literal["packed", "padded"] = "packed"
    too_long: Literal["cut", "leave_out"] = "cut"
    packing_strategy: PackingStrategy | None = None


def sources_of(data: TrainData) -> tuple[Source, ...]:
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


# ---------------------------------------------------------------------------
# Base types of every document between site, host and job: limits and addresses.
# ---------------------------------------------------------------------------


MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 32  # nesting of lists and objects
MAX_KEY_CHARACTERS = 300
MAX_FIELDS = 200  # of one object, known or not
MAX_EXCERPT_CHARACTERS = 500
LATEST_MS = 4_102_444_800_000  # 2100-01-01, as milliseconds since the Unix epoch

TimestampMs = Annotated[int, Field(ge=0, le=LATEST_MS)]
# Printable ASCII: PostgreSQL rejects NUL, even in queries.
Identifier = Annotated[str, StringConstraints(max_length=64, pattern="^[ -~]*$")]
Share = Annotated[float, Field(ge=0, le=1000)]  # 1 is all; clock drift may yield slightly more
Watts = Annotated[float, Field(ge=0, le=1e6)]
Celsius = Annotated[float, Field(ge=-300, le=10_000)]
Seconds = Annotated[float, Field(ge=0, le=1e10)]  # three centuries
Amount = Annotated[float, Field(ge=0, le=1e18)]
Figure = Annotated[float, Field(ge=-1e100, le=1e100)]  # of any unit
Rate = Annotated[float, Field(ge=0, le=1e21)]  # bytes or operations in a second


def of_texts(value: object) -> object:
    """Validate that an object's values are texts; return other types for pydantic to reject.

    Reports one error, even if thousands of entries are wrong.

    Raises:
        ValueError: an entry is not a text; the message names the first such entry.
    """
    for key, entry in value.items() if isinstance(value, dict) else ():
        if not isinstance(entry, str):
            msg = f"the entry {str(key)[:MAX_KEY_CHARACTERS]} is not text"
            raise ValueError(msg)  # noqa: TRY004 -- pydantic takes no TypeError for a fault
    return value


# Texts for display are truncated, not rejected.
Name = Annotated[str, BeforeValidator(lambda text: truncate(text, 255))]
Sentence = Annotated[str, BeforeValidator(lambda text: truncate(text, 2000))]
Names = Annotated[dict[Name, Name], BeforeValidator(of_texts)]


class Message(BaseModel):
    """Base of all messages: frozen, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: object) -> object:
        """Reject an object with thousands of unknown fields with a single error."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            msg = f"it has {len(value):,} fields; the limit is {MAX_FIELDS}"
            raise ValueError(msg)
        return value


def key_id(key: str) -> str:
    """Return a command key's public id, which does not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def truncate(text: object, max_characters: int) -> object:
    """Truncate a text; return other types unchanged for pydantic to reject."""
    return text[:max_characters] if isinstance(text, str) else text


def read_json(data: bytes | str) -> Any:  # noqa: ANN401 (JSON)
    """Return a JSON text as plain Python values that any database can store.

    Raises:
        ValueError: the text is not JSON, is nested too deep, or has an integer beyond 64 bits.
    """
    return plain(parse_json(data))


def parse_json(data: bytes | str) -> Any:  # noqa: ANN401 (JSON)
    """Return a JSON text as Python values, not yet checked by ``plain``.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(_too_deep("the body")) from None


def plain(value: Any, where: str = "", depth: int = 0) -> Any:  # noqa: ANN401 (JSON)
    """Return a JSON value with NUL and lone surrogates replaced by U+FFFD.

    Raises:
        ValueError: the value is nested too deep, or has a key too long or an integer beyond 64
            bits.
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict | list | tuple):
        if depth >= MAX_DEPTH:
            raise ValueError(_too_deep(where))
        if isinstance(value, dict):
            return {
                _key(key, where): plain(entry, f"{where}.{key}" if where else key, depth + 1)
                for key, entry in value.items()
            }
        return [plain(entry, f"{where}.{at}", depth + 1) for at, entry in enumerate(value)]
    if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
        msg = f"{where[:MAX_KEY_CHARACTERS] or 'the body'} is an integer beyond 64 bits"
        raise ValueError(msg)
    return value


def excerpt(value: object) -> str:
    """Return the beginning of a rejected message, safe to store and display."""
    try:
        text = repr(value)
    except RecursionError:
        text = _too_deep("it")
    return _text(text[:MAX_EXCERPT_CHARACTERS])


def _too_deep(where: str) -> str:
    return f"{where[:MAX_KEY_CHARACTERS]} is nested deeper than {MAX_DEPTH} levels"


def _text(value: str) -> str:
    if value.isascii():
        return value.replace("\x00", "\ufffd") if "\x00" in value else value
    whole = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return whole.replace("\x00", "\ufffd")


def _key(key: str, where: str) -> str:
    if len(key) > MAX_KEY_CHARACTERS:
        at = f" of {where[:MAX_KEY_CHARACTERS]}" if where else ""
        msg = f"a key{at} has {len(key)} characters; the limit is {MAX_KEY_CHARACTERS}"
        raise ValueError(msg)
    return _text(key)


# Types of numeric IP addresses and ports.


def _plain_address(text: str) -> str:
    return str(ipaddress.ip_address(text))


IpAddress = Annotated[str, AfterValidator(_plain_address)]
Port = Annotated[int, Field(ge=1024, le=65535)]

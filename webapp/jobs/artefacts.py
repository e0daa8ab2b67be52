"""Files of a job: the uploaded data that it reads, the artefacts that it leaves, adapters too."""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction

from runners.jobspec import ArtefactModel, HubModel, ModelRef, NamedAdapter, TrainSpec
from runners.jobspec.base import UploadedData, uploads_of
from runners.plans.serving_spec import served_name
from webapp.accounts.models import Team
from webapp.core.outages import check_room
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem, TooLargeProblem
from webapp.datasets.models import Dataset
from webapp.datasets.services import change_record, path_of
from webapp.hosts.models import Host
from webapp.jobs.models import FINAL_STATES, Artefact, Attempt, Job
from webapp.live.stream import publish

# Upload artefact files in parts: confined to one folder, verified by digest.


MAX_PART_BYTES = 16 * 1024**2
MIN_FREE_BYTES = 512 * 1024**2
PIECE_BYTES = 1024**2
PARTIAL_SUFFIX = ".part"
MAX_NAME_BYTES = 255 - len(PARTIAL_SUFFIX)  # per name, the file systems' limit
MAX_PATH_BYTES = 1000


class Readable(Protocol):
    """A source of bytes that is read in chunks."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; empty at the end."""


class UploadFile(NamedTuple):
    """One announced file of an artefact, and its target path."""

    artefact: Artefact
    path: str
    size_bytes: int
    target: Path

    @property
    def partial(self) -> Path:
        """Return the path of the incomplete file."""
        return self.target.with_name(self.target.name + PARTIAL_SUFFIX)


def folder_of(artefact: Artefact) -> Path:
    """Return the folder that holds an artefact's files on the server."""
    return Path(settings.ARTEFACTS_DIR) / artefact.attempt_id / artefact.name


def path_inside(folder: Path, path: str) -> Path:
    """Return the path of ``path`` inside ``folder``.

    Raises:
        InvalidProblem: the path is absolute, leaves the folder, or is hidden.
    """
    parts = PurePosixPath(path).parts
    if not parts or any(part in {"/", "..", "."} or part.startswith(".") for part in parts):
        raise InvalidProblem("bad_path", f"The path {path!r} leads out of the artefact's folder.")
    if "\x00" in path or "\\" in path:
        raise InvalidProblem(
            "bad_path",
            f"The path {path!r} contains a character that file names cannot have. Rename the "
            "file.",
        )
    if len(path.encode()) > MAX_PATH_BYTES or any(len(p.encode()) > MAX_NAME_BYTES for p in parts):
        sentence = (
            f"The path {path[:40]!r}… has {len(path.encode())} bytes. A path has {MAX_PATH_BYTES} "
            f"at most, each name in it {MAX_NAME_BYTES}: shorten the file's name."
        )
        raise InvalidProblem("bad_path", sentence)
    return folder.joinpath(*parts)


def find(*, host: Host, attempt_id: str, name: str, path: str) -> UploadFile:
    """Return the announced file of an artefact of one of the host's attempts.

    Raises:
        NotFoundProblem: the artefact or the file was never announced by this host.
    """
    artefact = Artefact.objects.filter(
        attempt_id=attempt_id, attempt__host=host, name=name
    ).first()
    if artefact is None:
        raise NotFoundProblem(
            "unknown_artefact", f"No artefact {name!r} of this attempt was announced yet."
        )
    if path not in artefact.files:
        raise NotFoundProblem("unknown_file", f"The artefact {name!r} has no file {path!r}.")
    target = path_inside(folder_of(artefact), path)
    return UploadFile(artefact, path, int(artefact.files[path]), target)


def received_bytes(file: UploadFile) -> int:
    """Return the received bytes; verify a complete file whose check was interrupted."""
    if file.target.is_file():
        if not file.artefact.is_complete:
            _update_completeness(file.artefact)
        return file.target.stat().st_size
    have = file.partial.stat().st_size if file.partial.is_file() else 0
    if not have or have < file.size_bytes:
        return have
    try:
        _complete(file)
    except ConflictProblem:
        return 0
    return have


def write_part(file: UploadFile, offset: int, body: Readable) -> int:
    """Append a part at the current end; return the received bytes afterwards.

    A part with another offset changes nothing; the returned number is where to continue. The
    complete file is verified by its digest, and starts again from 0 if that differs.

    Raises:
        TooLargeProblem: the part exceeds its limit or the announced size.
        BusyProblem: the disk is nearly full.
        ConflictProblem: the complete file differs from its digest, or its path is taken.
    """
    have = received_bytes(file)
    is_new_empty = file.size_bytes == 0 and not file.target.exists()
    if offset != have or (have == file.size_bytes and not is_new_empty):
        return have
    _check_disk(file)
    written = _append(file, offset, body)
    if offset + written == file.size_bytes:
        _complete(file)
    return offset + written


def _check_disk(file: UploadFile) -> None:
    try:
        file.target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        sentence = f"{file.path} lies below a path that is itself a file. Rename one of the two."
        raise ConflictProblem("path_taken", sentence) from None
    if file.target.is_dir() or file.partial.is_dir():
        raise ConflictProblem("path_taken", f"{file.path} is a folder of another file.")
    check_room(file.target.parent, MIN_FREE_BYTES + MAX_PART_BYTES)


def _append(file: UploadFile, offset: int, body: Readable) -> int:
    limit = min(MAX_PART_BYTES, file.size_bytes - offset)
    written = 0
    with file.partial.open("ab") as sink:
        while piece := body.read(PIECE_BYTES):
            written += len(piece)
            if written > limit:
                sink.truncate(offset)
                raise TooLargeProblem(
                    "part_too_large",
                    f"The part is longer than {limit} bytes, the limit at byte {offset}.",
                )
            sink.write(piece)
    return written


def _complete(file: UploadFile) -> None:
    expected = file.artefact.sha256.get(file.path)
    try:
        with file.partial.open("rb") as source:
            actual = hashlib.file_digest(source, "sha256").hexdigest()
    except FileNotFoundError:
        sentence = f"Another call completed {file.path} meanwhile; ask how much of it is here."
        raise ConflictProblem("completed_meanwhile", sentence) from None
    if actual != expected:
        file.partial.unlink()
        raise ConflictProblem(
            "digest_differs",
            f"{file.path} was received with another SHA-256; send it again from byte 0.",
        )
    file.partial.replace(file.target)
    _update_completeness(file.artefact)


def _update_completeness(artefact: Artefact) -> None:
    folder = folder_of(artefact)
    with transaction.atomic():
        row = Artefact.objects.select_for_update().get(pk=artefact.pk)
        if all(path_inside(folder, path).is_file() for path in row.files):
            Artefact.objects.filter(pk=row.pk).update(is_complete=True)
            job_id = row.attempt.job_id
            transaction.on_commit(
                lambda: publish(f"job:{job_id}", "job.artefact", {"job": job_id, "name": row.name})
            )


MOST_ADAPTERS = 64
ADAPTER_ID_LENGTH = 6


class Producer(NamedTuple):
    """The job of the site that wrote a model."""

    team_id: str
    kind: str
    spec: dict[str, Any]


def producer_of(model: ModelRef) -> Producer | None:
    """Return the job that wrote a model; None if no job of the site did."""
    if not isinstance(model, ArtefactModel):
        return None
    names = ("job__team_id", "job__kind", "job__spec")
    row = Attempt.objects.filter(pk=model.attempt_id).values_list(*names).first()
    return Producer(*row) if row else None


def adapters_of(
    team: Team, model: ModelRef, producer: Producer | None, host: Host | None = None
) -> tuple[NamedAdapter, ...]:
    """Return the adapters that the team's jobs trained on a model, newest first.

    ``producer``: of the model. A GGUF file has the adapters of its source model: llama.cpp applies
    them to it. Of a repository they are those on ``host``; the job checks that they were trained
    on the same weights.
    """
    base = _base_of(team, model, producer)
    if base is None:
        return ()
    adapters = Artefact.objects.filter(kind="adapter", attempt__job__team=team)
    if isinstance(base, HubModel):
        adapters = adapters.filter(
            attempt__host=host, attempt__job__spec__model__repository=base.repository
        )
    else:
        adapters = adapters.filter(facts__base__attempt_id=base.attempt_id)
    fitting = [
        each
        for each in adapters.order_by("-created_at").select_related("attempt__job")
        if isinstance(base, HubModel) or each.facts["base"] == base.model_dump()
    ]
    return tuple(
        NamedAdapter(
            name=_adapter_name(each),
            adapter=ArtefactModel(attempt_id=each.attempt_id, name=each.name),
        )
        for each in fitting[:MOST_ADAPTERS]
    )


def _base_of(
    team: Team, model: ModelRef, producer: Producer | None
) -> ArtefactModel | HubModel | None:
    """Return the base model of adapters; for a GGUF file its source model."""
    if isinstance(model, HubModel):
        return model
    if not isinstance(model, ArtefactModel):
        return None
    is_gguf = producer is not None and producer.spec.get("method") == "gguf"
    if producer is None or not is_gguf or producer[:2] != (team.pk, "compress"):
        return model
    source = producer.spec["model"]
    return ArtefactModel.model_validate(source) if source["source"] == "artefact" else None


def lacks_gguf(producer: Producer | None) -> bool:
    """Return whether a job of the site wrote a model, and in another format than GGUF.

    What a folder on a host holds is not known here: its own check on the host refuses it.
    """
    return producer is not None and producer.spec.get("method") != "gguf"


def _adapter_name(adapter: Artefact) -> str:
    """Return the name of an adapter: its job's, made unique by the end of the attempt id."""
    end = adapter.attempt_id[-ADAPTER_ID_LENGTH:].lower()
    return f"{served_name(adapter.attempt.job.name)}-{end}"


def dataset_delete(*, dataset: Dataset, by: User) -> None:
    """Delete a dataset and its file.

    Raises:
        ConflictProblem: a job that has not ended uses it.
    """
    waiting = Job.objects.filter(team=dataset.team_id).exclude(state__in=FINAL_STATES)
    for job in waiting.filter(spec__kind="train"):
        if any(each.dataset_id == dataset.pk for each in uploads_in(job)):
            raise ConflictProblem(
                "dataset_in_use",
                f"{dataset.name} cannot be deleted while the job “{job.name}” uses it. "
                "Stop that job or wait for its end, then delete the file.",
            )
    path = path_of(dataset)
    with transaction.atomic():
        change_record(dataset, "dataset.delete", by)
        dataset.delete()
    path.unlink(missing_ok=True)


def uploads_in(job: Job) -> tuple[UploadedData, ...]:
    """Return the uploaded datasets that a job reads."""
    if job.spec.get("kind") != "train":
        return ()
    return uploads_of(TrainSpec.model_validate(job.spec).data)


def promised_dataset(attempt_id: str, host: Host, dataset_id: str) -> Dataset:
    """Return a dataset named by the job of a claimed attempt of this host.

    Raises:
        NotFoundProblem: the job does not name it, or it was deleted.
    """
    attempts = Attempt.objects.filter(pk=attempt_id, host=host, ended_at=None).exclude(claim_id="")
    attempt = attempts.select_related("job").first()
    if attempt is not None and dataset_id in {each.dataset_id for each in uploads_in(attempt.job)}:
        dataset = Dataset.objects.filter(team=attempt.job.team_id, pk=dataset_id).first()
        if dataset is not None:
            return dataset
    raise NotFoundProblem(
        "no_dataset", "The training data was deleted, or the job does not name it."
    )


def artefacts_of(job: Job) -> list[Artefact]:
    """Return the artefacts of the job's current attempt."""
    attempt = job.current_attempt
    return list(Artefact.objects.filter(attempt=attempt)) if attempt else []

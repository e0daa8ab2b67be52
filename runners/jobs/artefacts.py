"""Publishes a folder of the attempt's output: written aside, hashed, renamed, announced."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from runners.jobs.runtime import Job
from runners.messages import ArtefactBody, ArtefactKind

CARD_NAME = "README.md"
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def publish_model(
    job: Job,
    write: Callable[[Path], object],
    card: str,
    facts: Mapping[str, Any],
    kind: Literal["model", "adapter"] = "model",
) -> ArtefactBody:
    """Write a folder of weights with its card to ``output/<kind>`` and announce it."""

    def write_with_card(building: Path) -> None:
        write(building)
        (building / CARD_NAME).write_text(f"{card}\n{_file_table(building)}")

    return publish_folder(job, kind, kind, write_with_card, facts)


def publish_report(job: Job, name: str, document: Mapping[str, Any]) -> ArtefactBody:
    """Publish a document as a downloadable file and as facts for the job's page."""

    def write(building: Path) -> None:
        (building / f"{name}.json").write_text(json.dumps(document, indent=1))

    return publish_folder(job, name, "report", write, document)


def publish_folder(
    job: Job,
    name: str,
    kind: ArtefactKind,
    write: Callable[[Path], object],
    facts: Mapping[str, Any],
) -> ArtefactBody:
    """Write an output folder aside, move it into place atomically, and announce it."""
    final = job.output_dir(name)
    building = final.with_name(f".{name}-building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    write(building)
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    body = describe_folder(final, facts, kind)
    job.emitter.artefact(body)
    return body


def describe_folder(
    folder: Path, facts: Mapping[str, Any], kind: ArtefactKind = "model"
) -> ArtefactBody:
    """Return sizes and digests of every file in the folder."""
    files = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return ArtefactBody(
        name=folder.name,
        kind=kind,
        total_bytes=sum(sizes.values()),
        files=sizes,
        sha256={name: file_sha256(path) for name, path in files.items()},
        facts=dict(facts),
    )


def weight_file_bytes(folder: Path) -> int:
    """Return the size of a model folder's weight files in bytes."""
    files = (path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    return sum(path.stat().st_size for path in files)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def card_text(title: str, sections: Mapping[str, Mapping[str, object]]) -> str:
    """Return a model card: a title, then one table per section."""
    parts = [f"# {title}\n"]
    for heading, rows in sections.items():
        lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
        parts.append("\n".join([f"## {heading}\n", "| | |", "|---|---|", *lines, ""]))
    return "\n".join(parts)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _file_table(folder: Path) -> str:
    rows = [
        f"| {path.relative_to(folder).as_posix()} | {path.stat().st_size} | {file_sha256(path)} |"
        for path in _files(folder)
    ]
    return "\n".join(["## Files\n", "| file | bytes | SHA-256 |", "|---|---|---|", *rows, ""])


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

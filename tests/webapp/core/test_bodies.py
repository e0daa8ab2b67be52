"""The largest file of each door: stated once, by its view, and what documents say of it."""

import ast
import re
from pathlib import Path

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test.client import encode_multipart
from django.urls import get_resolver, resolve

from planner.specs.units import MIB
from runners.host import shipping
from runners.jobspec.base import MAX_UPLOAD_BYTES
from tests.webapp.accounts.test_matrix import addresses
from tests.webapp.conftest import client_of
from webapp import pages
from webapp.core import bodies
from webapp.core.bodies import DEFAULT_BYTES, FORM_BYTES, largest_file, limit_at
from webapp.datasets.models import Dataset
from webapp.datasets.services import MAX_TEAM_BYTES
from webapp.jobs.artefacts import MAX_PART_BYTES
from webapp.wizard.forms import MAX_CONFIG_BYTES

ROOT = Path(__file__).resolve().parents[3]
DOORS = {
    ("POST", "/data/upload/"): MAX_UPLOAD_BYTES,
    ("POST", "/plans/x/upload/"): MAX_UPLOAD_BYTES,
    ("POST", "/plans/x/edit/workload/"): MAX_UPLOAD_BYTES,
    ("POST", "/api/v1/data"): MAX_UPLOAD_BYTES,
    ("POST", "/plans/x/verdict/"): MAX_CONFIG_BYTES,
    ("POST", "/models/new/"): MAX_CONFIG_BYTES,
    ("POST", "/api/v1/hosts/echo"): 2 * MIB,
    ("PUT", "/api/v1/attempts/a/artefacts/m/f/g"): MAX_PART_BYTES,
}
SAID = [  # what a document promises, and the limit that holds
    ("templates/docs/training-data.md", r"(\d+) MiB per upload", MAX_UPLOAD_BYTES),
    ("templates/docs/training-data.md", r"(\d+) GiB per team", MAX_TEAM_BYTES // 1024),
    ("templates/docs/operations.md", r"of at most (\d+) MiB, never served", MAX_UPLOAD_BYTES),
    ("templates/docs/operations.md", r"parts of (\d+) MiB", MAX_PART_BYTES),
    ("templates/docs/proxies.md", r"upload has up to (\d+) MiB", MAX_UPLOAD_BYTES),
    ("templates/docs/api.md", r"file of up to (\d+) MiB", MAX_UPLOAD_BYTES),
    ("templates/docs/api.md", r"body has up to (\d+) MiB", DEFAULT_BYTES),
]


def test_each_door_for_files_takes_what_is_promised(settings):
    for (method, path), limit in DOORS.items():
        assert largest_file(method, path) == limit, path
        assert limit_at(method, path) == limit + FORM_BYTES, path
    for method, path in (("GET", "/api/v1/data"), ("POST", "/api/v1/jobs"), ("POST", "/none")):
        assert limit_at(method, path) == DEFAULT_BYTES, path
    assert shipping.PART_BYTES <= MAX_PART_BYTES
    assert settings.DATA_UPLOAD_MAX_MEMORY_SIZE == DEFAULT_BYTES
    for page, pattern, limit in SAID:
        (number,) = re.findall(pattern, (ROOT / page).read_text("utf-8"))
        assert int(number) * MIB == limit, (page, pattern)


def _reading_files() -> set[str]:
    """Return the functions of pages that read files, and those that call one of them."""
    functions = {
        each.name: ast.unparse(each)
        for path in Path(pages.__file__).parent.glob("*.py")
        for each in ast.parse(path.read_text("utf-8")).body
        if isinstance(each, ast.FunctionDef)
    }
    found = {name for name, text in functions.items() if ".FILES" in text}
    while more := {
        name
        for name, text in functions.items()
        if name not in found and re.search(rf"\b({'|'.join(found)})\(", text)
    }:
        found |= more
    return found


def test_no_page_reads_a_file_without_saying_how_large():
    """An operation of the API that does not say so ends the start (``webapp.api.urls``)."""
    marked = {"echo", "data_add", "artefact_part"}
    views = set()
    for route in addresses(get_resolver().url_patterns):
        view = resolve(f"/{re.sub('<[^>]*>', '1', route)}").func
        name = getattr(view, "__name__", route)
        views.add(name)
        if getattr(view, bodies.FILES, {}):
            marked.add(name)
    assert {"dataset_upload", "plan_step", "model_new"} <= marked
    assert _reading_files() & views <= marked


@pytest.mark.django_db(databases="__all__")
def test_a_large_file_is_uploaded_once_however_often_it_is_sent(alice, settings, tmp_path):
    """Each sending has its own boundary, and Django reads no such body into memory at once."""
    settings.DATASETS_DIR = tmp_path
    lines = [b'{"text": "%d %s"}\n' % (n, b"x" * MIB) for n in range(9)]
    client, ids = client_of(alice), []
    for boundary in ("one", "two"):
        file = SimpleUploadedFile("big.jsonl", b"".join(lines))
        sent = encode_multipart(boundary, {"file": file})
        kind = f"multipart/form-data; boundary={boundary}"
        headers = {"Idempotency-Key": "k"}
        answer = client.post("/api/v1/data", sent, content_type=kind, headers=headers)
        assert answer.status_code == 201, answer.content[:300]
        ids.append(answer.json()["id"])
    assert ids[0] == ids[1]
    assert answer.headers["Idempotency-Replayed"] == "true"
    assert Dataset.objects.count() == 1

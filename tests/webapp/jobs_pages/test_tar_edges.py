"""The .tar of an artefact: long names, empty files, hostile names, files that are gone."""

import io
import tarfile
from urllib.parse import quote

import pytest
from django.test import AsyncClient
from hypothesis import given, settings
from hypothesis import strategies as st

from webapp.jobs.artefacts import file_name, folder_of, tar_bytes, tar_chunks
from webapp.jobs.models import Artefact, Job

BLOCK = 512
aio = pytest.mark.asyncio


def packed(folder, bodies: dict[str, bytes], root="job-model", mtime=1_700_000_000) -> bytes:
    members = []
    for at, (name, body) in enumerate(sorted(bodies.items())):
        file = folder / str(at)
        file.write_bytes(body)
        members.append((name, file))
    data = b"".join(tar_chunks(root, members, mtime))
    assert len(data) == tar_bytes(root, members)
    return data


def unpacked(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar}


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1023, 1024, 100_000, 2**20, 2**20 + 1])
def test_a_file_of_any_size_comes_back(tmp_path, size):
    body = bytes(at % 251 for at in range(size))

    assert unpacked(packed(tmp_path, {"f": body})) == {"job-model/f": body}


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "sub/dir/file",
        "x" * 99,
        "x" * 101,
        "x" * 255,
        "größe.json",
        "模型.bin",
        "a b",
    ],
)
def test_a_file_of_any_name_comes_back(tmp_path, name):
    assert unpacked(packed(tmp_path, {name: b"1"})) == {f"job-model/{name}": b"1"}


def test_an_artefact_without_files_is_an_empty_tar(tmp_path):
    assert unpacked(packed(tmp_path, {})) == {}


@settings(max_examples=30)
@given(
    bodies=st.dictionaries(
        st.text("abcdef/é-_.", min_size=1, max_size=150), st.binary(max_size=2000), max_size=6
    )
)
def test_any_files_come_back_as_they_were(tmp_path_factory, bodies):
    bodies = {f"f{name.strip('/')}": body for name, body in bodies.items()}
    data = packed(tmp_path_factory.mktemp("tar"), bodies)

    assert sorted(unpacked(data).values()) == sorted(bodies.values())
    assert len(data) % BLOCK == 0


def test_files_are_readable_by_everyone_and_run_by_nobody(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path, {"f": b"1"}))) as tar:
        assert [one.mode for one in tar] == [0o644]


def test_files_have_the_time_of_their_artefact(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path, {"f": b"1"}))) as tar:
        assert [one.mtime for one in tar] == [1_700_000_000]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("Train the demo model", "Train-the-demo-model"),
        ('a"b', "a-b"),
        ("line\r\nSet-Cookie: x", "line--Set-Cookie--x"),
        ("../../etc", "etc"),
        ("größe", "gr--e"),
        ("模型", "job"),
        ("", "job"),
        ("...", "job"),
        ("v1.2_final", "v1.2_final"),
    ],
)
def test_a_jobs_name_becomes_a_plainfile_name(name, kept):
    assert file_name(name) == kept


@pytest.fixture
def artefact(finished, settings, tmp_path) -> Artefact:
    settings.ARTEFACTS_DIR = tmp_path
    made = Artefact.objects.get(attempt=finished.current_attempt)
    folder_of(made).mkdir(parents=True)
    for name in made.files:
        (folder_of(made) / name).write_bytes(b"x")
    Artefact.objects.update(is_complete=True)
    return made


async def fetch(user, job, name="model"):
    client = AsyncClient()
    await client.aforce_login(user)
    return await client.get(f"/jobs/{job.pk}/artefacts/{name}/download/")


database = pytest.mark.django_db(databases=["default", "metrics"], transaction=True)


@aio
@database
async def test_files_that_are_gone_from_the_disk_are_not_found(alice, finished, artefact):
    (folder_of(artefact) / "config.json").unlink()

    assert (await fetch(alice, finished)).status_code == 404


@aio
@database
@pytest.mark.parametrize("name", ['"; x="', "line\nbreak", "模型"])
async def test_a_hostile_job_name_stays_within_its_header(alice, finished, artefact, name):
    await Job.objects.aupdate(name=name)

    response = await fetch(alice, finished)

    assert response["Content-Disposition"].count('"') == 2
    assert response["Content-Disposition"].isascii()


@aio
@database
async def test_a_deleted_jobs_artefact_is_not_found(alice, finished, artefact):
    await Job.objects.aupdate(deleted_at=finished.ended_at)

    assert (await fetch(alice, finished)).status_code == 404


@aio
@database
async def test_a_viewer_may_download(vera, finished, artefact):
    assert (await fetch(vera, finished)).status_code == 200


@aio
@database
@pytest.mark.parametrize("name", ["..", "%2e%2e", "model%2f..", "x" * 300])
async def test_a_name_that_climbs_is_not_found(alice, finished, artefact, name):
    assert (await fetch(alice, finished, name)).status_code == 404


@aio
@database
@pytest.mark.parametrize("name", ['a"b', "a\nb", "a b"])
async def test_an_artefact_with_a_strange_name_downloads_under_a_plain_one(
    alice, finished, artefact, name, settings
):
    folder = folder_of(artefact)
    await Artefact.objects.aupdate(name=name)
    folder.rename(folder.with_name(name))

    response = await fetch(alice, finished, quote(name))

    assert response.status_code == 200
    assert response["Content-Disposition"].count('"') == 2

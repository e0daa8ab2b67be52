"""An artefact as one streamed .tar, whatever its files' and its job's names are."""

import io
import tarfile
from urllib.parse import quote

import pytest
from django.test import AsyncClient
from hypothesis import given, settings
from hypothesis import strategies as st

from webapp.jobs.artefact_archive import file_name, tar_bytes, tar_chunks
from webapp.jobs.artefacts import folder_of
from webapp.jobs.models import Artefact, Job

database = pytest.mark.django_db(databases="__all__", transaction=True)
aio = pytest.mark.asyncio
BODIES = {"config.json": b"{}", "model.safetensors": b"weights!!"}


@pytest.fixture
def artefact(finished, settings, tmp_path) -> Artefact:
    """The finished job's model, every byte of it arrived."""
    settings.ARTEFACTS_DIR = tmp_path
    made = Artefact.objects.get(attempt=finished.current_attempt)
    folder_of(made).mkdir(parents=True)
    for name, body in BODIES.items():
        (folder_of(made) / name).write_bytes(body)
    Artefact.objects.filter(pk=made.pk).update(is_complete=True)
    return made


async def fetch(user, job, name="model"):
    client = AsyncClient()
    await client.aforce_login(user)
    return await client.get(f"/jobs/{job.pk}/artefacts/{name}/download/")


@aio
@database
async def test_the_tar_holds_every_file_with_its_bytes_and_is_named_after_the_job(
    alice, finished, artefact
):
    response = await fetch(alice, finished)
    body = b"".join([piece async for piece in response.streaming_content])
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        read = {each.name.split("/")[1]: tar.extractfile(each).read() for each in tar}
    assert read == BODIES
    assert int(response["Content-Length"]) == len(body)
    assert (
        response["Content-Disposition"] == 'attachment; filename="Train-the-demo-model-model.tar"'
    )


@aio
@database
async def test_the_log_is_a_text_file_of_every_line_with_its_time_and_stream(
    alice, charlie, finished
):
    client = AsyncClient()
    await client.aforce_login(alice)
    response = await client.get(f"/jobs/{finished.pk}/logs/download/")
    text = b"".join([piece async for piece in response.streaming_content]).decode()
    assert text.startswith(
        "2023-11-14T22:13:20Z supervisor: process 7 started\n"
        "2023-11-14T22:13:21Z supervisor: Training\n"
        "2023-11-14T22:13:23Z stdout: step 1 loss 8.1\n"
        "2023-11-14T22:13:23Z stdout: step 2 loss 7.9\n"
        "2023-11-14T22:13:24Z stderr: Warning: <slow> disk\n"
    )
    assert text.endswith("supervisor: ended with exit code 0\n")
    assert response["Content-Type"] == "text/plain; charset=utf-8"
    disposition = 'attachment; filename="Train-the-demo-model.log"'
    assert response["Content-Disposition"] == disposition
    await client.aforce_login(charlie)
    assert (await client.get(f"/jobs/{finished.pk}/logs/download/")).status_code == 404


@aio
@database
async def test_another_teams_an_unknown_and_an_incomplete_artefact_are_not_found(
    alice, charlie, finished, artefact
):
    assert (await fetch(charlie, finished)).status_code == 404
    assert (await fetch(alice, finished, "other")).status_code == 404
    await Artefact.objects.filter(pk=artefact.pk).aupdate(is_complete=False)
    assert (await fetch(alice, finished)).status_code == 404


def test_a_file_larger_than_a_piece_is_sent_in_pieces(tmp_path):
    file = tmp_path / "big"
    file.write_bytes(b"x" * (2 * 1024 * 1024 + 5))
    pieces = list(tar_chunks("root", [("big", file)], 0))
    assert max(map(len, pieces)) == 1024 * 1024
    assert sum(map(len, pieces)) == tar_bytes("root", [("big", file)])


# The .tar of an artefact: long names, empty files, hostile names, files that are gone.


BLOCK = 512


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


def test_a_file_of_any_size_and_name_comes_back(tmp_path):
    for size in [0, 1, 511, 512, 513, 1023, 1024, 100_000, 2**20, 2**20 + 1]:
        body = bytes(at % 251 for at in range(size))

        assert unpacked(packed(tmp_path, {"f": body})) == {"job-model/f": body}, size

    for name in [
        "config.json",
        "sub/dir/file",
        "x" * 99,
        "x" * 101,
        "x" * 255,
        "größe.json",
        "模型.bin",
        "a b",
    ]:
        assert unpacked(packed(tmp_path, {name: b"1"})) == {f"job-model/{name}": b"1"}, name

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


def test_files_are_readable_by_everyone_and_have_the_time_of_their_artefact(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path, {"f": b"1"}))) as tar:
        assert [(one.mode, one.mtime) for one in tar] == [(0o644, 1_700_000_000)]


def test_a_jobs_name_becomes_a_plainfile_name():
    for name, kept in [
        ("Train the demo model", "Train-the-demo-model"),
        ('a"b', "a-b"),
        ("line\r\nSet-Cookie: x", "line--Set-Cookie--x"),
        ("../../etc", "etc"),
        ("größe", "gr--e"),
        ("模型", "job"),
        ("", "job"),
        ("...", "job"),
        ("v1.2_final", "v1.2_final"),
    ]:
        assert file_name(name) == kept, (name, kept)


@aio
@database
async def test_what_climbs_is_gone_from_the_disk_or_is_of_a_deleted_job_is_not_found(
    alice, vera, finished, artefact
):
    assert (await fetch(vera, finished)).status_code == 200  # a viewer may
    for name in ("..", "%2e%2e", "model%2f..", "x" * 300):
        assert (await fetch(alice, finished, name)).status_code == 404, name
    kept = folder_of(artefact) / "config.json"
    body = kept.read_bytes()
    kept.unlink()
    assert (await fetch(alice, finished)).status_code == 404
    kept.write_bytes(body)
    assert (await fetch(alice, finished)).status_code == 200
    await Job.objects.aupdate(deleted_at=finished.ended_at)
    assert (await fetch(alice, finished)).status_code == 404


@aio
@database
async def test_a_hostile_job_name_stays_within_its_header(alice, finished, artefact):
    for name in ['"; x="', "line\nbreak", "模型"]:
        await Job.objects.aupdate(name=name)
        response = await fetch(alice, finished)
        assert response["Content-Disposition"].count('"') == 2, name
        assert response["Content-Disposition"].isascii(), name


@aio
@database
async def test_an_artefact_with_a_strange_name_downloads_under_a_plain_one(
    alice, finished, artefact, settings
):
    folder = folder_of(artefact)
    for name in ('a"b', "a\nb", "a b"):
        await Artefact.objects.aupdate(name=name)
        folder = folder.rename(folder.with_name(name))
        response = await fetch(alice, finished, quote(name))
        assert response.status_code == 200, name
        assert response["Content-Disposition"].count('"') == 2, name

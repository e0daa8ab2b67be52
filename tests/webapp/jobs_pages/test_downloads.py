"""An artefact as one streamed .tar."""

import io
import tarfile

import pytest
from django.test import AsyncClient

from webapp.jobs.artefacts import folder_of, tar_bytes, tar_chunks
from webapp.jobs.models import Artefact

pytestmark = pytest.mark.django_db(databases=["default", "metrics"], transaction=True)
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
async def test_the_tar_holds_every_file_with_its_bytes(alice, finished, artefact):
    response = await fetch(alice, finished)
    body = b"".join([piece async for piece in response.streaming_content])
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        read = {each.name.split("/")[1]: tar.extractfile(each).read() for each in tar}
    assert read == BODIES
    assert int(response["Content-Length"]) == len(body)


@aio
async def test_the_file_is_named_after_the_job(alice, finished, artefact):
    response = await fetch(alice, finished)
    assert (
        response["Content-Disposition"] == 'attachment; filename="Train-the-demo-model-model.tar"'
    )


@aio
async def test_another_team_cannot_download(charlie, finished, artefact):
    assert (await fetch(charlie, finished)).status_code == 404


@aio
async def test_an_unknown_artefact_is_not_found(alice, finished, artefact):
    assert (await fetch(alice, finished, "other")).status_code == 404


@aio
async def test_an_incomplete_artefact_is_not_found(alice, finished, artefact):
    await Artefact.objects.filter(pk=artefact.pk).aupdate(is_complete=False)
    assert (await fetch(alice, finished)).status_code == 404


def test_a_file_larger_than_a_piece_is_sent_in_pieces(tmp_path):
    file = tmp_path / "big"
    file.write_bytes(b"x" * (2 * 1024 * 1024 + 5))
    pieces = list(tar_chunks("root", [("big", file)], 0))
    assert max(map(len, pieces)) == 1024 * 1024
    assert sum(map(len, pieces)) == tar_bytes("root", [("big", file)])

"""Pushing a model: the token's account first, then large files, then one commit with the card."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runners.hub.errors import HubError
from runners.hub.publishing import VARIABLES, check_token, files_to_push, push
from runners.hub.settings import HubSettings
from tests.hub.hub_server import Hub
from tests.hub.models import write_files

# Of huggingface_hub's own requests.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPOSITORY = "lab/tuned"
WRITERS = {
    "hf_write": {"name": "ada", "role": "write", "orgs": ["lab"]},
    "hf_read": {"name": "ada", "role": "read", "orgs": ["lab"]},
    "hf_other": {"name": "bob", "role": "write"},
}
CARD = "---\nlibrary_name: transformers\n---\n# Tuned\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "output/model"
    files = {"config.json": "{}", "model-00001-of-00002.safetensors": 3000}
    write_files(made, {**files, "model-00002-of-00002.safetensors": 2000})
    write_files(
        made, {"training.pt": 10, "modeling.py": "exit()", ".cache/x": "x", "README.md": "old"}
    )
    return made


@pytest.fixture
def writer(hub: Hub, settings: HubSettings, monkeypatch) -> HubSettings:
    for name, value in VARIABLES.items():  # another test may have imported the library
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value == "1")
    hub.writers |= WRITERS
    hub.tokens |= set(WRITERS)
    return replace(settings, token="hf_write")


def test_a_push_is_one_commit_of_weights_and_card_without_pickles_and_code(hub, writer, folder):
    seen: list[tuple[int, int]] = []
    url = push(
        folder,
        REPOSITORY,
        CARD,
        writer,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    made = hub.folder / REPOSITORY
    names = sorted(path.name for path in made.iterdir())
    assert names == ["README.md", *[path.name for path in files_to_push(folder)]]
    assert (made / "README.md").read_text() == CARD
    for path in files_to_push(folder):
        assert (made / path.name).read_bytes() == path.read_bytes()
    assert url == f"{hub.url}/{REPOSITORY}/commit/{hub.commit(REPOSITORY)}"
    assert REPOSITORY in hub.private
    assert seen[-1] == (5002, 5002)
    assert seen == sorted(seen)


def test_a_push_that_broke_off_sends_no_large_file_again(hub, writer, folder):
    push(folder, REPOSITORY, CARD, writer)
    hub.log.clear()
    (folder / "config.json").write_text('{"a": 1}')
    push(folder, REPOSITORY, CARD, writer)
    assert not [each for each in hub.log if "lfs-upload" in each.path]
    assert json.loads((hub.folder / REPOSITORY / "config.json").read_text()) == {"a": 1}
    hub.cut_uploads = 1
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"new" * 700)
    with pytest.raises(HubError):
        push(folder, REPOSITORY, CARD, writer)
    before = (hub.folder / REPOSITORY / "model-00002-of-00002.safetensors").read_bytes()
    assert len(before) == 2000  # no half commit
    push(folder, REPOSITORY, CARD, writer)
    assert hub.files(REPOSITORY, "main")[1]["model-00002-of-00002.safetensors"].size == 2100


@pytest.mark.parametrize(
    ("token", "kind", "words"),
    [
        ("", "unauthorised", "store one that may write as the team's secret HF_TOKEN"),
        ("hf_read", "unauthorised", "may only read"),
        ("hf_other", "unauthorised", "the account bob does not belong to lab: push to bob/"),
        ("hf_none", "unauthorised", "HF_TOKEN"),
    ],
)
def test_a_token_that_may_not_write_is_refused_before_anything_is_sent(
    hub, writer, folder, token, kind, words
):
    with pytest.raises(HubError, match=words) as caught:
        push(folder, REPOSITORY, CARD, replace(writer, token=token))
    assert caught.value.kind == kind
    assert not (hub.folder / REPOSITORY).exists()
    assert not [each for each in hub.log if each.method != "GET"]


def test_a_hub_out_of_reach_and_a_folder_without_files_say_so(writer, tmp_path):
    assert check_token(writer, REPOSITORY) == "ada"
    with pytest.raises(HubError, match="is not reached") as caught:
        check_token(replace(writer, endpoint="http://127.0.0.1:9"), REPOSITORY)
    assert caught.value.is_out_of_reach
    with pytest.raises(HubError, match="has 0 files to push"):
        push(tmp_path / "none", REPOSITORY, CARD, writer)


def test_a_job_pushes_what_an_attempt_left_with_the_teams_token(hub, writer, folder, tmp_path):
    attempts = tmp_path / "host/attempts"
    source, own = attempts / "A1", attempts / "A2"
    (source / "output").mkdir(parents=True)
    folder.rename(source / "output/model")
    (own / "secrets").mkdir(parents=True)
    (own / "secrets/HF_TOKEN").write_text("hf_write")
    spec = {
        "kind": "publish", "repository": REPOSITORY, "card": CARD, "secrets": ["HF_TOKEN"],
        "model": {"source": "artefact", "attempt_id": "A1"},
    }  # fmt: skip
    request = {"attempt_id": "A2", "job_id": "J2", "number": 1, "fence": "f", "spec": spec}
    (own / "spec.json").write_text(json.dumps(request))
    env = os.environ | {
        "HF_ENDPOINT": hub.url, "NO_PROXY": "*", "HF_HUB_OFFLINE": "0",
        "HF_TOKEN_PATH": str(own / "secrets/HF_TOKEN"),
    }  # fmt: skip
    env.pop("HF_TOKEN", None)
    run = [sys.executable, "-m", "runners.jobs.publish", str(own)]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hf_write" not in done.stdout + done.stderr
    assert (hub.folder / REPOSITORY / "README.md").read_text() == CARD
    (own / "secrets/HF_TOKEN").write_text("hf_read")
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "may only read" in done.stderr) == (3, True), done.stderr

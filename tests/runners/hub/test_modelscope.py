"""ModelScope as a second hub: commits, digests, resumption and errors as of the Hub."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runners.hub.download import download
from runners.hub.errors import DownloadStoppedError, HubError
from runners.hub.listing import Listing, check_access, look_up, read_config
from runners.hub.modelscope import MODELSCOPE
from runners.hub.names import parse
from runners.hub.selection import exact_files
from runners.hub.settings import HubSettings, from_environment, usual_hub
from runners.hub.store import mark_copied, resolve_offline, revision_of, scan
from tests.hub.hub_server import Hub
from tests.hub.models import write_files
from tests.runners.hub.conftest import REPOSITORY, SIZE, WEIGHTS

TOKEN = "ms-0123456789"
Look = Callable[..., Listing]


@pytest.fixture
def settings(hub: Hub, tmp_path: Path) -> HubSettings:
    variables = {"MODELSCOPE_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    return replace(from_environment(variables, hub=MODELSCOPE.name), margin_bytes=0)


@pytest.fixture
def look(settings: HubSettings) -> Look:
    def listing_of(text: str = f"ms://{REPOSITORY}", **changes: object) -> Listing:
        return look_up(parse(text), replace(settings, **changes))

    return listing_of


def test_a_branch_is_a_commit_and_every_file_has_its_sha256(hub, settings, look):
    write_files(hub.folder / REPOSITORY, {"sub/notes.json": "{}"}, seed=2)
    listing = look()
    assert (listing.commit, listing.revision) == (hub.commit(REPOSITORY), "master")
    assert {len(file.sha256) for file in listing.files} == {64}
    assert "sub/notes.json" in listing.paths
    assert look(f"ms://{REPOSITORY}@{listing.commit}").files == listing.files
    assert read_config(listing, settings)["model_type"] == "llama"


def test_a_branch_that_is_named_like_a_commit_is_none(hub, look):
    fake = "a" * 40
    hub.branches[f"{REPOSITORY}@{fake}"] = REPOSITORY
    with pytest.raises(HubError, match=f"{fake} is the name of one of its branches, and no"):
        look(f"ms://{REPOSITORY}@{fake}")


def test_files_come_into_the_same_cache_under_their_commit(hub, settings, look):
    listing = look()
    files = exact_files(listing, "safetensors", "", settings)
    folder = download(listing, files, settings)
    assert folder == settings.cache / "models--acme--tiny/snapshots" / listing.commit
    assert (folder / WEIGHTS).read_bytes() == (hub.folder / REPOSITORY / WEIGHTS).read_bytes()
    (model,) = scan(settings)
    assert (model.is_complete, model.revisions) == (True, ("modelscope/master",))
    assert resolve_offline(REPOSITORY, "master", settings) == listing.commit
    theirs = replace(settings, hub="huggingface")  # whose main is another one
    assert resolve_offline(REPOSITORY, "main", theirs) is None
    sent = hub.large_sent
    download(listing, files, settings)
    assert hub.large_sent == sent


@pytest.mark.parametrize("at", ["", "@commit"])
def test_the_only_snapshot_is_not_that_of_another_hub(hub, settings, look, at):
    text = f"{REPOSITORY}{at.replace('commit', hub.commit(REPOSITORY))}"
    theirs = replace(settings, hub="huggingface")
    for own, other, listing in (
        (settings, theirs, look(f"ms://{text}")),
        (theirs, settings, look_up(parse(REPOSITORY), theirs)),
    ):
        shutil.rmtree(settings.cache, ignore_errors=True)
        download(listing, exact_files(listing, "safetensors", "", own), own)
        assert resolve_offline(REPOSITORY, "", other) is None
        assert resolve_offline(REPOSITORY, listing.commit, own) == listing.commit
    (settings.repository_folder(REPOSITORY) / "refs/main").unlink()  # asked for by its digits
    assert resolve_offline(REPOSITORY, "", settings) is None
    assert resolve_offline(REPOSITORY, "", theirs) == listing.commit
    mark_copied(settings, listing)
    for each in (settings, theirs):  # a copy, which states no hub
        assert resolve_offline(REPOSITORY, "", each) == listing.commit
    assert (scan(settings)[0].revisions, revision_of(REPOSITORY, listing.commit, settings)) == (
        (),
        "",
    )


@pytest.mark.usefixtures("quick")
def test_a_download_goes_on_and_a_wrong_byte_comes_again(hub, settings, look):
    listing = look()
    files = exact_files(listing, "safetensors", "", settings)
    hub.bytes_per_second, hub.corrupted["config.json"] = 4e6, 1
    with pytest.raises(DownloadStoppedError):
        download(listing, files, settings, should_stop=lambda: hub.large_sent > 2**20)
    hub.bytes_per_second = 0.0
    folder = download(listing, files, settings)
    assert (folder / WEIGHTS).stat().st_size == SIZE
    assert hub.large_sent < SIZE + 2**20
    assert sum("FilePath=config.json" in each.path for each in hub.log) >= 2


@pytest.mark.parametrize(
    ("name", "changes", "kind", "words"),
    [
        ("ms://acme/none", {}, "absent", "has no repository 'acme/none'"),
        (f"ms://{REPOSITORY}@v9", {}, "absent", "no revision v9"),
        ("ms://acme/closed", {}, "absent", "write a token that may read it into the secret MODELSC"),
        (f"ms://{REPOSITORY}", {"token": "no"}, "unauthorised", "the token of MODELSCOPE_API_TOKEN"),
        (f"ms://{REPOSITORY}", {"endpoint": "http://127.0.0.1:9"}, "offline", "MODELSCOPE_ENDPOINT"),
    ],
)  # fmt: skip
def test_each_hindrance_is_named_as_of_the_hub(hub, look, name, changes, kind, words):
    write_files(hub.folder / "acme/closed", {"config.json": "{}"})
    hub.private = {"acme/closed"}
    with pytest.raises(HubError, match=words) as refused:
        look(name, **changes)
    assert refused.value.kind == kind


def test_a_token_opens_what_is_closed_and_other_answers_are_none(hub, settings, look):
    hub.tokens, hub.admitted, hub.gated = {TOKEN}, {TOKEN}, {REPOSITORY: "auto"}
    listing = look(token=TOKEN)
    check_access(listing, replace(settings, token=TOKEN))
    with pytest.raises(HubError, match="MODELSCOPE_API_TOKEN"):
        check_access(listing, settings)
    hub.page = b'{"Code": 200, "Data": {"Commit": []}}'
    with pytest.raises(HubError, match="no list of files") as refused:
        look()
    assert refused.value.kind == "mirror"


def test_a_host_may_say_that_names_are_modelscopes():
    assert usual_hub({}) == usual_hub({"VLLM_USE_MODELSCOPE": "0"}) == "huggingface"
    for name in ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"):
        assert usual_hub({name: "True"}) == MODELSCOPE.name
        found = from_environment({name: "True"}, hub="")
        assert found.endpoint == "https://www.modelscope.cn"
        assert from_environment({name: "True"}).endpoint == "https://huggingface.co"

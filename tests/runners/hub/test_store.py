"""The Hub's cache on this host: what is there, by whomever, and what a deletion frees."""

import os
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from runners.hub.download import download
from runners.hub.errors import HubError
from runners.hub.listing import read_config
from runners.hub.selection import exact_files, needed_files
from runners.hub.store import (
    blob_path,
    delete,
    is_complete,
    missing,
    resolve_offline,
    scan,
    snapshot_folder,
    stored_listing,
    unfinished_bytes,
)
from tests.hub.models import write_files
from tests.runners.hub.conftest import FILES, REPOSITORY, SIZE, WEIGHTS

BYTES = SIZE + sum(len(text) for text in FILES.values() if isinstance(text, str))


@pytest.fixture
def fetched(settings, looked_up):
    """Download a repository, and return its listing and files."""

    def fetch(text: str = REPOSITORY, *, is_built_in: bool = False, **fields: object):
        listing = looked_up(text)
        files = needed_files(listing, "safetensors", is_built_in=is_built_in)
        download(listing, files, replace(settings, **fields))
        return listing, files

    return fetch


def test_what_huggingface_hub_has_downloaded_is_found(hub, settings, looked_up, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    listing = looked_up()
    files = needed_files(listing, "safetensors")
    assert missing(listing, files, settings) == files
    for file in files:
        huggingface_hub.hf_hub_download(
            REPOSITORY, file.path, endpoint=hub.url, cache_dir=settings.cache
        )
    assert missing(listing, files, settings) == ()
    assert is_complete(listing, files, settings)
    assert resolve_offline(REPOSITORY, "", settings) == listing.commit
    sent = hub.sent()
    assert download(listing, files, replace(settings, is_offline=True)) == snapshot_folder(
        settings, REPOSITORY, listing.commit
    )
    assert hub.sent() == sent


def test_a_complete_cache_may_be_read_only(settings, looked_up, fetched, monkeypatch):
    listing, files = fetched()

    def refuse(*_: object) -> None:
        raise PermissionError

    for name in ("write_text", "replace", "symlink_to"):
        monkeypatch.setattr(Path, name, refuse)
    assert download(listing, files, settings).name == listing.commit


def test_a_blob_that_was_cut_off_is_missing(settings, fetched):
    listing, files = fetched()
    weights = listing.file(WEIGHTS)
    os.truncate(blob_path(settings, REPOSITORY, weights), SIZE - 1)
    assert missing(listing, files, settings) == (weights,)
    assert not is_complete(listing, files, settings)


def test_without_a_network_a_revision_is_what_the_cache_has(hub, settings, fetched):
    assert resolve_offline(REPOSITORY, "", settings) is None
    assert scan(settings) == ()
    first, _ = fetched(f"{REPOSITORY}@{hub.commit(REPOSITORY)}")
    assert resolve_offline(REPOSITORY, "", settings) == first.commit  # the only one
    assert resolve_offline(REPOSITORY, "main", settings) is None
    write_files(hub.folder / REPOSITORY, {"config.json": "{}"})
    second, _ = fetched()
    for revision, commit in (
        ("", second.commit), ("main", second.commit), (first.commit, first.commit),
        ("v1", None), ("0" * 40, None), ("../../..", None),
    ):  # fmt: skip
        assert resolve_offline(REPOSITORY, revision, settings) == commit, revision


def test_without_a_network_the_cache_says_what_it_has_and_lacks(hub, settings, fetched):
    code = {"config.json": '{"auto_map": {"AutoModel": "m.M"}}'}
    write_files(hub.folder / "acme/coded", FILES | code)
    offline = replace(settings, is_offline=True, endpoint="http://127.0.0.1:9")
    for text, has_code in ((REPOSITORY, False), ("acme/coded", True)):
        listing = fetched(text, is_built_in=True)[0]
        found = stored_listing(listing.repository, listing.commit, offline)
        assert found is not None
        assert found.needs_remote_code == has_code
        files = exact_files(found, "safetensors", "", offline, is_built_in=True)
        assert {file.path: file.etag for file in files} == {
            file.path: file.etag for file in listing.files
        }
        assert read_config(found, offline).keys() == ({"auto_map"} if has_code else {"model_type"})
        assert is_complete(found, files, offline)
    (snapshot_folder(settings, REPOSITORY, hub.commit(REPOSITORY)) / WEIGHTS).unlink()
    lacking = stored_listing(REPOSITORY, hub.commit(REPOSITORY), offline)
    with pytest.raises(HubError, match=r"has no model\.safetensors"):
        exact_files(lacking, "safetensors", "", offline)
    assert stored_listing(REPOSITORY, "0" * 40, offline) is None


def test_a_deletion_frees_what_no_other_commit_has(hub, settings, fetched):
    first, _ = fetched()
    write_files(hub.folder / REPOSITORY, {"config.json": "{ }"})
    second, files = fetched()
    found = {model.commit: model for model in scan(settings)}
    assert found.keys() == {first.commit, second.commit}
    assert found[first.commit].bytes == BYTES
    assert found[second.commit].revisions == ("main",)
    assert found[second.commit].repository == REPOSITORY
    assert delete(settings, REPOSITORY, first.commit) == len(FILES["config.json"])
    assert is_complete(second, files, settings)
    blob = blob_path(settings, REPOSITORY, second.files[0])
    blob.with_name("x.ranges.incomplete").write_bytes(b"x" * 5000)
    left = unfinished_bytes(settings, REPOSITORY)
    assert left >= 5000
    assert (
        delete(settings, REPOSITORY, second.commit) == BYTES - len(FILES["config.json"]) + 3 + left
    )
    assert scan(settings) == ()
    assert not blob.parent.exists()
    assert delete(settings, REPOSITORY, second.commit) == 0


def test_without_symbolic_links_the_files_lie_in_the_snapshot(hub, settings, fetched):
    write_files(hub.folder / REPOSITORY, {"generation_config.json": "{}"})  # as tokenizer.json is
    listing, files = fetched(has_symlinks=False)
    folder = snapshot_folder(settings, REPOSITORY, listing.commit)
    assert {path.name for path in folder.iterdir()} == {*FILES, "generation_config.json"}
    assert [path for path in folder.iterdir() if path.is_symlink()] == []
    assert list((folder.parents[1] / "blobs").iterdir()) == []
    assert missing(listing, files, settings) == ()

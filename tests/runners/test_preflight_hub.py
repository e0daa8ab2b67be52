"""What a host says before a job whose model it would download."""

import json
import os
import re
import shutil

import pytest

from runners.host.preflight import HostState, run_checks
from runners.hub.data_files import data_files
from runners.hub.download import download
from runners.hub.links import note_transfer
from runners.hub.listing import look_up
from runners.hub.pruning import RULE_FILE
from runners.hub.repository import RepositoryName
from runners.hub.selection import needed_files
from runners.hub.settings import HubSettings, from_environment
from runners.hub.splits import note_of
from runners.jobspec import FolderModel, HubData, HubModel, StoredModel
from runners.shared.config import HostConfig, HostDir
from runners.shared.messages import Needs, PreflightCheck
from tests.hub.hub_server import Hub
from tests.hub.models import make_data_sets, write_files

MODEL = HubModel(repository="acme/tiny")


def said(
    host_dir: HostDir, model: StoredModel = MODEL, trusted: tuple[str, ...] = (), **config: object
) -> PreflightCheck:
    place = HostState(host_dir, HostConfig(**config), (host_dir.models,))
    checks = run_checks(Needs(kind="generate", model=model, trusted_code=trusted), place)
    return next(check for check in checks if check.name == "model")


def said_of_data(host_dir: HostDir, data: HubData) -> PreflightCheck:
    place = HostState(host_dir, HostConfig(min_free_bytes=0), (host_dir.models,))
    checks = run_checks(Needs(kind="train", data=(data,)), place)
    return next(check for check in checks if check.name == "data")


def test_what_is_downloaded_and_where_is_said_before(host_dir, own_hub: Hub, tmp_path):
    check = said(host_dir, min_free_bytes=0)
    assert check.ok, check
    assert f"acme/tiny at {own_hub.commit('acme/tiny')[:12]}, 1.0 MiB, is downloaded first" in (
        check.sentence
    )
    assert str(tmp_path) in check.sentence
    assert check.figures["missing_bytes"] > 2**20

    assert "It takes" not in check.sentence  # nothing was measured
    note_transfer(HubSettings(endpoint=own_hub.url, host_dir=host_dir.path), 10**8, 10.0)
    check = said(host_dir, min_free_bytes=0)
    assert "It takes about 1 s at the 10 MB/s of this host's last transfer" in check.sentence
    assert 0.1 < check.figures["seconds"] < 0.2

    full = said(host_dir, min_free_bytes=2**60)
    assert not full.ok
    assert full.remedy.startswith("Free ")


@pytest.mark.parametrize(
    ("fault", "model", "is_fit", "words"),
    [
        ({}, {"repository": "acme/none"}, False, "Correct the name of the repository"),
        ({}, {"repository": "acme/tiny", "weights": "gguf"}, False, "GGUF"),
        ({"private": {"acme/tiny"}}, {}, False, "HF_TOKEN"),
        ({"private": {"acme/tiny"}}, {"revision": "a" * 40}, True, "with the team's token"),
        ({"page": b"<html>Sign in to the network</html>"}, {}, False, "HF_ENDPOINT"),
    ],
)
def test_each_hindrance_is_named_with_its_way_out(
    host_dir, own_hub: Hub, fault, model, is_fit, words
):
    for name, value in fault.items():
        setattr(own_hub, name, value)
    check = said(host_dir, MODEL.model_copy(update=model), min_free_bytes=0)
    assert check.ok is is_fit, check
    assert words in f"{check.sentence} {check.remedy}"


def test_a_model_with_code_of_its_own_is_told_before(host_dir, own_hub: Hub):
    coded = {"config.json": '{"auto_map": {"AutoConfig": "coded.C"}}', "model.safetensors": 2**20}
    write_files(own_hub.folder / "acme/coded", {**coded, "coded.py": "x" * 2**19})
    key = f"acme/coded@{own_hub.commit('acme/coded')}"
    for trusted, size, words in (
        ((), "1.0 MiB", rf"the job will fail: .* code allow {key}"),
        ((key,), "1.5 MiB", r"Its own code is allowed: coded\.py\."),
    ):
        check = said(host_dir, HubModel(repository="acme/coded"), trusted, min_free_bytes=0)
        assert check.ok, check
        assert f"{size}, is downloaded first" in check.sentence
        assert re.search(words, check.sentence)


def test_a_host_without_the_hub_is_fit_if_its_cache_has_the_model(
    host_dir, own_hub: Hub, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check = said(host_dir, min_free_bytes=0)
    assert not check.ok
    assert "`slipway models push FOLDER HOST`" in check.remedy

    cached = tmp_path / "huggingface/hub/models--acme--tiny"
    (cached / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("a" * 40)
    check = said(host_dir, min_free_bytes=0)
    assert check.ok
    assert "is in this host's cache" in check.sentence
    coded = {"config.json": '{"auto_map": {"AutoConfig": "coded.C"}}', "coded.py": "x"}
    write_files(cached / "snapshots" / ("a" * 40), coded)
    for trusted, words in (
        ((), r"the job will fail: .* code allow acme/tiny@a{40}"),
        ((f"acme/tiny@{'a' * 40}",), r"Its own code is allowed: coded\.py\."),
    ):
        assert re.search(words, said(host_dir, MODEL, trusted, min_free_bytes=0).sentence)


def test_a_full_disk_is_fit_if_the_hosts_rule_makes_the_room(
    host_dir, own_hub: Hub, tmp_path, monkeypatch
):
    """1 MiB is free, and half of it stays so: too little for the model's 1 MiB."""
    settings = from_environment(os.environ)
    listing = look_up(RepositoryName("acme/other"), settings)
    download(listing, needed_files(listing, "safetensors"), settings)
    free = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    rule = host_dir.path / RULE_FILE
    for kept, is_fit in ((None, False), ([], True), (["acme/other"], False)):
        if kept is not None:
            rule.write_text(json.dumps({"keep_bytes": 2**40, "kept": kept}))
        check = said(host_dir, min_free_bytes=2**19)
        assert check.ok is is_fit, (kept, check)
        assert ("this host's rule deletes" in check.sentence) is is_fit


def test_data_sets_are_checked_too_before_they_are_downloaded(host_dir, own_hub: Hub):
    make_data_sets(own_hub.folder)
    commit, gone = own_hub.commit("datasets/tiny/chats"), "a" * 40
    for name, more, is_fit, words in (
        ("chats", {}, True, r"^datasets/tiny/chats at \w+, [\d.]+ MiB, is downloaded first"),
        (
            "chats",
            {"split": "dev"},
            False,
            "has test, train Correct the split or the subset in the",
        ),
        ("chats", {"split": "dev", "revision": commit}, False, "Correct the split or the subset"),
        ("chats", {"subset": "en", "revision": commit}, False, "Correct the split or the subset"),
        ("scripted", {}, False, "Name the revision refs/convert/parquet"),
        ("none", {}, False, "Correct the name of the repository or its revision in the plan"),
        ("none", {"revision": gone}, True, "with the team's token"),  # it may be a private one
    ):
        check = said_of_data(host_dir, HubData(repository=f"datasets/tiny/{name}", **more))
        assert check.ok is is_fit, check
        assert re.search(words, f"{check.sentence} {check.remedy}".strip()), check


def test_a_host_without_the_hub_is_fit_only_for_the_splits_that_it_has_whole(
    host_dir, own_hub: Hub, monkeypatch
):
    make_data_sets(own_hub.folder)
    data = HubData(repository="datasets/tiny/chats")
    settings = from_environment(os.environ)
    listing = look_up(RepositoryName(data.repository), settings)
    files = data_files(listing, "", "train", settings)
    folder = download(listing, files, settings)
    note = note_of(host_dir.path, data, listing.commit)
    note.parent.mkdir()
    note.write_text(json.dumps({"paths": [each.path for each in files]}))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for split, is_fit in (("train", True), ("test", False)):
        check = said_of_data(host_dir, data.model_copy(update={"split": split}))
        assert check.ok is is_fit, check
        assert ("is in this host's cache" in check.sentence) is is_fit
    (folder / files[0].path).unlink()
    assert not said_of_data(host_dir, data).ok


def test_an_address_of_a_store_is_allowed_by_the_operator_or_refused_with_the_way_out(host_dir):
    model = FolderModel(path="s3://lab/models/tiny")
    refused = said(host_dir, model)
    assert not refused.ok
    assert "operator add its prefix" in refused.sentence
    check = said(host_dir, model, object_stores=[{"prefix": "s3://lab"}])
    assert check.ok
    for words in ("downloaded first", "builds the environment s3", "room"):
        assert words in check.sentence

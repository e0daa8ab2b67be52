"""The models in the Hub's cache of a host: reported, deleted on order, pruned by its rule."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runners.host.hub_cache import HubCache
from runners.hub.download import download
from runners.hub.listing import look_up
from runners.hub.pruning import PruneRule, prune, read_rule
from runners.hub.repository import RepositoryName
from runners.hub.selection import needed_files
from runners.hub.settings import HubSettings, from_environment
from runners.hub.store import cache_bytes, scan
from runners.launchers.attempts import AttemptFolder
from runners.launchers.model_uses import uses_on_host
from runners.shared.config import HostDir
from runners.shared.messages import CachedModel, CacheOrders
from tests.hub.hub_server import Hub

TINY, OTHER = "acme/tiny", "acme/other"
MIB = 2**20
ATTEMPT = "01M8H1FMD2XRYDQH6R4P5GTAE1"


@pytest.fixture
def settings(own_hub: Hub) -> HubSettings:
    del own_hub  # its variables
    return from_environment(os.environ | {"HF_HUB_DISABLE_SYMLINKS": ""})


def fetch(settings: HubSettings, repository: str, used_at: float) -> str:
    """Download a repository as used at a time; return its key."""
    listing = look_up(RepositoryName(repository), settings)
    folder = download(listing, needed_files(listing, "safetensors"), settings)
    for path in folder.iterdir():
        os.utime(path, (used_at, path.stat().st_mtime))
    return f"{repository}@{listing.commit}"


@pytest.fixture
def both(settings: HubSettings) -> tuple[str, str]:
    """Download two models: TINY was used before OTHER."""
    return fetch(settings, TINY, 1_000.0), fetch(settings, OTHER, 2_000.0)


def names(models: tuple[CachedModel, ...]) -> list[str]:
    return [each.repository for each in models]


def reported(cache: HubCache) -> list[str]:
    cache.step()
    report = cache.news(everything=True)
    assert report is not None
    return names(report.models)


def use(host_dir: HostDir, text: str) -> AttemptFolder:
    """Make a live attempt whose spec holds a text."""
    folder = AttemptFolder(host_dir.attempts / ATTEMPT)
    folder.make_claim("fence", "boot")
    folder.spec.write_text(text)
    return folder


def test_a_host_reports_its_models_once_and_again_when_they_change(host_dir, settings, tmp_path):
    cache = HubCache(host_dir)
    assert cache.news(everything=True) is None  # nothing is known yet
    assert reported(cache) == []
    key = fetch(settings, TINY, 1_000.0)
    cache.step()
    report = cache.news(everything=False)
    assert report is not None
    (model,) = report.models
    assert f"{model.repository}@{model.commit}" == key
    assert MIB < model.size_bytes < MIB + 1_000
    assert (model.num_files, model.used_at_ms, model.is_complete) == (3, 1_000_000, True), model
    cache.mark_reported()
    cache.step()
    assert cache.news(everything=False) is None
    fetch(settings, OTHER, 2_000.0)
    cache.step()
    assert names(cache.news(everything=False).models) == [OTHER, TINY]
    assert "huggingface_hub" not in _loaded_by("runners.host.agent")


def _loaded_by(module: str) -> str:
    code = f"import {module}, sys; print(*sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("part", ["a shard", "a download"])
def test_what_has_arrived_in_part_is_reported_as_incomplete(host_dir, settings, part):
    if part == "a shard":
        key = fetch(settings, TINY, 1_000.0)
        folder = next(settings.cache.glob("models--acme--tiny/snapshots/*"))
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        key = f"{TINY}@"
        blobs = settings.repository_folder(TINY) / "blobs"
        blobs.mkdir(parents=True)
        (blobs / ("a" * 64 + ".incomplete")).write_bytes(b"x" * 5000)
    cache = HubCache(host_dir)
    cache.step()
    (model,) = cache.news(everything=True).models
    assert (f"{model.repository}@{model.commit}", model.is_complete) == (key, False)
    cache.obey(CacheOrders(delete=(key,)))
    assert reported(cache) == []
    assert not settings.repository_folder(TINY).exists()


@pytest.mark.parametrize(
    "text",
    [f'"{TINY}"', "/models--acme--tiny/snapshots", "a link"],
    ids=["name", "folder", "link"],
)
def test_an_order_deletes_a_model_but_none_that_a_job_uses(host_dir, settings, both, text):
    folder = use(host_dir, "" if text == "a link" else text)
    if text == "a link":
        links = folder.path / "weights" / "tiny"
        links.mkdir(parents=True)
        (links / "tiny.gguf").symlink_to(settings.repository_folder(TINY) / "blobs" / "x")
    cache = HubCache(host_dir)
    assert cache.obey(CacheOrders(delete=both))
    assert reported(cache) == [TINY]
    assert cache.problems == (f"{TINY} was not deleted: a job or a copy on this host uses it.",)
    (folder.path / "settled").touch()
    assert not cache.obey(CacheOrders(delete=both))  # nothing new, and still to be done
    assert reported(cache) == []
    cache.obey(CacheOrders(delete=("../..@x", "acme/none@" + "a" * 40)))
    assert reported(cache) == []


@pytest.mark.parametrize(
    ("keep", "kept", "used", "left"),
    [
        (None, (), "", [OTHER, TINY]),
        (3 * MIB, (), "", [OTHER, TINY]),
        (3 * MIB // 2, (), "", [OTHER]),
        (3 * MIB // 2, (TINY,), "", [TINY]),
        (3 * MIB // 2, (), f'"{TINY}"', [TINY]),
        (0, (), "", []),
        (0, (TINY, OTHER), "", [OTHER, TINY]),
    ],
)
def test_a_rule_keeps_so_much_the_longest_unused_go_first(
    host_dir, settings, both, keep, kept, used, left
):
    use(host_dir, used)
    cache = HubCache(host_dir)
    cache.step()
    cache.obey(CacheOrders(keep_bytes=keep, kept=kept))
    assert reported(cache) == left
    report = cache.news(everything=True)
    assert {each.repository for each in report.pruned} == {TINY, OTHER} - set(left)
    assert all(each.freed_bytes > MIB for each in report.pruned)
    cache.mark_reported()
    cache.step()
    assert cache.news(everything=True).pruned == ()  # said once
    assert HubCache(host_dir)._rule == read_rule(host_dir.path)


def test_room_is_made_before_a_download_for_the_rule_and_for_the_disk(host_dir, settings, both):
    is_used = uses_on_host(host_dir.attempts)
    rule, held = PruneRule(3 * MIB), cache_bytes(settings)

    def pruned(**more: int) -> list[str]:
        found = prune(settings, rule, is_used, host_dir=host_dir.path, **more)
        return [each.repository for each in found]

    assert pruned(incoming_bytes=3 * MIB - held) == []
    assert pruned(incoming_bytes=3 * MIB - held + 1) == [TINY]
    assert pruned(incoming_bytes=0, lacking_bytes=1) == [OTHER]
    assert scan(settings) == ()


def test_a_rule_of_another_form_prunes_nothing(tmp_path: Path):
    for text in ("", "[]", '{"keep_bytes": "5"}', '{"kept": ["a/b"]}'):
        (tmp_path / "hub_cache.json").write_text(text)
        assert read_rule(tmp_path) == PruneRule()

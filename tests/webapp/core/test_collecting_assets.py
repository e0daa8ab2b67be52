"""Assets that are collected while somebody reads them: none is missing or half written."""

import gzip
import json
import os
from pathlib import Path

import brotli
import pytest
import servestatic.middleware
from django.core.files.base import ContentFile
from django.core.management import call_command
from servestatic.middleware import ServeStaticMiddleware

from webapp.core.staticfiles import HashedStaticFilesStorage


@pytest.fixture
def assets(tmp_path, settings) -> Path:
    """Two assets of our own, of which one names the other; collected below ``static``."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "page.css").write_text("a { background: url('dot.svg'); }")
    (source / "dot.svg").write_text("<svg/>")
    settings.STATICFILES_DIRS = [source]
    settings.STATICFILES_FINDERS = ["django.contrib.staticfiles.finders.FileSystemFinder"]
    settings.STATIC_ROOT = tmp_path / "static"
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "webapp.core.staticfiles.HashedStaticFilesStorage"}
    }
    return source


def collect() -> None:
    call_command("collectstatic", interactive=False, verbosity=0)


async def answer_nothing(_request):
    """What stands behind the middleware here."""


def named(root: Path) -> list[Path]:
    """Return the files that the manifest names."""
    manifest = json.loads((root / "staticfiles.json").read_text())
    return [root / name for name in manifest["paths"].values()]


def test_a_second_collecting_takes_no_file_away_at_any_moment(assets, settings, monkeypatch):
    collect()
    files = [settings.STATIC_ROOT / "staticfiles.json", *named(settings.STATIC_ROOT)]
    moments = []
    write = HashedStaticFilesStorage._save

    def watched(self, name, content):
        moments.append(all(file.stat().st_size for file in files))
        return write(self, name, content)

    monkeypatch.setattr(HashedStaticFilesStorage, "_save", watched)
    collect()

    assert len(moments) > 1
    assert all(moments)


def test_a_web_process_may_start_at_any_moment_of_it(assets, settings, monkeypatch):
    settings.DEBUG = False
    collect()
    served = []
    write = HashedStaticFilesStorage._save

    def starting(self, name, content):
        another_process = HashedStaticFilesStorage()
        monkeypatch.setattr(servestatic.middleware, "staticfiles_storage", another_process)
        served.append(len(ServeStaticMiddleware(answer_nothing).files))
        return write(self, name, content)

    monkeypatch.setattr(HashedStaticFilesStorage, "_save", starting)
    collect()

    assert set(served) == {max(served)}
    assert max(served) >= 2 * len(named(settings.STATIC_ROOT))


def test_a_changed_asset_gets_a_new_name_and_the_old_one_stays(assets, settings):
    collect()
    before = set(named(settings.STATIC_ROOT))
    (assets / "dot.svg").write_text("<svg><circle/></svg>")

    collect()

    after = set(named(settings.STATIC_ROOT))
    assert len(before & after) == len(before) - 2  # the dot, and the page that names it
    assert all(file.exists() for file in before | after)


def test_what_is_collected_is_whole_and_readable_by_a_web_server(assets, settings):
    collect()

    for file in named(settings.STATIC_ROOT):
        assert file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o644


def test_nothing_is_left_beside_the_folder(assets, settings, tmp_path):
    collect()
    collect()

    assert sorted(each.name for each in tmp_path.iterdir()) == ["source", "static"]


def test_a_write_that_fails_leaves_the_old_file_and_no_half_one(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path / "static")
    storage.save("a.txt", ContentFile("old"))

    class Breaking(ContentFile):
        def chunks(self, _chunk_size=None):
            yield b"ne"
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        storage.save("a.txt", Breaking("new"))

    assert (tmp_path / "static" / "a.txt").read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["static"]


def test_saving_a_text_twice_replaces_it(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path / "static")

    names = [storage.save("a.txt", ContentFile(text)) for text in ("old", "new")]

    assert names == ["a.txt", "a.txt"]
    assert (tmp_path / "static" / "a.txt").read_text() == "new"


def test_a_hashed_file_lies_beside_its_compressed_variants(assets, settings):
    text = "a { color: red; }\n" * 200
    (assets / "long.css").write_text(text)
    collect()

    (name,) = settings.STATIC_ROOT.glob("long.*.css")
    assert gzip.decompress(Path(f"{name}.gz").read_bytes()) == name.read_bytes()
    assert brotli.decompress(Path(f"{name}.br").read_bytes()) == name.read_bytes()
    assert Path(f"{name}.br").stat().st_mode & 0o777 == 0o644


def test_a_file_that_is_small_or_compressed_already_gets_none(assets, settings):
    (assets / "noise.woff2").write_bytes(os.urandom(5000))
    collect()

    assert list(settings.STATIC_ROOT.rglob("noise*.woff2"))
    assert not [*settings.STATIC_ROOT.rglob("*.br"), *settings.STATIC_ROOT.rglob("*.gz")]


def test_a_variant_is_made_once(assets, settings, monkeypatch):
    (assets / "long.css").write_text("a { color: red; }\n" * 200)
    collect()
    made = []
    monkeypatch.setattr(brotli, "compress", lambda data, **_options: made.append(data) or data)

    collect()

    assert made == []

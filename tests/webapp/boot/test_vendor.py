import json

import pytest

from webapp.boot import vendor


def test_every_vendored_file_has_its_published_bytes():
    assert vendor.changed_files() == []


def test_every_file_of_the_vendor_folder_is_locked():
    locked = {file.target for file in vendor.locked_files()} | {"static/vendor/vendor.lock"}

    found = {
        path.relative_to(vendor.ROOT).as_posix()
        for path in (vendor.ROOT / "static" / "vendor").iterdir()
    }

    assert found <= locked


def test_a_changed_byte_is_named(tmp_path):
    lock = tmp_path / "vendor.lock"
    row = {"target": "a.js", "package": "a@1.0.0", "member": "a.js", "licence": "MIT"}
    lock.write_text(json.dumps({"files": [row | {"sha384": vendor.sha384(b"published")}]}))
    (tmp_path / "a.js").write_bytes(b"tampered")

    assert vendor.changed_files(tmp_path, lock) == ["a.js"]


@pytest.mark.parametrize("file", vendor.locked_files(), ids=lambda file: file.target)
def test_every_package_is_pinned_to_one_version(file):
    name, _, version = file.package.rpartition("@")

    assert name
    assert version.count(".") == 2

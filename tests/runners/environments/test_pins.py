"""The files that pin an environment: those that are shipped, and what such a file may hold."""

import pytest

from runners.environments.store import SHIPPED, PinsError, read_pins

SHIPPED_FILES = sorted(SHIPPED.glob("*.txt"))
GOOD = "# For tests.\n# probe: one two\n# size-bytes: 5\n# tried: yes\none==1.0\ntwo==2.0+cpu\n"


@pytest.mark.parametrize("path", SHIPPED_FILES, ids=lambda path: path.stem)
def test_every_shipped_file_says_what_it_is_for_and_pins_each_package_once(path):
    pins = read_pins(path)

    names = [line.partition("==")[0].lower().replace("_", "-") for line in pins.packages]
    assert "GB" in pins.purpose or "MB" in pins.purpose
    assert len(names) == len(set(names)) > 0
    assert pins.size_bytes > 0


def test_only_what_was_built_says_so():
    tried = {path.stem for path in SHIPPED_FILES if read_pins(path).is_tried}

    assert tried == {"llamacpp", "lm_eval"}


def test_a_file_is_read_as_written(tmp_path):
    (path := tmp_path / "tiny.txt").write_text(GOOD)

    pins = read_pins(path)

    assert (pins.name, pins.purpose, pins.probe) == ("tiny", "For tests.", ("one", "two"))
    assert (pins.size_bytes, pins.is_tried) == (5, True)
    assert pins.packages == ("one==1.0", "two==2.0+cpu")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# For tests.", "one==1.0", "must begin with a comment"),
        ("one==1.0", "one>=1.0", "'one>=1.0' is not name==version"),
        ("one==1.0", "--index-url http://elsewhere", "is not name==version"),
        ("one==1.0", "one @ file:///tmp/one.whl", "is not name==version"),
        ("probe: one two", "probe: one;two", "needs '# probe"),
        ("size-bytes: 5", "size-bytes: many", "needs '# probe"),
    ],
)
def test_a_line_that_may_not_stand_there_is_named(tmp_path, old, new, words):
    (path := tmp_path / "tiny.txt").write_text(GOOD.replace(old, new))

    with pytest.raises(PinsError, match=words.replace("+", r"\+")):
        read_pins(path)


def test_other_pins_have_another_digest(tmp_path):
    (path := tmp_path / "tiny.txt").write_text(GOOD)
    before = read_pins(path).digest
    path.write_text(GOOD.replace("one==1.0", "one==1.1"))

    assert read_pins(path).digest != before


def test_what_stands_beside_the_agents_packages_says_so_and_what_it_does_without(tmp_path):
    (path := tmp_path / "tiny.txt").write_text(GOOD)
    before = read_pins(path)
    path.write_text(GOOD.replace("# tried", "# beside: main\n# without: three four\n# tried"))

    pins = read_pins(path)

    assert (pins.is_beside_main, pins.without) == (True, {"three", "four"})
    assert before.agent_package_folders == []
    assert any("site-packages" in folder for folder in pins.agent_package_folders)
    assert pins.digest != before.digest

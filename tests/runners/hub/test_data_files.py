"""Which files of a data set are a split, and why others are refused."""

from pathlib import Path

import pytest

from runners.hub.data_files import CARD, data_files, look_up_data
from runners.hub.errors import HubError
from runners.hub.listing import Listing
from runners.hub.repository import RepositoryName
from tests.hub.models import write_files

NAME = "datasets/acme/notes"
PARTS = [f"data/train-0000{at}-of-00002.parquet" for at in (0, 1)]
CONVERTED = ["en/train/0000.parquet", "en/train/0001.parquet", "de/test/0000.parquet"]
TWO = """---
configs:
- config_name: main
  data_files: [{split: train, path: "main/train-*"}, {split: test, path: main/test.jsonl}]
- config_name: other
  data_dir: other
---
# Notes
"""


def of_card(configs: str) -> str:
    return f"---\nlicense: mit\nconfigs:\n{configs}\n---\n"


def wanted(look, paths: dict[str, str] | list[str], subset: str, split: str) -> list[str]:
    """Return the files of a split, without the card."""
    files = paths if isinstance(paths, dict) else dict.fromkeys(paths, "{}")
    return [path for path in look(files, subset, split) if path != CARD]


@pytest.fixture
def look(hub, settings, tmp_path):
    def of(files: dict[str, str], subset: str, split: str) -> list[str]:
        write_files(tmp_path / "repositories" / NAME, files)
        listing = look_up_data(RepositoryName(NAME), settings)
        return [each.path for each in data_files(listing, subset, split, settings)]

    return of


CHOSEN = {
    "parts": (["README.md", "dataset_infos.json", *PARTS], "", "train", PARTS),
    "splits with names of their own": (
        ["data/train_sft-00000-of-00001-a3ecca35f3d7e3f7.parquet", "data/train_gen-00000-of-00001.parquet"],
        "", "train_sft", ["data/train_sft-00000-of-00001-a3ecca35f3d7e3f7.parquet"],
    ),
    "words in names": (["notes_dev.jsonl", "notes.train.jsonl"], "", "validation", ["notes_dev.jsonl"]),
    "words in folders": (["a/training/1.csv", "a/test/1.csv"], "", "train", ["a/training/1.csv"]),
    "one file": (["alpaca_data_cleaned.json", "LICENSE.txt", ".cache.json"], "", "train", ["alpaca_data_cleaned.json"]),
    **{
        f"parts beside {other}": ([other, *PARTS], "", "train", PARTS)
        for other in ("all.jsonl", "stats.json", "train_metadata.jsonl", "notes/train_readme.txt", "train.csv.gz")
    },
    "folders before names": (["a/test/train.csv", "train.csv"], "", "test", ["a/test/train.csv"]),
    "names before a file that has none": (["stats.json", "train.csv"], "", "train", ["train.csv"]),
    "the ending that most have": (
        ["train_readme.txt", "train_1.csv", "train_2.csv"], "", "train", ["train_1.csv", "train_2.csv"],
    ),
    "of as many the table": (["train_stats.json", "train.parquet"], "", "train", ["train.parquet"]),
    "packed files of another split": (["train.csv", "test.csv.gz"], "", "train", ["train.csv"]),
    "a card": ({"README.md": TWO, "main/train-1.jsonl": "", "main/train-2.jsonl": "", "x.jsonl": ""},
               "main", "train", ["main/train-1.jsonl", "main/train-2.jsonl"]),
    "a folder of a card": ({"README.md": TWO, "other/train.csv": "", "train.csv": ""},
                           "other", "train", ["other/train.csv"]),
    "folders of a card": (
        {"README.md": of_card("- {config_name: x, data_files: [./a/, b/*/c.csv]}"),
         "a/b/c.csv": "", "a/d.csv": "", "b/x/c.csv": "", "b/x/y/c.csv": ""},
        "", "train", ["a/b/c.csv", "a/d.csv", "b/x/c.csv"],
    ),
    "the only subset of a card": (
        {"README.md": of_card("- {config_name: x, data_files: 'a/**/*.jsonl'}"),
         "a/b/c.jsonl": "", "a/d.jsonl": "", "e.jsonl": ""},
        "", "train", ["a/b/c.jsonl", "a/d.jsonl"],
    ),
    "the marked subset of a card": (
        {"README.md": of_card("- {config_name: x, data_files: a.csv}\n- {config_name: y, data_files: [b.csv], default: true}"),
         "a.csv": "", "b.csv": ""},
        "", "train", ["b.csv"],
    ),
    "a card with a script beside it": (
        {"README.md": of_card("- {config_name: x, data_files: a.csv}"), "notes.py": "", "a.csv": ""}, "", "train", ["a.csv"],
    ),
    "an alias beside the files that a card states": (
        {"README.md": "---\na: &a [x]\nb: [*a, !!int '']\nconfigs: [{data_files: a.csv}]\n---\n", "a.csv": ""},
        "", "train", ["a.csv"],
    ),
    **{
        f"the pattern {pattern} without what is beside": (
            {"README.md": of_card(f"- {{config_name: x, data_files: '{pattern}'}}"),
             **dict.fromkeys((".gitattributes", "data/.b.csv", "data/LICENSE", "data/__x__/a.csv",
                              "data/dataset_infos.json", "data/a.csv"), "")},
            "", "train", ["data/a.csv"],
        )
        for pattern in ("**", "data/*", "data")
    },
    "hidden files that a card names": (
        {"README.md": of_card("- {config_name: x, data_files: [.a/*.csv, metadata.csv]}"),
         ".a/a.csv": "", "metadata.csv": ""},
        "", "train", [".a/a.csv", "metadata.csv"],
    ),
    "the Hub's conversion": ([*CONVERTED, "raw.zip"], "en", "train", CONVERTED[:2]),
}  # fmt: skip
CARDS = {
    "aliases": ("- config_name: &a [x, x]\n  data_files: [*a, *a]", r"has an alias \(\*name\) in its configs"),
    "an alias of itself": ("- &a {config_name: x, data_files: *a}", "has an alias"),
    "deep lists": (f"- {'[' * 500_000}", "nested deeper than 64 levels"),
    "many values": (f"- [{'a,' * 300_000}]", "of more than 250,000 values"),
    "many paths": (f"- {{data_files: [{'a.csv,' * 50_001}]}}", "has more than 100 patterns or 50,000 paths"),
    "a name that is none": ("- {config_name: [a], data_files: a.csv}", "states as config_name what is no text"),
    "a split that is none": ("- {data_files: [{split: 1, path: a.csv}]}", "states as split what is no text"),
    "a path that is none": ("- {data_files: {train: a.csv}}", "states data_files without a path"),
    "a folder that is none": ("- {data_dir: {a: b}}", "states as data_dir what is no text"),
    "a long name": (f"- {{config_name: {'x' * 1025}, data_files: a.csv}}", "a config_name of 1,025 characters, and 1,024"),
    **{
        f"the value {value}": (f"- {{a: {value}}}", "begins with what is no YAML")
        for value in ("!!bool x", "!!int ''", "!!timestamp x", "!!float ''", "2026-99-99", "!x y", f"0x{'f' * 9}g: [")
    },
}  # fmt: skip
REFUSED = {
    "another split": (PARTS, "", "validation", "no_split", r"no split 'validation': it has train"),
    "another subset": (PARTS, "en", "train", "no_split", r"no subset 'en': it has default"),
    "several subsets": (
        CONVERTED, "", "train", "ambiguous", "has 2 subsets: name one of (en, de|de, en)",
    ),
    "a split of another subset": (
        CONVERTED, "de", "train", "no_split", r"no split 'train' of its subset 'de': it has test",
    ),
    "a lost part": (PARTS[:1], "", "train", "unusable", r"has 1 of the 2 parts"),
    "no data": (["README.md", "a.py"], "", "train", "unusable", r"has no \.jsonl, .*\.txt files"),
    "packed files": (
        {"README.md": of_card("- {config_name: x, data_files: a.jsonl.gz}"), "a.jsonl.gz": ""}, "", "train",
        "unusable", r"has files that end in \.gz, and files of one kind are read: \.jsonl",
    ),
    **{
        f"files that are not read: {paths}": (
            paths, "", "train", "unusable", rf"{paths[0].rpartition('.')[2]}\b.*, and files of one kind are read",
        )
        for paths in (["a.zip"], ["train.zst", "stats.json"], ["train.tsv", "train.json"],
                      ["data.arrow", "x/stats.json"], ["train.tar", "train_1.csv", "train_2.csv"])
    },
    "two kinds of JSON": (
        ["train.json", "train_2.jsonl"], "", "train", "unusable", r"end in \.json, \.jsonl",
    ),
    "files of two kinds": (
        {"README.md": of_card("- {config_name: x, data_files: 'a.*'}"), "a.jsonl": "", "a.csv": ""}, "", "train",
        "unusable", r"end in \.csv, \.jsonl",
    ),
    "an address in a card": (
        {"README.md": of_card("- {config_name: x, data_files: 'https://a.org/**b'}"), "a.csv": ""}, "", "train",
        "unusable", "has no split 'train': it has no",
    ),
    "a card that is none": ({"README.md": "---\na: [\n---\n"}, "", "train", "unusable", "is no YAML"),
    "a pattern of files in no folder": (
        {"README.md": of_card("- {config_name: x, data_files: '*.csv'}"), "a/b.csv": ""}, "", "train",
        "unusable", "has no split 'train'",
    ),
    "patterns without end": (
        {"README.md": of_card(f"- {{config_name: x, data_files: {['*a*' * 9] * 101}}}"), "a" * 200: ""}, "", "train",
        "unusable", "has more than 100 patterns or 50,000 paths for a subset; choose another",
    ),
    **{
        f"a card with {what}": ({"README.md": of_card(configs), "a.csv": ""}, "", "train", "unusable", words)
        for what, (configs, words) in CARDS.items()
    },
    "a script": (
        ["notes.py", "raw.json"], "", "train", "remote_code",
        r"a loading script \(notes\.py\), which never runs here: .*acme/notes@refs/convert/parquet",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("paths", "subset", "split", "files"), CHOSEN.values(), ids=CHOSEN)
def test_a_split_has_the_files_that_its_card_or_their_names_state(
    look, paths, subset, split, files
):
    assert wanted(look, paths, subset, split) == files


@pytest.mark.parametrize(
    ("paths", "subset", "split", "kind", "words"), REFUSED.values(), ids=REFUSED
)
def test_what_cannot_be_read_is_refused_with_its_way_out(look, paths, subset, split, kind, words):
    with pytest.raises(HubError, match=words) as refused:
        wanted(look, paths, subset, split)
    assert refused.value.kind == kind


def test_a_script_is_replaced_by_the_hubs_own_conversion_where_it_is(
    hub, settings, tmp_path: Path
):
    folder = tmp_path / "repositories"
    write_files(folder / NAME, {"notes.py": "raise SystemExit"})
    write_files(folder / "datasets/acme/converted", dict.fromkeys(CONVERTED[:2], "x"))
    hub.branches = {f"{NAME}@refs/convert/parquet": "datasets/acme/converted"}
    for name in (RepositoryName(NAME), RepositoryName(NAME, "refs/convert/parquet")):
        found: Listing = look_up_data(name, settings)
        assert found.commit == hub.commit("datasets/acme/converted")
        files = data_files(found, "", "train", settings)
        assert [each.path for each in files] == CONVERTED[:2]
    at_main = look_up_data(RepositoryName(NAME, "main"), settings)
    with pytest.raises(HubError, match="never runs here"):
        data_files(at_main, "", "train", settings)

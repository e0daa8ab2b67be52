"""Which files of a data set's repository are a split: by its card, else by their names.

The rules are those of the datasets library, whose scripts are never run here.
Sources: https://huggingface.co/docs/hub/datasets-manual-configuration and
https://huggingface.co/docs/hub/datasets-file-names-and-splits.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from runners.datasets.records import OTHER_SUFFIXES, PART_NAME, SUFFIXES
from runners.datasets.repositories import DATA_SETS
from runners.datasets.text import TextError, read_text
from runners.hub.cards import CardError, configs_of, text_of
from runners.hub.errors import HubError
from runners.hub.listing import TIMEOUT_SECONDS, HubFile, Listing, look_up, read_file
from runners.hub.repository import RepositoryName
from runners.hub.selection import some
from runners.hub.settings import HubSettings
from runners.jobspec.base import USUAL_SPLIT

CARD = "README.md"
MAX_CARD_BYTES = 2 * 2**20
MAX_PATTERNS = 100  # of a subset, beside the paths of single files
MAX_PATHS = 50_000  # of a subset, patterns too
USUAL_SUBSET = "default"
ENDINGS = ", ".join(SUFFIXES)
# Of as many files of two endings the first is read. Files of JSON and of lines are of one kind.
KINDS = (".parquet", ".jsonl", ".csv", ".txt")
UNREAD = frozenset(
    {*OTHER_SUFFIXES, ".7z", ".avro", ".bz2", ".feather", ".lz4", ".orc", ".rar", ".tar", ".tgz"}
) - {".md"}  # of data, too
CONVERTED = "refs/convert/parquet"  # where the Hub keeps its own conversion of a data set
OF_CONVERTED = re.compile(r"(?P<subset>[^/]+)/(?P<split>[^/]+)/\d{4}\.parquet")
# Files of other meaning that end as data does.
BESIDE = re.compile(
    r"(?:dataset_infos?|dataset_dict|config|state|metadata|requirements|license|readme)(?:\.\w+)?",
    re.IGNORECASE,
)
SHARDED = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:-\w+)?\.\w+")
WORDS: Mapping[str, frozenset[str]] = {
    USUAL_SPLIT: frozenset({"train", "training"}),
    "validation": frozenset({"validation", "valid", "dev", "val"}),
    "test": frozenset({"test", "testing", "eval", "evaluation"}),
}
Splits = dict[str, list[HubFile]]


def look_up_data(
    name: RepositoryName, settings: HubSettings, timeout: float = TIMEOUT_SECONDS
) -> Listing:
    """Return what a data set's repository holds, at the commit that its revision is now.

    Of one that has only a script, and no stated revision, it is the Hub's own conversion.

    Raises:
        HubError: any of ``look_up``.
    """
    listing = look_up(name, settings, timeout)
    if name.revision or not _script(listing) or _card_subsets(listing, settings):
        return listing
    try:
        return look_up(replace(name, revision=CONVERTED), settings, timeout)
    except HubError as error:
        if error.kind != "absent":
            raise
        return listing


def data_files(
    listing: Listing, subset: str, split: str, settings: HubSettings
) -> tuple[HubFile, ...]:
    """Return the card of a data set, if it has one, and the files of a split in their order.

    ``subset`` "": the usual one, or the only one.

    Raises:
        HubError: remote_code: only a script has the data; ambiguous: several subsets, and none is
            named; no_split: no such split or subset; unusable; or any of ``read_file``.
    """
    where = listing.shown()
    stated = _card_subsets(listing, settings)
    if not stated and (script := _script(listing)):
        raise HubError(
            "remote_code",
            f"{where} has a loading script ({script}), which never runs here: name the Hub's own "
            f"conversion, {listing.repository.removeprefix(DATA_SETS)}@{CONVERTED}, if its page "
            "has that branch, or a data set of plain files",
        )
    named = {} if stated else _subsets_by_name(listing)
    subsets = list(stated or named)
    chosen = subset or _usual(subsets, stated, where)
    if chosen not in subsets:
        raise HubError("no_split", f"{where} has no subset {chosen!r}: it has {some(subsets)}")
    splits = _of_config(listing, stated[chosen]) if stated else named[chosen]
    if split not in splits:
        has = f"it has {some(list(splits))}" if splits else f"it has no {ENDINGS} files"
        of = f" of its subset {chosen!r}" if len(subsets) > 1 else ""
        raise HubError(
            "no_split" if splits else "unusable", f"{where} has no split {split!r}{of}: {has}"
        )
    files = sorted(splits[split], key=lambda each: each.path)
    _check(files, f"{where}, split {split!r},")
    card = listing.file(CARD)
    return (*([card] if card else ()), *files)


def _check(files: Sequence[HubFile], what: str) -> None:
    """Refuse files that cannot be read as one, and a set of numbered parts that is not whole."""
    suffixes = sorted({PurePosixPath(each.path).suffix.lower() for each in files})
    if len(suffixes) > 1 or suffixes[0] not in SUFFIXES:
        raise HubError(
            "unusable",
            f"{what} has files that end in {some(suffixes)}, and files of one kind are read: "
            f"{ENDINGS}; choose another data set",
        )
    parts = [match for each in files if (match := PART_NAME.search(each.path))]
    counts = {int(match[2]) for match in parts}
    if len(parts) == len(files) and len(counts) == 1 and len(files) < max(counts):
        raise HubError(
            "unusable",
            f"{what} has {len(files)} of the {max(counts)} parts that their names state: choose "
            "another revision",
        )


def _usual(names: Sequence[str], stated: Mapping[str, Any], where: str) -> str:
    """Return the subset that is read where none is named."""
    marked = [name for name, config in stated.items() if config.get("default") is True]
    if len(marked) == 1:
        return marked[0]
    if USUAL_SUBSET in names or len(names) == 1:
        return USUAL_SUBSET if USUAL_SUBSET in names else names[0]
    if not names:
        raise HubError("unusable", f"{where} has no {ENDINGS} files")
    raise HubError("ambiguous", f"{where} has {len(names)} subsets: name one of {some(names)}")


def _script(listing: Listing) -> str:
    """Return the script that the datasets library would have run for a repository, "" if none."""
    script = f"{listing.repository.rpartition('/')[2]}.py"
    return script if script in listing.paths else ""


# By the card


def _card_subsets(listing: Listing, settings: HubSettings) -> dict[str, dict[str, Any]]:
    """Return the subsets that the card of a data set states with their files."""
    if CARD not in listing.paths:
        return {}
    data = read_file(listing, CARD, settings, MAX_CARD_BYTES)
    try:
        return {
            text_of(each.get("config_name"), "config_name", USUAL_SUBSET): each
            for each in configs_of(read_text(data))
            if each.get("data_files") or each.get("data_dir")
        }
    except (TextError, CardError) as error:
        raise _unusable(listing, error) from None


def _unusable(listing: Listing, error: TextError | CardError) -> HubError:
    where = listing.shown()
    way_out = "choose another revision, or another data set"
    words = str(error).removeprefix("it ")
    return HubError("unusable", f"{where}: {CARD} {words}; {way_out}")


def _of_config(listing: Listing, config: Mapping[str, Any]) -> Splits:
    """Return the files of each split that a subset of a card states.

    Raises:
        HubError: unusable, what it states is no name or path, or there are too many.
    """
    try:
        folder = f"{text_of(config.get('data_dir'), 'data_dir').strip('/')}/".lstrip("/")
        files = [each for each in listing.files if each.path.startswith(folder)]
        if not config.get("data_files"):
            return _splits_by_name([each for each in files if _is_data(each)])
        return _stated_splits(config["data_files"], folder, files)
    except CardError as error:
        raise _unusable(listing, error) from None


def _stated_splits(stated: object, folder: str, files: Sequence[HubFile]) -> Splits:
    by_path = {each.path: each for each in files}
    splits: dict[str, dict[HubFile, None]] = {}
    num_paths = num_patterns = 0
    for split, path in _rows(stated):
        pattern = f"{folder}{path.removeprefix('./')}".rstrip("/")
        is_pattern = pattern not in by_path
        num_paths, num_patterns = num_paths + 1, num_patterns + is_pattern
        if num_patterns > MAX_PATTERNS or num_paths > MAX_PATHS:
            raise CardError(
                f"has more than {MAX_PATTERNS} patterns or {MAX_PATHS:,} paths for a subset"
            )
        found = _fitting(files, pattern) if is_pattern else [by_path[pattern]]
        splits.setdefault(split, {}).update(dict.fromkeys(found))
    return {split: list(found) for split, found in splits.items() if found}


def _rows(stated: object) -> Iterator[tuple[str, str]]:
    """Yield each path or pattern of a subset with its split."""
    for row in stated if isinstance(stated, list) else [stated]:
        named = row if isinstance(row, dict) else {"path": row}
        split, paths = text_of(named.get("split"), "split", USUAL_SPLIT), named.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            if not (text := text_of(path, "path")):
                raise CardError("states data_files without a path")
            yield split, text


def _fitting(files: Sequence[HubFile], pattern: str) -> list[HubFile]:
    """Return the files that a pattern names; what is beside the data only if it says so."""
    parts = pattern.split("/")
    num_hidden = sum(map(_is_hidden, parts))
    paths = ((each, each.path.split("/")) for each in files)
    return [
        each
        for each, path in paths
        if _fits(path, parts)
        and sum(map(_is_hidden, path)) <= num_hidden
        and (path[-1] == parts[-1] or BESIDE.fullmatch(path[-1]) is None)
    ]


def _fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path is what a pattern names, by their parts: a file, or one in a folder.

    The first ``**`` stands for any number of folders; another one is read as ``*``.
    """
    if "**" in pattern:
        at = pattern.index("**")
        before, after = pattern[:at], pattern[at + 1 :]
        end = len(path) - len(after)
        return end >= at and _alike(path[:at], before) and _alike(path[end:], after)
    is_in_folder = len(path) > len(pattern) and path[: len(pattern)] == pattern
    return is_in_folder or _alike(path, pattern)


def _alike(path: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(path) == len(pattern) and all(map(fnmatchcase, path, pattern))


# By the names of files


def _is_hidden(part: str) -> bool:
    return part.startswith((".", "__"))


def _is_data(file: HubFile) -> bool:
    path = PurePosixPath(file.path)
    is_hidden = any(map(_is_hidden, path.parts))
    is_kind = path.suffix.lower() in UNREAD.union(SUFFIXES)
    return is_kind and not is_hidden and BESIDE.fullmatch(path.name) is None


def _subsets_by_name(listing: Listing) -> dict[str, Splits]:
    """Return the files of each subset and split, as the Hub's conversion or people name them."""
    files = [each for each in listing.files if _is_data(each)]
    tables = [each for each in files if _kind(each) not in UNREAD]
    converted = [OF_CONVERTED.fullmatch(each.path) for each in tables]
    if not tables or not all(converted):
        return {USUAL_SUBSET: splits} if (splits := _splits_by_name(files)) else {}
    subsets: dict[str, Splits] = {}
    for file, match in zip(tables, converted, strict=True):
        if match:
            subsets.setdefault(match["subset"], {}).setdefault(match["split"], []).append(file)
    return subsets


def _splits_by_name(files: Sequence[HubFile]) -> Splits:
    """Return the files of each split by the first way of naming that any file has."""
    for names in (_sharded, _words_of_folders, _words_of_name, _of_all):
        splits: Splits = {}
        for each in files:
            for split in names(each.path):
                splits.setdefault(split, []).append(each)
        if splits:
            return {split: _most_frequent(found) for split, found in splits.items()}
    return {}


def _most_frequent(files: list[HubFile]) -> list[HubFile]:
    """Return the files of the ending that most have; all, to be refused, if some are not read."""
    kinds = [_kind(each) for each in files]
    if not UNREAD.isdisjoint(kinds):
        return files
    count = Counter(kinds)
    kind = max(KINDS, key=count.__getitem__)
    return [each for each in files if _kind(each) == kind]


def _kind(file: HubFile) -> str:
    suffix = PurePosixPath(file.path).suffix.lower()
    return ".jsonl" if suffix == ".json" else suffix


def _sharded(path: str) -> Iterator[str]:
    if match := SHARDED.fullmatch(path):
        yield match["split"]


def _of_all(_path: str) -> Iterator[str]:
    yield USUAL_SPLIT


def _words_of_name(path: str) -> Iterator[str]:
    return _splits_in(PurePosixPath(path).stem)


def _words_of_folders(path: str) -> Iterator[str]:
    return _splits_in(str(PurePosixPath(path).parent))


def _splits_in(text: str) -> Iterator[str]:
    words = set(re.split(r"[^a-z]+", text.lower()))
    return (split for split, known in WORDS.items() if known & words)

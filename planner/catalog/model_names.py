"""The names of the catalog's models: which repository a name as people write it stands for.

A name stands for one repository, its identity; repositories of one shape share an entry. A name
that could be several repositories, or that states a tuning or a version that none has, is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from planner.catalog.format_names import StatedFormat, names_gguf, split_format
from planner.catalog.reading import MAX_NEAREST, data_toml, nearest_names
from planner.specs.base import UnknownModelError

WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)*")
# Words of a name for its publisher or its file layout.
NOT_OF_THE_MODEL = frozenset({"meta", "hf"})
# Words of a name for its tuning, which does not affect the shape.
TUNING = frozenset({"instruct", "chat", "base", "it"})
Words = tuple[str, ...]


@dataclass(frozen=True)
class ModelEntry:
    """A catalog entry before its config is read.

    ``own`` has the config fields in which an alias differs from the entry, by alias.
    """

    id: str
    config: str
    aliases: tuple[str, ...]
    source: str
    as_of: str
    published_parameters: int | None
    own: dict[str, dict[str, Any]]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the id, then the aliases."""
        return (self.id, *self.aliases)


@dataclass(frozen=True)
class Named:
    """What a name stands for: a name of an entry, and the format that replaces its own."""

    entry: ModelEntry
    known: str
    stated: StatedFormat | None = None

    @property
    def repository(self) -> str:
        """Return the repository; a name that is none stands for the entry's."""
        return self.known if "/" in self.known else self.entry.id


@cache
def entries() -> dict[str, ModelEntry]:
    """Return the catalog by id, in file order."""
    index = data_toml("models.toml")
    source, as_of = index["source"], index["as_of"]
    return {
        row["id"]: ModelEntry(
            id=row["id"],
            config=row.get("config", row["id"].replace("/", "--")),
            aliases=tuple(row.get("aliases", ())),
            source=row.get("source", source),
            as_of=row.get("as_of", as_of),
            published_parameters=row.get("published_parameters"),
            own=row.get("own", {}),
        )
        for row in index["models"]
    }


@cache
def _ids_by_name() -> dict[str, str]:
    """Return the catalog ids by every name of a model, an entry's own id first."""
    return {name: entry.id for entry in entries().values() for name in entry.names}


@cache
def _by_lower_name() -> dict[str, str]:
    return {name.lower(): name for name in _ids_by_name()}


# ---------------------------------------------------------------------------
# Readings of a name, the most exact first.
# ---------------------------------------------------------------------------


def name_words(name: str) -> Words:
    """Return the words of a name without its owner; the tuning and the version stay.

    >>> name_words("meta-llama/Meta-Llama-3.1-8B-Instruct")
    ('llama', '3.1', '8', 'b', 'instruct')
    """
    words = WORDS.findall(_last_part(name))
    return tuple(word for word in words if word not in NOT_OF_THE_MODEL)


def shape_key(name: str) -> Words:
    """Return the words of a name that determine the shape, without owner and tuning.

    >>> shape_key("NousResearch/Llama-2-7b-chat-hf")
    ('llama', '2', '7', 'b')
    """
    return tuple(word for word in name_words(name) if word not in TUNING)


def _last_part(name: str) -> str:
    return name.lower().rpartition("/")[2]


def _without_version(words: Words) -> Words:
    """Return words without a version suffix, which is a number after ``v``.

    >>> _without_version(("mistral", "7", "b", "v", "0.3"))
    ('mistral', '7', 'b')
    """
    starts = [
        at
        for at, (word, after) in enumerate(pairwise(words))
        if at and word == "v" and after[0].isdigit()
    ]
    return words[: starts[0]] if starts else words


def _unversioned_words(name: str) -> Words:
    return _without_version(name_words(name))


def _unversioned_shape(name: str) -> Words:
    return _without_version(shape_key(name))


@cache
def _names_by(reading: Callable[[str], str | Words]) -> dict[str | Words, tuple[str, ...]]:
    """Return the catalog's names by what a reading makes of them."""
    names: dict[str | Words, tuple[str, ...]] = {}
    for name in _ids_by_name():
        key = reading(name)
        names[key] = (*names.get(key, ()), name)
    return names


def _matches(name: str) -> tuple[str, ...]:
    """Return the catalog's names that a name may stand for, by the most exact reading.

    A repository has its own name whatever the catalog has, so that it may differ in its tuning
    from those of its shape. A short name stands for a repository: one with its tuning, or any if
    it states none; the last words may be left out if only one model goes on like this.
    """
    words, shape = name_words(name), shape_key(name)
    if not shape:
        return ()
    is_repository = "/" in name
    named = (
        _names_by(_last_part).get(_last_part(name))
        or _names_by(name_words).get(words)
        or _names_by(_unversioned_words).get(words)
    )
    if not named and (is_repository or words == shape):
        named = _names_by(shape_key).get(shape, ()) + tuple(
            each
            for each in _names_by(_unversioned_shape).get(shape, ())
            if shape_key(each) != shape
        )
    if not named and not is_repository:
        named = tuple(each for each in _ids_by_name() if name_words(each)[: len(words)] == words)
    return named or ()


def _known(name: str) -> str | None:
    """Return the catalog's name that a name stands for, None if there is none or several."""
    exact = _by_lower_name().get(name.lower())
    if exact is not None:
        return exact
    matches = _matches(name)
    is_one_model = "/" in name or len({shape_key(each) for each in matches}) == 1
    is_one_shape = len({_ids_by_name()[each] for each in matches}) == 1
    return matches[0] if is_one_model and is_one_shape else None


@cache
def _names_without_format() -> dict[Words, str]:
    """Return the names of checkpoints that state their format, by the shape words before it.

    Unquantised ones come first: every format can take the place of theirs.
    """
    split = [(split_format(name), name) for name in _ids_by_name()]
    named = [(*stated, name) for stated, name in split if stated is not None]
    named.sort(key=lambda each: not each[1].is_plain)
    names: dict[Words, str] = {}
    for rest, _, name in named:
        names.setdefault(shape_key(rest), name)
    return names


ADDRESS = re.compile(
    r"(?:ms:/|(?:https?://)?(?:www\.)?"
    r"(?:huggingface\.co|hf\.co|modelscope\.(?:cn|ai)/models|ollama\.com/library))/"
    r"(?P<path>[^?#]+)(?:[?#].*)?",
    re.IGNORECASE,
)
FILE_OF_ADDRESS = re.compile(
    r"[^/]+/[^/]+/(?:blob|resolve)/[^/]+/(?:.*/)?(?P<file>[^/]+\.gguf)", re.IGNORECASE
)
MULTI_TOKEN = re.compile(r"[-_]MTP$", re.IGNORECASE)  # with its multi-token prediction layers


def without_address(name: str) -> str:
    """Return the repository, or the GGUF file, that the address of its page names.

    >>> without_address("https://huggingface.co/Qwen/Qwen3-8B/tree/main")
    'Qwen/Qwen3-8B'
    """
    match = ADDRESS.fullmatch(name.strip())
    if match is None:
        return name.strip()
    path = match["path"].strip("/")
    if file := FILE_OF_ADDRESS.fullmatch(path):
        return file["file"]
    return "/".join(path.split("/")[:2])


def find(model_id: str) -> Named | None:
    """Return what a name stands for with its format, None if the catalog has no such name."""
    name = without_address(model_id)
    if (found := _find(name)) is None and MULTI_TOKEN.search(name):
        return _find(MULTI_TOKEN.sub("", name))
    return found


def _find(name: str) -> Named | None:
    exact, split = _by_lower_name().get(name.lower()), split_format(name)
    is_other_publishers = split is not None and split[1].is_publishers
    known = exact or (None if is_other_publishers else _known(name))
    if known is not None:
        return Named(entries()[_ids_by_name()[known]], known)
    if split is not None and (base := _base_of(split[0])):
        return Named(entries()[_ids_by_name()[base]], base, split[1])
    return None


def _base_of(rest: str) -> str | None:
    """Return the catalog's name of the model whose checkpoint a name states, None if unknown.

    A rest that states another quantisation contradicts the format after it.
    """
    inner = split_format(rest)
    if inner is not None and not inner[1].is_plain:
        return None
    return _known(rest) or _names_without_format().get(shape_key(rest))


def read_name(model_id: str) -> Named:
    """Return what a name stands for.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    found = find(model_id)
    if found is None:
        raise _unknown(model_id)
    return found


def _unknown(model_id: str) -> UnknownModelError:
    """Return the error for an unknown name, with the nearest ones."""
    rest = names_gguf(without_address(model_id))
    base = _base_of(rest) if rest else None
    if base is not None:
        return UnknownModelError(
            f"{model_id} holds GGUF files: name the model itself, {base}, and the type of the "
            "file as a quantization, such as gguf:q4_k_m",
            "model",
            nearest=(base,),
        )
    if several := _matches(without_address(model_id)):
        nearest, more = several[:MAX_NEAREST], len(several) - MAX_NEAREST
        others = f" and {more} more" if more > 0 else ""
        return UnknownModelError(
            f"{model_id!r} may be several models of the catalog: {', '.join(nearest)}{others}; "
            "name one",
            "model",
            nearest=nearest,
        )
    nearest = nearest_names(without_address(model_id), _ids_by_name())
    return UnknownModelError(
        f"no model {model_id!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
        "any other model can be given as its config.json",
        "model",
        nearest=nearest,
    )

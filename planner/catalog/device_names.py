"""Spellings of a device: which catalog id a name as people write it stands for.

Words for the maker or for what is true of every device are left out, separators do not count, and
a memory size must be that of the device. A name that could be two devices stands for none.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from planner.specs.units import GIB

# Vendors, brands, machines and other words that do not tell one device from another.
MAKERS = (
    "nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "intel", "google", "aws", "apple",
)  # fmt: skip
NO_NAME = frozenset(
    {*MAKERS, "generation", "edition", "gpu", "gpus", "graphics", "card", "cards", "chip"}
)
# A product line that is left out: "4090" is an RTX 4090, "7900 xtx" an RX 7900 XTX.
LINES = ("rtx", "gtx", "rx", "arc", "arcpro", "aipro")
MACHINE = re.compile(r"\b(?:mac-?book(?:-?(?:pro|air))?|i?mac(?:-?(?:pro|mini|studio))?)\b")
LAPTOP = re.compile(r"\b(?:mobile|notebook|max-?q)\b")
SPACED_SIZE = re.compile(r"(?<=\d)(?:-?(?:gib|gb)|g)\b")
SIZE = re.compile(r"(\d+)gb")
MADE_BY = re.compile(rf"(?:{'|'.join(MAKERS)})+")
SIZE_ROUNDING = 0.03  # of the size in a name, in gigabytes or gibibytes
Key = TypeVar("Key", str, tuple[str, ...])


def is_named_size(memory_bytes: int, size: int) -> bool:
    """Return whether a name with ``size`` gigabytes or gibibytes means a memory.

    >>> [is_named_size(80 * 2**30, size) for size in (80, 86, 90)], is_named_size(141 * 10**9, 141)
    ([True, True, False], True)
    """
    return any(abs(memory_bytes / (size * unit) - 1.0) <= SIZE_ROUNDING for unit in (10**9, 2**30))


class NamedDevice(NamedTuple):
    """A device that a name stands for, and its memory in GiB where the name states another."""

    id: str
    memory_gib: int | None = None


class Sizes(NamedTuple):
    """The memory sizes in GiB with which a device was sold, and the chip that it is a form of."""

    chip: str
    gib: tuple[int, ...]


def words_of(name: str) -> tuple[str, ...]:
    """Return the words of a name that tell a device from others.

    >>> words_of("NVIDIA GeForce RTX 4090 Notebook"), words_of("MacBook Pro M3 Max 64 GB")
    (('rtx', '4090', 'laptop'), ('m3', 'max', '64gb'))
    """
    slug = _slug(name)
    slug = LAPTOP.sub("laptop", MACHINE.sub("-", SPACED_SIZE.sub("gb", slug)))
    words = tuple(word for word in slug.split("-") if word and word not in NO_NAME)
    joined = MADE_BY.match(words[0]) if words else None
    rest = words[0][joined.end() :] if joined else ""
    return (rest, *words[1:]) if rest else words


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _without_makers(words: list[str]) -> list[str]:
    return [word for word in words if word not in MAKERS]


def _unique(pairs: Iterable[tuple[Key, str]]) -> dict[Key, str]:
    """Return the devices by their keys, without those keys that several have."""
    found: dict[Key, set[str]] = {}
    for key, device in pairs:
        found.setdefault(key, set()).add(device)
    return {key: next(iter(devices)) for key, devices in found.items() if len(devices) == 1}


class DeviceNames:
    """The names of a catalog, by which a device is found."""

    def __init__(
        self,
        names: Mapping[str, Iterable[str]],
        memory: Mapping[str, int],
        sizes: dict[str, Sizes],
    ) -> None:
        """Take each device's names, its id first, its memory in bytes, and the sizes sold."""
        self._memory, self._sizes = memory, sizes
        ids = [(device, device) for device in names]
        all_names = [(name, device) for device, own in names.items() for name in own]
        without_maker = [
            each for each in all_names if _slug(each[0]) == "-".join(words_of(each[0]))
        ]
        # The more exact a name is, the later it comes, and takes the place of others.
        self._joined = _unique(
            ("".join(_without_makers(_slug(name).split("-"))), each) for name, each in all_names
        )
        self._unordered: dict[tuple[str, ...], str] = {}
        self._whole = _unique((_slug(name).replace("-", ""), each) for name, each in all_names)
        for pairs in (all_names, without_maker, ids):
            self._joined |= _unique((("".join(words_of(name)), each) for name, each in pairs))
            self._unordered |= _unique(
                ((tuple(sorted(words_of(name))), each) for name, each in pairs)
            )

    def find(self, name: str) -> NamedDevice | None:
        """Return the device that a name stands for, or None."""
        words = words_of(name)
        if not words:
            return None
        if (device := self._whole.get(_slug(name).replace("-", ""))) is not None:
            return NamedDevice(device)
        if (device := self._without_size(words)) is not None:
            return NamedDevice(device)
        return next(filter(None, self._sized(words)), None)

    def _without_size(self, words: tuple[str, ...]) -> str | None:
        joined = "".join(words)
        found = (
            self._joined.get(joined)
            or self._unordered.get(tuple(sorted(words)))
            or self._whole.get(joined)
        )
        if found is not None:
            return found
        of_lines = {each for line in LINES if (each := self._joined.get(line + joined))}
        return of_lines.pop() if len(of_lines) == 1 else None

    def _sized(self, words: tuple[str, ...]) -> Iterator[NamedDevice | None]:
        """Yield what a name with a memory size stands for, also if both are one word."""
        stated = [word for word in words if SIZE.fullmatch(word)]
        if len(stated) == 1 and len(words) > 1:
            rest = tuple(word for word in words if word != stated[0])
            yield self._of_size(self._without_size(rest), int(stated[0].removesuffix("gb")))
        joined = "".join(words)
        if not joined.endswith("gb"):
            return
        bare = joined.removesuffix("gb")
        for at in range(len(bare) - 1, 0, -1):
            if not bare[at].isdigit():
                return
            if bare[at] != "0":
                yield self._of_size(self._without_size((bare[:at],)), int(bare[at:]))

    def _of_size(self, device: str | None, size: int) -> NamedDevice | None:
        """Return a device if it was made with a memory of ``size`` gigabytes or gibibytes."""
        if device is None:
            return None
        if device in self._sizes:
            chip = self._sizes[device].chip
            forms = [device, *(each for each, own in self._sizes.items() if own.chip == chip)]
            form = next((each for each in forms if size in self._sizes[each].gib), None)
            if form is None:
                return None
            return NamedDevice(form, None if size * GIB == self._memory[form] else size)
        return NamedDevice(device) if is_named_size(self._memory[device], size) else None

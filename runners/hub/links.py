"""How fast files come to this host from each source, and the bandwidth that its processes share.

Each download and each copy notes its bytes and seconds in the host's folder. The newest of a
source say how long the next one takes: their median, and the range of the middle 80 percent.
"""

import fcntl
import logging
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from planner.specs.units import MIB
from runners.hub.settings import HubSettings
from runners.shared.config import HostConfigError, HostDir

LINKS_FILE = "links.json"
LIMIT_FILE = "bandwidth"
SITE = "site"  # the link to the server, by which copies come
KEPT = 20  # transfers of a source, the newest
LEAST_BYTES = 8 * MIB  # fewer say more of the delay than of the rate
LEAST_SECONDS = 1e-3
MIDDLE = 0.8  # of the transfers, within the stated range
FULL_SHARE = 0.9  # of what the host allows: a transfer that comes so near took all of it
PIECE_SECONDS = 1.0  # of the link that whoever waits has taken at once, at most
LONGEST_DELAY_SECONDS = 600.0  # a time further away was written before the clock was set

log = logging.getLogger(__name__)


class Transfer(BaseModel):
    """What a transfer brought, in which time, and the bytes per second that the host allowed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num_bytes: int = Field(gt=0, le=10**18)
    seconds: float = Field(ge=LEAST_SECONDS, le=1e9)
    limit: float = Field(default=0.0, ge=0, le=1e18)  # 0: none


class Link(BaseModel):
    """The newest transfers of a source, the newest last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str
    transfers: tuple[Transfer, ...] = Field(min_length=1, max_length=KEPT)


LINKS = TypeAdapter(dict[Annotated[str, Field(pattern=r"^[a-z]{1,20}$")], Link])


class LinkRate(NamedTuple):
    """Bytes per second of a source's transfers: the median, and the range of the middle 80 %."""

    address: str  # of the source, such as huggingface.co
    median: float
    low: float
    high: float
    num_transfers: int
    is_limited: bool = False  # the host allows no more than the median now

    def words(self, num_bytes: float) -> str:
        """Return how long a transfer takes, and by what figure, for the end of a sentence.

        >>> LinkRate("mirror.lan", 50e6, 40e6, 80e6, 3).words(24e9).partition(" this ")[0]
        'about 8 min (5 to 10 min) at the 50 MB/s of'
        """
        several = self.num_transfers > 1
        seconds, least, most = (num_bytes / each for each in (self.median, self.high, self.low))
        around = f" ({_range(least, most)})" * several
        of = f"last {self.num_transfers} transfers" if several else "last transfer"
        if self.is_limited:
            return f"about {_duration(seconds)} at the {_rate(self.median)} that this host allows"
        return (
            f"about {_duration(seconds)}{around} at the {_rate(self.median)} of this host's {of} "
            f"from {self.address}"
        )

    @property
    def figure(self) -> str:
        """Return the rate with its range, of how many transfers, from where.

        >>> LinkRate("mirror.lan", 50e6, 40e6, 80e6, 3).figure
        '50 MB/s (40 to 80 MB/s), measured on the last 3 transfers from mirror.lan'
        """
        several = self.num_transfers > 1
        around = f" ({_rate(self.low).removesuffix(' MB/s')} to {_rate(self.high)})" * several
        of = f"last {self.num_transfers} transfers" if several else "last transfer"
        allowed = ", as much as the host allows" * self.is_limited
        return f"{_rate(self.median)}{around}, measured on the {of} from {self.address}{allowed}"


def _duration(seconds: float) -> str:
    number, unit = _in_unit(seconds, seconds)
    return f"{number} {unit}"


def _range(least: float, most: float) -> str:
    low, unit = _in_unit(least, most)
    return f"{low} to {_in_unit(most, most)[0]} {unit}"


def _in_unit(seconds: float, of: float) -> tuple[str, str]:
    """Return a duration in the unit in which another one is stated."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if of >= 1.5 * size:
            number = seconds / size
            return f"{number:.{int(unit == 'h')}f}", unit
    return f"{max(1.0, seconds):.0f}", "s"


def _rate(bytes_per_second: float) -> str:
    number = bytes_per_second / 1e6
    digits = max(0, 1 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:.{min(digits, 3)}f} MB/s"


def of_host(settings: HubSettings, host_dir: Path) -> HubSettings:
    """Return settings whose transfers a host notes, within the bandwidth that it allows.

    Raises:
        HostConfigError: config.json of the host's folder is not valid.
    """
    limit = HostDir(host_dir).config().max_transfer_bytes_per_second
    return replace(settings, host_dir=host_dir, max_bytes_per_second=float(limit or 0))


# What was measured


def note_transfer(settings: HubSettings, num_bytes: int, seconds: float) -> None:
    """Keep the bytes and seconds of a transfer, if they say something of the link.

    A host's folder that cannot be written is no reason to lose a download: nothing is kept.
    """
    if settings.host_dir is None or num_bytes < LEAST_BYTES or seconds < LEAST_SECONDS:
        return
    path = settings.host_dir / LINKS_FILE
    address, limit = urlsplit(settings.endpoint).netloc, settings.max_bytes_per_second
    with suppress(OSError, ValidationError), _locked(path.with_suffix(".lock")):
        newest = Transfer(num_bytes=num_bytes, seconds=round(seconds, 3), limit=limit)
        links = _read(path)
        known = links.get(settings.link)
        before = known.transfers if known and known.address == address else ()
        links[settings.link] = Link(address=address, transfers=(*before, newest)[-KEPT:])
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(LINKS.dump_json(links))
        temporary.replace(path)


def measured_rates(host_dir: Path) -> dict[str, LinkRate]:
    """Return what a host measured of each link, by the link's name; none was measured: empty.

    No rate is higher than what the host allows now. Transfers of a time when it allowed less say
    nothing of the link, and are left out.
    """
    limit = math.inf
    with suppress(HostConfigError):
        limit = HostDir(host_dir).config().max_transfer_bytes_per_second or math.inf
    found = {}
    for name, link in _read(host_dir / LINKS_FILE).items():
        transfers = [each for each in link.transfers if limit <= (each.limit or math.inf)]
        if not transfers:
            continue
        rates = sorted(_within(limit, each.num_bytes / each.seconds) for each in transfers)
        outside = (1 - MIDDLE) / 2 * (len(rates) - 1)
        found[name] = LinkRate(
            address=link.address,
            median=statistics.median(rates),
            low=rates[math.floor(outside)],
            high=rates[math.ceil(len(rates) - 1 - outside)],
            num_transfers=len(rates),
            is_limited=statistics.median(rates) >= limit,
        )
    return found


def _within(limit: float, rate: float) -> float:
    """Return a rate, or the limit where that is what the transfer ran at."""
    return limit if rate >= FULL_SHARE * limit else rate


def _read(path: Path) -> dict[str, Link]:
    """Return what the file says; damaged, of another form, or absent: nothing."""
    with suppress(OSError, ValidationError):
        return LINKS.validate_json(path.read_bytes())
    return {}


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


# The limit


class Bandwidth:
    """Delays whoever receives or sends, so that all together keep within a rate.

    With a host's folder, "all" are this host's processes: the time until which the link is taken
    lies in a file there. Without one, or where that file cannot be used, those of this process.
    """

    def __init__(self, settings: HubSettings) -> None:
        self._rate = settings.max_bytes_per_second
        self._path = settings.host_dir / LIMIT_FILE if settings.host_dir else None
        self._free_at = 0.0

    def delays(self, num_bytes: int) -> Iterator[float]:
        """Yield the seconds to wait, one after the other, until some bytes may have passed.

        Each time the link is taken for a second at most, so that others have their turn between.
        """
        left = num_bytes / self._rate if self._rate > 0 else 0.0
        while left > 0:
            seconds = min(left, PIECE_SECONDS)
            yield max(0.0, self._take(seconds))
            left -= seconds

    def _take(self, seconds: float) -> float:
        """Take the link for some seconds; return those until their end."""
        if self._path is not None:
            try:
                self._free_at = _taken(self._path, self._free_at, seconds)
                return self._free_at - time.time()
            except OSError as error:
                log.warning(
                    "%s cannot be written or locked (%s): this process keeps within the host's "
                    "bandwidth by itself, without counting what others transfer",
                    self._path, error.strerror,
                )  # fmt: skip
                self._path = None
        self._free_at = _after(self._free_at, seconds)
        return self._free_at - time.time()


def _taken(path: Path, free_at: float, seconds: float) -> float:
    """Take the link that a file stands for; return the time until which it then is taken.

    Raises:
        OSError: the file cannot be written or locked.
    """
    with _locked(path) as handle:
        with suppress(ValueError):
            free_at = float(os.pread(handle, 32, 0) or b"0")
        free_at = _after(free_at, seconds)
        os.pwrite(handle, f"{free_at:<32.6f}".encode(), 0)
    return free_at


def _after(free_at: float, seconds: float) -> float:
    now = time.time()
    begins = free_at if now < free_at < now + LONGEST_DELAY_SECONDS else now
    return begins + seconds

"""The cloud offers: what a provider rents out by the hour, for how much, seen when and where."""

import csv
import statistics
from functools import cache

from pydantic import NonNegativeFloat, PositiveInt

from planner.catalog.nearest import nearest_names
from planner.catalog.reading import data_text
from planner.errors import UnknownInstanceError
from planner.specs.base import SparseSpec

NUMBERS = ("vcpus", "host_memory_bytes")
TEXTS = ("gpu", "region", "tier", "as_of", "source", "notes")


class Instance(SparseSpec):
    """One offer: so many devices for so many dollars an hour, as seen on a day.

    ``device`` is a catalog id, absent when the device catalog does not have the card. A spot
    offer can be taken away; its price is the lowest that was seen, not a promise.
    """

    id: str
    provider: str
    gpu: str
    device: str | None = None
    devices: PositiveInt
    vcpus: PositiveInt | None = None
    host_memory_bytes: PositiveInt | None = None
    region: str | None = None
    price_usd_per_hour: NonNegativeFloat
    price_usd_per_device_hour: NonNegativeFloat
    tier: str
    is_spot: bool
    as_of: str
    source: str
    notes: str | None = None

    @property
    def price_source(self) -> str:
        """Return where the price is from: the offer, who collected it, the day."""
        spot = "spot price" if self.is_spot else f"{self.tier} price"
        return f"{spot} of {self.id}, {self.source}, {self.as_of}"


def _instance(row: dict[str, str]) -> Instance:
    price, devices = float(row["usd_per_hour"]), int(row["devices"])
    return Instance(
        id=row["id"],
        provider=row["provider"],
        device=row["device"] or None,
        devices=devices,
        price_usd_per_hour=price,
        price_usd_per_device_hour=price / devices,
        is_spot=row["spot"] == "yes",
        **{name: row[name] or None for name in TEXTS},
        **{name: int(row[name]) if row[name] else None for name in NUMBERS},
    )


@cache
def _instances() -> dict[str, Instance]:
    rows = csv.DictReader(data_text("instances.csv").splitlines())
    return {row["id"]: _instance(row) for row in rows}


@cache
def _ids_by_name() -> dict[str, str]:
    """Return the ids by every name that means one offer: the id, and its type if nobody shares it.

    ``aws/p5.48xlarge`` is also ``p5.48xlarge``.
    """
    short: dict[str, list[str]] = {}
    for instance_id in _instances():
        short.setdefault(instance_id.split("/", 1)[1], []).append(instance_id)
    alone = {name: found[0] for name, found in short.items() if len(found) == 1}
    return {**alone, **{instance_id: instance_id for instance_id in _instances()}}


def list_instances() -> tuple[Instance, ...]:
    """Return every offer, in the order of the file."""
    return tuple(_instances().values())


def get_instance(name: str) -> Instance:
    """Return an offer by its id, or by its type where only one provider has it.

    Raises:
        UnknownInstanceError: the catalog has no such name; the message gives the nearest ones.
    """
    wanted = name.strip().lower()
    found = _ids_by_name().get(wanted)
    if found is None:
        nearest = nearest_names(wanted, _instances())
        raise UnknownInstanceError(
            f"no instance {name!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
            "any other offer can be given as a cluster whose device has price_usd_per_hour",
            "cluster.instance",
            nearest=nearest,
        )
    return _instances()[found]


def offers_for(device_id: str, *, spot: bool = False) -> tuple[Instance, ...]:
    """Return the offers of a device by price per device, cheapest first; spot ones on request."""
    found = [one for one in list_instances() if one.device == device_id]
    firm = [one for one in found if spot or not one.is_spot]
    return tuple(sorted(firm, key=lambda one: (one.price_usd_per_device_hour, one.id)))


@cache
def price_of(device_id: str) -> dict[str, object]:
    """Return the median price of one device-hour among the newest firm offers, with its source."""
    firm = offers_for(device_id)
    if not firm:
        return {}
    newest = max(offer.as_of[:4] for offer in firm)
    recent = [offer for offer in firm if offer.as_of.startswith(newest)]
    providers = sorted({offer.provider for offer in recent})
    collectors = sorted({offer.source.split(" ")[0] for offer in recent})
    day = max(offer.as_of for offer in recent)
    words = (
        f"median of {len(recent)} on-demand offers of {', '.join(providers)}, "
        f"collected by {', '.join(collectors)}, {day}"
    )
    hourly = statistics.median(offer.price_usd_per_device_hour for offer in recent)
    return {"price_usd_per_hour": round(hourly, 6), "price_source": words}

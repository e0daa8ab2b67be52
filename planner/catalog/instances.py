"""Cloud offers: devices per hourly price, with source, region and date."""

import csv
import statistics
from functools import cache

from pydantic import NonNegativeFloat, PositiveInt

from planner.catalog.reading import data_text, nearest_names
from planner.errors import UnknownInstanceError
from planner.specs.base import SparseSpec

NUMBERS = ("vcpus", "host_memory_bytes")
TEXTS = ("gpu", "region", "tier", "as_of", "source", "notes")


class Instance(SparseSpec):
    """One offer: a number of devices for an hourly price, as of a date.

    ``device`` is a catalog id, absent if the device catalog does not have the GPU. A spot offer
    can be revoked; its price is the lowest observed one.
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
        """Return the source of the price: offer, collector and date."""
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
    """Return offer ids by name: the id, and the instance type if it is unique.

    ``aws/p5.48xlarge`` is also ``p5.48xlarge``.
    """
    ids_by_type: dict[str, list[str]] = {}
    for instance_id in _instances():
        ids_by_type.setdefault(instance_id.split("/", 1)[1], []).append(instance_id)
    unique = {name: ids[0] for name, ids in ids_by_type.items() if len(ids) == 1}
    return {**unique, **{instance_id: instance_id for instance_id in _instances()}}


def list_instances() -> tuple[Instance, ...]:
    """Return every offer, in file order."""
    return tuple(_instances().values())


def get_instance(name: str) -> Instance:
    """Return an offer by its id, or by its type if only one provider has it.

    Raises:
        UnknownInstanceError: the catalog has no such name; the message gives the nearest ones.
    """
    requested = name.strip().lower()
    instance_id = _ids_by_name().get(requested)
    if instance_id is None:
        nearest = nearest_names(requested, _instances())
        raise UnknownInstanceError(
            f"no instance {name!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
            "any other offer can be given as a cluster whose device has price_usd_per_hour",
            "cluster.instance",
            nearest=nearest,
        )
    return _instances()[instance_id]


def offers_for(device_id: str, *, spot: bool = False) -> tuple[Instance, ...]:
    """Return the offers of a device, cheapest per device first; without spot by default."""
    offers = [offer for offer in list_instances() if offer.device == device_id]
    selected = [offer for offer in offers if spot or not offer.is_spot]
    return tuple(sorted(selected, key=lambda offer: (offer.price_usd_per_device_hour, offer.id)))


@cache
def price_of(device_id: str) -> dict[str, object]:
    """Return the median price per device-hour of the newest firm offers, with its source."""
    firm = offers_for(device_id)
    if not firm:
        return {}
    newest = max(offer.as_of[:4] for offer in firm)
    recent = [offer for offer in firm if offer.as_of.startswith(newest)]
    providers = sorted({offer.provider for offer in recent})
    collectors = sorted({offer.source.split(" ")[0] for offer in recent})
    day = max(offer.as_of for offer in recent)
    source_text = (
        f"median of {len(recent)} on-demand offers of {', '.join(providers)}, "
        f"collected by {', '.join(collectors)}, {day}"
    )
    hourly = statistics.median(offer.price_usd_per_device_hour for offer in recent)
    return {"price_usd_per_hour": round(hourly, 6), "price_source": source_text}

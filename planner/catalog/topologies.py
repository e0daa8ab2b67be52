"""Published topologies of clusters: NVLink domains across nodes, pods, and what joins these."""

import csv
from functools import cache

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from planner.catalog.reading import data_text, nearest_names
from planner.specs.base import SparseSpec, UnknownTopologyError

WHOLE = ("devices_per_node", "nvlink_domain_devices", "nodes_per_pod")
RATES = ("oversubscription_ratio", "inter_node_bandwidth_bytes_per_second")
TEXTS = ("device", "notes")


class Topology(SparseSpec):
    """How the nodes of a published cluster are joined; absent fields are as without a topology.

    ``device`` is the catalog id of the only device that the topology is of.
    """

    id: str
    name: str
    device: str | None = None
    devices_per_node: PositiveInt | None = None
    nvlink_domain_devices: PositiveInt | None = None
    nodes_per_pod: PositiveInt | None = None
    oversubscription_ratio: NonNegativeFloat | None = None
    inter_node_bandwidth_bytes_per_second: PositiveFloat | None = None
    source: str
    notes: str | None = None

    @property
    def cluster_fields(self) -> dict[str, float]:
        """Return the fields of a cluster that the topology sets."""
        fields = {name: getattr(self, name) for name in (*WHOLE, *RATES)}
        return {name: value for name, value in fields.items() if value is not None}


@cache
def _topologies() -> dict[str, Topology]:
    rows = csv.DictReader(data_text("topologies.csv").splitlines())
    return {row["id"]: _topology(row) for row in rows}


def _topology(row: dict[str, str]) -> Topology:
    return Topology(
        id=row["id"],
        name=row["name"],
        source=row["source"],
        **{name: row[name] or None for name in TEXTS},
        **{name: int(row[name]) if row[name] else None for name in WHOLE},
        **{name: float(row[name]) if row[name] else None for name in RATES},
    )


def list_topologies() -> tuple[Topology, ...]:
    """Return every topology, in file order."""
    return tuple(_topologies().values())


def get_topology(name: str) -> Topology:
    """Return a topology by its id.

    Raises:
        UnknownTopologyError: the catalog has no such id; the message gives the nearest ones.
    """
    found = _topologies().get(name.strip().lower())
    if found is None:
        nearest = nearest_names(name.strip().lower(), _topologies())
        raise UnknownTopologyError(
            f"no topology {name!r} in the catalog; it has {', '.join(_topologies())}; any other "
            "can be stated as nvlink_domain_devices, nodes_per_pod and oversubscription_ratio",
            "cluster.topology",
            nearest=nearest,
        )
    return found

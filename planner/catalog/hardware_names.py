"""Hardware as people write it: how many of which device in how many nodes, or a cloud offer."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.catalog.devices import (
    find_device,
    find_instance,
    list_devices,
    list_instances,
    memory_sizes,
    nearest_devices,
)
from planner.catalog.reading import nearest_names
from planner.specs.base import BadRequestError, UnknownDeviceError
from planner.specs.cluster import DeviceSpec

TIMES = r"\s*[x\u00d7*]\s*"
NODES = re.compile(
    rf"(\d+)(?:{TIMES}|\s*nodes?\s*(?:of|with|x)?\s*)(\d+)(?:{TIMES}|\s+)(.+)", re.IGNORECASE
)
COUNT_FIRST = re.compile(rf"(\d+)(?:{TIMES}|\s+)(.+)", re.IGNORECASE)
COUNT_WORDS = {"single": 1, "one": 1, "dual": 2, "two": 2, "triple": 3, "three": 3}
COUNT_WORDS |= {"quad": 4, "four": 4, "eight": 8}
COUNT_WORD = re.compile(rf"({'|'.join(COUNT_WORDS)})\s+(.+)", re.IGNORECASE)
COUNT_LAST = re.compile(r"(.+?)\s*[x\u00d7*:]\s*(\d+)", re.IGNORECASE)
FORMS = (
    "8xh200, h200:8, 2x8xh100 (nodes x devices), a device with its memory such as m2-16gb, a "
    "cloud offer such as aws/p5.48xlarge"
)
# The most devices of one node. HGX and OAM boards have 8, GCP's a2-megagpu-16g 16 (its GPU
# machine types), the NVL72 racks 72 that NVLink joins; PCIe servers take 10 cards (Supermicro
# SYS-421GE-TNRT). A machine with unified memory is one device. Links of TPUs and Trainium join
# whole pods, which count as one node.
MOST_PER_NODE, MOST_PCIE_PER_NODE = 8, 10
MOST_OF_DEVICE = {"gb200-nvl72": 72, "gb300-nvl72": 72, "a100-sxm4-40gb": 16}
MANY = 1024  # a larger number next to a name is part of the name, such as RTX 6000
POD_VENDORS = frozenset({"Google", "AWS"})


class Hardware(NamedTuple):
    """The hardware that a text names, as fields of a ClusterSpec, and what was assumed of it."""

    cluster: dict[str, Any]
    note: str = ""


def read_hardware(text: str, field: str = "cluster.device") -> Hardware:
    """Return the hardware that a text names.

    A count before or after a device is the devices of one node, of at most as many as are built;
    before a cloud offer it is the number of its machines. Two counts are nodes and devices.

    Raises:
        UnknownDeviceError: nothing has this name; the message gives the nearest names.
        BadRequestError: a count is 0, or cannot be that of devices.

    >>> read_hardware("A100-80GB:4").cluster
    {'device': 'a100-sxm4-80gb', 'devices_per_node': 4, 'nodes': 1}
    """
    for counts, name in _readings(text.strip()):
        found = _named(name)
        if found is None:
            continue
        if 0 in counts:
            raise BadRequestError(f"{field} is {text!r}: a count must be 1 or more", field)
        if isinstance(found, DeviceSpec):
            return _devices(text, found, counts, field)
        if len(counts) > 1:
            raise BadRequestError(
                f"{field} is {text!r}: the offer {name} sets the devices of a machine; give only "
                f"the number of machines, such as {counts[0]}x{name}",
                field,
            )
        return Hardware({"instance": found, **({"nodes": counts[0]} if counts else {})})
    names = [name for counts, name in _readings(text.strip()) if max(counts, default=0) <= MANY]
    nearest = _nearest(names[-1])
    raise UnknownDeviceError(
        f"{field} is {text!r}: no device or cloud offer has this name; nearest: "
        f"{', '.join(nearest) or 'none'}. Write {FORMS}",
        field,
        nearest=nearest,
    )


def _readings(text: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield each way to read a text as counts and a name; a whole name comes first."""
    yield (), text
    found: list[tuple[tuple[int, ...], str]] = []
    if match := NODES.fullmatch(text):
        found.append(((int(match[1]), int(match[2])), match[3]))
    if match := COUNT_FIRST.fullmatch(text):
        found.append(((int(match[1]),), match[2]))
    if match := COUNT_WORD.fullmatch(text):
        found.append(((COUNT_WORDS[match[1].lower()],), match[2]))
    if match := COUNT_LAST.fullmatch(text):
        found.append(((int(match[2]),), match[1]))
    for counts, name in found:
        yield counts, name
        if name.lower().endswith("s"):  # 8 H100s
            yield counts, name[:-1]


def _named(name: str) -> DeviceSpec | str | None:
    """Return a device, or the id of a cloud offer, with exactly this name, or None."""
    if (device := find_device(name)) is not None:
        return device
    offer = find_instance(name)
    return None if offer is None else offer.id


def _nearest(name: str) -> tuple[str, ...]:
    sold = nearest_devices(name)
    if any(each.rpartition("-")[0] in memory_sizes() for each in sold):
        return sold
    return nearest_names(
        name, [*(each.id for each in list_devices()), *(each.id for each in list_instances())]
    )


def _devices(text: str, device: DeviceSpec, counts: tuple[int, ...], field: str) -> Hardware:
    """Return devices in nodes; one count of more than a node takes is of several nodes."""
    if not counts:
        return Hardware({"device": device.id}, _default_memory(device, text))
    note = _default_memory(device, text)
    if len(counts) > 1:
        return Hardware(_cluster(device, counts[1], counts[0]), note)
    (count,) = counts
    most = most_per_node(device)
    if most is None or count <= most:
        return Hardware(_cluster(device, count, 1), note)
    each = next(size for size in range(most, 0, -1) if count % size == 0)
    if each == 1 < most:
        raise BadRequestError(
            f"{field} is {text!r}: a node takes at most {most} of {device.id}, and {count} are "
            f"not several equal nodes; write nodes x devices, such as 2x{most}x{device.id}, or "
            f"1x{count}x{device.id} for one node",
            field,
        )
    nodes = count // each
    split = f"{text.strip()} as {nodes} nodes of {each} (1x{count}x{device.id} is one node)"
    return Hardware(_cluster(device, each, nodes), "; ".join(filter(None, (split, note))))


def _cluster(device: DeviceSpec, devices_per_node: int, nodes: int) -> dict[str, Any]:
    return {"device": device.id, "devices_per_node": devices_per_node, "nodes": nodes}


def most_per_node(device: DeviceSpec) -> int | None:
    """Return the most of a device that one node takes, None where no number is usual."""
    if device.kind in {"uma", "cpu"}:
        return 1
    if device.vendor in POD_VENDORS:
        return None
    is_card = (device.link or "").startswith("PCIe")
    return MOST_OF_DEVICE.get(device.id, MOST_PCIE_PER_NODE if is_card else MOST_PER_NODE)


def _default_memory(device: DeviceSpec, text: str) -> str:
    """Return which memory was taken of a device sold with several, if a text says none."""
    sizes = memory_sizes().get(device.id)
    if sizes is None or re.search(r"\d\s*(?:gi?b|g)\b", text, re.IGNORECASE):
        return ""
    taken = f"{device.memory_bytes / 2**30:g}"
    others = ", ".join(str(size) for size in sizes.gib if str(size) != taken)
    example = f"{sizes.chip}-{sizes.gib[0]}gb"
    return f"{taken} GB of memory: {device.id} was also sold with {others}, such as {example}"

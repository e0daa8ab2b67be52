"""The time zone of pages, from TZ.

The settings and ``manage.py up`` import this module, so it imports no package.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Zone(NamedTuple):
    """A zone that Python knows, and what to tell the operator if it is not the one of TZ."""

    name: str
    words: str = ""


ZONE_FOLDERS = ("/usr/share/zoneinfo/", "/usr/lib/zoneinfo/", "/usr/share/lib/zoneinfo/")


def time_zone(variables: Mapping[str, str]) -> Zone:
    """Return the zone of TZ, which belongs to the C library and takes more forms than a name.

    ``:`` before a name and paths of zone files are read. A rule such as ``CET-1CEST,M3.5.0``
    names no zone that pages could show, so UTC is used.
    """
    import zoneinfo  # here: with its sysconfig, which only the site's processes need

    typed = variables.get("TZ", "").strip()
    wanted = typed.removeprefix(":")
    if not wanted:
        return Zone("UTC")
    name = _zone_of_path(wanted) if wanted.startswith("/") else wanted.replace(" ", "_")
    if not _is_zone(name):
        alike = {each.lower(): each for each in zoneinfo.available_timezones()}
        name = alike.get(name.lower(), "")
    if name:
        return Zone(name)
    return Zone(
        "UTC",
        f"TZ is {typed!r}, which is no name of a time zone: pages show UTC. Set TZ to a name such "
        "as Europe/Berlin.",
    )


def _zone_of_path(path: str) -> str:
    """Return the zone whose file a path is, by the file or the link to it; "" if none is known."""
    for each in (path, os.path.realpath(path)):
        for folder in ZONE_FOLDERS:
            if each.startswith(folder):
                return each.removeprefix(folder)
    return ""


def _is_zone(name: str) -> bool:
    import zoneinfo  # as above

    try:
        zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return name == "UTC"
    return True

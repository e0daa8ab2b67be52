"""How much of a host is in use, as its last heartbeat reported it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from django.db.models import QuerySet
from django.db.models.fields.json import KeyTransform

from webapp.hosts.models import Host

COLUMNS = ("use_processor", "use_free", "use_gpus", "use_attempts", "use_total", "use_cards")


class HostUse(NamedTuple):
    """Shares between 0 and 1 of a host at its last heartbeat; None where it has no such part."""

    processor: float
    memory: float | None
    gpus: float | None  # mean utilisation
    gpu_memory: float | None
    num_foreign_gpus: int = 0  # on which programs run that are none of Slipway's jobs
    num_jobs: int = 0

    @classmethod
    def of(cls, host: Host) -> Self | None:
        """Return the use of a host whose documents are loaded; None before its first heartbeat."""
        beat, facts = host.last_beat, host.facts
        return cls._from(
            beat.get("cpu_utilization"), beat.get("memory_available_bytes"), beat.get("gpus"),
            beat.get("attempts"), facts.get("memory_bytes"), facts.get("gpus"),
        )  # fmt: skip

    @classmethod
    def of_row(cls, host: Host) -> Self | None:
        """Return the use of a host of ``with_use``."""
        return cls._from(*(getattr(host, name) for name in COLUMNS))

    @classmethod
    def _from(
        cls,
        processor: float | None,
        free: int | None,
        gpus: Sequence[Mapping[str, Any]] | None,
        attempts: Sequence[Mapping[str, Any]] | None,
        total: int | None,
        cards: Sequence[Mapping[str, Any]] | None,
    ) -> Self | None:
        if processor is None:
            return None
        loads, room = gpus or (), sum(int(each["memory_bytes"]) for each in cards or ())
        used = sum(int(each["memory_used_bytes"]) for each in loads)
        return cls(
            processor=processor,
            memory=1.0 - free / total if total and free is not None else None,
            gpus=sum(each["utilization"] for each in loads) / len(loads) if loads else None,
            gpu_memory=min(1.0, used / room) if loads and room else None,
            num_foreign_gpus=sum(bool(each.get("foreign_pids")) for each in loads),
            num_jobs=sum(each.get("phase") == "running" for each in attempts or ()),
        )


def with_use(hosts: QuerySet[Host]) -> QuerySet[Host]:
    """Return hosts with what ``HostUse.of_row`` reads, without their large documents."""
    beat = ("cpu_utilization", "memory_available_bytes", "gpus", "attempts")
    # A path such as F("last_beat__gpus") makes Django keep an exception, and with it the request.
    read = [*(("last_beat", name) for name in beat), ("facts", "memory_bytes"), ("facts", "gpus")]
    keys = (KeyTransform(name, field) for field, name in read)
    return hosts.annotate(**dict(zip(COLUMNS, keys, strict=True)))

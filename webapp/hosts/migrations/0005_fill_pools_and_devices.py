"""Every name of a pool becomes a row of its team; what hosts said of themselves, devices."""

from typing import Any

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def devices_of(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the devices that a host's facts describe."""
    if gpus := facts.get("gpus"):
        names = ("index", "uuid", "name", "memory_bytes")
        return [{"kind": "gpu", **{name: gpu[name] for name in names}} for gpu in gpus]
    if not facts:
        return []
    name, memory = facts.get("cpu_model", ""), facts.get("memory_bytes", 0)
    return [{"kind": "cpu", "index": 0, "uuid": "cpu", "name": name, "memory_bytes": memory}]


def fill(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """Make the rows."""
    host_model = apps.get_model("hosts", "Host")
    pool_model = apps.get_model("hosts", "Pool")
    device_model = apps.get_model("hosts", "Device")
    for host in host_model.objects.all():
        slug = host.pool or "default"
        host.pool_row, _ = pool_model.objects.get_or_create(
            team_id=host.team_id, slug=slug, defaults={"name": slug}
        )
        host.save(update_fields=["pool_row"])
        for device in devices_of(host.facts):
            device_model.objects.create(host=host, **device)


class Migration(migrations.Migration):
    dependencies = [("hosts", "0004_pools_and_devices")]

    operations = [migrations.RunPython(fill, migrations.RunPython.noop)]

"""Jobs get their host's pool; what runs holds its host's devices; what waits has no attempt."""

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import F, OuterRef, Subquery

WAITING = ("draft", "queued")
LIVE = ("preflight", "starting", "running", "stopping")


def fill(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """Say where every job belongs, and who holds what."""
    job_model = apps.get_model("jobs", "Job")
    host_model = apps.get_model("hosts", "Host")
    pool = host_model.objects.filter(pk=OuterRef("host")).values("pool")
    job_model.objects.update(pool=Subquery(pool), requested_host=F("host"))
    waiting = job_model.objects.filter(state__in=WAITING)
    apps.get_model("jobs", "Attempt").objects.filter(
        job__state__in=WAITING, claimed_at=None
    ).delete()
    waiting.update(host=None, current_attempt=None)
    _hold(apps)


def _hold(apps: Apps) -> None:
    device_model = apps.get_model("hosts", "Device")
    allocation_model = apps.get_model("jobs", "Allocation")
    live = apps.get_model("jobs", "Job").objects.filter(
        state__in=LIVE, current_attempt__isnull=False
    )
    for job in live.select_related("current_attempt"):
        attempt = job.current_attempt
        for device in device_model.objects.filter(host_id=attempt.host_id):
            allocation_model.objects.get_or_create(
                device=device,
                released_at=None,
                defaults={"attempt": attempt, "taken_at": attempt.created_at},
            )


class Migration(migrations.Migration):
    dependencies = [("jobs", "0004_queue")]

    operations = [migrations.RunPython(fill, migrations.RunPython.noop)]

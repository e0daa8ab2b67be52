"""Every measurement belongs to its job's team."""

from django.db import migrations
from django.db.models import OuterRef, Subquery


def forward(apps, _schema_editor):
    team = apps.get_model("jobs", "Job").objects.filter(pk=OuterRef("job")).values("team")
    measurements = apps.get_model("jobs", "Measurement").objects
    measurements.filter(team=None).update(team=Subquery(team))


class Migration(migrations.Migration):
    dependencies = [("jobs", "0012_bounded_pages")]
    operations = [migrations.RunPython(forward, migrations.RunPython.noop)]

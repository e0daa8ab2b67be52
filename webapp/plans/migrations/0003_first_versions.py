"""Every saved plan of an older release is the first version of its own."""

from django.db import migrations
from django.db.models import F


def forward(apps, _schema_editor):
    saved = apps.get_model("plans", "Plan").objects.filter(state="computed", series="")
    saved.update(series=F("id"), version=1)


class Migration(migrations.Migration):
    dependencies = [("plans", "0002_versions")]
    operations = [migrations.RunPython(forward, migrations.RunPython.noop)]

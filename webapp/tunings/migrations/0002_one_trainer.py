"""Stored tunings name the trainer of a fine-tuning in ``hardware.engine`` alone."""

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from runners.plans.old_names import with_one_trainer


def move_trainers(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """Move the trainer of each tuning's document."""
    for tuning in apps.get_model("tunings", "Tuning").objects.only("document").iterator():
        moved = with_one_trainer(tuning.document)
        if moved != tuning.document:
            tuning.document = moved
            tuning.save(update_fields=["document"])


class Migration(migrations.Migration):
    """Convert ``Tuning.document``."""

    dependencies = [("tunings", "0001_initial")]

    operations = [migrations.RunPython(move_trainers, migrations.RunPython.noop)]

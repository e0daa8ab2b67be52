"""Stored drafts name the trainer of a fine-tuning in ``hardware.engine`` alone."""

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from runners.plans.old_names import with_one_trainer

BATCH = 200


def move_trainers(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """Move the trainer of each stored draft."""
    plan_model = apps.get_model("plans", "Plan")
    changed = []
    for plan in plan_model.objects.only("draft").iterator(BATCH):
        moved = with_one_trainer(plan.draft) if isinstance(plan.draft, dict) else plan.draft
        if moved == plan.draft:
            continue
        plan.draft = moved
        changed.append(plan)
        if len(changed) == BATCH:
            plan_model.objects.bulk_update(changed, ["draft"])
            changed = []
    plan_model.objects.bulk_update(changed, ["draft"])


class Migration(migrations.Migration):
    """Convert ``Plan.draft``."""

    dependencies = [("plans", "0002_documents")]

    operations = [migrations.RunPython(move_trainers, migrations.RunPython.noop)]

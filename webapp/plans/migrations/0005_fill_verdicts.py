"""Every saved plan of an older release keeps the state of its verdict."""

from django.db import migrations

from webapp.plans.verdict import stored_state


def forward(apps, _schema_editor):
    plans = apps.get_model("plans", "Plan").objects
    saved = plans.filter(state="computed", verdict="").exclude(answer={})
    for key in list(saved.values_list("pk", flat=True)):  # one wide document at a time
        plan = plans.only("answer", "draft").get(pk=key)
        plans.filter(pk=key).update(verdict=stored_state(plan.answer, plan.draft))


class Migration(migrations.Migration):
    dependencies = [("plans", "0004_listed")]
    operations = [migrations.RunPython(forward, migrations.RunPython.noop)]

"""A replica leaves from ``left_at`` on: the flag beside it said the same."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("deployments", "0009_fallbacks"),
    ]

    operations = [
        migrations.RemoveField(model_name="replica", name="is_leaving"),
    ]

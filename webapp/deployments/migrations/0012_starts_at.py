"""When a replica in the queue gets its devices, by the scheduler's forecast."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("deployments", "0011_silent_and_plain"),
    ]

    operations = [
        migrations.AddField(
            model_name="replica",
            name="starts_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
    ]

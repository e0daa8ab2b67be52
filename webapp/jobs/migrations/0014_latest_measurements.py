"""No measurement is without a team; the latest of each team come from an index."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0004_login_tries_and_sessions"),
        ("jobs", "0013_fill_measurement_team"),
    ]

    operations = [
        migrations.AlterField(
            model_name="measurement",
            name="team",
            field=models.ForeignKey(
                db_index=False,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="+",
                to="accounts.team",
            ),
        ),
        migrations.AddIndex(
            model_name="measurement",
            index=models.Index(
                condition=models.Q(("is_excluded", False)),
                fields=["team", "-measured_at", "job", "metric", "ratio", "is_excluded"],
                name="measurements_latest",
            ),
        ),
    ]

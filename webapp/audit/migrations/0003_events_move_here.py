"""Take the model of events from the app ``jobs``; its table ``jobs_event`` stays as it is."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("audit", "0002_cut_old_history"),
        ("jobs", "0016_jobs_of_host"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="Event",
                    fields=[
                        (
                            "id",
                            models.BigAutoField(
                                auto_created=True,
                                primary_key=True,
                                serialize=False,
                                verbose_name="ID",
                            ),
                        ),
                        ("at", models.DateTimeField(db_index=True)),
                        ("team_id", models.CharField(db_index=True, max_length=26)),
                        ("kind", models.CharField(max_length=40)),
                        ("subject", models.CharField(db_index=True, max_length=26)),
                        ("attempt_id", models.CharField(blank=True, max_length=26)),
                        ("from_state", models.CharField(blank=True, max_length=24)),
                        ("to_state", models.CharField(blank=True, max_length=24)),
                        ("reason", models.CharField(blank=True, max_length=40)),
                        ("actor", models.CharField(max_length=80)),
                        ("detail", models.JSONField(blank=True, default=dict)),
                    ],
                    options={
                        "db_table": "jobs_event",
                        "ordering": ["id"],
                    },
                ),
            ]
        ),
    ]

"""Measurements say whether they are valid, who decided otherwise, and what factors a run moved."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("hosts", "0013_refused_messages"),
        ("jobs", "0010_listed"),
    ]

    operations = [
        migrations.AddField(
            model_name="measurement",
            name="decided_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="measurement",
            name="decided_by",
            field=models.CharField(blank=True, max_length=150),
        ),
        migrations.AddField(
            model_name="measurement",
            name="decision",
            field=models.CharField(
                blank=True,
                choices=[("", "None"), ("excluded", "Excluded"), ("included", "Included")],
                max_length=8,
            ),
        ),
        migrations.AddField(
            model_name="measurement",
            name="decision_reason",
            field=models.CharField(blank=True, max_length=200),
        ),
        migrations.AddField(
            model_name="measurement",
            name="held_back",
            field=models.CharField(blank=True, max_length=300),
        ),
        migrations.AddField(
            model_name="measurement",
            name="invalid_reason",
            field=models.CharField(blank=True, max_length=300),
        ),
        migrations.AddField(
            model_name="measurement",
            name="validity",
            field=models.JSONField(blank=True, default=dict),
        ),
        migrations.CreateModel(
            name="CalibrationChange",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("at", models.DateTimeField()),
                (
                    "cause",
                    models.CharField(
                        choices=[
                            ("run", "Run"),
                            ("excluded", "Excluded"),
                            ("included", "Included"),
                        ],
                        max_length=8,
                    ),
                ),
                ("actor", models.CharField(max_length=150)),
                ("before", models.JSONField(blank=True, default=dict)),
                ("after", models.JSONField(blank=True, default=dict)),
                ("why", models.CharField(blank=True, max_length=400)),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="calibration_changes",
                        to="hosts.host",
                    ),
                ),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="calibration_changes",
                        to="jobs.job",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
                "indexes": [
                    models.Index(fields=["job", "id"], name="jobs_calibr_job_id_8c9c66_idx")
                ],
            },
        ),
    ]

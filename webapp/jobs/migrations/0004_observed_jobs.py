import django.db.models.deletion
import webapp.core.ids
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0001_initial"),
        ("hosts", "0005_ray"),
        ("jobs", "0003_shared_devices"),
        ("plans", "0003_one_trainer"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="ObservedJob",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=webapp.core.ids.new_ulid,
                        editable=False,
                        max_length=26,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("job_id", models.CharField(max_length=255)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("report", models.JSONField(blank=True, default=dict)),
                ("reported_at", models.DateTimeField(blank=True, null=True)),
                ("has_ended", models.BooleanField(default=False)),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="hosts.host",
                    ),
                ),
                (
                    "owner",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "plan",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="plans.plan",
                    ),
                ),
                (
                    "team",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="accounts.team",
                    ),
                ),
            ],
            options={
                "ordering": ["-created_at", "-id"],
                "indexes": [
                    models.Index(
                        fields=["team", "-created_at", "-id"], name="observed_jobs_listed"
                    ),
                    models.Index(fields=["host", "has_ended"], name="observed_jobs_of_host"),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("host", "job_id"), name="one_observed_job")
                ],
            },
        ),
    ]

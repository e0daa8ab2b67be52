"""Indexes of pages that stay quick with a long history; measurements know their team."""

import django.db.models.deletion
from django.db import migrations, models
from django.db.models.lookups import IsNull


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0004_login_tries_and_sessions"),
        ("hosts", "0013_refused_messages"),
        ("jobs", "0011_measurement_validity"),
        ("plans", "0003_first_versions"),
    ]

    operations = [
        migrations.AddField(
            model_name="measurement",
            name="team",
            field=models.ForeignKey(
                db_index=False,
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="+",
                to="accounts.team",
            ),
        ),
        migrations.AlterField(
            model_name="job",
            name="plan",
            field=models.ForeignKey(
                blank=True,
                db_index=False,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="jobs",
                to="plans.plan",
            ),
        ),
        migrations.RemoveIndex(model_name="job", name="jobs_job_pool_state"),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["pool", "state", "deleted_at"], name="jobs_of_pool"),
        ),
        migrations.RemoveIndex(model_name="job", name="jobs_ended"),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                condition=models.Q(("deleted_at", None)),
                fields=["state", "ended_at", "team", "id", "deleted_at"],
                name="jobs_ended",
            ),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["plan", "deleted_at"], name="jobs_of_plan"),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                condition=models.Q(("deleted_at__isnull", False)),
                fields=["team", "id", "deleted_at"],
                name="jobs_deleted",
            ),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                models.F("pool"),
                models.F("team"),
                models.F("priority").desc(),
                IsNull(models.F("queue_rank"), True),  # noqa: FBT003 -- the lookup's own signature
                models.F("queue_rank"),
                models.F("queued_at"),
                models.F("id"),
                models.F("deleted_at"),
                models.F("state"),
                condition=models.Q(("deleted_at", None), ("state", "queued")),
                name="jobs_waiting",
            ),
        ),
    ]

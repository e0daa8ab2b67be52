"""What pools, hosts and gangs do is counted, and the last like jobs are found, from indexes."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0014_latest_measurements")]

    operations = [
        migrations.AddIndex(
            model_name="attempt",
            index=models.Index(
                condition=models.Q(("ended_at", None), ("leader__isnull", False)),
                fields=["leader", "ended_at", "job", "host"],
                name="attempts_of_gangs",
            ),
        ),
        migrations.RemoveIndex(model_name="job", name="jobs_job_state_3df1c3_idx"),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                fields=["state", "host", "requested_host", "deleted_at"], name="jobs_at_host"
            ),
        ),
        migrations.RemoveIndex(model_name="job", name="jobs_of_pool"),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                fields=[
                    "pool",
                    "state",
                    "kind",
                    "model_name",
                    "-ended_at",
                    "started_at",
                    "deleted_at",
                ],
                name="jobs_of_pool",
            ),
        ),
    ]

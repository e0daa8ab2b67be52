"""Jobs wait in pools, attempts hold devices; the next migration fills what is new."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("hosts", "0006_hosts_in_pools"),
        ("jobs", "0003_plan_request"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="pool",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="jobs",
                to="hosts.pool",
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="requested_host",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="requested_jobs",
                to="hosts.host",
            ),
        ),
        migrations.AlterField(
            model_name="job",
            name="host",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="jobs",
                to="hosts.host",
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="num_hosts",
            field=models.PositiveIntegerField(default=1),
        ),
        migrations.AddField(
            model_name="job",
            name="devices_per_host",
            field=models.PositiveIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="job",
            name="priority",
            field=models.SmallIntegerField(
                choices=[(-1, "Low"), (0, "Normal"), (1, "High")], default=0
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="queue_rank",
            field=models.PositiveIntegerField(blank=True, null=True),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["pool", "state"], name="jobs_job_pool_state"),
        ),
        migrations.AddField(
            model_name="attempt",
            name="node_rank",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="attempt",
            name="leader",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="members",
                to="jobs.attempt",
            ),
        ),
        migrations.AlterModelOptions(
            name="attempt", options={"ordering": ["number", "node_rank"]}
        ),
        migrations.RemoveConstraint(model_name="attempt", name="attempt_number"),
        migrations.AddConstraint(
            model_name="attempt",
            constraint=models.UniqueConstraint(
                fields=("job", "number", "node_rank"), name="attempt_number"
            ),
        ),
        migrations.CreateModel(
            name="Allocation",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("taken_at", models.DateTimeField()),
                ("released_at", models.DateTimeField(blank=True, null=True)),
                (
                    "attempt",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="allocations",
                        to="jobs.attempt",
                    ),
                ),
                (
                    "device",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="allocations",
                        to="hosts.device",
                    ),
                ),
            ],
            options={"ordering": ["id"]},
        ),
        migrations.AddConstraint(
            model_name="allocation",
            constraint=models.UniqueConstraint(
                condition=models.Q(("released_at__isnull", True)),
                fields=("device",),
                name="one_holder_per_device",
            ),
        ),
    ]

"""Pools and devices as tables of their own; the next migration fills them."""

import django.db.models.deletion
from django.db import migrations, models

import webapp.core.ids


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0001_initial"),
        ("hosts", "0003_clock_offset"),
    ]

    operations = [
        migrations.CreateModel(
            name="Pool",
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
                ("name", models.CharField(max_length=40)),
                ("slug", models.SlugField(max_length=40)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "shared_with",
                    models.ManyToManyField(
                        blank=True, related_name="shared_pools", to="accounts.team"
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
            options={"ordering": ["name"]},
        ),
        migrations.AddConstraint(
            model_name="pool",
            constraint=models.UniqueConstraint(fields=("team", "slug"), name="one_pool_slug"),
        ),
        migrations.CreateModel(
            name="Device",
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
                ("index", models.PositiveIntegerField()),
                (
                    "kind",
                    models.CharField(choices=[("gpu", "GPU"), ("cpu", "CPU")], max_length=8),
                ),
                ("uuid", models.CharField(max_length=80)),
                ("name", models.CharField(max_length=120)),
                ("memory_bytes", models.PositiveBigIntegerField()),
                ("is_present", models.BooleanField(default=True)),
                ("cordoned_at", models.DateTimeField(blank=True, null=True)),
                ("cordoned_by", models.CharField(blank=True, max_length=80)),
                ("cordon_reason", models.CharField(blank=True, max_length=200)),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="devices",
                        to="hosts.host",
                    ),
                ),
            ],
            options={"ordering": ["host", "index", "id"]},
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.UniqueConstraint(fields=("host", "uuid"), name="one_device_uuid"),
        ),
        migrations.AddField(
            model_name="host",
            name="pool_row",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="hosts",
                to="hosts.pool",
            ),
        ),
    ]

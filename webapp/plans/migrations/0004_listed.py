"""Saved plans keep the state of their verdict, and an index holds what the list filters by."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0004_login_tries_and_sessions"),
        ("plans", "0003_first_versions"),
    ]

    operations = [
        migrations.AddField(
            model_name="plan",
            name="verdict",
            field=models.CharField(blank=True, max_length=24),
        ),
        migrations.AlterField(
            model_name="plan",
            name="team",
            field=models.ForeignKey(
                db_index=False,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="+",
                to="accounts.team",
            ),
        ),
        migrations.AddIndex(
            model_name="plan",
            index=models.Index(
                condition=models.Q(("deleted_at", None)),
                fields=[
                    "team",
                    "-saved_at",
                    "-id",
                    "state",
                    "is_latest",
                    "owner",
                    "base",
                    "revision",
                    "name",
                    "deleted_at",
                ],
                name="plans_listed",
            ),
        ),
    ]

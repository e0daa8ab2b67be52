"""Every job has a pool."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0005_fill_queue")]

    operations = [
        migrations.AlterField(
            model_name="job",
            name="pool",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT,
                related_name="jobs",
                to="hosts.pool",
            ),
        ),
    ]

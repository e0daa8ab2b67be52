"""A host's pool is a row now."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("hosts", "0005_fill_pools_and_devices")]

    operations = [
        migrations.RemoveField(model_name="host", name="pool"),
        migrations.RenameField(model_name="host", old_name="pool_row", new_name="pool"),
        migrations.AlterField(
            model_name="host",
            name="pool",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT,
                related_name="hosts",
                to="hosts.pool",
            ),
        ),
    ]

"""Keys of services, which are a team's and no person's."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("deployments", "0012_starts_at"),
    ]

    operations = [
        migrations.AddField(
            model_name="servingkey",
            name="is_service",
            field=models.BooleanField(default=False),
        ),
    ]

"""Since when a gateway has found no replica where it should be, and chat templates."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("deployments", "0010_left_at_alone"),
    ]

    operations = [
        migrations.AddField(
            model_name="replica",
            name="silent_since",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="deployment",
            name="has_chat_template",
            field=models.BooleanField(blank=True, null=True),
        ),
    ]

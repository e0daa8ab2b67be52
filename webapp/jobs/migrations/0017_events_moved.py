"""Give the model of events to the app ``audit``, with its table."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("audit", "0003_events_move_here"),
        ("jobs", "0016_jobs_of_host"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[migrations.DeleteModel(name="Event")]
        ),
    ]

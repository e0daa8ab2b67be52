from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0007_token_budgets"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="logintry",
            options={"verbose_name_plural": "login tries"},
        ),
    ]

"""The kind quantize is named compress, and its dtype a method."""

from django.db import migrations

METHODS = {"int4": "nf4"}


def forward(apps, _schema_editor):
    for job in apps.get_model("jobs", "Job").objects.filter(kind="quantize").iterator():
        spec = dict(job.spec)
        dtype = spec.pop("weight_dtype", "int8")
        job.spec = {**spec, "kind": "compress", "method": METHODS.get(dtype, dtype)}
        job.kind = "compress"
        job.save(update_fields=["kind", "spec"])


class Migration(migrations.Migration):
    dependencies = [("jobs", "0008_gang_places")]
    operations = [migrations.RunPython(forward, migrations.RunPython.noop)]

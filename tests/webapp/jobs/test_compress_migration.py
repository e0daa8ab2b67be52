"""Jobs that were stored as quantisations are compressions after the migration."""

import importlib

import pytest
from django.apps import apps

from runners.jobspec import ArtefactModel, CompressSpec
from tests.webapp.conftest import make_job
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")
migration = importlib.import_module("webapp.jobs.migrations.0009_compress_kind")
MODEL = ArtefactModel(attempt_id="a1")


@pytest.mark.parametrize(("dtype", "method"), [("int8", "int8"), ("int4", "nf4")])
def test_a_stored_quantisation_becomes_a_compression(team, alice, host, dtype, method):
    job = make_job(team, alice, host)
    old = {"kind": "quantize", "model": MODEL.model_dump(), "weight_dtype": dtype, "seed": 5}
    Job.objects.filter(pk=job.pk).update(kind="quantize", spec=old)

    migration.forward(apps, None)

    job.refresh_from_db()
    assert job.kind == "compress"
    assert CompressSpec(**job.spec) == CompressSpec(model=MODEL, method=method, seed=5)

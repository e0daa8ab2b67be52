"""`slipway deployments` and `slipway keys` against the site."""

import json

import pytest
import yaml

from runners.jobspec.serve import key_hash
from tests.webapp.api.test_cli import logged_in, own_folders, run  # noqa: F401 (fixtures)
from tests.webapp.deployments.test_deployments import answer
from tests.webapp.plans.conftest import trained  # noqa: F401
from webapp.core.clock import now
from webapp.deployments.models import Deployment, ServingKey, Usage

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_file_is_deployed_changed_woken_and_deleted(
    run, logged_in, trained, host, tmp_path  # noqa: F811
):  # fmt: skip
    document = {
        "goal": "serve",
        "model": {"source": "team", "team_model": trained.pk},
        "hardware": {"host": host.slug},
        "workload": {"concurrency": 2, "input_tokens": 64, "output_tokens": 32},
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    code, out, err = run("deployments", "add", "small", "-f", path, "--idle", "5")
    assert code == 0, err
    row = Deployment.objects.get()
    assert (row.name, row.idle_seconds, "asleep" in out) == ("small", 300.0, True)
    assert row.plan.document.workload.concurrency == 2
    assert "http://testserver/v1" in run("deployments", "list")[1]
    assert run("deployments", "change", "small", "--awake")[0] == 0
    row.refresh_from_db()
    assert (row.is_kept_awake, row.idle_seconds) == (True, None)
    assert run("deployments", "change", "small", "--may-sleep", "--alias", "gpt-4o")[0] == 0
    assert "small or gpt-4o" in run("deployments", "get", "small")[1]
    assert run("deployments", "change", "small", "--fallback", "small")[0] != 0
    Deployment.objects.create(team=row.team, owner=row.owner, name="tiny", plan=row.plan)
    assert run("deployments", "change", "small", "--fallback", "tiny")[0] == 0
    assert "falls back to tiny" in run("deployments", "get", "small")[1]
    assert run("deployments", "change", "small", "--fallback", "")[0] == 0
    Deployment.objects.get(name="tiny").delete()
    assert run("deployments", "draft", "small")[0] != 0  # it has none
    code, out, err = run("deployments", "draft", "small", "--replicas", "1-3")
    assert (code, "1 to 3" in out, "rollout small" in out) == (0, True, True), err
    assert "1 to 3" in run("deployments", "draft", "small")[1]
    assert "discarded" in run("deployments", "draft", "small", "--discard")[1]
    run("deployments", "draft", "small", "--replicas", "2")
    assert run("deployments", "rollout", "small")[0] == 0
    row.refresh_from_db()
    assert (row.min_replicas, row.max_replicas) == (2, 2)
    assert run("deployments", "change", "small", "--replicas", "1")[0] == 0
    assert "loading" in run("deployments", "wake", "small")[1]
    assert json.loads(run("deployments", "get", row.pk, "-o", "json")[1])["replicas"]
    answer(row.replicas.get())
    assert "ready" in run("deployments", "get", "small")[1]
    row.replicas.update(silent_since=now())
    assert "not answering since" in run("deployments", "get", "small")[1]
    assert run("deployments", "sleep", "small", "--yes")[0] == 0
    key = run("keys", "add", "laptop", "--model", "small")[1].strip()
    made = ServingKey.objects.get()
    assert (made.digest, made.model_names) == (key_hash(key), ["small"])
    Usage.objects.create(key=made, deployment=row, day=now().date(), completion_tokens=1234)
    for options in ((), ("--by", "person"), ("--month", f"{now():%Y-%m}", "--by", "day")):
        assert "1,234" in run("deployments", "usage", *options)[1]
    assert "alice" in run("deployments", "usage", "--by", "person")[1]
    assert run("deployments", "usage", "--by", "team")[0] != 0  # one has its own
    rotated = run("keys", "rotate", made.pk, "--overlap", "2")[1].strip()
    made.refresh_from_db()
    assert (made.digest, rotated != key) == (key_hash(rotated), True)
    assert run("keys", "revoke", made.pk, "--yes")[0] == 0
    assert "revoked" in run("keys", "list")[1]
    assert run("deployments", "delete", "small", "--yes")[0] == 0
    for wrong in (("get", "small"), ("add", "x"), ("change", "small")):
        assert run("deployments", *wrong)[0] != 0

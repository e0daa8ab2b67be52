"""The run of a tracker that a job's page links."""

from types import SimpleNamespace

from webapp.jobs.tracking import TrackedRun, tracked_run


def artefact(name: str, **facts: object) -> SimpleNamespace:
    return SimpleNamespace(name=name, facts=facts)


def test_a_run_is_shown_with_its_page_and_no_other_address_is_linked():
    facts = {"tracker": "mlflow", "project": "p", "run": "r"}
    for url, shown in [
        (
            "https://m.example.org/#/experiments/1/runs/a",
            "https://m.example.org/#/experiments/1/runs/a",
        ),
        ("javascript:alert(1)", ""),
        ("", ""),
        (None, ""),
    ]:
        found = tracked_run([artefact("model"), artefact("tracking", **facts, url=url)])
        assert found == TrackedRun("MLflow", "p", "r", shown)
    for other in (artefact("tracking", tracker="another"), artefact("tracking"), artefact("data")):
        assert tracked_run([other]) is None

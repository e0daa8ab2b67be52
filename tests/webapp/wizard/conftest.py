"""A browser that presses buttons on the wizard's plain forms, as one without JavaScript would."""

import re

import pytest
from django.test import Client

from tests.webapp.conftest import client_of
from webapp.plans.models import Plan

STEPS = ("goal", "model", "workload", "hardware")


class Walker:
    """Goes through the wizard of one plan by GET and POST alone."""

    def __init__(self, client: Client, query: str = "") -> None:
        self.client = client
        location = client.get(f"/plans/new/{query}")["Location"]
        self.plan_id = re.findall(r"/plans/(\w+)/", location)[0]
        self.first_step = location.split("/")[-2]
        self._shown: dict[str, dict] = {}  # forms whose steps were not left since

    @property
    def plan(self) -> Plan:
        return Plan.objects.get(pk=self.plan_id)

    def url(self, step: str) -> str:
        return f"/plans/{self.plan_id}/edit/{step}/"

    def page(self, step: str, query: str = ""):
        return self.client.get(self.url(step) + query)

    def shown(self, step: str) -> dict:
        """What a browser would send from the form as it is shown."""
        return self._fields_of(self.page(step).context)

    @staticmethod
    def _fields_of(context) -> dict:
        fields = [*context["form"], *(context.get("pins") or [])]
        values = {field.html_name: field.value() for field in fields}
        texts = {"config", "folder_config", "config_file"}
        return {k: v for k, v in values.items() if v is not None and k not in texts}

    def press(self, step: str, go: str = "next", **changes):
        """Send a step's form with changes; where it is refused, the draft is as it was shown."""
        before = self._shown.pop(step, None) or self.shown(step)
        answer = self.client.post(self.url(step), {**before, **changes, "go": go})
        self._shown = {step: before} if answer.status_code == 422 else {}
        return answer

    def to_review(self) -> None:
        for step in STEPS:
            response = self.press(step)
            assert response.status_code == 302, response.context["form"].errors


@pytest.fixture
def walk(alice, host):
    return lambda query="": Walker(client_of(alice), query)

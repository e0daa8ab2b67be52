"""A host that calls the API, and people with sessions."""

import pytest
from django.test import Client


class HostClient:
    """Calls as the host does: JSON bodies, a bearer credential."""

    def __init__(self, credential: str = "") -> None:
        headers = {"Authorization": f"Bearer {credential}"} if credential else {}
        self.client = Client(headers=headers)

    def post(self, path: str, body, **headers: str):
        text = body if isinstance(body, str) else body.model_dump_json()
        return self.client.post(
            f"/api/v1{path}", text, content_type="application/json", headers=headers
        )

    def put(self, path: str, data: bytes):
        return self.client.put(f"/api/v1{path}", data, content_type="application/octet-stream")

    def get(self, path: str):
        return self.client.get(f"/api/v1{path}")


@pytest.fixture
def as_host(credential) -> HostClient:
    return HostClient(credential)


@pytest.fixture
def as_nobody() -> HostClient:
    return HostClient()

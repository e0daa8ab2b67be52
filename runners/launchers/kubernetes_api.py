"""Our requests to a Kubernetes API server, by the official client (``slipway[kubernetes]``).

Replies are read as JSON and not as the client's classes, which refuse what a newer server adds.
"""

import json
import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from yaml import YAMLError

from runners.launchers.scheduler import SchedulerError, SchedulerUnreachableError
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.log_text import lines_of, shortened

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

TIMEOUT_SECONDS = 20.0
MESSAGE_CHARACTERS = 500
MOST_LOG_BYTES = 64 * 1024
NOT_FOUND, CONFLICT, TOO_MANY = 404, 409, 429
# Of these the same request may succeed later: no credential yet, a timeout, too many requests.
PASSING = frozenset({401, 408, TOO_MANY})
SERVER_FAULT = 500
KUEUE = "kueue.x-k8s.io"


class KubernetesError(SchedulerError):
    """The API server rejected a request; the text is its message."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class KubernetesUnreachableError(KubernetesError, SchedulerUnreachableError):
    """The API server does not answer: the state of its jobs is unknown."""


class Api:
    """The requests of one host, in its namespace."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config

    @cached_property
    def _client(self) -> "ApiClient":
        """Return the client, by the pod's own account or else by kubeconfig.

        Raises:
            KubernetesUnreachableError: the library is not installed, or neither is there.
        """
        try:
            from kubernetes import client, config
        except ImportError:
            raise KubernetesUnreachableError(
                "the Python package kubernetes is not installed: pip install 'slipway[kubernetes]'"
            ) from None
        settings = client.Configuration()
        is_pod = "KUBERNETES_SERVICE_HOST" in os.environ and not self._config.context
        load = config.load_incluster_config if is_pod else config.load_kube_config
        named = {
            "config_file": os.environ.get("KUBECONFIG"),
            "context": self._config.context or None,
        }
        chosen = {} if is_pod else named
        try:
            load(client_configuration=settings, **chosen)
        except (config.ConfigException, OSError, ValueError, YAMLError) as error:
            raise KubernetesUnreachableError(f"no cluster is set up here: {error}") from None
        settings.retries = False  # the next round asks again
        return client.ApiClient(settings)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        is_json: bool = True,
    ) -> dict[str, Any]:
        """Make one request and return the reply's object; ``text`` of one that is no JSON.

        Raises:
            KubernetesUnreachableError: there is no answer, or one that a moment may mend.
            KubernetesError: the server rejects it.
        """
        api, accepted = self._client, "application/json" if is_json else "*/*"
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            reply = api.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": accepted, "Content-Type": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=TIMEOUT_SECONDS,
            )
            found = json.loads(reply.data) if is_json else {"text": reply.data}
        except ApiException as refusal:
            raise _error_of(refusal.status or 0, refusal.body, str(refusal.reason)) from None
        except (HTTPError, OSError) as error:
            raise KubernetesUnreachableError(_one_line(str(error))) from None
        except ValueError:
            raise KubernetesUnreachableError("the API server's reply is no JSON") from None
        return cast("dict[str, Any]", found)

    # Jobs

    @property
    def _jobs(self) -> str:
        return f"/apis/batch/v1/namespaces/{self._config.namespace}/jobs"

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._config.namespace}/pods"

    def jobs(self, labels: str) -> list[dict[str, Any]]:
        """Return the Jobs with these labels."""
        return list(self.request("GET", self._jobs, query={"labelSelector": labels})["items"])

    def pods(self, labels: str) -> list[dict[str, Any]]:
        """Return the pods with these labels."""
        return list(self.request("GET", self._pods, query={"labelSelector": labels})["items"])

    def pod(self, name: str) -> dict[str, Any]:
        """Return the pod of this name."""
        return self.request("GET", f"{self._pods}/{name}")

    def pod_log(self, name: str, container: str, lines: int) -> bytes:
        """Return the last lines of what a container of a pod printed."""
        query = {
            "container": container,
            "tailLines": str(lines),
            "limitBytes": str(MOST_LOG_BYTES),
        }
        reply = self.request("GET", f"{self._pods}/{name}/log", query=query, is_json=False)
        return bytes(reply["text"])

    def job(self, name: str) -> dict[str, Any] | None:
        """Return a Job, or None if there is none of this name."""
        try:
            return self.request("GET", f"{self._jobs}/{name}")
        except KubernetesUnreachableError:
            raise
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def create_job(self, job: Mapping[str, Any]) -> None:
        """Create a Job; one of this name that is there already is ours."""
        try:
            self.request("POST", self._jobs, query={"fieldValidation": "Strict"}, body=job)
        except KubernetesUnreachableError:
            raise
        except KubernetesError as error:
            if error.status != CONFLICT:
                raise

    def delete_job(self, name: str) -> None:
        """Delete a Job and its pods, which get SIGTERM, and SIGKILL after their own grace."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
        self.request("DELETE", f"{self._jobs}/{name}", body=body)

    def end_pods(self, labels: str, grace_seconds: int) -> None:
        """End pods: they get SIGTERM, and SIGKILL after this time. Their Job fails."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace_seconds}
        self.request("DELETE", self._pods, query={"labelSelector": labels}, body=body)

    def last_event(self, job: str) -> str:
        """Return the last warning about a Job, such as why no pod of it could be made."""
        chosen = f"involvedObject.kind=Job,involvedObject.name={job},type=Warning"
        path = f"/api/v1/namespaces/{self._config.namespace}/events"
        events = self.request("GET", path, query={"fieldSelector": chosen})["items"]
        if not events:
            return ""
        newest = max(events, key=lambda each: str(each.get("lastTimestamp") or ""))
        return str(newest.get("message") or "")

    def local_queues(self) -> list[dict[str, Any]]:
        """Return Kueue's queues of the namespace, in the version that the server prefers.

        Without Kueue there are none. A server that states no preference has the first version.
        Source: Kubernetes' API reference, APIGroup of meta/v1.
        """
        try:
            group = self.request("GET", f"/apis/{KUEUE}")
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return []
            raise
        version = (group.get("preferredVersion") or group["versions"][0])["groupVersion"]
        path = f"/apis/{version}/namespaces/{self._config.namespace}/localqueues"
        return list(self.request("GET", path)["items"])

    def priority_classes(self) -> list[dict[str, Any]]:
        """Return the cluster's classes; an account of one namespace may not list them."""
        return list(self.request("GET", "/apis/scheduling.k8s.io/v1/priorityclasses")["items"])

    # Facts

    def version(self) -> str:
        """Return the server's release, such as v1.34.1."""
        return str(self.request("GET", "/version").get("gitVersion", ""))

    def nodes(self) -> list[dict[str, Any]]:
        """Return the cluster's nodes; the account may not be allowed to list them."""
        return list(self.request("GET", "/api/v1/nodes")["items"])


def _error_of(status: int, body: object, reason: str) -> KubernetesError:
    """Return the error of a reply: the API's Status objects have a sentence."""
    message = reason
    try:
        document = json.loads(cast("str | bytes", body or "{}"))
        message = str(document.get("message") or reason)
    except (ValueError, AttributeError):
        pass
    is_passing = status in PASSING or status >= SERVER_FAULT or not status
    words = _one_line(message or f"status {status}")
    return (KubernetesUnreachableError if is_passing else KubernetesError)(words, status)


def _one_line(text: str) -> str:
    return shortened(" ".join(filter(None, map(str.strip, lines_of(text)))), MESSAGE_CHARACTERS)

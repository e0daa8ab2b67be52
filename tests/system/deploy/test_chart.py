"""The chart, linted and rendered by Helm itself, and strictly valid in three releases.

Helm is the shared library in the PyPI package ``helm-sdkpy`` (0.1.32 has Helm 4), which asks for
Python 3.12 and runs on 3.11 too: ``pip install --ignore-requires-python --no-deps helm-sdkpy``.
The rules of compose files are those of the schema in the PyPI package ``check-jsonschema``.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from runners.host import commands as host_commands
from runners.shared import kubernetes
from tests.runners.cluster.types import ROOTS, faults
from tests.runners.test_kubernetes import RELEASES
from tests.webapp.deploy.test_files import CHART, COMPOSE, KNOWN, NEEDED
from webapp.boot.suite import ROOT

pytestmark = pytest.mark.slow
SECRETS = {"database-url": "postgresql://u:p@db/s", "redis-url": "redis://:p@redis:6379/0"}
MANY = {
    "publicUrl": "https://ai.example.org:8443",
    "trustedProxies": ["10.42.0.0/16", "fd00::/8"],
    "existingSecret": "",
    "secretValues": {**SECRETS, "secrets-keys": "k"},
    "secretKeys": {"SLIPWAY_SECRETS_KEYS": "secrets-keys"},
    "settings": {"SLIPWAY_ADMIN_NETWORKS": "10.0.0.0/8,192.0.2.7", "TZ": "Europe/Berlin"},
    "web": {"replicas": 5},
    "gateway": {"hosts": ["gw1.example.org", "gw2.example.org"]},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls",
                "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "0"}},
    "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]},
    "imagePullSecrets": [{"name": "registry"}],
}  # fmt: skip
ONE_NODE = {
    "image": {"repository": "slipway", "tag": "1", "pullPolicy": "Never"},
    "persistence": {"existingClaim": "disk", "accessMode": "ReadWriteOnce"},
    "web": {"replicas": 1},
    "networkPolicy": {"enabled": False},
    "nodeSelector": {"kubernetes.io/hostname": "n1"},
    "tolerations": [{"key": "server", "operator": "Exists"}],
    "service": {"type": "NodePort", "port": 8080},
}
AGENT = {
    "agent": {
        "enabled": True, "volumeClaim": "shared", "mountPath": "/srv/slipway", "kueue": True,
        "observe": True, "clusterFacts": True, "arguments": ["--gpus", "8", "--memory", "900Gi"],
        "server": "https://other.example.org", "nodeSelector": {"role": "head"},
        "tolerations": [{"key": "head", "operator": "Exists"}],
    },
}  # fmt: skip
SETS = {"defaults": {}, "many": MANY, "one node": ONE_NODE, "agent": AGENT}


def library() -> Path:
    """Return Helm's library, or skip the test."""
    spec = importlib.util.find_spec("helm_sdkpy")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = [path for each in folders for path in Path(each).glob("_lib/*/libhelm_sdkpy.so")]
    if not found:
        pytest.skip("Helm is not here: pip install --ignore-requires-python helm-sdkpy==0.1.32")
    return found[0]


@cache
def of_helm(values: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.system.deploy.helm", str(library()), str(CHART)]
    done = subprocess.run(
        command, cwd=ROOT, input=values.encode(), capture_output=True, check=True, timeout=120
    )
    return dict(json.loads(done.stdout))


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    said = of_helm(json.dumps(values))
    assert said["refusal"] == ""
    texts = [said["manifest"], *said["hooks"]]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each object that makes pods, and the pod's template."""
    for each in objects:
        if each["kind"] in ("Deployment", "Job"):
            yield each, each["spec"]["template"]


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def test_helm_lints_the_chart_and_every_manifest_is_strictly_valid_in_three_releases():
    kinds: Counter[str] = Counter()
    for name, values in SETS.items():
        said = of_helm(json.dumps(values))
        assert said["lint"] == {"TotalChartsLinted": 1, "Messages": None, "Errors": None}, name
        for each in rendered(values):
            kinds[each["kind"]] += 1
            for release in RELEASES:
                found = list(faults(each, release, f"V1{each['kind']}"))
                assert found == [], (name, release, each["metadata"]["name"])
    assert {f"V1{kind}" for kind in kinds} == set(ROOTS)
    wrong = rendered({})[0]
    wrong["spec"]["podSelector"]["labels"] = {}
    assert list(faults(wrong, "1.36", f"V1{wrong['kind']}"))


def test_what_the_manifests_name_is_there_and_every_selector_finds_its_pods():
    outside = {
        "Secret": {"slipway", "tls", "registry"},
        "PersistentVolumeClaim": {"disk", "shared"},
    }
    for name, values in SETS.items():
        objects = rendered(values)
        names = {(each["kind"], each["metadata"]["name"]) for each in objects}
        assert len(names) == len(objects), name
        labels = [template["metadata"]["labels"] for _, template in pods(objects)]
        for each in objects:
            spec = each.get("spec", {})
            selector = {"Service": spec.get("selector"), "PodDisruptionBudget": spec.get("selector"),
                        "NetworkPolicy": spec.get("podSelector"),
                        "Deployment": spec.get("selector")}.get(each["kind"])  # fmt: skip
            if selector is not None:
                wanted = selector.get("matchLabels", selector).items()
                found = [of_pod for of_pod in labels if wanted <= of_pod.items()]
                several = each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy")
                assert len(found) >= 1 if several else len(found) == 1, (name, each["metadata"])
        for _, template in pods(objects):
            assert ("ServiceAccount", template["spec"]["serviceAccountName"]) in names
            for volume in template["spec"]["volumes"]:
                kind, key, field = (
                    ("Secret", "secret", "secretName") if "secret" in volume
                    else ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName")
                )  # fmt: skip
                if key in volume:
                    told = volume[key][field]
                    assert (kind, told) in names or told in outside[kind], (name, told)
        for each in objects:
            if each["kind"] == "Ingress":
                paths = [path for rule in each["spec"]["rules"] for path in rule["http"]["paths"]]
                assert {("Service", path["backend"]["service"]["name"]) for path in paths} <= names


def test_every_process_has_the_variables_that_it_needs_and_no_unknown_one_and_may_little():
    for name, values in SETS.items():
        for owner, template in pods(rendered(values)):
            is_agent = owner["metadata"]["labels"]["app.kubernetes.io/component"] == "agent"
            assert template["spec"]["securityContext"]["seccompProfile"] == {
                "type": "RuntimeDefault"
            }
            assert template["spec"]["securityContext"]["runAsUser"] == 10001
            assert is_agent or template["spec"]["automountServiceAccountToken"] is False
            for each in containers(template):
                told = {variable["name"] for variable in each["env"]}
                assert len(told) == len(each["env"]), name
                if is_agent:
                    assert told <= {"HF_HOME", "HOME", "SLIPWAY_ENROLMENT", "WITHOUT_TOKEN"}
                else:
                    assert told >= {*NEEDED, "SLIPWAY_PUBLIC_URL"}, name
                    assert told <= KNOWN, told - KNOWN
                security = each["securityContext"]
                assert security["readOnlyRootFilesystem"] is True
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"] == {"drop": ["ALL"]}
                is_served = "serve" in each["command"]
                assert is_served == ("readinessProbe" in each) == ("livenessProbe" in each)
    gateways = [
        each["env"] for _, template in pods(rendered(MANY)) for each in containers(template)
    ]
    urls = "wss://gw1.example.org/tunnel/,wss://gw2.example.org/tunnel/"
    assert all({"name": "SLIPWAY_GATEWAYS", "value": urls} in each for each in gateways)


def test_the_agent_may_what_the_page_says_and_no_more():
    page = (ROOT / "templates/docs/kubernetes.md").read_text("utf-8")
    text = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    told = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Role")["rules"]
    objects = {each["kind"]: each for each in rendered(AGENT)}
    assert objects["Role"]["rules"] == told
    assert objects["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
        {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"], "verbs": ["list"]},
    ]
    fewer = {"agent": {"enabled": True, "volumeClaim": "shared"}}
    kinds = {each["kind"]: each for each in rendered(fewer)}
    assert kinds["Role"]["rules"] == told[:3]
    assert "ClusterRole" not in kinds


def test_an_upgrade_is_prepared_with_its_own_secret_and_an_installation_beside_its_pods():
    for values, secret in (({}, "slipway"), (MANY, "team-slipway-upgrade")):
        made = {(each["kind"], each["metadata"]["name"]): each for each in rendered(values)}
        first, upgrade = (made["Job", f"team-slipway-{name}"] for name in ("prepare", "upgrade"))
        assert "annotations" not in first["metadata"]
        assert upgrade["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
        volumes = upgrade["spec"]["template"]["spec"]["volumes"]
        assert [each["secret"]["secretName"] for each in volumes if "secret" in each] == [secret]
        if secret != "slipway":
            own, release = made["Secret", secret], made["Secret", "team-slipway"]
            notes = own["metadata"]["annotations"]
            assert (notes["helm.sh/hook"], notes["helm.sh/hook-weight"]) == ("pre-upgrade", "-1")
            assert own["stringData"] == release["stringData"]


def test_the_agent_enrols_once_and_takes_what_holds_for_jobs_at_each_start(tmp_path):
    values = {**AGENT, "imagePullSecrets": [{"name": "registry"}, {"name": "other"}]}
    deployment = next(each for each in rendered(values) if "agent" in each["metadata"]["name"]
                      and each["kind"] == "Deployment")  # fmt: skip
    enrol, work = containers(deployment["spec"]["template"])
    *shell, credential = enrol["command"]
    assert credential == "/srv/slipway/host/credential.json"
    words = next(each["value"] for each in enrol["env"] if each["name"] == "WITHOUT_TOKEN")
    for is_enrolled, token, expected in (
        (True, "", (0, "", "")), (False, "", (1, "", f"{words}\n")),
        (False, "slt_x", (0, "enrols\n", "")),
    ):  # fmt: skip
        place = tmp_path / "credential.json" if is_enrolled else tmp_path / "none"
        (tmp_path / "credential.json").touch()
        done = subprocess.run(
            [*shell, str(place), "echo", "enrols"], capture_output=True, text=True, check=False,
            env={"WITHOUT_TOKEN": words} | ({"SLIPWAY_ENROLMENT": token} if token else {}),
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == expected
    assert "the Secret slipway-agent (agent.tokenSecret)" in words
    for each in (enrol["args"], work["command"]):
        assert each[:3] == ["python", "-m", "runners"]
        options = host_commands.parser().parse_args(each[3:])
        assert str(options.dir) == "/srv/slipway/host"
        config = kubernetes.read(options, options.dir)
        assert (config.gpus, config.memory, config.volume_claim) == (8, "900Gi", "shared")
        assert config.image == work["image"] == "registry.example.org/slipway-host:0.1.0"
        assert config.image_pull_secret == "registry"


def test_values_that_cannot_work_are_refused_by_name():
    for values, words in (
        ({"publicUrl": "http://slipway.example.org"}, "publicUrl"),
        ({"existingSecret": ""}, "secretValues.database-url is missing"),
        ({"secretKeys": {"DATABASE": "x"}}, "at '/secretKeys': additional properties 'DATABASE'"),
        ({"settings": {"SLIPWAY_ADMIN_NETWORK": "10.0.0.0/8"}}, "SLIPWAY_ADMIN_NETWORK"),
        ({"settings": {"DATABASE_URL": "postgresql://u:p@db/s"}}, "DATABASE_URL"),
        ({"control": {"replicas": 2}}, "replicas"),
        ({"agent": {"enabled": True}}, "agent.volumeClaim is missing"),
        ({"agent": {"arguments": ["--name", "x"]}}, "/agent/arguments/0"),
        ({"podSecurityContext": {"runAsUser": 0}}, "runAsUser"),
        ({"trustedProxies": ["ingress.lan"]}, "trustedProxies"),
    ):
        assert words in of_helm(json.dumps(values))["refusal"], values


def test_the_compose_file_has_the_form_of_the_specification():
    spec = importlib.util.find_spec("check_jsonschema")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the schema is not here: pip install check-jsonschema")
    folder = Path(spec.submodule_search_locations[0]) / "builtin_schemas/vendor"
    validator = pytest.importorskip("jsonschema").Draft7Validator
    schema = json.loads((folder / "compose-spec.json").read_text())
    found = validator(schema).iter_errors(yaml.safe_load(COMPOSE.read_text()))
    assert [f"{list(each.absolute_path)}: {each.message}" for each in found] == []

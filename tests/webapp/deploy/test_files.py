"""Image, compose file, units and chart of a server for a team: they set what the code reads."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import CommandError, get_commands, load_command_class

from runners.host import commands as host_commands
from runners.host import preflight
from webapp.boot.suite import ROOT
from webapp.core.site_settings import (
    FILE_SUFFIX,
    IN_FILES,
    READERS,
    SettingError,
    read_secret_files,
)

DEPLOY = ROOT / "webapp/operations/deploy"
CHART, COMPOSE = DEPLOY / "chart", DEPLOY / "compose.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SERVICES = ("prepare", "web", "gateway", "control", "ticker")  # of the server, in compose.yaml
# Of other programs, which the page Configuration names too.
OTHERS = {
    "MODELSCOPE_ENDPOINT", "VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE", "HTTPS_PROXY",
    "HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE",
}  # fmt: skip
FILES = {f"{name}{FILE_SUFFIX}" for name in IN_FILES}
KNOWN = {*READERS, *FILES, *OTHERS}
NEEDED = {"SLIPWAY_DATA_DIR", "DATABASE_URL_FILE", "REDIS_URL_FILE"}
OF_PYTHON = {"PYTHONUNBUFFERED", "PATH"}


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text("utf-8")))


def unit(text: str) -> dict[str, list[str]]:
    """A unit's settings by name, each with all of its values."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", "[")):
            found.setdefault(name, []).append(value)
    return found


def image_variables() -> set[str]:
    lines = re.findall(r"^ENV (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return {word.partition("=")[0] for line in lines for word in line.split()}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Where a command of ours stands, and its words after Python's name."""
    docker = re.search(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    yield "Dockerfile", json.loads(docker[1])[1:]
    for name in SERVICES:
        yield f"compose {name}", compose()["services"][name]["command"][1:]
    for path in UNITS:
        yield path.name, shlex.split(unit(path.read_text())["ExecStart"][0])[1:]
    for path in sorted((CHART / "templates").glob("*.yaml")):
        for words in re.findall(
            r'list "python" ("manage.py"(?: "[^"]*"| \$name)*)', path.read_text()
        ):
            names = ("control", "ticker") if "$name" in words else ("",)
            for name in names:
                yield path.name, shlex.split(words.replace("$name", name))


def test_every_command_is_one_that_the_project_has():
    known, seen = get_commands(), set()
    for place, words in commands():
        manage, name, *arguments = (each.replace("%i", "8001") for each in words)
        assert (manage, name in known) == ("manage.py", True), place
        parser = load_command_class(known[name], name).create_parser("manage.py", name)
        parser.parse_args(arguments)  # ends the test at a wrong one
        kind = re.sub(r"^compose .*|^.*\.(service|yaml)$", r"\1", place)
        seen.add((kind, name, *arguments[:1]))
    processes = {
        ("prepare",), ("serve", "web"), ("serve", "gateway"), ("control",), ("ticker",)
    }  # fmt: skip
    for kind in ("", "service", "yaml"):
        assert {row[1:] for row in seen if row[0] == kind} == processes, kind


def test_every_process_is_given_what_it_needs_and_nothing_that_nobody_reads():
    in_image = image_variables()
    assert in_image <= KNOWN | OF_PYTHON
    services = compose()["services"]
    for name in SERVICES:
        told = {*services[name]["environment"], *in_image} - OF_PYTHON
        assert told >= {*NEEDED, "SLIPWAY_PUBLIC_URL", "FORWARDED_ALLOW_IPS"}, name
        assert told <= KNOWN, told - KNOWN
    for path in UNITS:
        settings = unit(path.read_text())
        pairs = [each for line in settings["Environment"] for each in line.split()]
        told = {each.partition("=")[0] for each in pairs} - OF_PYTHON
        assert told == NEEDED, path.name
        made = {each.partition(":")[0] for each in settings["LoadCredential"]}
        named = {each.partition("%d/")[2] for each in pairs if "%d/" in each}
        assert made == named, path.name
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(schema["secretKeys"]["properties"]) == set(IN_FILES)
    of_chart = {
        "SLIPWAY_DATA_DIR",
        "SLIPWAY_PUBLIC_URL",
        "FORWARDED_ALLOW_IPS",
        "SLIPWAY_GATEWAYS",
    }
    free = set(schema["settings"]["properties"])
    assert free == {*READERS, *OTHERS} - of_chart - set(IN_FILES)
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    assert set(re.findall(r"\{name: ([A-Z_]+),", helpers)) == of_chart


def test_what_the_compose_file_names_is_there_and_no_secret_is_in_it():
    document = compose()
    services = document["services"]
    for name, each in services.items():
        for kind in ("networks", "secrets"):
            assert set(each.get(kind, ())) <= set(document[kind]), name
        named = [volume for volume in each.get("volumes", ()) if isinstance(volume, str)]
        volumes = {volume.partition(":")[0] for volume in named}
        assert volumes <= set(document["volumes"]), name
        assert {config["source"] for config in each.get("configs", ())} <= set(document["configs"])
        for other, wanted in each.get("depends_on", {}).items():
            is_once = services[other].get("restart") == "no"
            healthy = {"condition": "service_healthy"}
            done = {"condition": "service_completed_successfully"}
            assert wanted == (done if is_once else healthy), (name, other)
            assert is_once or "healthcheck" in services[other], (name, other)
        assert each.get("read_only") or name == "database"
        assert "ports" not in each or name == "proxy"
        assert each["image"].partition(":")[2], name
    for name in SERVICES:
        assert services[name]["cap_drop"] == ["ALL"], name
        assert services[name]["security_opt"] == ["no-new-privileges:true"], name
    assert "configs" in document
    assert all((DEPLOY / each["file"]).is_file() for each in document["configs"].values())
    assert {name for name, each in services.items() if "deploy" in each} == {"web"}
    assert {name for name, each in services.items() if "build" in each} == {"prepare"}
    assert {services[name]["pull_policy"] for name in SERVICES[1:]} == {"never"}


def test_only_the_proxys_own_address_is_trusted_and_no_other_container_gets_it():
    text = re.sub(r"\$\{SLIPWAY_NETWORK:-([\d.]+)\}", r"\1", COMPOSE.read_text("utf-8"))
    document = yaml.safe_load(text)
    (pool,) = document["networks"]["inner"]["ipam"]["config"]
    proxy = document["services"]["proxy"]["networks"]["inner"]["ipv4_address"]
    others = ip_network(pool["ip_range"])
    assert others.subnet_of(ip_network(pool["subnet"]))
    for each in (proxy, pool["gateway"]):
        assert ip_address(each) in ip_network(pool["subnet"]), each
        assert ip_address(each) not in others, each
    assert proxy != pool["gateway"]
    for name in SERVICES:
        assert document["services"][name]["environment"]["FORWARDED_ALLOW_IPS"] == proxy


def test_redis_reads_its_password_as_the_user_to_which_its_image_changes(tmp_path):
    (shell, options, script) = compose()["services"]["redis"]["command"]
    (tmp_path / "redis_password").write_text("cret")
    entry = tmp_path / "docker-entrypoint.sh"  # as the image's, whose umask is 0077
    entry.write_text('#!/bin/sh\numask 0077\n[ "$*" = "valkey-server -" ] && cat\n')
    entry.chmod(0o755)
    script = script.replace("$$", "$").replace("/run/secrets", str(tmp_path))
    done = subprocess.run(
        [shell, options, script], capture_output=True, text=True, check=True,
        env={"PATH": f"{tmp_path}:{os.defpath}"},
    )  # fmt: skip
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines == {
        "requirepass": "cret", "appendonly": "yes", "maxmemory-policy": "noeviction",
        "dir": "/data",
    }  # fmt: skip


def test_the_image_of_a_host_with_gpus_has_a_compiler_that_its_preflight_finds():
    packages = re.search(r"\$\(case .*? esac\)", (DEPLOY / "Dockerfile").read_text())[0]
    for extras, expected in (("web", False), ("worker,gpu,kubernetes", True), ("gpus", False)):
        done = subprocess.run(
            ["sh", "-c", f"echo {packages}"], env={"EXTRAS": extras}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert bool(set(done.stdout.split()) & set(preflight.COMPILERS)) is expected, extras
        assert ("libc6-dev" in done.stdout) is expected, extras


def test_what_git_ignores_reaches_no_image():
    ignored = (ROOT / ".gitignore").read_text().split()
    kept_out = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for name in ("**/.git", "**/*.egg-info", *ignored):
        names = {name, f"**/{name.rstrip('/')}", name.rstrip("/"), f"**/{Path(name).name}"}
        is_cache = name.endswith("_cache/") and "**/.*_cache" in kept_out
        assert is_cache or names & set(kept_out), name


def test_the_secrets_that_the_compose_file_reads_are_made_once(tmp_path):
    script = tmp_path / "secrets.sh"
    script.write_text((DEPLOY / "secrets.sh").read_text())
    folder = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run(["sh", str(script)], check=True, umask=0o022)
        made = {path.name: path.read_text() for path in folder.iterdir()}
        assert folder.stat().st_mode & 0o777 == 0o700
    assert {f"./secrets/{name}" for name in made} == {
        each["file"] for each in compose()["secrets"].values()
    }
    assert len(made["database_password"]) == 64
    for name, password in (("database_url", "database_password"), ("redis_url", "redis_password")):
        assert made[password] in made[name]
        variables = {f"{name.upper()}_FILE": str(folder / name)}
        read_secret_files(variables)
        READERS[name.upper()](variables)
    script.unlink()
    assert (folder / "redis_url").read_text() == made["redis_url"]


HARDENED = {
    "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "ProtectSystem": "strict",
    "ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes", "UMask": "0077",
    "ProtectKernelModules": "yes", "ProtectKernelTunables": "yes", "ProtectControlGroups": "yes",
    "RestrictSUIDSGID": "yes", "RestrictNamespaces": "yes", "LockPersonality": "yes",
    "SystemCallArchitectures": "native", "StateDirectoryMode": "0700", "User": "slipway",
}  # fmt: skip


def test_every_unit_is_hardened_at_least_as_the_agents_and_in_the_same_way():
    agents = unit(host_commands.TEMPLATE)
    texts = [path.read_text() for path in UNITS]
    assert len({text.partition("User=")[2] for text in texts}) == 1
    for path, text in zip(UNITS, texts, strict=True):
        settings = unit(text)
        assert {name: settings[name][0] for name in HARDENED} == HARDENED, path.name
        of_agent = [name for name in agents if name.startswith(("Protect", "Private", "Restrict"))]
        assert {name: settings[name][:1] for name in of_agent} == {
            name: agents[name] for name in of_agent
        }
        is_once = path.name == "slipway-prepare.service"
        assert settings["Type"] == (["oneshot"] if is_once else ["exec"])
        assert settings.get("Restart") == (None if is_once else ["always"])
        assert settings["WantedBy"] == settings["PartOf"] == ["slipway.target"]
        assert is_once or "slipway-prepare.service" in settings["After"][0]
        # A restart of `prepare`, as of an upgrade, would restart all that has Requires= at once.
        assert is_once or "slipway-prepare.service" in settings["Wants"]
        assert "Requires" not in settings


def test_the_chart_has_the_version_of_the_project():
    version = re.search(
        r'^version = "(\d+\.\d+\.\d+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version[1]
    assert f"slipway:{version[1]}" in compose()["services"]["web"]["image"]


def test_a_secret_is_read_from_the_file_that_a_variable_names(tmp_path):
    path = tmp_path / "url"
    path.write_text(" postgresql://u:cret@db/s\n")
    variables = {
        "DATABASE_URL_FILE": str(path),
        "REDIS_URL": "redis://redis",
        "REDIS_URL_FILE": " ",
    }
    read_secret_files(variables)
    assert variables == {
        "DATABASE_URL": "postgresql://u:cret@db/s", "REDIS_URL": "redis://redis",
        "REDIS_URL_FILE": " ",
    }  # fmt: skip
    read_secret_files(variables)  # as a child of `up` does, which has the value


def test_a_file_of_a_secret_that_cannot_be_used_is_named_and_not_shown(tmp_path):
    path = tmp_path / "secret"
    for content, others, words in (
        (b"cret", {"SLIPWAY_SECRET_KEY": "x"}, "SLIPWAY_SECRET_KEY is set as well: unset one"),
        (b" \n", {}, "give a file with the text of SLIPWAY_SECRET_KEY"),
        (b"cret\0", {}, "give a file"),
        (b"cret\xff", {}, "give a file"),
        (b"cret" * 20_000, {}, "of 1 to 65,536 bytes"),
        (None, {}, "there is no such file that this user may read"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SettingError, match=r"^SLIPWAY_SECRET_KEY_FILE is ") as refusal:
            read_secret_files({"SLIPWAY_SECRET_KEY_FILE": str(path), **others})
        assert words in str(refusal.value), content
        assert "cret\n" not in str(refusal.value).replace("secret", "")
    assert set(IN_FILES) <= {*READERS, "MODELSCOPE_API_TOKEN"}


def test_a_server_listens_at_the_address_that_it_is_given(monkeypatch):
    served = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server: served.append(server.config))
    monkeypatch.setattr("uvicorn.Config.load", lambda _: None)
    monkeypatch.setattr("webapp.core.readiness.missing_preparation", str)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.7")
    command = load_command_class("webapp.operations", "serve")
    for part, application in (
        ("web", "webapp.asgi:application"), ("gateway", "webapp.gateway.asgi:application"),
    ):  # fmt: skip
        command.run_from_argv(["manage.py", "serve", part, "--host", "0.0.0.0", "--port", "8010"])
        config = served.pop()
        assert (config.app, config.host, config.port) == (application, "0.0.0.0", 8010)
        assert config.forwarded_allow_ips == "127.0.0.1,::1,10.0.0.7"
        assert config.http.__name__ == "HeaderDeadlineProtocol"
    with pytest.raises(CommandError, match="--port is 0; it can be 1 to 65535"):
        command.handle(part="web", host="127.0.0.1", port=0)

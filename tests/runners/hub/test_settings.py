"""The Hub's variables: where its files lie, what jobs inherit, what cannot work."""

import os
import subprocess
import sys

import pytest

from runners.hub.settings import PASSED, HubSettingsError, cache_folder, from_environment

HOME = "/home/ada"
PLACES = {  # variables: the folder
    (): f"{HOME}/.cache/huggingface/hub",
    ("HF_HOME=/big",): "/big/hub",
    ("HF_HOME=~/models",): f"{HOME}/models/hub",
    ("HF_HOME=$DISK/hf", "DISK=/mnt"): "/mnt/hf/hub",
    ("XDG_CACHE_HOME=/xdg",): "/xdg/huggingface/hub",
    ("HF_HUB_CACHE=/hub", "HF_HOME=/big"): "/hub",
    ("HUGGINGFACE_HUB_CACHE=/old", "HF_HOME=/big"): "/old",
    ("HF_HUB_CACHE=${DISK}/x", "DISK=/mnt", "HUGGINGFACE_HUB_CACHE=/old"): "/mnt/x",
}


def test_the_cache_is_where_huggingface_hub_has_it():
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    children = {}
    for variables, folder in PLACES.items():
        stated = {"HOME": HOME} | dict(each.split("=") for each in variables)
        assert str(cache_folder(stated)) == folder, variables
        children[variables] = subprocess.Popen(
            [sys.executable, "-c", code], env={"PATH": os.environ["PATH"], **stated},
            stdout=subprocess.PIPE,
        )  # fmt: skip
    for variables, child in children.items():
        assert child.communicate()[0].decode().strip() == PLACES[variables], variables


def test_variables_that_cannot_work_are_refused_by_name(tmp_path):
    (tmp_path / "empty.pem").touch()
    for variable, why in {
        "HF_ENDPOINT=mirror.lan": "HF_ENDPOINT is 'mirror.lan': it must be the address of a hub",
        "HF_ENDPOINT=https://u:secret@mirror.lan": r"HF_ENDPOINT is 'https://mirror\.lan'",
        "HF_ENDPOINT=https://mirror.lan/?x=1": "without a user or a query",
        "HF_ENDPOINT=https://[::1": "HF_ENDPOINT is",
        "HF_TOKEN=hf_\u00fc": "HF_TOKEN has characters that no token has",
        "SSL_CERT_FILE=/no/such.pem": "SSL_CERT_FILE is '/no/such.pem', which is no readable PEM",
        f"REQUESTS_CA_BUNDLE={tmp_path}/empty.pem": "REQUESTS_CA_BUNDLE is",
    }.items():
        name, _, value = variable.partition("=")
        with pytest.raises(HubSettingsError, match=why) as refused:
            from_environment({name: value})
        assert "secret" not in str(refused.value)


def test_settings_come_from_the_environment_and_show_no_token():
    variables = {
        "HF_ENDPOINT": " https://mirror.lan/hub/ ", "HF_TOKEN": "hf_secret\n", "HF_HOME": "/big",
        "HF_HUB_OFFLINE": "yes", "HTTPS_PROXY": "http://ada:secret@proxy.lan:3128",
    }  # fmt: skip
    settings = from_environment(variables)
    assert settings.endpoint == "https://mirror.lan/hub"
    assert settings.is_offline
    assert settings.proxy == "the proxy http://proxy.lan:3128 of HTTPS_PROXY"
    assert "secret" not in repr(settings)
    assert settings.headers("https://mirror.lan/hub/api")["Authorization"] == "Bearer hf_secret"
    for elsewhere in ("http://mirror.lan/", "https://mirror.lan:444/", "https://cdn.lan/x"):
        assert "Authorization" not in settings.headers(elsewhere), elsewhere


def test_a_job_inherits_the_place_of_the_files_and_never_the_token():
    assert {"HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "no_proxy", "SSL_CERT_FILE"} <= set(PASSED)
    assert [name for name in PASSED if "TOKEN" in name] == []

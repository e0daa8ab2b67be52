"""The extra ``web``, whose packages the image of the server has, brings all that it imports."""

import subprocess
import sys

import pytest

from webapp.boot.suite import ROOT

pytestmark = pytest.mark.slow
# Hides every package that `pip install '.[web]'` does not bring, then loads all of the server.
PROGRAM = """
import importlib.metadata, os, sys, tomllib
from pathlib import Path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
waiting = [*project["dependencies"], *project["optional-dependencies"][sys.argv[1]]]
waiting, brought, seen = [Requirement(each) for each in waiting], set(), set()
while waiting:
    need = waiting.pop()
    name = canonicalize_name(need.name)
    if (name, *sorted(need.extras)) in seen:
        continue
    seen.add((name, *sorted(need.extras)))
    brought.add(name)
    try:
        others = [Requirement(each) for each in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        continue  # not for this platform
    extras = [{"extra": each} for each in need.extras or {""}]
    waiting += [each for each in others
                if each.marker is None or any(map(each.marker.evaluate, extras))]
owners = importlib.metadata.packages_distributions()
hidden = {module for module, names in owners.items()
          if not brought & {canonicalize_name(each) for each in names}}
assert "torch" in hidden and "django" not in hidden

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is not among the packages", name=name)

sys.meta_path.insert(0, Hidden())
sys.path.insert(0, os.getcwd())
import django
django.setup()
import webapp.asgi, webapp.gateway.asgi
from django.core.management import get_commands, load_command_class
from django.urls import get_resolver
get_resolver().url_patterns
for name in ("audit", "backup", "control", "doctor", "enrol_token", "prepare", "prune", "restore",
             "rotate_secrets", "serve", "ticker"):
    load_command_class(get_commands()[name], name)
print("loaded")
"""


def test_the_server_needs_no_package_beyond_those_of_its_image():
    command = [sys.executable, "-c", PROGRAM, "web"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("loaded\n"), done.stderr[-2000:]

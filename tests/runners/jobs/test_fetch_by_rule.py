"""A job's download keeps to its host's rule, and marks what it uses."""

import os
from pathlib import Path

import pytest

from runners.hub.download import download
from runners.hub.listing import look_up
from runners.hub.pruning import PRUNED_FOLDER, RULE_FILE, PruneRule
from runners.hub.repository import RepositoryName
from runners.hub.selection import needed_files
from runners.hub.settings import HubSettings, from_environment
from runners.hub.store import scan
from runners.jobs.events import Emitter
from runners.jobs.fetch import Fetching
from runners.jobspec import GenerateSpec, HubModel
from runners.supervision import child
from tests.hub.hub_server import Hub

MIB = 2**20


@pytest.fixture
def settings(own_hub: Hub) -> HubSettings:
    """Settings with acme/other in the cache, last used in 1970."""
    del own_hub  # its variables
    made = from_environment(os.environ)
    listing = look_up(RepositoryName("acme/other"), made)
    folder = download(listing, needed_files(listing, "safetensors"), made)
    for path in folder.iterdir():
        os.utime(path, (1_000, 1_000))
    return made


@pytest.mark.parametrize(
    ("keep", "kept", "left"),
    [
        (None, (), {"acme/tiny", "acme/other"}),
        (3 * MIB, (), {"acme/tiny", "acme/other"}),
        (3 * MIB // 2, (), {"acme/tiny"}),
        (3 * MIB // 2, ("acme/other",), {"acme/tiny", "acme/other"}),
        (0, (), {"acme/tiny"}),  # the rule holds no job back
    ],
)
def test_a_download_first_deletes_what_the_rule_no_longer_keeps(
    settings, tmp_path: Path, capsys, keep, kept, left
):
    host_dir = tmp_path / "host"
    attempt = host_dir / "attempts" / "A"
    attempt.mkdir(parents=True)
    (attempt / "spec.json").write_text('"acme/tiny"')
    child.write_json(host_dir / RULE_FILE, PruneRule(keep, frozenset(kept)).document())
    emitter = Emitter(os.open(tmp_path / "events", os.O_WRONLY | os.O_CREAT))
    fetching = Fetching(attempt, settings, emitter)
    spec = GenerateSpec(model=HubModel(repository="acme/tiny"))
    for _ in range(2):  # the second time all is there: nothing is pruned
        fetching.all_of(spec, ("safetensors",))
    emitter.close()
    found = {each.repository: each for each in scan(settings)}
    assert set(found) == left
    assert len(list((host_dir / PRUNED_FOLDER).glob("*.json"))) == 2 - len(left)
    assert found["acme/tiny"].last_used > 1_600_000_000
    is_told = "was deleted by this host's rule" in capsys.readouterr().out
    assert is_told is (len(left) == 1)

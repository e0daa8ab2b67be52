"""Real models of several architectures, from names on a hub to the folders that jobs read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runners.hub.download import download
from runners.hub.listing import look_up
from runners.hub.names import parse
from runners.hub.selection import exact_files
from runners.hub.settings import HubSettings
from runners.jobs.model_files import MODEL_ROOTS_VARIABLE, check_gguf, opened_model, weight_files
from runners.jobspec import FolderModel
from tests.hub.hub_server import Hub
from tests.hub.models import ARCHITECTURES, OWNER, SHARDED, make_repositories

IDS = torch.tensor([[5, 17, 300, 2, 41]])


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("repositories")
    make_repositories(folder)
    with Hub(folder) as made:
        yield made


@pytest.fixture
def fetch(hub, tmp_path):
    """Return what downloads a repository by its name, and returns the folder."""
    settings = HubSettings(endpoint=hub.url, cache=tmp_path / "cache", margin_bytes=0)

    def fetched(text: str) -> Path:
        name = parse(text, hub.url)
        listing = look_up(name, settings)
        weights = "gguf" if listing.repository.endswith("GGUF") else "safetensors"
        return download(listing, exact_files(listing, weights, name.file, settings), settings)

    return fetched


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_by_name_is_the_model_of_its_repository(hub, fetch, kind, tmp_path, monkeypatch):
    folder = fetch(f"{hub.url}/{OWNER}/{kind}/tree/main")
    source = hub.folder / OWNER / kind
    assert torch.equal(logits(folder), logits(source))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert "im_start" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    monkeypatch.setenv(MODEL_ROOTS_VARIABLE, str(tmp_path / "cache"))
    opened = opened_model(FolderModel(path=str(folder)), tmp_path / "host")
    names = [path.name for path in weight_files(opened)]
    assert names == sorted(path.name for path in source.glob("*.safetensors"))
    assert (len(names) > 1) == (kind == SHARDED)


def test_a_model_of_three_hundred_shards_is_whole(hub, fetch):
    folder = fetch(f"{OWNER}/llama-300")
    assert len(weight_files(folder)) == 300
    assert torch.equal(logits(folder), logits(hub.folder / OWNER / "llama-300"))


def test_one_type_of_gguf_is_fetched(fetch):
    folder = fetch(f"hf.co/{OWNER}/llama-GGUF:q8_0")
    (file,) = folder.glob("*.gguf")
    assert file.name == "llama-Q8_0.gguf"
    check_gguf(file, file.name)

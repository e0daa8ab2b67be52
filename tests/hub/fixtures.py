"""A small hub that this process and what it starts ask in place of the real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.hub_server import Hub
from tests.hub.models import write_files

CONFIG = """{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
  "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
  "head_dim": 16
}"""
FILES = {"config.json": CONFIG, "tokenizer.json": "{}", "model.safetensors": 2**20}


@pytest.fixture
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a hub: acme/tiny, acme/other, acme/tiny-GGUF; acme/strange, of no known family."""
    folder = tmp_path / "repositories"
    for name in ("tiny", "other"):
        write_files(folder / "acme" / name, FILES)
    gguf = {"config.json": CONFIG, "tiny-Q8_0.gguf": 1000, "tiny-Q4_K_M.gguf": 999}
    write_files(folder / "acme/tiny-GGUF", gguf)
    write_files(folder / "acme/strange", {**FILES, "config.json": '{"model_type": "perceptron"}'})
    with Hub(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        monkeypatch.setenv("NO_PROXY", "*")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # runners.jobs sets both
            monkeypatch.delenv(name, raising=False)
        yield hub

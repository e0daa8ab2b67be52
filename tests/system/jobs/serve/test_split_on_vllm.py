"""vLLM itself, divided: run where an interpreter has it, on a processor or on GPUs.

``SLIPWAY_VLLM_PYTHON`` names one with vllm 0.32.0 (or its build for processors), nixl, and what
the environment ``vllm`` pins for a job; without it there is nothing here to run.
"""

import json
import os
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.serve import EngineOptions, PhaseSplit, key_hash
from tests.system.jobs.serve.serving import KEY, Endpoint, complete, ended, until

PYTHON = os.environ.get("SLIPWAY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SLIPWAY_VLLM_PYTHON names no interpreter with vLLM"),
]
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PROMPTS = ("import os\n", "def f(x):\n    return", "for each in range(10): print(each) " * 12)
MOVED = 'vllm:nixl_bytes_transferred_sum{slipway_engine="decode-1"'


@pytest.fixture(scope="module")
def model(host, base) -> FolderModel:
    """A model of heads that vLLM has kernels for, with the tokens of the tiny trained one."""
    folder = host.path / "models" / "heads-of-64"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=512, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    return FolderModel(path=folder.name)


@pytest.fixture
def start(host, model):
    def serving(name: str, options: EngineOptions) -> Iterator[Endpoint]:
        spec = ServeSpec(
            model=model, engine="vllm", engine_options=options, weight_dtype="fp32",
            max_concurrency=4, max_length=512, key_hashes=(key_hash(KEY),),
        )  # fmt: skip
        folder = host.attempt(name, spec)
        with (folder / "events.jsonl").open("ab") as events:
            process = subprocess.Popen(
                [PYTHON, "-m", "runners.jobs.serve.vllm", str(folder)],
                env={**host.environment(), **ENV, "SLIPWAY_EVENT_FD": str(events.fileno())},
                pass_fds=[events.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
        return ended(Endpoint(host, folder, process, KEY))

    return serving


def texts(endpoint: Endpoint) -> list[str]:
    client = endpoint.client()
    return [complete(client, each, max_tokens=16).choices[0].text for each in PROMPTS]


def moved(endpoint: Endpoint) -> float:
    """Return the bytes of caches that travelled, by vLLM's own count."""
    page = endpoint.get("/metrics").text.splitlines()
    return sum(float(each.split()[-1]) for each in page if each.startswith(MOVED))


def test_a_divided_vllm_writes_what_a_whole_one_writes_and_its_caches_travel(start):
    with start("vllm-whole", EngineOptions()) as endpoint:
        whole = texts(endpoint)

    with start("vllm-split", EngineOptions(split=PhaseSplit(), lookup_tokens=4)) as endpoint:
        assert texts(endpoint) == whole
        until(lambda: moved(endpoint) > 100_000, "no cache travelled")
        client = endpoint.client()
        assert len(complete(client, PROMPTS[0], n=2, temperature=0.8).choices) == 2
        until(lambda: endpoint.figure("slipway_output_tokens_total") >= 3 * 16 + 2 * 12, "tokens")

        reader = min(psutil.Process(endpoint.process.pid).children(), key=lambda each: each.pid)
        reader.kill()
        until(lambda: endpoint.get("/health").status_code == 503, "nobody noticed")
        until(lambda: endpoint.get("/health").status_code == 200, "no restart")
        assert texts(endpoint) == whole

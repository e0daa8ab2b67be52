"""The docs page of the command line names what there is, and its examples work."""

import json
import re
from pathlib import Path
from typing import get_args

from planner.catalog.devices import get_device, list_instances
from planner.catalog.engines import engine_name
from planner.catalog.gguf import packed_format
from planner.catalog.models import get_entry
from planner.exports.registry import FORMATS
from planner.imports import import_table, read_paste
from planner.imports.documents import MOST_ALIASES, MOST_DEPTH, MOST_VALUES
from planner.imports.paste import MOST_CHARACTERS
from planner.specs.base import read_quantization
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import InverseQuestion
from planner.workload.cluster import resolve_cluster

PAGE = (Path(__file__).parents[2] / "templates" / "docs" / "planner.md").read_text("utf-8")
EXAMPLES = [json.loads(line) for line in re.findall(r"^\{.*\}$", PAGE, re.MULTILINE)]


def test_the_page_counts_the_offers_names_every_format_and_question_and_has_examples():
    offers = list_instances()
    providers = {offer.provider for offer in offers}
    assert f"{len(offers)} offers of {len(providers)} providers" in PAGE
    wrong = [name for name in (*FORMATS, *get_args(InverseQuestion)) if f"`{name}`" not in PAGE]
    assert not wrong, wrong
    assert len(EXAMPLES) == 3


def test_the_pages_clusters_are_ones_that_the_planner_takes():
    for example in EXAMPLES:
        (value,) = example.values()
        for one in value if isinstance(value, list) else [value]:
            cluster = resolve_cluster(ClusterSpec.model_validate(one))
            assert cluster.device.price_usd_per_hour > 0, example


def test_the_pages_import_is_what_the_command_prints():
    (text, printed) = re.findall(
        r"^\$ python -m planner import <<'END'\n(.*?)^END\n(.*?)^```",
        PAGE,
        re.DOTALL | re.MULTILINE,
    )[0]
    assert import_table(read_paste(text)) == printed
    assert f"| {MOST_CHARACTERS:,} characters |" in PAGE
    limits = f"{MOST_DEPTH} levels, {MOST_VALUES:,} values with aliases counted, {MOST_ALIASES} al"
    assert limits in PAGE


def test_every_name_that_the_page_gives_is_read():
    for name, meant in (
        ("NousResearch/Llama-2-7b-chat-hf", lambda n: get_entry(n).id == "meta-llama/Llama-2-7b"),
        ("NVIDIA H100 80GB HBM3", lambda n: get_device(n).id == "h100-sxm5-80gb"),
        ("Tesla T4", lambda n: get_device(n).id == "t4"),
        ("TensorRT-LLM", lambda n: engine_name(n) == "tensorrt_llm"),
        ("Megatron-LM", lambda n: engine_name(n) == "megatron"),
        ("gptq-int4 g128", lambda n: read_quantization(n)["group_size"] == 128),
        ("bnb.nf4-dq", lambda n: read_quantization(n)["quantization"] == "nf4"),
        ("int4 (awq g128)", lambda n: read_quantization(n)["quantization"] == "awq"),
        ("gguf:3.9", lambda n: packed_format(n).linear_bits == 3.9),
        ("exl2:4.25", lambda n: packed_format(n).linear_bits == 4.25),
    ):
        assert f"`{name}`" in PAGE, (name, meant)
        assert meant(name), (name, meant)

"""The rows of the serving engines: what each claims is there, and what it lacks is refused."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from planner.catalog.engines import DEFAULT_ENGINE, engines_by_work
from runners.environments.builder import SHIPPED, read_pins
from runners.host.preflight_weights import WORDS
from runners.jobs.serve.relayed.backend import EngineAdapter
from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.engines import (
    DEVICE_WORDS,
    ENGINES,
    FEATURES,
    OWN,
    ROWS,
    EngineName,
    in_environment,
    listed,
    names,
    needing_gpu,
    running_on,
    serving,
    titles,
    with_feature,
)
from runners.jobspec.request_options import NEUTRAL
from runners.jobspec.serve import FIELD_FEATURES
from runners.launchers.launch import render_argv

DOCS = (Path(__file__).parents[2] / "templates" / "docs" / "endpoints.md").read_text("utf-8")
MODEL = FolderModel(path="/models/one")
# A value of each field that asks for a feature; engine_options stand for themselves.
ASKED = {
    "enforce_eager": True,
    "adapters": [{"name": "a", "adapter": {"source": "folder", "path": "/models/a"}}],
    "engine_options": {},
    "engine_options.has_prefix_cache": False,
    "engine_options.draft": {"model": {"source": "folder", "path": "/models/d"}},
    "engine_options.lookup_tokens": 3,
    "engine_options.split": {},
}


def asking(path: str) -> dict[str, object]:
    """Return the fields of a spec in which one field, by its path, is set."""
    part, _, name = path.partition(".")
    return {part: {name: ASKED[path]} if name else ASKED[path]}


def test_an_engine_has_a_row_and_a_row_names_what_exists(tmp_path):
    assert tuple(ENGINES) == get_args(EngineName)
    assert ENGINES[OWN].environment is None
    planned = {*engines_by_work(training=False), DEFAULT_ENGINE}
    for each in ROWS:
        assert each.planned_as in planned, each
        assert importlib.util.find_spec(f"{each.module}.__main__"), each
        assert each.request_options <= set(NEUTRAL), each
        assert set(each.memory_log) <= set(WORDS), each
        assert each.devices <= set(DEVICE_WORDS), each
        assert bool(each.prompt_reuse) is ("prefix_caching" not in each.features), each
        argv = render_argv(ServeSpec(model=MODEL, engine=each.name), tmp_path)
        assert argv[-2] == each.module, each
        if each.environment:
            pins = read_pins(SHIPPED / f"{each.environment}.txt")
            assert {*each.packages} & {line.partition("==")[0] for line in pins.packages}, each
            assert (pins.cuda is not None) is (
                each in needing_gpu() or each.cpu_environment is not None
            ), each


def test_a_feature_belongs_to_an_engine_and_its_field_is_refused_by_the_others():
    assert set(FIELD_FEATURES.values()) == set(FEATURES)
    assert FIELD_FEATURES.keys() == ASKED.keys()
    for path, feature in FIELD_FEATURES.items():
        having = with_feature(feature)
        assert having, feature
        for each in ROWS:
            fields = {"model": MODEL, "engine": each.name, **asking(path)}
            if each in having:
                assert ServeSpec.model_validate(fields).engine == each.name, (path, each.name)
                continue
            words = f"is not supported by the engine {each.name}; leave it out, or choose"
            with pytest.raises(ValidationError, match=words) as caught:
                ServeSpec.model_validate(fields)
            message = str(caught.value)
            has_options = "parallel_sizes" in each.features
            named = path if has_options else path.partition(".")[0]
            wanted = names(with_feature(FIELD_FEATURES[named]), "or")
            assert f"{named} {words} {wanted}" in message, (path, each.name)


def test_an_engine_that_splits_its_phases_says_how_each_part_is_started():
    for each in ROWS:
        if importlib.util.find_spec(f"{each.module}.adapter") is None:
            continue
        adapters = [
            one
            for one in vars(importlib.import_module(f"{each.module}.adapter")).values()
            if isinstance(one, type)
            and issubclass(one, EngineAdapter)
            and one is not EngineAdapter
        ]
        assert [one.title for one in adapters] == [each.title]
        is_split = adapters[0].part_command is not EngineAdapter.part_command
        assert is_split is ("disaggregation" in each.features), each


def test_the_docs_print_which_engine_has_which_feature():
    head = f"| Field of the job's spec | {' | '.join(each.title for each in ROWS)} |"
    _, found, rest = DOCS.partition(head)
    assert found
    rows = re.findall(
        r"^\| .*?\(`([\w.]+)`.*?\) \| (.*) \|$", rest.partition("\n\n")[0], re.MULTILINE
    )
    printed = {
        path: tuple(
            each for each, cell in zip(ROWS, cells.split(" | "), strict=True) if cell == "yes"
        )
        for path, cells in rows
    }
    assert printed == {path: with_feature(feature) for path, feature in FIELD_FEATURES.items()}


def test_sentences_list_the_engines_of_the_rows():
    own, llama, vllm, sglang = (
        ENGINES[name] for name in ("slipway", "llamacpp", "vllm", "sglang")
    )
    assert titles((vllm, sglang)) == "vLLM and SGLang"
    assert names((own, vllm, sglang), "or") == "slipway, vllm or sglang"
    assert llama in serving("gguf")
    assert vllm not in serving("gguf")
    assert {own, llama} <= {*running_on("cpu")}
    assert {own, vllm} <= {*running_on("nvidia")}
    assert sglang not in running_on("cpu", "amd")
    assert own.device_words == "processors, NVIDIA GPUs or AMD GPUs"
    assert sglang.device_words == "NVIDIA GPUs"
    assert names(in_environment("llamacpp")) == "llamacpp"
    assert in_environment("vllm") == in_environment("vllm_cpu") == (vllm,)
    assert in_environment("oneshot") == ()
    assert listed(["a", "b", "c"], "or") == "a, b or c"

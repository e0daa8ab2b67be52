"""Any text gives a draft or an error in words; nothing of it is run, and secrets are not kept."""

import contextlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.imports import read_paste
from planner.imports.draft import TITLES
from planner.imports.paste import MOST_CHARACTERS
from planner.imports.shell import ALONE, option_table
from planner.specs.base import PlannerError
from tests.planner.imports.test_import_commands import LINES, LLAMA
from tests.planner.imports.test_import_files import FILES

TABLES = sorted(Path("planner/catalog/data/tool_options").glob("*.toml"))
BOMB = "a: &a [x, x, x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}, *{before}, *{before}, *{before}, *{before}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
# A text, and words of its refusal: the value, the limit and the way out.
REFUSED = {
    "": "empty: paste vllm serve",
    "# only a comment": "empty",
    "x" * (MOST_CHARACTERS + 1): "at most 65,536 are read",
    "ls -la /": "no command of a known tool: paste vllm serve",
    "vllm\x00serve": "control character",
    "vllm serve $(cat model.txt)": "is never run; write the value itself",
    "vllm serve `cat model.txt`": "is never run",
    f"vllm serve '{LLAMA}": "the quote ' before",
    f'bash -c "vllm serve {LLAMA} -tp \'2"': "is not closed",
    "python manage.py runserver --insecure": "no command of a known tool",
    "llamafactory-cli webui": "has no settings: paste its file",
    "llamafactory-cli train examples/lora.yaml": "paste the content of the file",
    "accelerate launch -m axolotl.cli.train my.yml": "paste the content of the file",
    "torchrun --nproc_per_node 3 pretrain_gpt.py --tensor-model-parallel-size 2": "multiple of",
    "base_model: a\nbase_model: b\n": "line 2: the key 'base_model' stands there twice",
    "base_model: [\n": "line 2",
    "base_model: &x [*x]\n": "contains itself",
    "base_model: x\n? [a]\n: 1\n": "a list or a mapping",
    "base_model: " + "[" * 20 + "]" * 20: "deeper than 16 levels",
    "base_model: !!python/object/apply:os.system [ls]\n": "YAML is not read",
    BOMB: "aliases",
    "base_model: x\nsequence_len: 0x" + "f" * 5000: "64 bits",
    "one: 1\ntwo: 2\n": "no known tool has a file with the keys one, two",
    "services: {llm: {image: vllm}}\n": "no container of the file has a command",
    "--- \n- a\n": "the YAML has no mapping of settings",
    "a: 1\n---\n" * 40: "more than 32 documents",
    "base_model: 2026-99-99\n": "YAML is not read: a value cannot be read",
    '{"zero_optimization": {}, "data_types": {"grad_accum_dtype": "int7"}}': "gradient_dtype is",
    "base_model: " + "a" * 600: "at most 512 are a name or a path",
    "base_model: x\n" + "".join(f"k{at}: 1\n" for at in range(1001)): "at most 1,000 are read",
    "axolotl train": "paste the content of the file",
    '{"model_type": "llama"': "not valid JSON",
    '{"model_type": "llama", "model_type": "x"}': "stands twice",
    '{"model_type": "llama", "hidden_size": NaN}': "no number of JSON",
    '{"a": ' * 40 + "1" + "}" * 40: "deeper than 16 levels",
    '{"model_type": "llama"}': "lacks",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text[:40]))
def test_a_text_is_refused_in_words(text):
    with pytest.raises(PlannerError) as refused:
        read_paste(text)
    assert REFUSED[text] in str(refused.value)
    assert len(str(refused.value)) < 700


# A text, the source of a setting in it whose value is outside its limits, and words of its reason.
LEFT_OUT = {
    f"vllm serve {LLAMA} -tp four": (
        "-tp four",
        "'four' is not used: it must be a whole number from 1 to 65,536",
    ),
    f"vllm serve {LLAMA} -tp 0": ("-tp 0", "'0' is not used: it must be a whole number from 1"),
    f"vllm serve {LLAMA} -tp": ("-tp", "it has no value: vLLM takes one"),
    f"vllm serve {LLAMA} --gpu-memory-utilization 1.5": (
        "--gpu-memory-utilization 1.5",
        "a number from 0.01 to 1",
    ),
    f"vllm serve {LLAMA} --speculative-config '{{'": (
        "--speculative-config {",
        "a JSON object such as",
    ),
    "accelerate launch --num_processes 3 --num_machines 2 x.py": (
        "--num_processes 3",
        "a multiple of the 2 machines",
    ),
    "base_model: x\nmicro_batch_size: true\n": ("micro_batch_size: true", "a whole number from 1"),
    "base_model: x\nfsdp: full_shard\nfsdp_config: '{'": (
        "fsdp_config: {",
        "a JSON object such as",
    ),
    '{"zero_optimization": {"offload_param": {"device": "tape"}}}': (
        "zero_optimization.offload_param.device: tape",
        "must be none, cpu or nvme",
    ),
    "torchrun pretrain_gpt.py --data-parallel-sharding-strategy x": (
        "--data-parallel-sharding-strategy x",
        "no_shard, optim,",
    ),
    "accelerate launch --mixed_precision x x.py": (
        "--mixed_precision x",
        "it must be no, fp16, bf16 or fp8",
    ),
    f"sglang serve {LLAMA} --tp 3 --attn-dp-size 2": (
        "--tp 3",
        "a multiple of the 2 attention ranks",
    ),
    f"vllm serve {LLAMA} --dtype int3": ("--dtype int3", "auto, half, float16"),
    f"torchrun x.py --bf16=maybe --model_name_or_path {LLAMA}": (
        "--bf16=maybe",
        "it must be true or false",
    ),
}


@pytest.mark.parametrize("text", LEFT_OUT, ids=lambda text: repr(text[:40]))
def test_a_value_outside_its_limits_is_left_out_and_the_rest_is_read(text):
    source, words = LEFT_OUT[text]
    draft = read_paste(text)
    (item,) = (each for each in draft.ignored if each.source == source)
    assert words in item.reason
    assert any(each.startswith(f"{source}: ") for each in draft.assumptions)


PIECES = st.sampled_from(
    [*LINES, *(text for text, _ in FILES.values()), "'", '"', "`", "$(", "$((", "\\", "\n", "<<X",
     "{", "}", "[", "]", ": ", "- ", "&a ", "*a", "#", "|", ";", "--", "=", "-1", "1e400", "~",
     "vllm serve", "!!binary ", "<<: ", "\u2028", "0x1", "2026-01-01", ".inf", "null"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.text(max_size=8), max_size=8), st.integers(0, 400))
def test_no_text_raises_anything_but_an_error_of_the_planner(pieces, cut):
    text = "".join(pieces)
    for each in (text, text[cut:], text[:cut]):
        with contextlib.suppress(PlannerError):
            read_paste(each).model_dump_json()


def test_a_pasted_text_is_not_run(tmp_path):
    mark = tmp_path / "mark"
    draft = read_paste(f"touch {mark}; vllm serve {LLAMA} | tee {mark} && echo $(touch {mark})")
    assert draft.model == LLAMA
    assert not mark.exists()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_an_option_of_a_tool_stands_in_one_group_and_an_alias_leads_to_one(path):
    table = tomllib.loads(path.read_text())
    groups = [group.get(kind, []) for group in table["options"]
              for kind in ("values", "lists", "switches")]  # fmt: skip
    names = [name for group in groups for name in group]
    assert sorted(set(names)) == sorted(names)
    assert [name for name, target in table.get("aliases", {}).items() if target not in names] == []
    assert [name for name in table.get("aliases", {}) if name in names] == []
    assert table["source"]
    assert all(group.get("reason", "-") for group in table["options"])


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        ("vllm", f"vllm serve {LLAMA}"),
        ("sglang", f"sglang serve {LLAMA}"),
        ("llama_cpp", "llama-server -m Llama-3.1-8B-Q8_0.gguf"),
        ("tensorrt_llm", f"trtllm-serve {LLAMA}"),
        ("torchrun", "torchrun X train.py"),
        ("accelerate", "accelerate launch X train.py"),
        ("deepspeed", "deepspeed X train.py"),
        ("megatron", "torchrun pretrain_gpt.py"),
        ("transformers", "trl sft"),
        ("aiperf", f"aiperf profile -m {LLAMA}"),
    ],
)
def test_an_option_without_a_reason_in_the_table_is_read(tool, command):
    table = option_table(tool)
    unread = []
    for name in sorted(table.names - table.reasons.keys()):
        value = "" if name in table.switches else " cpu" if "device" in name else " 1"
        option = f"--{name}{value}"
        line = command.replace("X", option) if "X" in command else f"{command} {option}"
        try:
            draft = read_paste(line)
        except PlannerError:  # its value was read
            continue
        unread += [item.source for item in draft.ignored if item.reason == ALONE]
        assert draft.unknown == (), name
    assert unread == []


def test_every_kind_has_a_title_and_the_reader_loads_nothing_heavy():
    assert len(set(TITLES.values())) == len(TITLES)
    program = (
        "import sys, planner.imports; "
        "print([m for m in ('scipy', 'torch', 'django', 'celery') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

"""Each setting of a text stands in one list, and only what it means changes the draft.

Known-good texts of every tool get further settings at random: known and unknown ones, with odd
values. The seed is drawn anew on each run and stands in the message of a failure.
"""

import os
import random
import re
import secrets
import shlex
from functools import cache

import yaml

from planner.imports import read_paste
from planner.imports.draft import is_secret
from planner.imports.shell import option_table
from planner.imports.trainers import OBJECTIVES, PREFERENCE_ARGUMENTS
from planner.specs.base import PlannerError
from tests.planner.imports.test_import_commands import LLAMA, flat

# A command, and the table of its options.
COMMANDS = (
    (f"vllm serve {LLAMA} --tensor-parallel-size 2 --max-model-len 8192", "vllm"),
    (f"python -m sglang.launch_server --model-path {LLAMA} --tp 2", "sglang"),
    ("llama-server -m Llama-3.1-8B-Q8_0.gguf -c 8192 -np 2", "llama_cpp"),
    (f"trtllm-serve {LLAMA} --tp_size 2 --max_batch_size 16", "tensorrt_llm"),
    ((f"torchrun --nproc_per_node 8 train.py --model_name_or_path {LLAMA} --max_length 512 "
     "--per_device_train_batch_size 2"), "transformers"),
    (f"trl sft --model_name_or_path {LLAMA} --use_peft --max_length 512", "transformers"),
    ((f"deepspeed --num_gpus 4 src/train.py --stage sft --finetuning_type lora --cutoff_len 512 "
     f"--model_name_or_path {LLAMA} --per_device_train_batch_size 1"), "llama_factory"),
    (f"llamafactory-cli train --stage sft --finetuning_type lora --model_name_or_path {LLAMA}",
     "llama_factory"),
    (f"swift sft --model {LLAMA} --train_type lora --max_length 1024", "swift"),
    (("torchrun --nproc_per_node 8 pretrain_gpt.py --seq-length 512 --micro-batch-size 1 "
     "--global-batch-size 64"), "megatron"),
    ("torchrun --nproc_per_node 8 train.py --batch_size=12 --block_size=1024", "nanogpt"),
    (f"vllm bench serve --model {LLAMA} --request-rate 4", "vllm_bench"),
    (f"python -m sglang.bench_serving --model {LLAMA} --max-concurrency 8", "sglang_bench"),
    (f"aiperf profile -m {LLAMA} --concurrency 8 --osl 100", "aiperf"),
    (f"vllm run-batch -i in.jsonl -o out.jsonl --model {LLAMA}", "vllm_batch"),
    ("llama-quantize Llama-3.1-8B-F16.gguf out.gguf Q4_K_M", "llama_quantize"),
    (f"auto-round --model {LLAMA} --scheme W4A16", "auto_round"),
    ("mlx_lm.lora --model mlx-community/Qwen3-8B-4bit --train --batch-size 2", "mlx"),
)  # fmt: skip
# A file, and the table of its keys.
FILES = (
    (f"base_model: {LLAMA}\nadapter: lora\nsequence_len: 1024\nmicro_batch_size: 2\n", "axolotl"),
    ((f"model_name_or_path: {LLAMA}\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\n"
     "cutoff_len: 1024\n"), "llama_factory"),
    (f"model_name_or_path: {LLAMA}\nmax_length: 1024\nuse_peft: true\n", "transformers"),
)  # fmt: skip
ODD = (
    "0,5", "1.5", "-1", "0", "7", "64", "4k", "8K", "16GB", "1e3", "1_000", "key=value", "a.b=c",
    "true", "false", "auto", "none", "null", "bf16", "fp8", "cpu", "two words", "\u00bd", "\uff11",
    "99999999999999999", '{"a": 1}', "[1, 2]", "a/b.yaml", "$SIZE", "it's", "#5", "100%",
)  # fmt: skip
# Settings that decide how the others are read: the kind of work, its data, or a file beside the
# command.
DECIDE = frozenset({"model", "model_tag", "model_path", "config", "config_file", "dataset_name", "export_dir", "infer_backend", "input_file", "n_embd", "n_head",
                    "n_layer", "public_dataset", "seq_dist", "template",
                    *(name for name, method in PREFERENCE_ARGUMENTS.items() if method in OBJECTIVES)})  # fmt: skip
CASES = int(os.environ.get("SLIPWAY_IMPORT_CASES", "150"))


def sections(draft):
    return {"understood": draft.understood, "ignored": draft.ignored, "unknown": draft.unknown}


def places(draft, written):
    """Return the lists in which a setting stands, by its name as it was written."""
    pattern = re.compile(rf"(?<![\w.-]){re.escape(written)}(?![\w.-])")
    return [
        name
        for name, items in sections(draft).items()
        if any(pattern.search(each.source) for each in items)
    ]


def test_an_inserted_option_stands_in_one_list_and_changes_nothing_else():
    seed = secrets.randbits(32)
    rng = random.Random(seed)  # noqa: S311 - cases of a test
    wrong = []
    for _ in range(CASES):
        base, tool = rng.choice(COMMANDS)
        table = option_table(tool)
        name = (
            rng.choice(sorted(table.names)) if rng.random() < 0.85 else f"made_{rng.randrange(99)}"
        )
        written = "--" + (name.replace("_", "-") if rng.random() < 0.5 else name)
        if tool == "nanogpt":
            written = f"--{name}"
        if is_stated(base, name, table):
            continue
        value = rng.choice(ODD)
        shape = rng.random()
        if tool == "nanogpt" or shape < 0.4:
            words = f"{written}={shlex.quote(value)}"
        elif shape < 0.9 and not (value.startswith("-") and not value[1:].isdigit()):
            words = f"{written} {shlex.quote(value)}"
        else:
            words = written
        wrong += inserted(base, f"{base} {words}", written, seed)
    assert wrong == [], wrong[0]


def test_an_inserted_key_stands_in_one_list_and_changes_nothing_else():
    seed = secrets.randbits(32)
    rng = random.Random(seed)  # noqa: S311 - cases of a test
    wrong = []
    for _ in range(CASES):
        base, tool = rng.choice(FILES)
        table = option_table(tool)
        known = rng.random() < 0.85
        name = rng.choice(sorted(table.names)) if known else f"made_{rng.randrange(99)}"
        if is_stated(base, name, table):
            continue
        value = rng.choice([*ODD, "", None, True, False, 3, 0.5, ["q_proj", "v_proj"]])
        text = base + yaml.safe_dump({name: value}, allow_unicode=True)
        wrong += inserted(base, text, name, seed)
    assert wrong == [], wrong[0]


def is_stated(base, name, table):
    stated = {table.name_of(word.strip("-: ").split("=")[0].rstrip(":"))
              for word in base.split() if word.startswith("-") or word.endswith(":")}  # fmt: skip
    return name in stated | DECIDE


@cache
def read_base(text):
    return read_paste(text)


def inserted(base, text, written, seed):
    """Return what is wrong with the draft of a text that has one setting more than another."""
    before = read_base(base)
    try:
        after = read_paste(text)
    except PlannerError as error:
        return [] if error.message else [(seed, text, "an error without words")]
    found = places(after, written)
    if len(found) != 1:
        return [(seed, text, f"stands in {found}", sections(after))]
    if found == ["understood"]:
        return []
    changed = {
        name: (value, flat(after.request).get(name))
        for name, value in flat(before.request).items()
        if flat(after.request).get(name) != value
    } | {name: value for name, value in flat(after.request).items()
         if name not in flat(before.request)}  # fmt: skip
    # A setting that sets no limit takes its own default away.
    default = f"{written.lstrip('-').replace('_', '-')} "
    own = {each.field for each in before.understood
           if each.source.replace("_", "-").startswith(default) and "default" in each.source}  # fmt: skip
    changed = {name: pair for name, pair in changed.items() if name not in own or pair[1]}
    return [(seed, text, "changed", changed)] if changed else []


def test_a_repeated_option_counts_once_and_the_earlier_one_says_so():
    seed = secrets.randbits(32)
    rng = random.Random(seed)  # noqa: S311 - cases of a test
    for _ in range(60):
        base, tool = rng.choice(COMMANDS)
        table = option_table(tool)
        name = rng.choice(sorted(table.values))
        if is_stated(base, name, table) or is_secret(name):
            continue
        try:
            draft = read_paste(f"{base} --{name}=2 --{name}=4")
        except PlannerError:  # with the others of the text, it contradicts the devices
            continue
        for value in (2, 4):
            count = sum(
                f"--{name}={value}" in each.source.split()
                for items in sections(draft).values()
                for each in items
            )
            assert count >= 1, (seed, base, name, sections(draft))
            assert len(places(draft, f"--{name}={value}")) == 1, (seed, base, name, value)

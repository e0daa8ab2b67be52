"""What the tools' own parsers take, as they said once: options, their values, what excludes what.

``options.toml`` holds the options of a version with the values that its parser offers. The rules
here are those that a tool checks after it has read its options.
"""

import re
import shlex
import tomllib
from pathlib import Path

OPTIONS = tomllib.loads((Path(__file__).parent / "options.toml").read_text())
PROGRAMS = {
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server",
    "tensorrt_llm": "trtllm-serve",
    "llama_cpp": "llama-server",
    "megatron": "torchrun",
}
HERE = re.compile(r"cat > \S+ <<'END'\n.*?\nEND\n", re.DOTALL)
WHOLE = re.compile(r"-?\d+")


def commands(tool, text):
    """Return each command of a tool in a shell text, as words, without the files it writes."""
    lines = HERE.sub("", text.replace("\\\n", " ")).splitlines()
    return [shlex.split(line) for line in lines if line.strip().startswith(PROGRAMS[tool])]


def told(command):
    """Return the options of a command with their values, true where there is none."""
    found, name = {}, None
    for word in command:
        if word.startswith("--"):
            flag, is_joined, value = word.partition("=")
            found[flag.removeprefix("--")] = value if is_joined else True
            name = None if is_joined else flag.removeprefix("--")
        elif name and word != "$@":
            found[name], name = word, None
    return found


def refusals(tool, command):
    """Return what the tool would refuse of a command, in words."""
    table, found = OPTIONS[tool], told(command)
    launcher = OPTIONS["torchrun"]["options"] if tool == "megatron" else []
    unknown = [
        f"no option --{name}" for name in found if name not in {*table["options"], *launcher}
    ]
    values = table.get("values", {})
    wrong = [
        f"--{name} {value}: choose among {values[name]}"
        for name, value in found.items()
        if name in values and value not in values[name]
    ]
    numbers = [
        f"--{name} {value}: not a whole number"
        for name, value in found.items()
        if name in table.get("numbers", [])
        and not WHOLE.fullmatch(str(value))
        and value[:1] != "$"
    ]
    return [*unknown, *wrong, *numbers, *RULES.get(tool, lambda _: [])(found)]


def size(found, name, default=1):
    return int(found.get(name, default))


def sglang_rules(found):
    """The rules of sglang 0.5.23, sglang/srt/arg_groups: parallel, speculative and validation."""
    world, nodes = size(found, "tp-size") * size(found, "pp-size"), size(found, "nnodes")
    ranks, replicas = size(found, "attn-dp-size"), size(found, "dp-size")
    drafts = "speculative-algorithm" in found
    checks = {
        "ranks and replicas exclude each other": ranks == 1 or replicas == 1,
        "tp-size is a multiple of attn-dp-size": size(found, "tp-size") % ranks == 0,
        "the world is dealt evenly to the nodes": world % nodes == 0,
        "replicas stand on one node": replicas == 1 or nodes == 1,
        "a draft model takes no stages": not drafts or size(found, "pp-size") == 1,
        "a draft model takes no attention ranks": not drafts or ranks == 1,
        "each attention rank runs a request": (
            "max-running-requests" not in found or size(found, "max-running-requests") >= ranks
        ),
        "experts fill the tensor ranks at most": size(found, "ep-size") <= size(found, "tp-size"),
    }
    return [words for words, holds in checks.items() if not holds]


def vllm_rules(found):
    """The rules of vLLM 0.33, vllm/config/parallel.py and scheduler.py."""
    longest = int(found.get("max-model-len", 0))
    tokens = int(found.get("max-num-batched-tokens", longest or 1))
    world = (
        size(found, "tensor-parallel-size") * size(found, "pipeline-parallel-size")
        * size(found, "data-parallel-size")
    )  # fmt: skip
    checks = {
        "a world is dealt evenly to its nodes": world % size(found, "nnodes") == 0,
        "without chunks a batch holds the longest request": (
            "no-enable-chunked-prefill" not in found or tokens >= longest
        ),
        "a draft model takes no stages": (
            "speculative-config" not in found or size(found, "pipeline-parallel-size") == 1
        ),
        "a batch holds a token of every sequence": tokens >= size(found, "max-num-seqs"),
    }
    return [words for words, holds in checks.items() if not holds]


def megatron_rules(found):
    """The rules of Megatron-LM d98e8a6, megatron/training/arguments.py and core/optimizer."""
    tensor, context = (
        size(found, "tensor-model-parallel-size"), size(found, "context-parallel-size"),
    )  # fmt: skip
    sharded = "use-megatron-fsdp" in found
    experts, stages = (
        size(found, "expert-model-parallel-size"),
        size(found, "pipeline-model-parallel-size"),
    )
    cut = size(found, "expert-tensor-parallel-size", tensor)
    world = size(found, "nnodes") * size(found, "nproc-per-node")
    precise = "use-precision-aware-optimizer" in found
    optimizer = found.get("optimizer", "adam")
    groups = int(found.get("num-query-groups", found["num-attention-heads"]))
    checks = {
        "sharding has its own checkpoints": (found.get("ckpt-format") == "fsdp_dtensor")
        == sharded,
        "ranks of a mixture split the sequence": (
            tensor == 1 or "num-experts" not in found or "sequence-parallel" in found
        ),
        "experts and their columns are dealt evenly": world % (experts * cut * stages) == 0,
        "chunks need stages": "num-virtual-stages-per-pipeline-rank" not in found or stages > 1,
        "parameters are gathered beside gradients": (
            "overlap-param-gather" not in found
            or ("overlap-grad-reduce" in found and "use-distributed-optimizer" in found)
        ),
        "sharding has two optimisers": not sharded or optimizer in {"adam", "sgd"},
        "a precise optimiser is Adam": not precise or optimizer == "adam",
        "a precise optimiser is sharded": not precise or "use-distributed-optimizer" in found,
        "offloading needs the precise optimiser": "optimizer-cpu-offload" not in found or precise,
        "the sequence is cut into twice the context ranks": (
            context == 1 or int(found["seq-length"]) % (2 * context) == 0
        ),
        "positions reach the sequence": (
            int(found["max-position-embeddings"]) >= int(found["seq-length"])
        ),
        "key-value heads and tensor ranks divide": groups % tensor == 0 or tensor % groups == 0,
        "no two ways to name stages": (
            "pipeline-model-parallel-layout" not in found
            or "num-virtual-stages-per-pipeline-rank" not in found
        ),
    }
    return [words for words, holds in checks.items() if not holds]


def llama_cpp_rules(found):
    """The rules of llama.cpp b11434, src/llama-cparams.h, which its context checks."""
    narrow = found.get("cache-type-v", "f16") not in {"f16", "f32", "bf16"}
    checks = {
        "256 slots at most": size(found, "parallel") <= 256,
        "a quantised cache needs flash attention": not narrow or found.get("flash-attn") == "on",
    }
    return [words for words, holds in checks.items() if not holds]


RULES = {
    "llama_cpp": llama_cpp_rules,
    "megatron": megatron_rules,
    "sglang": sglang_rules,
    "vllm": vllm_rules,
}

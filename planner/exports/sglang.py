"""Export a serving plan as the command line of SGLang's server."""

from planner.exports.export import (
    MASTER,
    PORT,
    RANK,
    ExportCase,
    Format,
    Notes,
    servers_notes,
    servers_text,
    size_flags,
)
from planner.exports.vllm import (
    cache_notes,
    checkpoint_notes,
    format_flags,
    loading_flags,
    serving_notes,
)
from planner.specs.units import GIB

# Formats that SGLang makes of a 16-bit checkpoint while loading.
AT_LOAD = {"fp8": "fp8", "nf4": "bitsandbytes"}
CACHES = {"fp8": "fp8_e4m3"}


def sglang_arguments(case: ExportCase) -> list[str]:
    """Return SGLang's server with only the flags that the plan decides."""
    command = ["python", "-m", "sglang.launch_server", "--model-path"]
    command.append(case.checkpoint(AT_LOAD))
    command += loading_flags(case, AT_LOAD, "--tokenizer-path")
    formats = format_flags(case, AT_LOAD, CACHES)
    return [*command, *_layout(case), *formats, *_limits(case), *_extras(case)]


def _layout(case: ExportCase) -> list[str]:
    flags = size_flags(
        ("--tp-size", case.size("tensor") * case.attention_ranks),
        ("--pp-size", case.size("pipeline")),
        ("--dp-size", case.size("data") // servers(case)),
        ("--ep-size", case.size("expert")),
        ("--attn-dp-size", case.attention_ranks),
        ("--nnodes", server_nodes(case)),
    )
    if server_nodes(case) > 1:
        flags += ["--node-rank", RANK, "--dist-init-addr", f"{MASTER}:{PORT}"]
    return flags


def servers(case: ExportCase) -> int:
    """Return the number of servers of the plan; replicas of one server are on one node.

    Source: sglang 0.5.23, sglang/srt/arg_groups/parallel_hook.py (no replicas together with
    attention data parallelism, whose ranks ``--tp-size`` includes) and validation_hook.py (no
    replicas over several nodes).
    """
    if case.size("data") == 1 or (case.attention_ranks == 1 and case.nodes == 1):
        return 1
    replica = case.size("tensor") * case.size("pipeline")
    quotient, remainder = divmod(case.devices_per_node, replica)
    shares_node = case.attention_ranks == 1 and quotient and not remainder
    return case.size("data") // (quotient if shares_node else 1)


def server_nodes(case: ExportCase) -> int:
    """Return the nodes of one server."""
    if servers(case) == 1:
        return case.nodes
    devices = case.devices // servers(case)
    return -(-devices // case.plan.cluster.devices_per_node)


def drafts(case: ExportCase) -> bool:
    """Return whether SGLang supports the plan's draft model in its layout.

    Source: sglang 0.5.23, sglang/srt/arg_groups/speculative_hook.py and validation_hook.py.
    """
    plain = case.size("pipeline") == 1 and case.attention_ranks == 1
    return case.strategy.speculative is not None and plain


def _limits(case: ExportCase) -> list[str]:
    flags = ["--context-length", str(case.accepted_tokens)] if case.accepted_tokens else []
    if case.sequences_per_rank:
        # SGLang divides this number by the attention ranks, rounded down, and refuses a rank of 0.
        running = case.sequences_per_rank * case.attention_ranks
        flags += ["--max-running-requests", str(running)]
    tokens = case.strategy.max_batch_tokens
    if case.strategy.chunked_prefill is False:
        flags += ["--chunked-prefill-size", "-1"]
    elif tokens:
        # SGLang divides this size by the attention data-parallel ranks.
        flags += ["--chunked-prefill-size", str(tokens * case.attention_ranks)]
    if case.strategy.scheduler_recv_interval:
        flags += ["--scheduler-recv-interval", str(case.strategy.scheduler_recv_interval)]
    share = case.memory_share("sglang")
    return [*flags, *(["--mem-fraction-static", f"{share:g}"] if share else [])]


def _extras(case: ExportCase) -> list[str]:
    flags: list[str] = []
    if case.offload.weights_cpu:
        flags += ["--cpu-offload-gb", str(-(-case.offloaded_weight_bytes // GIB)).split(".")[0]]
    draft = case.strategy.speculative
    if draft and drafts(case):
        flags += ["--speculative-algorithm", "STANDALONE"]
        flags += ["--speculative-draft-model-path", draft.draft_model]
        flags += ["--speculative-num-steps", str(draft.tokens), "--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", str(draft.tokens + 1)]
    return flags


def sglang_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the command leaves to the user."""
    notes = [*serving_notes(case, "sglang", "SGLang"), *cache_notes(case, CACHES, "SGLang")]
    notes += checkpoint_notes(case, AT_LOAD)
    if case.attention_ranks > 1:
        notes.append("releases before 0.5.2x write it --dp-size N --enable-dp-attention")
    notes += servers_notes(case, servers(case))
    if case.strategy.speculative and not drafts(case):
        notes.append(
            "SGLang drafts with a model of its own neither over stages nor with attention "
            "data parallelism: the plan's draft is left out"
        )
    if case.size("context") > 1:
        notes.append("SGLang splits the context inside the tensor ranks only: it is left out")
    if server_nodes(case) > 1:
        notes.append("run it on every node, NODE_RANK counting from 0; MASTER_ADDR is the first")
    return tuple(notes)


def sglang_text(case: ExportCase) -> str:
    """Return the command, one option per line."""
    return servers_text(case, sglang_arguments(case), servers(case))


SGLANG = Format("sglang", "SGLang", "serve-sglang.sh", sglang_text, sglang_notes, at_load=AT_LOAD)

"""Read the command lines of vLLM, SGLang, llama.cpp and TensorRT-LLM into a serving question."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.cost.parameters import count_parameters
from planner.imports.documents import options_of, read_yaml
from planner.imports.draft import LARGEST_TOKENS, Draft, Option, shown
from planner.imports.models import add_gguf, add_model
from planner.imports.serving import (
    ServerDraft,
    add_cache_dtype,
    add_devices,
    add_draft_model,
    add_dtype,
    add_ggml_scaling,
    add_offload,
    add_quantization,
    add_rotary_scaling,
    add_servers,
    add_share,
    add_stated_cache,
    context_of,
    need_requests,
)
from planner.imports.shell import ignore_rest, ignore_words, read_options, source_of
from planner.specs.model import ModelSpec

# The patterns with which people keep all experts in host memory, as --cpu-moe does.
ALL_EXPERTS = re.compile(r"[\\.*]*(ffn_[\\.*]*_?)?exps[\\.*]*=CPU")
# Slots of a server that is given no number: they share the context as one pool.
# Source: ggml-org/llama.cpp, tools/server/server.cpp (b11434).
AUTO_SLOTS = 4
ALL_LAYERS = frozenset({"all", "auto", "-1", "-2"})
PREFIX = (
    "the engine reuses common prefixes by itself: state their share of the prompts in "
    "workload.prefix_share_ratio"
)
# ---------------------------------------------------------------------------
# vLLM
# ---------------------------------------------------------------------------


def read_vllm(draft: Draft, words: list[str], *, tool: str = "vllm") -> None:
    """Read the arguments of ``vllm serve`` or of its OpenAI-compatible server.

    ``tool`` is the table of options, of a command that has more of them.

    Source: vLLM 0.33, vllm/engine/arg_utils.py and vllm/entrypoints/openai/cli_args.py.
    """
    arguments = read_options(draft, words, tool)
    draft.request["engine"] = "vllm"
    server = ServerDraft(draft, arguments.options)
    named = server.take("model") or server.take("model_tag")
    positional = arguments.positional
    if named is None and positional:
        named = Option("model", positional[0].replace("\0", "$"), source_of(positional[0]))
        positional = positional[1:]
    ignore_words(draft, positional)
    if named is None:
        draft.need("model", "the command names none")
    else:
        server.spec = add_any_model(draft, named)
    add_quantization(server)
    add_dtype(server)
    add_stated_cache(server)
    ranks = _vllm_layout(server)
    server.put_whole("max_model_len", "workload.max_request_tokens")
    _add_concurrency(server, "max_num_seqs", ranks)
    server.put_whole("max_num_batched_tokens", "pins.max_batch_tokens")
    add_share(server, "gpu_memory_utilization")
    _vllm_extras(server)
    add_rotary_scaling(server)
    need_requests(draft)
    ignore_rest(draft, server.options, tool)


def add_any_model(draft: Draft, named: Option) -> ModelSpec | None:
    """Record a model that may be a GGUF file, by its name."""
    is_gguf = named.text.lower().endswith(".gguf") or "-gguf" in named.text.lower()
    return (add_gguf if is_gguf else add_model)(draft, named.source, named.text)


def _vllm_layout(server: ServerDraft) -> int:
    """Record the parallel sizes and the devices; return the ranks that batch requests each."""
    draft, options = server.draft, server.options
    sources = [options[name].source for name in VLLM_SIZES if name in options]
    tensor = server.size("tensor_parallel_size", "tensor_parallel_size")
    pipeline = server.size("pipeline_parallel_size", "pipeline_parallel_size")
    data_option = server.take("data_parallel_size")
    data = data_option.whole() if data_option else 1
    experts = server.take("enable_expert_parallel")
    is_sparse = server.spec.is_moe if server.spec else experts is not None
    if data_option:
        axis = "attention_data" if is_sparse else "data"
        draft.put(data_option.source, f"pins.{axis}_parallel_size", data)
    if experts and not is_sparse:
        draft.ignore(experts.source, "the model has no experts")
    elif experts and experts.is_on:
        draft.put(experts.source, "pins.expert_parallel_size", tensor * data)
    elif is_sparse:
        _without_expert_parallel(server, "--enable-expert-parallel")
    nodes, local = server.take("nnodes"), server.take("data_parallel_size_local")
    replica = tensor * pipeline
    per_node = replica * local.whole() if local else None
    for option in (nodes, local):
        sources += [option.source] if option else []
    server.nodes = nodes.whole() if nodes else None
    add_devices(server, ", ".join(sources) or "one device", replica * data, per_node)
    add_offload(server, "cpu_offload_gb", replica)
    return data


def _without_expert_parallel(server: ServerDraft, option: str) -> None:
    """Record that the ranks cut each expert of a sparse model: the tools' default."""
    if server.spec and server.spec.is_moe:
        server.draft.put(f"no {option} (off by default)", "pins.expert_parallel_size", 1)


VLLM_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _add_concurrency(server: ServerDraft, name: str, ranks: int) -> None:
    """Record the requests that a server runs at once as the load that it is planned for."""
    option = server.take(name)
    if option is not None:
        requests = option.whole(most=LARGEST_TOKENS)
        server.draft.put(option.source, "workload.concurrency", requests * ranks)


def _vllm_extras(server: ServerDraft) -> None:
    draft = server.draft
    chunked = server.take("enable_chunked_prefill")
    if chunked:
        draft.put(chunked.source, "pins.chunked_prefill", chunked.is_on)
    prefix = server.take("enable_prefix_caching")
    if prefix and prefix.is_on:
        draft.ignore(prefix.source, PREFIX)
    elif prefix:
        draft.put(prefix.source, "workload.prefix_share_ratio", 0.0)
    _vllm_speculation(server)
    server.ignore("config", "the file is not read: paste its settings themselves")


WITHOUT_DRAFT = "Slipway models speculation by a draft model, not this method"


def _vllm_speculation(server: ServerDraft) -> None:
    """Record a draft model, from the JSON or from the options that stand for its keys."""
    config, method = server.take("speculative_config"), server.take("spec_method")
    model = server.take("spec_model") or server.take("speculative_model")
    tokens = server.take("spec_tokens") or server.take("num_speculative_tokens")
    if config is not None:
        _vllm_speculative_config(server, config)
        return
    uses_draft = method is None or method.text == "draft_model"
    if model is not None and uses_draft and model.text not in {"[ngram]", "ngram"}:
        source = " ".join(each.source for each in (model, method, tokens) if each)
        add_draft_model(server, source, model.text, tokens.whole() if tokens else None)
        return
    for option in (method, model, tokens):
        if option is not None:
            server.draft.ignore(option.source, WITHOUT_DRAFT)


def _vllm_speculative_config(server: ServerDraft, option: Option) -> None:
    try:
        setting = json.loads(option.text)
    except (ValueError, RecursionError):
        setting = None
    if not isinstance(setting, dict):
        raise option.refusal('a JSON object such as {"model": …, "num_speculative_tokens": 4}')
    model, method = setting.get("model"), setting.get("method", "draft_model")
    if not isinstance(model, str) or method != "draft_model":
        server.draft.ignore(option.source, WITHOUT_DRAFT)
        return
    tokens = setting.get("num_speculative_tokens")
    count = None if tokens is None else replace(option, value=tokens).whole()
    add_draft_model(server, option.source, model, count)


# ---------------------------------------------------------------------------
# SGLang
# ---------------------------------------------------------------------------


def read_sglang(draft: Draft, words: list[str]) -> None:
    """Read the arguments of SGLang's server.

    Source: SGLang 0.5.23, sglang/srt/server_args.py and sglang/srt/arg_groups.
    """
    arguments = read_options(draft, words, "sglang")
    draft.request["engine"] = "sglang"
    server = ServerDraft(draft, arguments.options)
    named, positional = server.take("model_path"), arguments.positional
    if named is None and positional:  # sglang serve MODEL
        named = Option("model_path", positional[0].replace("\0", "$"), source_of(positional[0]))
        positional = positional[1:]
    ignore_words(draft, positional)
    if named is None:
        draft.need("model", "the command names none")
    else:
        server.spec = add_any_model(draft, named)
    add_quantization(server)
    add_dtype(server)
    add_stated_cache(server)
    data, attention = _sglang_layout(server)
    server.put_whole("context_length", "workload.max_request_tokens")
    _add_concurrency(server, "max_running_requests", data)
    chunk = server.take("chunked_prefill_size")
    if chunk and chunk.text.startswith("-"):
        draft.put(chunk.source, "pins.chunked_prefill", False)  # noqa: FBT003 - the field's value
    elif chunk:
        tokens = max(1, chunk.whole(most=LARGEST_TOKENS) // attention)
        draft.put(chunk.source, "pins.max_batch_tokens", tokens)
    add_share(server, "mem_fraction_static")
    server.put_whole("scheduler_recv_interval", "pins.scheduler_recv_interval")
    radix = server.take("disable_radix_cache")
    if radix:
        draft.put(radix.source, "workload.prefix_share_ratio", 0.0)
    _sglang_speculation(server)
    server.ignore("config", "the file is not read: paste its settings themselves")
    add_servers(server)
    add_rotary_scaling(server)
    need_requests(draft)
    ignore_rest(draft, server.options, "sglang")


def _sglang_layout(server: ServerDraft) -> tuple[int, int]:
    """Record the parallel sizes; return the replicas of the server, and its attention ranks."""
    draft = server.draft
    tensor, pipeline = server.take("tp_size"), server.take("pp_size")
    data, attention = server.take("dp_size"), server.take("attn_dp_size")
    shared, expert = server.take("enable_dp_attention"), server.take("ep_size")
    nodes = server.take("nnodes")
    ranks = tensor.whole() if tensor else 1
    replicas = data.whole() if data else 1
    attention_ranks = attention.whole() if attention else 1
    if shared and data and not attention:  # releases before 0.5.23
        attention = replace(data, source=f"{data.source} {shared.source}")
        attention_ranks, data, replicas = replicas, None, 1
    elif shared and not attention:
        draft.ignore(shared.source, "it has an effect together with --dp-size alone")
    elif shared:
        draft.ignore(shared.source, "the attention ranks are stated")
    if tensor:
        if ranks % attention_ranks:
            raise tensor.refusal(f"a multiple of the {attention_ranks} attention ranks")
        draft.put(tensor.source, "pins.tensor_parallel_size", ranks // attention_ranks)
    stages = pipeline.whole() if pipeline else 1
    for option, name, size in (
        (pipeline, "pipeline_parallel_size", stages),
        (data, "data_parallel_size", replicas),
        (attention, "attention_data_parallel_size", attention_ranks),
        (expert, "expert_parallel_size", expert.whole() if expert else 1),
    ):
        if option:
            draft.put(option.source, f"pins.{name}", size)
    if expert is None:
        _without_expert_parallel(server, "--ep-size")
    server.nodes = nodes.whole() if nodes else None
    used = [each.source for each in (tensor, pipeline, data, nodes) if each]
    devices = ranks * stages * replicas
    add_devices(server, ", ".join(used) or "one device", devices, None)
    add_offload(server, "cpu_offload_gb", ranks * stages)
    return replicas, attention_ranks


def _sglang_speculation(server: ServerDraft) -> None:
    algorithm = server.take("speculative_algorithm")
    model, steps = (
        server.take("speculative_draft_model_path"),
        server.take("speculative_num_steps"),
    )
    if model and algorithm and algorithm.text.upper() == "STANDALONE":
        count = steps.whole() if steps else None
        add_draft_model(server, model.source, model.text, count)
        return
    for option in (algorithm, model, steps):
        if option:
            server.draft.ignore(option.source, WITHOUT_DRAFT)


# ---------------------------------------------------------------------------
# llama.cpp
# ---------------------------------------------------------------------------


def read_llama_cpp(draft: Draft, words: list[str], *, answers_once: bool = False) -> None:
    """Read the arguments of ``llama-server``, or of ``llama-cli``, which answers one prompt.

    Source: llama.cpp b11434, common/arg.cpp and tools/server/README.md.
    """
    arguments = read_options(draft, words, "llama_cpp")
    draft.request["engine"] = "llama_cpp"
    server = ServerDraft(draft, arguments.options)
    ignore_words(draft, arguments.positional)
    repository, named = server.take("hf_repo"), server.take("model")
    file = server.take("hf_file")
    if named or (file and not repository):
        chosen = named or file
        server.spec = add_gguf(draft, chosen.source, chosen.text) if chosen else None
        for option in (repository, file):
            if option is not None and option is not chosen:
                draft.ignore(option.source, "another option names the file")
    elif repository:
        source = " ".join(each.source for each in (repository, file) if each)
        server.spec = add_gguf(draft, source, repository.text, file.text if file else "")
    else:
        draft.need("model", "the command names no GGUF file")
    _llama_devices(server)
    add_ggml_scaling(server)
    _llama_context(server, answers_once=answers_once)
    server.put_whole("batch_size", "pins.max_batch_tokens")
    _llama_cache(server)
    flash = server.take("flash_attn")
    if flash and flash.text.lower() == "auto":
        draft.ignore(flash.source, "auto: the engine's default is planned")
    elif flash:
        draft.put(flash.source, "pins.attention", "flash" if flash.is_on else "eager")
    _llama_speculation(server)
    add_servers(server)
    ignore_rest(draft, server.options, "llama_cpp")


def _llama_context(server: ServerDraft, *, answers_once: bool) -> None:
    """Record slots and context: slots share the context, in equal parts or as one pool."""
    draft = server.draft
    slots, context = server.take("parallel"), server.take("ctx_size")
    unified, predict = server.take("kv_unified"), server.take("n_predict")
    if answers_once:
        draft.put("one prompt", "workload.batch_size", 1)
        if predict and not predict.text.startswith("-"):
            draft.put(predict.source, "workload.output_tokens", predict.whole(most=LARGEST_TOKENS))
        else:
            draft.need("workload.output_tokens", "tokens of the answer (-n)")
        draft.need("workload.input_tokens", "tokens of the prompt")
        for option in (slots, context, unified):
            if option:
                draft.ignore(
                    option.source, "a batch of one prompt takes the context that it needs"
                )
        return
    is_auto = slots is None or slots.text == "-1"
    if slots is not None and not is_auto:
        count = slots.whole()
        draft.put(slots.source, "workload.concurrency", count)
    else:
        count = AUTO_SLOTS
        source = slots.source if slots else f"--parallel {AUTO_SLOTS} (the default)"
        draft.put(source, "workload.concurrency", count)
    if context and context.text != "0":
        tokens = context.whole(most=LARGEST_TOKENS)
        is_shared = unified.is_on if unified else is_auto
        longest = tokens if is_shared else tokens // count
        if server.spec is not None:
            longest = min(longest, context_of(server.spec, draft))
        is_pool = unified is not None and unified.is_on
        source = f"{context.source} {unified.source}" if unified and is_pool else context.source
        draft.put(source, "workload.max_request_tokens", max(1, longest))
    elif context:
        draft.ignore(context.source, "0: the model's own context is planned without it")
    if unified and not (context and context.text != "0" and unified.is_on):
        pool = "one pool of cache for all slots is how Slipway plans them"
        draft.ignore(unified.source, pool if unified.is_on else "each slot has its own part")
    if predict:
        draft.ignore(predict.source, "the longest answer; a plan needs the typical one")
    need_requests(draft)


def _llama_devices(server: ServerDraft) -> None:
    """Record the devices, how the layers are split over them, and the layers in host memory."""
    draft = server.draft
    split, mode = server.take("tensor_split"), server.take("split_mode")
    listed = server.take("device")
    header = draft.header
    in_header = header.devices // header.servers if header else 1
    devices = draft.value("cluster.devices_per_node") or in_header
    if header and devices > 1:
        add_devices(server, header.source, devices, None)
    if split:
        parts = [part for part in re.split(r"[,/;]", split.text) if part.strip()]
        used = [Option("", part, split.source, split.title).number(0, 1e9) for part in parts]
        devices = max(1, sum(share > 0 for share in used))
        draft.put(split.source, "cluster.devices_per_node", devices)
        if len({share for share in used if share}) > 1:
            reason = "Slipway splits layers by the speed of the devices, not by given shares"
            draft.ignore(split.source, reason)
    elif listed and listed.text.lower() != "none":
        devices = len([name for name in listed.text.split(",") if name.strip()]) or 1
        draft.put(listed.source, "cluster.devices_per_node", devices)
    elif listed:
        draft.ignore(listed.source, "none: everything runs on the CPU; choose one as the device")
    if mode:
        _llama_split(server, mode, devices)
    layers, experts = server.take("n_gpu_layers"), server.take("n_cpu_moe")
    all_experts = server.take("cpu_moe")
    tensors = server.options.get("override_tensor")
    if tensors and not all_experts and ALL_EXPERTS.fullmatch(tensors.text):
        all_experts = server.take("override_tensor")
    if all_experts or experts:
        _llama_experts(server, all_experts or experts, layers, is_all=all_experts is not None)
    elif layers:
        add_llama_layers(server, layers)


def _llama_split(server: ServerDraft, mode: Option, devices: int) -> None:
    axis = {"row": "tensor", "tensor": "tensor", "layer": "pipeline"}.get(mode.text.lower())
    if axis and devices > 1:
        server.draft.put(mode.source, f"pins.{axis}_parallel_size", devices)
    elif axis:
        reason = "the number of devices is not stated: pin the size once it is"
        server.draft.ignore(mode.source, reason)
    else:
        server.draft.ignore(mode.source, "none: one device")


def add_llama_layers(server: ServerDraft, option: Option) -> None:
    """Record the layers that are not on the device as a share of the weights in host memory."""
    draft, text = server.draft, option.text.lower()
    if text in ALL_LAYERS:
        draft.ignore(
            option.source, "all layers are on the device, as in a plan without offloading"
        )
        return
    count = option.whole(0, LARGEST_TOKENS)
    if count == 0:
        draft.ignore(option.source, "0: everything runs on the CPU; choose one as the device")
    elif server.spec is None:
        reason = "a plan offloads a share of the layers, and their number is not known"
        draft.ignore(option.source, reason)
    elif count > server.spec.num_hidden_layers:
        draft.ignore(
            option.source, "all layers are on the device, as in a plan without offloading"
        )
    else:
        layers = server.spec.num_hidden_layers + 1  # the output layer counts as one
        share = round(1 - count / layers, 3)
        draft.put(option.source, "pins.offload", {"weights_cpu": share})


def _llama_experts(
    server: ServerDraft, option: Option | None, layers: Option | None, *, is_all: bool
) -> None:
    """Record experts in host memory as a share of all weights, with the layers that are there.

    The option counts layers from the first, those without experts too.
    """
    spec = server.spec
    if option is None or spec is None or not spec.is_moe:
        if option is not None:
            reason = "the model has no experts" if spec else "the model's experts are not known"
            server.draft.ignore(option.source, reason)
        if layers:
            add_llama_layers(server, layers)
        return
    counts = count_parameters(spec)
    last = spec.num_dense_layers + spec.num_moe_layers
    moved = last if is_all else min(last, option.whole(0))
    with_experts = max(0, moved - spec.num_dense_layers)
    share = counts.experts / counts.total * with_experts / spec.num_moe_layers
    source = option.source
    on_device = _layers_on_device(layers, spec)
    if layers and on_device < 1 and with_experts == spec.num_moe_layers:
        share += (1 - share) * (1 - on_device)
        source = f"{layers.source} {source}"
    elif layers:
        server.draft.ignore(layers.source, "the experts in host memory decide the share")
    server.draft.put(source, "pins.offload", {"weights_cpu": round(share, 3)})


def _layers_on_device(option: Option | None, spec: ModelSpec) -> float:
    """Return the share of the layers on the device, the output layer among them."""
    if option is None or option.text.lower() in ALL_LAYERS:
        return 1.0
    return min(1.0, option.whole(0, LARGEST_TOKENS) / (spec.num_hidden_layers + 1))


def _llama_cache(server: ServerDraft) -> None:
    """Record the type of the cache, if keys and values have the same."""
    keys, values = server.options.get("cache_type_k"), server.options.get("cache_type_v")
    if keys and values and keys.text.lower() != values.text.lower():
        reason = "Slipway plans keys and values of one type: pin kv_cache_dtype"
        server.ignore("cache_type_k", reason)
        server.ignore("cache_type_v", reason)
        return
    if keys and values:
        add_cache_dtype(server, "cache_type_k")
        server.ignore("cache_type_v", "the type of the keys, which stands for both")
        return
    for name in ("cache_type_k", "cache_type_v"):
        server.ignore(name, "Slipway plans keys and values of one type: pin kv_cache_dtype")


def _llama_speculation(server: ServerDraft) -> None:
    kind, tokens = server.take("spec_type"), server.take("spec_draft_n_max")
    model, repository = server.take("spec_draft_model"), server.take("spec_draft_hf")
    named = model or repository
    if named and (kind is None or kind.text == "draft-simple"):
        reading = Draft(server.draft.kind)
        add_gguf(reading, named.source, named.text)
        name = reading.value("model") or named.text.rsplit("/", 1)[-1].removesuffix(".gguf")
        add_draft_model(server, named.source, name, tokens.whole() if tokens else None)
        return
    for option in (kind, model, repository, tokens):
        if option:
            server.draft.ignore(option.source, WITHOUT_DRAFT)


# ---------------------------------------------------------------------------
# TensorRT-LLM
# ---------------------------------------------------------------------------


OF_FREE_MEMORY = "of the memory that the weights leave, as TensorRT-LLM and its plan take it"


def read_tensorrt_llm(draft: Draft, words: list[str], files: dict[str, str]) -> None:
    """Read the arguments of ``trtllm-serve``, and its options file if the text has it.

    Source: TensorRT-LLM 1.3, tensorrt_llm/commands/serve.py and llmapi/llm_args.py.
    """
    arguments = read_options(draft, words, "tensorrt_llm")
    draft.request["engine"] = "tensorrt_llm"
    server = ServerDraft(draft, arguments.options)
    named, *rest = arguments.positional or [""]
    ignore_words(draft, rest)
    if named:
        server.spec = add_model(draft, source_of(named), named.replace("\0", "$"))
    else:
        draft.need("model", "the command names none")
    extra = server.take("extra_llm_api_options")
    settings: dict[str, Any] = {}
    if extra and extra.text in files:
        document = (read_yaml(files[extra.text]) or [None])[0]
        settings = document if isinstance(document, dict) else {}
    elif extra:
        draft.ignore(extra.source, "the file is not read: paste it above the command")
    is_shared = settings.get("enable_attention_dp") is True
    if "ep_size" not in server.options:
        _without_expert_parallel(server, "--ep_size")
    tensor, expert = server.take("tp_size"), server.size("ep_size", "expert_parallel_size")
    ranks = tensor.whole() if tensor else 1
    if tensor:
        axis = "attention_data" if is_shared else "tensor"
        draft.put(tensor.source, f"pins.{axis}_parallel_size", ranks)
    stages = server.size("pp_size", "pipeline_parallel_size")
    context = server.size("cp_size", "context_parallel_size")
    used = f"{ranks * stages * context} ranks, experts over {expert}"
    add_devices(server, used, ranks * stages * context, None)
    _add_concurrency(server, "max_batch_size", ranks if is_shared else 1)
    server.put_whole("max_num_tokens", "pins.max_batch_tokens")
    server.put_whole("max_seq_len", "workload.max_request_tokens")
    add_share(server, "kv_cache_free_gpu_memory_fraction", OF_FREE_MEMORY)
    _trtllm_settings(server, settings)
    add_servers(server)
    need_requests(draft)
    ignore_rest(draft, server.options, "tensorrt_llm")


def _trtllm_settings(server: ServerDraft, settings: dict[str, Any]) -> None:
    draft = server.draft
    cache = settings.get("kv_cache_config")
    cache = cache if isinstance(cache, dict) else {}
    speculation = settings.get("speculative_config")
    speculation = speculation if isinstance(speculation, dict) else {}
    fields: tuple[tuple[dict[str, Any], str, Callable[[Option], None]], ...] = (
        (settings, "enable_chunked_prefill",
         lambda o: draft.put(o.source, "pins.chunked_prefill", o.is_on)),
        (cache, "dtype", lambda o: _put_cache(server, o)),
        (cache, "enable_block_reuse",
         lambda o: draft.ignore(o.source, PREFIX) if o.is_on
         else draft.put(o.source, "workload.prefix_share_ratio", 0.0)),
        (cache, "free_gpu_memory_fraction", lambda o: _put_free_share(server, o)),
    )  # fmt: skip
    for mapping, name, put in fields:
        options = options_of({name: mapping[name]} if name in mapping else {})
        if name in options:
            put(options[name])
    rest = sorted(set(map(str, cache)) - {name for inside, name, _ in fields if inside is cache})
    for name in rest:
        draft.ignore(shown(f"kv_cache_config.{name}: {cache[name]}"), "Slipway does not model it")
    model, tokens = speculation.get("speculative_model"), speculation.get("max_draft_len")
    if isinstance(model, str) and speculation.get("decoding_type") == "Draft_Target":
        count = None if tokens is None else Option("max_draft_len", tokens, "").whole()
        add_draft_model(server, shown(f"speculative_model: {model}"), model, count)
    elif speculation:
        draft.ignore(shown(f"speculative_config: {speculation}"), WITHOUT_DRAFT)
    read = {"enable_chunked_prefill", "kv_cache_config", "speculative_config"}
    for name in sorted(set(map(str, settings)) - read - {"enable_attention_dp"}):
        draft.ignore(shown(name), "Slipway does not model it")


def _put_free_share(server: ServerDraft, option: Option) -> None:
    server.options["free_share"] = option
    add_share(server, "free_share", OF_FREE_MEMORY)


def _put_cache(server: ServerDraft, option: Option) -> None:
    server.options["kv_cache_dtype"] = option
    add_cache_dtype(server)

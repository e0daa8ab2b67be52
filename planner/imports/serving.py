"""What the command lines of servers share: formats, devices, offloading and speculation.

A server's largest batch becomes the concurrency of the workload, its longest context the longest
request; the lengths of typical requests are in no command line, so that a plan still needs them.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from planner.catalog.gguf import packed_format
from planner.catalog.models import stretched_context
from planner.cost.parameters import count_parameters
from planner.cost.weights import element_bytes, unquantised_dtype
from planner.imports.draft import LARGEST_TOKENS, Draft, Item, Option, Options, shown
from planner.imports.models import known_model
from planner.specs.base import DTYPES, PlannerError, read_quantization
from planner.specs.model import ModelSpec
from planner.specs.units import GIB

AUTO = frozenset({"auto", "none", "default", ""})
MODEL_DECIDES = "auto: the model's own is planned without it"
CHECKPOINT_DECIDES = "the checkpoint states its format itself"
# Formats that an engine makes of a 16-bit checkpoint while loading; see planner/exports.
AT_LOAD = {
    "fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8",
    "fp8_per_channel": "fp8",
    "mxfp8": "fp8",
    "nvfp4_per_token": "nvfp4",
    "nvfp4_online": "nvfp4",
    "int8_per_channel_weight_only": "int8",
    "experts_int8": "int8",
    "bitsandbytes": "nf4",
}
CHECKPOINT_METHODS = {
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), "awq"),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), "gptq"),
}
CACHE_DTYPES = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "fp8_per_token_head": "fp8",
    "mxfp8": "fp8",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
    "nvfp4": "nvfp4",
    # llama.cpp's types of blocks
    "f32": "fp32",
    "f16": "fp16",
    "q8_0": "int8",
    "q4_0": "int4",
    "q4_1": "int4",
    "iq4_nl": "nf4",
}
PLAIN_DTYPES = frozenset({"fp32", "bf16", "fp16"})
CHECKPOINT_FORMATS = frozenset({"fp8", "nvfp4", "int4", "int8", "mxfp4", "nf4", "ternary"})


@dataclass
class ServerDraft:
    """A server's command in reading: the draft, its options and the model's shape if known."""

    draft: Draft
    options: Options
    spec: ModelSpec | None = None
    nodes: int | None = None

    def take(self, name: str) -> Option | None:
        """Remove and return an option."""
        return self.draft.take(self.options, name)

    def size(self, name: str, field: str | None = None) -> int:
        """Return a parallel size, 1 by default, and record it as a pin."""
        option = self.take(name)
        if option is None:
            return 1
        size = option.whole()
        if field:
            self.draft.put(option.source, f"pins.{field}", size)
        return size

    def put_whole(self, name: str, field: str, most: int = LARGEST_TOKENS) -> int | None:
        """Record a whole number as a field of the request, and return it."""
        option = self.take(name)
        if option is None:
            return None
        if option.text.lower() in AUTO:
            self.draft.ignore(option.source, "the engine's default is planned without it")
            return None
        number = option.whole(most=most)
        self.draft.put(option.source, field, number)
        return number

    def ignore(self, name: str, reason: str) -> None:
        """Record an option that the plan does not use."""
        option = self.options.pop(name, None)
        if option is not None:
            self.draft.ignore(option.source, reason)


STRETCHES = (
    "Slipway does not model another rotary scaling: it stretches the context of {context:,} "
    "tokens to {stretched:,}, and the plan keeps to the model's own; paste the config.json with "
    "this rope_scaling to plan longer requests"
)
STRETCHING = frozenset({"yarn", "linear", "dynamic"})
SCALING_FIELDS = frozenset(
    {
        "factor", "original_max_position_embeddings", "rope_theta", "attention_factor",
        "beta_fast", "beta_slow",
    }
)  # fmt: skip
KEPT_OF_ROPE = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
# Options of vLLM and SGLang that change a model's config, or its rotary scaling alone.
CONFIG_CHANGES = ("rope_scaling", "hf_overrides", "json_model_override_args")


def add_rotary_scaling(server: ServerDraft) -> None:
    """Say what a rotary scaling stretches, and keep the longest request to the model's context."""
    if server.draft.kind == "vllm" and _take_scaling(server):
        return
    if server.spec is None:
        return
    context = server.spec.max_position_embeddings
    for name in CONFIG_CHANGES:
        option = server.options.get(name)
        scaling = _scaling_of(option) if option else None
        if option is None or scaling is None:
            continue
        try:
            stretched = stretched_context(context, scaling)
        except PlannerError as error:
            raise option.refusal(f"a rope_scaling of transformers ({error.message})") from error
        if stretched > context:
            _keep_to(server, server.take(name), stretched)


def add_ggml_scaling(server: ServerDraft) -> None:
    """Say what llama.cpp's own options of rotary scaling stretch.

    Source: ggml-org/llama.cpp, common/arg.cpp: --rope-scale expands the context by a factor.
    """
    option, original = server.options.get("rope_scale"), server.options.get("yarn_orig_ctx")
    kind = server.options.get("rope_scaling")
    if option is not None and not option.is_variable and kind is not None and kind.text == "yarn":
        _take_ggml(server)
        return
    if server.spec is None or option is None or option.is_variable:
        return
    context = server.spec.max_position_embeddings
    length = original.whole(0, LARGEST_TOKENS) if original and not original.is_variable else 0
    stretched = int((length or context) * option.number(0, 10_000))
    if stretched > context:
        _keep_to(server, server.take("rope_scale"), stretched)


GGML = {
    "rope_scale": "factor",
    "yarn_orig_ctx": "original_max_position_embeddings",
    "rope_freq_base": "rope_theta",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _take_ggml(server: ServerDraft) -> None:
    """Record YaRN as llama.cpp's options state it."""
    scaling: dict[str, Any] = {"rope_type": "yarn"}
    taken = [server.take("rope_scaling")]
    for name, field in GGML.items():
        option = server.take(name)
        if option is not None:
            is_whole = name == "yarn_orig_ctx"
            scaling[field] = (
                option.whole(1, LARGEST_TOKENS) if is_whole else option.number(0, 1e12)
            )
        taken.append(option)
    if scaling["factor"] > 1:
        _put_scaling(server, " ".join(each.source for each in taken if each), scaling)


def context_of(spec: ModelSpec, draft: Draft) -> int:
    """Return the context of a model in tokens, as the command stretches it."""
    context = spec.max_position_embeddings
    return stretched_context(context, draft.rope_scaling) if draft.rope_scaling else context


def _take_scaling(server: ServerDraft) -> bool:
    """Record a rotary scaling that is all that a command changes of the config, if it is one."""
    options = [server.options.get(name) for name in ("rope_scaling", "hf_overrides")]
    given = [each for each in options if each is not None and not each.is_variable]
    if len(given) != 1 or not (scaling := _scaling_alone(given[0])):
        return False
    theta = server.options.get("rope_theta")
    if theta is not None and not theta.is_variable:
        server.take("rope_theta")
        scaling = {"rope_theta": theta.number(1, 1e12), **scaling}
    option = server.take(given[0].name)
    sources = [each.source for each in (option, theta) if each is not None]
    _put_scaling(server, " ".join(sources), scaling)
    return True


def _put_scaling(server: ServerDraft, source: str, scaling: dict[str, Any]) -> None:
    server.draft.rope_scaling = scaling
    item = Item(source=source, field="model.rope_scaling", value=scaling)
    server.draft.understood.append(item)


def _scaling_alone(option: Option) -> dict[str, Any] | None:
    """Return the scaling of an option that changes nothing else of the model's config.

    What the model's rotary embedding has beside its scaling stays as its config has it.
    """
    scaling, found = _scaling_of(option), None
    with suppress(ValueError, RecursionError):
        found = json.loads(option.text)
    if scaling is None or not isinstance(found, dict):
        return None
    if option.name != "rope_scaling" and set(found) - {"rope_scaling", "rope_parameters"}:
        return None
    kind = scaling.get("rope_type") or scaling.get("type")
    stated = {name: value for name, value in scaling.items() if name not in KEPT_OF_ROPE}
    numbers = {name: value for name, value in stated.items() if name not in {"rope_type", "type"}}
    is_known = kind in STRETCHING and not set(numbers) - SCALING_FIELDS
    are_numbers = all(isinstance(each, int | float) for each in numbers.values())
    if not is_known or not are_numbers or numbers.get("factor", 1) <= 1:
        return None
    return {"rope_type": kind, **numbers}


def _scaling_of(option: Option) -> dict[str, Any] | None:
    """Return the rotary scaling of an option in JSON, itself or within a model's config."""
    try:
        found = json.loads(option.text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or option.name == "rope_scaling":
        return found if isinstance(found, dict) else None
    inner = found.get("rope_scaling") or found.get("rope_parameters")
    return inner if isinstance(inner, dict) else None


def _keep_to(server: ServerDraft, option: Option | None, stretched: int) -> None:
    """Limit the longest request to the model's own context, and say what stretches it."""
    if server.spec is None or option is None:
        return
    draft, context = server.draft, server.spec.max_position_embeddings
    longest = draft.value("workload.max_request_tokens")
    if longest is not None and longest > context:
        at = next(at for at, each in enumerate(draft.understood)
                  if each.field == "workload.max_request_tokens")  # fmt: skip
        source = draft.understood.pop(at).source
        draft.put(source, "workload.max_request_tokens", context)
    draft.assume(option.source, STRETCHES.format(context=context, stretched=stretched))


def add_dtype(server: ServerDraft) -> None:
    """Record the dtype of unquantised weights and activations."""
    option = server.take("dtype")
    if option is None:
        return
    if option.text in AUTO:
        server.draft.ignore(option.source, MODEL_DECIDES)
        return
    dtype = DTYPES.get(option.text.lower(), option.text.lower())
    if dtype not in PLAIN_DTYPES:
        raise option.refusal("auto, half, float16, bfloat16, float or float32")
    pins = server.draft.request.get("pins", {})
    stored = server.spec.weight_dtype if server.spec else None
    if "weight_dtype" in pins or "quantization" in pins or stored in CHECKPOINT_FORMATS:
        server.draft.ignore(option.source, "the format of the quantised weights decides")
    else:
        server.draft.put(option.source, "pins.weight_dtype", dtype)


def add_quantization(server: ServerDraft) -> None:
    """Record a format that the engine makes while loading, or the one of a checkpoint."""
    option = server.take("quantization")
    if option is None:
        return
    name = option.text.lower()
    stored = server.spec.weight_dtype if server.spec else None
    if server.spec and (server.spec.quantization or stored in CHECKPOINT_FORMATS):
        server.draft.ignore(option.source, CHECKPOINT_DECIDES)
    elif name in AT_LOAD:
        server.draft.put(option.source, "pins.weight_dtype", AT_LOAD[name])
    elif name in CHECKPOINT_METHODS:
        fields = read_quantization(CHECKPOINT_METHODS[name])
        server.draft.put(option.source, "pins.quantization", fields["quantization"])
    else:
        reason = CHECKPOINT_DECIDES if name else MODEL_DECIDES
        server.draft.ignore(option.source, reason)


# Checkpoints of ModelOpt, as NVIDIA publishes them, state an FP8 cache (kv_cache_quant_algo).
STATES_CACHE = "nvidia/"
LEFT_OUT = "--kv-cache-dtype left out"
NARROW_FLOATS = frozenset({"fp8", "nvfp4"})


def add_stated_cache(server: ServerDraft) -> None:
    """Record the dtype of the KV cache as a command of vLLM or SGLang states it.

    Without the flag these engines keep the cache in 16 bits unless the checkpoint states more,
    where a plan takes what benchmarks set on the device.
    """
    option = server.options.get("kv_cache_dtype")
    add_cache_dtype(server)
    spec = server.spec
    pins = server.draft.request.get("pins", {})
    weights = pins.get("weight_dtype") or (spec.weight_dtype if spec else None)
    is_open = option is None or option.text.lower() in AUTO
    if is_open and weights in NARROW_FLOATS and not (spec and spec.id.startswith(STATES_CACHE)):
        source = option.source if option else LEFT_OUT
        if option:  # understood after all
            server.draft.ignored.pop()
        server.draft.put(source, "pins.kv_cache_dtype", "bf16")


def add_cache_dtype(server: ServerDraft, name: str = "kv_cache_dtype") -> None:
    """Record the dtype of the KV cache from the option of that name."""
    option = server.take(name)
    if option is None:
        return
    text = option.text.lower()
    if text in AUTO:
        server.draft.ignore(option.source, MODEL_DECIDES)
        return
    dtype = CACHE_DTYPES.get(text) or DTYPES.get(text, text)
    if dtype in PLAIN_DTYPES | set(CACHE_DTYPES.values()):
        server.draft.put(option.source, "pins.kv_cache_dtype", dtype)
    else:
        server.draft.ignore(option.source, f"Slipway does not model a cache in {shown(text)}")


def add_share(server: ServerDraft, name: str, meaning: str = "") -> None:
    """Record the engine's share of memory, in the engine's own meaning, which may be told."""
    option = server.take(name)
    if option is not None:
        share = option.number(0.01, 1.0)
        server.draft.put(option.source, "pins.gpu_memory_utilization", share)
        if meaning:
            server.draft.ignore(option.source, meaning)


def weight_bytes(server: ServerDraft) -> float | None:
    """Return the bytes of all weights in the pinned or stored format, None if not known."""
    if server.spec is None:
        return None
    counts = count_parameters(server.spec)
    pins = server.draft.request.get("pins", {})
    dtype = pins.get("weight_dtype") or server.spec.weight_dtype or "bf16"
    try:
        packed = packed_format(pins.get("quantization"), server.spec)
    except PlannerError:
        packed = None
    element = packed.linear_bytes_per_element if packed else element_bytes(dtype)
    rest = counts.total - counts.layer_linear
    return counts.layer_linear * element + rest * element_bytes(unquantised_dtype(dtype))


def add_offload(server: ServerDraft, name: str, devices: int) -> None:
    """Record the GiB of weights per device in host memory as a share of all weights."""
    option = server.take(name)
    if option is None:
        return
    gib, total = option.number(0, 65_536), weight_bytes(server)
    if gib == 0:
        server.draft.ignore(option.source, "0: nothing is offloaded, as without it")
    elif total is None:
        reason = "a plan offloads a share of the weights, and their size is not known"
        server.draft.ignore(option.source, reason)
    else:
        share = min(1.0, round(gib * GIB * devices / total, 3))
        server.draft.put(option.source, "pins.offload", {"weights_cpu": share})


def add_devices(server: ServerDraft, source: str, devices: int, per_node: int | None) -> None:
    """Record the devices that a layout takes as the cluster."""
    draft = server.draft
    nodes = server.nodes or (devices // per_node if per_node and devices % per_node == 0 else None)
    if nodes:
        draft.put(source, "cluster.devices_per_node", per_node or max(1, devices // nodes))
        draft.put(source, "cluster.nodes", nodes)
    elif devices <= LARGEST_NODE:
        if devices > 1:
            draft.put(source, "cluster.devices_per_node", devices)
    else:
        draft.need(
            "cluster.devices_per_node", f"the layout takes {devices} devices: how many a node"
        )
        draft.need("cluster.nodes", f"the nodes of these {devices} devices")


LARGEST_NODE = 8


def add_draft_model(server: ServerDraft, source: str, model: str, tokens: int | None) -> None:
    """Record speculative decoding with a draft model."""
    setting: dict[str, Any] = {"draft_model": model}
    if tokens is not None:
        setting["tokens"] = tokens
    server.draft.put(source, "pins.speculative", setting)
    if known_model(model) is None:
        name = "pins.speculative.draft_model"
        server.draft.need(name, f"{shown(model)} is not in the catalog; choose one that is")


def add_servers(server: ServerDraft) -> None:
    """Record the servers of an export as replicas, with their requests and devices together.

    The command of an export is that of one of its servers; its header has their number.
    """
    draft, header = server.draft, server.draft.header
    if header is None or header.servers == 1:
        return
    source = f"{header.servers} servers"
    data = draft.value("pins.data_parallel_size") or 1
    draft.put(source, "pins.data_parallel_size", data * header.servers)
    requests = draft.value("workload.concurrency")
    if requests:
        draft.put(source, "workload.concurrency", requests * header.servers)
    if header.devices // header.nodes <= LARGEST_NODE:
        draft.put(header.source, "cluster.devices_per_node", header.devices // header.nodes)
        draft.put(header.source, "cluster.nodes", header.nodes)
    else:
        draft.need("cluster.nodes", f"the nodes of {header.devices} devices")


def need_requests(draft: Draft) -> None:
    """Record that a plan needs the lengths of typical requests."""
    draft.need("workload.input_tokens", "tokens of a typical prompt; no server's command has them")
    draft.need("workload.output_tokens", "tokens of a typical answer")

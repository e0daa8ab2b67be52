"""Descriptions of the fields of requests that come from the planner and from the wizard.

The planner's specs name units in their fields and say the rest in their docstrings; the OpenAPI
document says it field by field. ``openapi.complete`` adds each to a field that has none.
"""

from typing import Any

_DTYPE = "Such as bf16, fp16, fp8, int8 or int4; left out: chosen by the planner"
_RANKS = "Ranks, 1 or more; left out: chosen by the planner"
_RATE = "In bytes per second; left out: the catalog's"
_SHARE = "Share from 0 to 1"
_DEVICE = "Id of a device of the catalog, such as h100-sxm, or the fields of one"
_QUESTION = {
    "id": "The caller's own mark of the question, repeated in the answer",
    "model": "Id of the catalog, a config.json of Hugging Face, or the fields of a model's shape",
    "cluster": "The hardware",
    "workload": "The work; its “kind” says which of serve, generate, train and compress",
    "engine": "Engine that runs it, such as vllm; left out: the planner's own figures",
    "host_calibration": "Measured factors of the host; left out: none",
}
_SEARCH = _QUESTION | {
    "objective": "What is best among the strategies that fit",
    "constraints": "Limits on figures of the estimate, by name",
    "pins": "Parts of the strategy that are fixed",
    "top": "Strategies in the answer, 1 to 100",
    "hardware_options": "Other hardware, of which the best is chosen",
}
REQUEST_FIELDS: dict[str, dict[str, str]] = {
    "EstimateRequest": _QUESTION | {"strategy": "The layout; what is left out is the default"},
    "PlanRequest": _SEARCH,
    "InverseRequest": _SEARCH | {"question": "What is maximised, such as longest_context"},
    "Bound": {
        "min": "Least value, in the unit of the figure; left out: none",
        "max": "Greatest value, in the unit of the figure; left out: none",
    },
    "CalibrationFactor": {
        "factor": "What the times of the operator class are multiplied by, above 0",
        "n": "Measurements that it comes from, 1 or more",
        "spread": "Standard deviation of the log ratios that remain, 0 or more",
    },
    "HostCalibration": {
        "host": "Slug of the host",
        "factors": "By operator class",
        "digest": "Digest of the measurements that they come from",
    },
    "ClusterSpec": {
        "device": _DEVICE,
        "instance": "Id of a cloud offer, which sets the device, memory and price",
        "devices_per_node": "Devices in one machine, 1 or more",
        "nodes": "Machines, 1 or more",
        "other_nodes": "Machines with other devices, after the first ones",
        "topology": "Id of a published one, which sets what is left out of the next fields",
        "nvlink_domain_devices": "Devices that NVLink joins across machines, such as 72; left "
        "out: those of a machine",
        "nodes_per_pod": "Machines that reach each other at full bandwidth; left out: all",
        "oversubscription_ratio": "Bandwidth of a pod's machines over that of its links to "
        "others, 1 or more; left out: 1",
        "intra_node_bandwidth_bytes_per_second": f"Between devices of a machine. {_RATE}",
        "inter_node_bandwidth_bytes_per_second": f"Between machines, per device. {_RATE}",
        "collective_latency_seconds": "Of a collective in a machine, beyond its transfer",
        "hand_over_latency_seconds": "Of a message between two ranks, beyond its transfer",
        "ranks_per_core": "Ranks that share a core of one CPU, above 0",
        "host_memory_bytes": "Memory of one machine; left out: not known",
        "host_memory_bandwidth_bytes_per_second": f"Of the machine's memory. {_RATE}",
        "host_to_device_bandwidth_bytes_per_second": f"To one device. {_RATE}",
        "disk_bandwidth_bytes_per_second": "Of one machine's disk; left out: not known",
        "disk_capacity_bytes": "Free on one machine's disk; left out: not known",
        "grid_gco2_per_kwh": "Grams of CO₂ per kWh at the location; left out: not known",
        "mean_time_between_failures_hours": "Of one device; left out: the published median",
        "electricity_usd_per_kwh": "US dollars per kWh at the location; left out: not known",
    },
    "NodeGroup": {
        "device": _DEVICE,
        "devices_per_node": "Devices in one machine, 1 or more",
        "nodes": "Machines, 1 or more",
        "nvlink_domain_devices": "Devices that NVLink joins across machines; left out: those of "
        "a machine",
    },
    "DeviceSpec": {
        "id": "Id in the catalog, or custom",
        "name": "Name that is shown",
        "vendor": "Such as NVIDIA or AMD",
        "kind": "uma: memory that the processor shares",
        "memory_bytes": "Memory of the device",
        "memory_bandwidth_bytes_per_second": "Of the device's memory",
        "peak_flops_per_second": "Dense peak by dtype",
        "achieved_flops_per_second": "Best published matrix product, by dtype",
        "intra_node_bandwidth_bytes_per_second": "To the other devices of its machine",
        "host_to_device_bandwidth_bytes_per_second": "From the memory of its machine",
        "link": "What connects the devices of a machine, such as NVLink",
        "tdp_watts": "Thermal design power",
        "price_usd_per_hour": "US dollars per hour; left out: not known",
        "price_source": "Where the price is published",
        "op_overhead_seconds": "Time to issue one small operator",
        "weight_stream_bytes_per_second": "Rate at which stored weights are read, by dtype",
        "usable_memory_ratio": f"Memory that a process may take. {_SHARE}",
        "runtime_overhead_bytes": "Of a process before it loads a model",
        "training_overhead_bytes": "Beyond tensors in training: workspaces, unused blocks",
        "provenance": "Whether the rates are measured or published",
        "source": "Where the rates come from",
        "as_of": "Date of the rates, such as 2026-11-28",
        "aliases": "Other names",
        "notes": "What else is known",
    },
    "ServeWorkload": {
        "kind": "Serving",
        "input_tokens": "Of a typical prompt, 1 or more",
        "output_tokens": "Of a typical answer, 1 or more",
        "concurrency": "Requests at a time (closed loop), 1 or more; excludes the other arrivals",
        "request_rate_per_second": "Requests per second (open loop), above 0",
        "burst_requests": "Requests that arrive at once, 1 or more",
        "prefix_share_ratio": "Part of the prompt that all requests share, from 0 to below 1",
        "length_variation": "Standard deviation of lengths over their mean: chats have about 1",
        "ttft_slo_seconds": "Greatest time to the first token; left out: no target",
        "tpot_slo_seconds": "Greatest time per further token; left out: no target",
        "max_request_tokens": "Longest request to accept, prompt and answer; left out: typical",
    },
    "GenerateWorkload": {
        "kind": "Offline generation",
        "batch_size": "Prompts, 1 or more; engines that can queue what memory does not hold",
        "input_tokens": "Of a prompt, 1 or more",
        "output_tokens": "Of an answer, 1 or more",
        "at_once": "Whether memory must hold the whole batch; left out: it may be queued",
    },
    "TrainWorkload": {
        "kind": "Training",
        "sequence_length": "Tokens of a row, 1 or more",
        "global_batch_size": "Rows of a step over all ranks; pairs of rows for dpo, orpo, reward",
        "method": "What is trained, and how",
        "objective": "What the loss compares; all but supervised go with full, lora and qlora",
        "precompute_reference": "Of dpo and kto: the reference answers before the first step",
        "lora_rank": "Rank of the LoRA matrices, 1 or more",
        "lora_targets": "Layers that get LoRA matrices",
        "optimizer": "Left out: AdamW",
        "tokens": "Tokens to train on; left out: one step is costed",
        "padding_ratio": "Padding in a batch, from 0 to below 1",
        "checkpoint_seconds": "How long a checkpoint stops the steps; left out: by its size",
        "restart_seconds": "From a failure to the next step; left out: 660",
        "document_tokens": "Mean document of a packed row, weighted by tokens",
        "length_schedule": "Pairs of a row's tokens and the share of tokens; shares add up to 1",
        "time_budget_seconds": "Time that is given; the tokens are then the result",
    },
    "CompressWorkload": {
        "kind": "Compression",
        "method": "Method of compression",
        "bits": "Of a weight, 1 to 16; left out: the method's",
        "group_size": "Weights that share a scale, 1 or more; left out: the method's",
        "calibration_tokens": "Text that the method reads, 0 or more",
    },
    "Strategy": {
        "weight_dtype": _DTYPE,
        "activation_dtype": _DTYPE,
        "kv_cache_dtype": _DTYPE,
        "compute_dtype": _DTYPE,
        "quantization": "Format of quantized weights, such as awq; left out: none",
        "group_size": "Weights that share a scale, 1 or more",
        "sparsity": f"Weights that are zero. {_SHARE}",
        "data_parallel_size": _RANKS,
        "tensor_parallel_size": _RANKS,
        "pipeline_parallel_size": _RANKS,
        "context_parallel_size": _RANKS,
        "expert_parallel_size": _RANKS,
        "attention_data_parallel_size": _RANKS,
        "sequence_parallel": "Whether norms and dropout are split over the tensor-parallel ranks",
        "zero_stage": "ZeRO: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights",
        "zero_shard_size": f"That share one copy. {_RANKS}",
        "pipeline_schedule": "Order of micro-batches in the stages",
        "virtual_pipeline_size": "Parts of the model on each rank of the pipeline, 1 or more",
        "micro_batch_size": "Rows that a rank computes at once, 1 or more",
        "gradient_accumulation_steps": "Micro-batches of a step, 1 or more",
        "activation_recomputation": "What the backward pass computes again",
        "attention": "Kernel of the attention",
        "attention_kernel": "Older kernel; left out: that of “attention”",
        "fused_norms": "Whether norms are one kernel each",
        "optimizer_dtype": _DTYPE,
        "gradient_dtype": _DTYPE,
        "gradient_compression_ratio": "How much smaller gradients are sent, 1 or more",
        "synchronization_interval_steps": "Steps between exchanges of gradients, 1 or more",
        "offload": "What is kept outside the device's memory",
        "max_batch_tokens": "Tokens of one engine step, 0 or more",
        "scheduler_recv_interval": "Decode steps between SGLang's looks for requests",
        "chunked_prefill": "Whether long prompts are computed in parts between decode steps",
        "speculative": "Speculative decoding; left out: none",
        "disaggregated": "Prefill and decode on separate devices; left out: together",
    },
    "OffloadSpec": {
        "weights_cpu": f"Weights in host memory. {_SHARE}",
        "weights_disk": f"Weights on disk. {_SHARE}",
        "weights_active_ratio": "Offloaded dense weights that a token uses, above 0 to 1",
        "kv_cpu": f"KV cache in host memory. {_SHARE}",
        "kv_disk": f"KV cache on disk. {_SHARE}",
        "optimizer": "Where the optimizer's states are; none: on the device",
        "activations_cpu": f"Activations in host memory. {_SHARE}",
    },
    "SpeculativeSpec": {
        "draft_model": "Id of the draft model in the catalog, or lookup",
        "tokens": "Proposed per verification, 1 or more",
        "acceptance_ratio": f"Proposed tokens that are accepted. {_SHARE}",
    },
    "DisaggregatedSpec": {
        "prefill_devices": "1 or more",
        "decode_devices": "1 or more",
    },
    "LaunchToApprove": {
        "launch": "How it is launched, as for POST /plans/{plan_id}/launch",
        "reason": "For the person who decides, up to 400 characters",
    },
    "Pasted": {"text": "The command line or file, up to 65,536 characters"},
    "PlanFromJob": {
        "how": "clone: as it was launched; need: with the measured memory; change: see change",
        "change": "Number of a change of the post-mortem, from 0; with how “change”",
    },
    "PlannerRequest": {
        "request": "As POST /planner/plan takes it; what is left out has the wizard's default",
        "name": "Up to 120 characters; left out: named by its content",
    },
    "Saving": {
        "name": "Up to 120 characters; empty: as it is",
        "save_as": "The next version of the plan it came from, or a new plan",
    },
    "TwoJobs": {"zero_stage": "ZeRO stage that is compared with DDP, 1 to 3"},
}


def describe(schemas: dict[str, Any]) -> None:
    """Add the descriptions to the schemas of an OpenAPI document, in place."""
    for name, fields in REQUEST_FIELDS.items():
        for field, words in fields.items():
            schemas[name]["properties"][field].setdefault("description", words)

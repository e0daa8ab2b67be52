"""Read load tests' command lines: of vLLM, SGLang, AIPerf and GenAI-Perf, and vLLM's batches.

A load test states what no server's command has: how long requests are, and how they arrive. The
plan is one to serve the model under this load, whose own load test repeats it. The command has an
engine only where its ``--backend`` names one.
"""

import math
from typing import NamedTuple

from planner.imports.draft import LARGEST_TOKENS, Draft, Option
from planner.imports.models import hub_repository, known_model
from planner.imports.servers import add_any_model, read_vllm
from planner.imports.serving import ServerDraft
from planner.imports.shell import ignore_rest, ignore_words, read_options

MOST_RATE = 1e6  # requests a second
# Engines that a benchmark of a server names as its backend; others speak OpenAI's API.
ENGINES = {
    "vllm": "vllm",
    "vllm-chat": "vllm",
    "sglang": "sglang",
    "sglang-native": "sglang",
    "sglang-oai": "sglang",
    "sglang-oai-chat": "sglang",
    "trt": "tensorrt_llm",
    "tensorrt-llm": "tensorrt_llm",
}
ANY_SERVER = "a protocol that several engines speak: the plan chooses among them"
CAPPED = "at most so many requests at once: an open loop is planned by its rate alone"
VARIATION = (0.01, 3.0)  # limits of workload.length_variation
AT_ONCE = frozenset({"inf", "infinity"})


class Sampled(NamedTuple):
    """Options of a data set that is made at random, and their defaults in tokens.

    The prompt is ``prefix``, common to requests, and ``prompt``; or ``prompt`` has it within.
    """

    prompt: str
    answer: str
    prompt_tokens: int
    answer_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    is_within: bool = False
    ratio: str = ""


RANDOM = Sampled(
    "random_input_len", "random_output_len", 1024, 128, "random_prefix_len",
    ratio="random_range_ratio",
)  # fmt: skip
SGLANG_RANDOM = Sampled(
    "random_input_len", "random_output_len", 1024, 1024, ratio="random_range_ratio"
)
# Source: vllm/benchmarks/datasets/arg_utils.py; python/sglang/benchmark/args.py.
VLLM_DATA = {
    "random": RANDOM,
    "random-mm": RANDOM,
    "sonnet": Sampled(
        "sonnet_input_len", "sonnet_output_len", 550, 150, "sonnet_prefix_len", 200, is_within=True
    ),
    "prefix_repetition": Sampled(
        "prefix_repetition_suffix_len", "prefix_repetition_output_len", 256, 128,
        "prefix_repetition_prefix_len", 256,
    ),
}  # fmt: skip
SGLANG_DATA = {
    "random": SGLANG_RANDOM,
    "random-ids": SGLANG_RANDOM,
    "generated-shared-prefix": Sampled(
        "gsp_question_len", "gsp_output_len", 128, 256, "gsp_system_prompt_len", 2048,
        ratio="gsp_range_ratio",
    ),
}  # fmt: skip
# Options for the answers of data sets whose prompts are as long as their records.
VLLM_ANSWERS = {
    "sharegpt": "sharegpt_output_len",
    "custom": "custom_output_len",
    "hf": "hf_output_len",
    "spec_bench": "spec_bench_output_len",
}
GROUPS = "each group has a prefix of its own: the share is that of one group's requests"


# ---------------------------------------------------------------------------
# vLLM and SGLang
# ---------------------------------------------------------------------------


def read_vllm_bench(draft: Draft, words: list[str]) -> None:
    """Read ``vllm bench serve``, which measures a server of any engine.

    Source: vllm-project/vllm, vllm/benchmarks/serve.py.
    """
    server = _begin(draft, words, "vllm_bench")
    backend = server.take("backend") or server.take("endpoint_type")
    _add_engine(server, backend, default="")
    named = server.take("dataset_name")
    data = named.text if named else "random"
    for name in ("input_len", "output_len"):  # general names, which those of a data set replace
        general, own = server.take(name), f"random_{name}"
        if general is not None and (data in VLLM_DATA or name == "output_len"):
            target = _of_data(data, name) or own
            server.options.setdefault(target, general)
        elif general is not None:
            draft.ignore(general.source, f"the prompts of {data} are as long as its records")
    sampled = VLLM_DATA.get(data)
    if sampled is not None:
        ratio = _add_sampled(server, sampled, named)
        if ratio is not None and (spread := ratio.number(0, 1)) > 0:
            # Uniform from (1 - r) to (1 + r) times the mean.
            _put_variation(draft, ratio.source, spread / math.sqrt(3))
        elif ratio is not None:
            draft.ignore(ratio.source, "0: lengths do not differ, as without it")
    else:
        _need_lengths(server, data, named, VLLM_ANSWERS.get(data, "random_output_len"))
    groups = server.take("prefix_repetition_num_prefixes")
    if groups is not None:
        draft.ignore(groups.source, GROUPS)
    _add_arrivals(server)
    for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"):
        option = server.take(name)
        if option is not None:
            draft.assume(option.source, "Slipway plans one load: state its rate")
    ignore_rest(draft, server.options, "vllm_bench")


def _of_data(data: str, name: str) -> str:
    """Return a data set's own option for the general one of prompts or answers."""
    sampled = VLLM_DATA.get(data)
    if sampled is None:
        return VLLM_ANSWERS.get(data, "")
    return sampled.prompt if name == "input_len" else sampled.answer


def read_sglang_bench(draft: Draft, words: list[str]) -> None:
    """Read ``python -m sglang.bench_serving``, which measures a server of any engine.

    Source: sgl-project/sglang, python/sglang/benchmark.
    """
    server = _begin(draft, words, "sglang_bench")
    _add_engine(server, server.take("backend"), default="sglang")
    named = server.take("dataset_name")
    data = named.text if named else "sharegpt"
    sampled = SGLANG_DATA.get(data)
    if sampled is not None:
        _add_spread(server, sampled, named)
    else:
        fixed = server.take("fixed_output_len")
        if fixed is not None:
            server.options.setdefault("sharegpt_output_len", fixed)
        _need_lengths(server, data, named, "sharegpt_output_len")
    groups = server.take("gsp_num_groups")
    if groups is not None:
        draft.ignore(groups.source, GROUPS)
    for name in ("multi", "request_rate_range"):
        option = server.take(name)
        if option is not None:
            draft.assume(option.source, "Slipway plans one load, and its load test takes several")
    _add_arrivals(server)
    ignore_rest(draft, server.options, "sglang_bench")


def _add_spread(server: ServerDraft, sampled: Sampled, named: Option | None) -> None:
    """Record SGLang's random lengths: uniform from a share of the stated ones up to them.

    Source: sgl-project/sglang, python/sglang/benchmark/datasets/common.py, compute_random_lens.
    """
    draft = server.draft
    ratio = server.options.get(sampled.ratio)
    is_full = sampled is not SGLANG_RANDOM and ratio is None  # GSP's lengths are exact by default
    share = 1.0 if is_full else ratio.number(0, 1) if ratio is not None else 0.0
    _add_sampled(server, sampled, named, mean=(1 + share) / 2)
    if share < 1:
        source = ratio.source if ratio else f"{sampled.ratio.replace('_', '-')} 0 (the default)"
        _put_variation(draft, source, (1 - share) / (1 + share) / math.sqrt(3))
    elif ratio is not None:
        draft.ignore(ratio.source, "1: lengths do not differ")


# ---------------------------------------------------------------------------
# AIPerf and GenAI-Perf
# ---------------------------------------------------------------------------


AIPERF_PROMPT = 550  # tokens
POISSON = "Slipway plans requests that arrive at random, as a Poisson process"


def read_aiperf(draft: Draft, words: list[str]) -> None:
    """Read ``aiperf profile`` or ``genai-perf profile``.

    Source: ai-dynamo/aiperf, docs/cli_options.md.
    """
    server = _begin(draft, words, "aiperf")
    given = server.take("input_file") or server.take("public_dataset")
    mixed = server.take("seq_dist")
    prompt, answer = (server.take(f"{name}_mean") for name in AIPERF_LENGTHS)
    tokens = prompt.whole(most=LARGEST_TOKENS) if prompt else AIPERF_PROMPT
    for option in (given, mixed):
        if option is not None:
            draft.assume(option.source, "requests of several lengths: state their means")
    if prompt is not None or (given is None and mixed is None):
        shared = _aiperf_prefix(server)
        source = prompt.source if prompt else f"isl {AIPERF_PROMPT} (the default)"
        _put_prompt(draft, source, tokens, *shared)
    else:
        draft.need("workload.input_tokens", "tokens of a typical prompt of the data")
    if answer is not None:
        draft.put(answer.source, "workload.output_tokens", answer.whole(most=LARGEST_TOKENS))
    else:
        draft.need("workload.output_tokens", "tokens of a typical answer: the text sets no --osl")
    _aiperf_variation(server, tokens, answer)
    turns = server.take("session_turns_mean")
    if turns is not None and turns.text != "1":
        draft.assume(turns.source, "Slipway plans single requests: a turn's prompt has the others")
    elif turns is not None:
        draft.ignore(turns.source, "one request of each session, as without it")
    pattern = server.take("arrival_pattern")
    if pattern is not None and pattern.text.lower() == "poisson":
        draft.ignore(pattern.source, "as planned")
    elif pattern is not None:
        draft.assume(pattern.source, POISSON)
    _add_arrivals(server, cap="concurrency")
    ignore_rest(draft, server.options, "aiperf")


AIPERF_LENGTHS = ("synthetic_input_tokens", "output_tokens")


def _aiperf_prefix(server: ServerDraft) -> tuple[str, int]:
    """Return the text that states a prefix of all requests, and its tokens."""
    system = server.take("shared_system_prompt_length")
    if system is not None:
        return system.source, system.whole(most=LARGEST_TOKENS)
    pool, prefix = server.take("prefix_prompt_pool_size"), server.take("prefix_prompt_length")
    if pool is None or prefix is None or pool.text == "0" or prefix.text == "0":
        for option in (pool, prefix):
            if option is not None:
                server.draft.ignore(option.source, "no prefix without both of its options")
        return "", 0
    server.draft.ignore(pool.source, GROUPS)
    return prefix.source, prefix.whole(most=LARGEST_TOKENS)


def _aiperf_variation(server: ServerDraft, tokens: int, answer: Option | None) -> None:
    """Record the spread of lengths: a plan has one for prompts and answers."""
    means = (tokens, answer.whole(most=LARGEST_TOKENS) if answer else None)
    found: float | None = None
    for name, mean in zip(AIPERF_LENGTHS, means, strict=True):
        option = server.take(f"{name}_stddev")
        if option is None:
            continue
        deviation = option.number(0, LARGEST_TOKENS)
        if deviation == 0 or mean is None:
            reason = "0: lengths do not differ" if mean else "of answers without a stated mean"
            server.draft.ignore(option.source, reason)
        elif found is None:
            found = deviation / mean
            _put_variation(server.draft, option.source, found)
        else:
            reason = "a plan has one variation of lengths: that of prompts is planned"
            server.draft.assume(option.source, reason)


# ---------------------------------------------------------------------------
# What they share
# ---------------------------------------------------------------------------


def _begin(draft: Draft, words: list[str], tool: str) -> ServerDraft:
    """Return the options of a load test, with the model recorded."""
    draft.goal = "serve"
    arguments = read_options(draft, words, tool)
    server = ServerDraft(draft, arguments.options)
    ignore_words(draft, arguments.positional)
    named, tokenizer = server.take("model"), server.take("tokenizer")
    if named is None and tokenizer is None:
        draft.need("model", "the load test asks its server for it: name it")
        return server
    # The name that a server was given may say less than the repository of its tokenizer.
    chosen, other = named or tokenizer, tokenizer if named else None
    if other and named and not _names_weights(named) and _names_weights(other):
        chosen, other = other, named
    if chosen is not None:
        server.spec = add_any_model(draft, chosen)
    if other is not None:
        draft.ignore(other.source, "the other of model and tokenizer names the weights")
    return server


def _names_weights(option: Option) -> bool:
    return known_model(option.text) is not None or bool(hub_repository(option.text))


def _add_engine(server: ServerDraft, option: Option | None, *, default: str) -> None:
    """Record the engine that a backend names, if it names one."""
    engine = ENGINES.get(option.text.lower()) if option else default
    if engine:
        source = option.source if option else f"backend {default} (the default)"
        server.draft.put(source, "engine", engine)
    elif option is not None:
        server.draft.ignore(option.source, ANY_SERVER)


def _add_sampled(
    server: ServerDraft, sampled: Sampled, named: Option | None, *, mean: float = 1.0
) -> Option | None:
    """Record the lengths of a data set made at random; return the option of their spread.

    ``mean`` is the mean length as a share of the stated one.
    """
    draft = server.draft
    if named is not None:
        draft.ignore(named.source, "requests made at random, of the lengths that are stated")
    read = {
        name: server.take(name)
        for name in (sampled.prompt, sampled.answer, sampled.prefix)
        if name
    }
    prompt, answer, prefix = (
        read.get(name) for name in (sampled.prompt, sampled.answer, sampled.prefix)
    )
    tokens = prompt.whole(most=LARGEST_TOKENS) if prompt else sampled.prompt_tokens
    shared = prefix.whole(0, LARGEST_TOKENS) if prefix else sampled.prefix_tokens
    own = max(0, tokens - shared) if sampled.is_within else max(1, round(tokens * mean))
    shared = min(shared, tokens) if sampled.is_within else shared
    prefix_source = prefix.source if prefix else _default(sampled.prefix, shared)
    prompt_source = prompt.source if prompt else _default(sampled.prompt, tokens)
    _put_prompt(draft, prompt_source, own, prefix_source, shared)
    count = answer.whole(most=LARGEST_TOKENS) if answer else sampled.answer_tokens
    source = answer.source if answer else _default(sampled.answer, count)
    draft.put(source, "workload.output_tokens", max(1, round(count * mean)))
    return server.take(sampled.ratio) if sampled.ratio else None


def _default(name: str, tokens: int) -> str:
    return f"{name.replace('_', '-')} {tokens} (the default)"


def _put_prompt(draft: Draft, source: str, own: int, prefix: str = "", shared: int = 0) -> None:
    """Record the tokens of a prompt: its own, and those of a prefix that requests share."""
    whole = f"{source} {prefix}" if shared else source
    draft.put(whole, "workload.input_tokens", own + shared)
    if shared and own:
        share = round(shared / (own + shared), 4)
        draft.put(prefix, "workload.prefix_share_ratio", share)
    elif prefix and not shared and "(the default)" not in prefix:
        draft.ignore(prefix, "0: no common prefix, as without it")


def _put_variation(draft: Draft, source: str, variation: float) -> None:
    """Record the standard deviation of lengths over their mean, as far as a plan has it."""
    rounded = round(variation, 3)
    least, most = VARIATION
    if least <= rounded <= most:
        draft.put(source, "workload.length_variation", rounded)
    else:
        draft.ignore(source, f"a variation of {rounded:g}, and a plan has {least:g} to {most:g}")


def _need_lengths(server: ServerDraft, data: str, named: Option | None, answers: str) -> None:
    """Record that the lengths of requests are those of a data set, but for stated answers."""
    draft = server.draft
    if named is not None:
        draft.assume(named.source, "lengths are those of its records: state their means")
    draft.need("workload.input_tokens", f"tokens of a typical prompt of {data}")
    fixed = server.take(answers)
    if fixed is not None:
        draft.put(fixed.source, "workload.output_tokens", fixed.whole(most=LARGEST_TOKENS))
    else:
        draft.need("workload.output_tokens", f"tokens of a typical answer of {data}")


NUM_PROMPTS = 1000  # of vLLM's and SGLang's load tests


def _add_arrivals(server: ServerDraft, *, cap: str = "max_concurrency") -> None:
    """Record how requests arrive: in an open loop at a rate, in a closed one, or all at once."""
    draft = server.draft
    rate, limit = server.take("request_rate"), server.take(cap)
    number, bursts = server.options.pop("num_prompts", None), server.take("burstiness")
    is_open = rate is not None and rate.text.lower() not in AT_ONCE
    if is_open and rate is not None:
        draft.put(rate.source, "workload.request_rate_per_second", rate.number(1e-6, MOST_RATE))
        if limit is not None:
            draft.assume(limit.source, CAPPED)
    elif limit is not None:
        draft.put(limit.source, "workload.concurrency", limit.whole(most=LARGEST_TOKENS))
        if rate is not None:
            draft.ignore(rate.source, "requests follow each other at once, as without it")
    elif cap == "max_concurrency":
        count = number.whole(most=LARGEST_TOKENS) if number else NUM_PROMPTS
        source = number.source if number else f"num-prompts {NUM_PROMPTS} (the default)"
        source = f"{rate.source} {source}" if rate else source
        draft.put(source, "workload.burst_requests", count)
        number = None
    else:
        text = f"no --{cap} and no --request-rate"
        draft.assume(text, "as many requests at once as memory holds are planned")
    if number is not None:
        draft.ignore(number.source, "no effect on the plan: how long the load lasts")
    if bursts is not None and is_open and bursts.number(0, 1e6) != 1:
        draft.assume(bursts.source, POISSON)
    elif bursts is not None:
        draft.ignore(bursts.source, "as planned, or without effect")


# ---------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------


WAITS = "a batch queues what memory does not hold"
IN_A_BATCH = {
    "workload.max_request_tokens": "a batch takes the context that it needs",
    "workload.concurrency": WAITS,
    "workload.prefix_share_ratio": "a batch is planned without common prefixes",
}


def read_vllm_batch(draft: Draft, words: list[str]) -> None:
    """Read ``vllm run-batch``, which answers a file of requests with vLLM's own options.

    Source: vllm-project/vllm, vllm/entrypoints/openai/run_batch.py.
    """
    draft.goal = "generate"
    read_vllm(draft, words, tool="vllm_batch")
    for item in [each for each in draft.understood if each.field in IN_A_BATCH]:
        draft.understood.remove(item)
        draft.ignore(item.source, IN_A_BATCH[item.field or ""])
    draft.request.pop("workload", None)
    draft.missing = [each for each in draft.missing if not each.startswith("workload.")]
    draft.need("workload.batch_size", "the requests of the file")
    draft.need("workload.input_tokens", "tokens of a typical prompt of the file")
    draft.need("workload.output_tokens", "tokens of a typical answer")

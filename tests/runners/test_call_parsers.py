"""Which parsers of tool calls vLLM and SGLang are started with, by model type and template."""

from runners.jobspec.call_parsers import call_parsing, parser_rows
from runners.jobspec.engine_args import arguments_of

# What tells each form apart, as the models' own repositories have it in their templates.
HERMES = "{% if tools %}<tools>{% endif %}<tool_call>{'name': .., 'arguments': ..}</tool_call>"
TEMPLATES = {
    "Qwen2.5": ("qwen2", HERMES),
    "Qwen3": ("qwen3", HERMES + "{% if enable_thinking is false %}<think>"),
    "Qwen3-Instruct-2507": ("qwen3_moe", HERMES),
    "Qwen3-Coder": ("qwen3_moe", "{% if tools %}<tool_call><function=f><parameter=a>"),
    "Hermes 3 on Llama": ("llama", HERMES),
    "Llama 3.1": ("llama", 'tools ipython {"name": f, "parameters": {}}'),
    "Mistral 7B": ("mistral", "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"),
    "GLM-4.6": ("glm4_moe", "{% if tools %}<tool_call>{function-name}\n<arg_key>"),
    "GLM-4.7": ("glm4_moe", "{% if tools %}<tool_call>{function-name}<arg_key>"),
    "gpt-oss": ("gpt_oss", "{% if tools %}<|channel|>"),
    "R1-Distill": ("qwen2", "<\uff5cAssistant\uff5c><think>\n"),
    "TinyLlama": ("llama", "{{ message.content }}"),
}
VLLM = {
    "Qwen2.5": ("hermes", None),
    "Qwen3": ("hermes", "qwen3"),
    "Qwen3-Instruct-2507": ("hermes", None),
    "Qwen3-Coder": ("qwen3_xml", None),
    "Hermes 3 on Llama": ("hermes", None),
    "Llama 3.1": ("llama3_json", None),
    "Mistral 7B": ("mistral", None),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7": ("glm47", "glm47"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "R1-Distill": (None, "deepseek_r1"),
    "TinyLlama": (None, None),
}
SGLANG = VLLM | {
    "Qwen2.5": ("qwen25", None),
    "Qwen3": ("qwen25", "qwen3"),
    "Qwen3-Instruct-2507": ("qwen25", None),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Llama 3.1": ("llama3", None),
    "GLM-4.7": ("glm47", "glm45"),
    "gpt-oss": ("gpt-oss", "gpt-oss"),
    "R1-Distill": (None, "deepseek-r1"),
}


def test_each_family_gets_its_engines_parsers_or_a_reason():
    for engine, expected in (("vllm", VLLM), ("sglang", SGLANG)):
        for name, (tools, reasoning) in expected.items():
            auto = ("--enable-auto-tool-choice",) if tools and engine == "vllm" else ()
            flags = (
                *auto,
                *(("--tool-call-parser", tools) if tools else ()),
                *(("--reasoning-parser", reasoning) if reasoning else ()),
            )
            found = call_parsing(engine, (), *TEMPLATES[name])
            assert found.flags == flags, (engine, name)
            assert bool(found.refusal) is (tools is None), (engine, name)
    without = call_parsing("vllm", (), *TEMPLATES["TinyLlama"])
    assert without.refusal == "the model's chat template does not take tools"
    unknown = call_parsing("sglang", (), "mamba", "{% if tools %}")
    assert "no parser of SGLang is known for the calls of this model" in unknown.refusal
    assert "(model_type mamba)" in unknown.refusal


def test_what_a_person_states_is_left_alone():
    qwen = TEMPLATES["Qwen3"]
    for given, flags, is_read in (
        (("--tool-call-parser", "xlam"),
         ("--enable-auto-tool-choice", "--reasoning-parser", "qwen3"), True),
        (("--tool_call_parser=xlam", "--reasoning-parser", "granite"),
         ("--enable-auto-tool-choice",), True),
        (("--no-enable-auto-tool-choice",),
         ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser",
          "qwen3"), False),
    ):  # fmt: skip
        found = call_parsing("vllm", given, *qwen)
        assert found.flags == flags, given
        assert bool(found.refusal) is not is_read, given
    named = call_parsing("sglang", ("--tool-call-parser", "pythonic"), "mamba", "{% if tools %}")
    assert (named.flags, named.refusal) == ((), "")


def test_the_tables_names_are_those_of_the_pinned_release():
    choices = {option.names[0]: option.choices for option in arguments_of("sglang").options}
    for row in parser_rows():
        for flag, name in (
            ("--tool-call-parser", row.sglang.tools),
            ("--reasoning-parser", row.sglang.reasoning),
        ):
            assert name is None or name in choices[flag], (row.form, name)
        assert row.model_types or row.marks, row.form
    forms = [each.form for each in parser_rows()]
    assert len(forms) == len(set(forms))

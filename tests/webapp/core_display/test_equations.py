"""Equations as MathML: what is a fraction, a power, a name with an index, and what stays text."""

import html
import re

from planner.api import plan
from planner.specs.estimate import PlanRequest
from webapp.core.equations import mathml

CASES = {
    "F = 2 · n · T": "<mi>F</mi><mo>=</mo><mn>2</mn><mo>·</mo><mi>n</mi><mo>·</mo><mi>T</mi>",
    "n_split/t": "<mfrac><msub><mi>n</mi><mi>split</mi></msub><mi>t</mi></mfrac>",
    "F / (a · b)": "<mfrac><mi>F</mi><mrow><mi>a</mi><mo>·</mo><mi>b</mi></mrow></mfrac>",
    "sqrt(d²)": "<msqrt><msup><mi>d</mi><mn>2</mn></msup></msqrt>",
    "a - 1": "<mi>a</mi><mo>\N{MINUS SIGN}</mo><mn>1</mn>",
    "10^6": "<msup><mn>10</mn><mn>6</mn></msup>",
}


def test_an_equation_is_set_as_in_print():
    for text, row in CASES.items():
        found = re.search(r"<semantics><mrow>(.*)</mrow><annotation", mathml(text))
        assert found, text
        assert found[1] == row, text


def test_a_condition_and_what_is_no_equation_stay_words_that_are_escaped():
    assert mathml("t = m/n for n > 1").endswith("</math> for n &gt; 1")
    assert mathml("the larger of <b>two</b>") == "the larger of &lt;b&gt;two&lt;/b&gt;"
    assert "<math" not in mathml("a ( b")


def test_most_equations_of_a_plan_are_well_formed_mathml_with_their_text():
    work = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 16}
    cluster = {"device": "a100-sxm4-80gb", "devices_per_node": 2}
    request = {"model": "meta-llama/Llama-3.1-8B", "cluster": cluster, "workload": work}
    answer = plan(PlanRequest.model_validate({**request, "engine": "vllm"}))
    texts = {term.equation for term in answer.plans[0].terms if term.equation}
    set_in_print = 0
    for text in texts:
        found = mathml(text)
        if not found.startswith("<math"):
            continue
        set_in_print += 1
        open_tags: list[str] = []
        for closes, name in re.findall(r"<(/?)(\w+)[^>]*>", found):
            if closes:
                assert open_tags.pop() == name, text
            else:
                open_tags.append(name)
        assert not open_tags, text
        note = re.search(r"<annotation[^>]*>(.*)</annotation>", found)
        assert note, text
        assert html.unescape(note[1]) == text
    assert set_in_print > 0.8 * len(texts), (set_in_print, len(texts))

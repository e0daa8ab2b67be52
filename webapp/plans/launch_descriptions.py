"""What a launch does, by kind of job, as text."""

from runners.jobspec import ModelSpec, RandomModel, TrainSpec
from webapp.plans.training_data import text_words

FLOATS_OF_8_BITS = (
    " Weights are held as 8-bit floats, in half the memory of 16 bit; products are in 16 bit, so "
    "expect no more speed."
)
EXPLANATIONS = {
    "train": "The host trains the model on its own text, evaluates it on held-out text, "
    "and saves it as a model of your team.",
    "lora": "The host trains an adapter on its own text and evaluates it on held-out text; the "
    "model's weights stay frozen. It leaves the adapter in peft's "
    "format, and the merged model as a model of your team.",
    "classification": "The host trains the encoder and its head to tell the labels of texts "
    "apart, evaluates it on held-out texts, and saves it as a model of your team.",
    "compress": "The host compresses the weights, saves them, loads them again, and measures "
    "size, speed, memory and perplexity before and after.",
    "generate": "The host loads the model as planned, answers every prompt and writes the "
    "answers to a file. Finished answers are kept if the job stops.",
    "benchmark": "The host loads the model as planned and measures prefill, decode and peak "
    "memory. It ends with the measurements.",
    "serve": "The host loads the model as planned and answers requests in OpenAI's form, at an "
    "address of its own, until somebody stops it. The job's page has the address, the key and "
    "live figures.",
}
RANDOM_WEIGHTS = (
    " This model's weights are not on the host, so it runs with random ones: speed and memory are "
    "real, the text and its perplexity are not."
)


def words_of(spec: ModelSpec) -> str:
    """Return a description of what launching a spec does."""
    if isinstance(spec, TrainSpec) and spec.objective == "classification":
        return EXPLANATIONS["classification"]
    text = EXPLANATIONS[spec.kind]
    if getattr(spec, "weight_dtype", "") == "fp8":
        text += FLOATS_OF_8_BITS
    if isinstance(spec, TrainSpec):
        text = EXPLANATIONS["lora"] if spec.lora is not None else text
        text = text.replace("its own text", text_words(spec.data))
    return text + (RANDOM_WEIGHTS if isinstance(spec.model, RandomModel) else "")

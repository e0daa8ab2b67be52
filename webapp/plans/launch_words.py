"""What a launch does, in words, by the kind of its job."""

FLOATS_OF_8_BITS = (
    " Weights are held as 8-bit floats, in half the memory of 16 bit; products are in 16 bit, so "
    "expect no more speed."
)
EXPLANATIONS = {
    "train": "The host trains the model on its own text, evaluates it on text that it kept back, "
    "and leaves it as a model of your team.",
    "lora": "The host trains an adapter beside the model's weights, which stay as they are, on "
    "its own text, and evaluates it on text that it kept back. It leaves the adapter in peft's "
    "format, and the merged model as a model of your team.",
    "compress": "The host compresses the weights, saves them, loads them again, and measures "
    "size, speed, memory and perplexity before and after.",
    "generate": "The host loads the model as planned, answers every prompt, and leaves the "
    "answers as a file. What is answered stays so, whatever stops the job.",
    "benchmark": "The host loads the model as planned and measures prefill, decode and peak "
    "memory. It ends with the measurements.",
    "serve": "The host loads the model as planned and answers requests in OpenAI's form, at an "
    "address of its own, until somebody stops it. The job's page has the address, the key and "
    "live figures.",
}

"""Export a model folder as GGUF and evaluate the weights read back from the file."""

from pathlib import Path

import torch
from transformers import AutoConfig

from runners.jobs.artefacts import weight_file_bytes
from runners.jobs.compress.engine import Compressed
from runners.jobs.compress.gguf_file import check_writable, read_back, write_gguf
from runners.jobs.compress.gguf_tokens import tokens_of
from runners.jobs.compress.layerwise import check_disk
from runners.jobs.compress.whole_model import held_out_of, load_whole
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import LoadedModel, load_tokenizer, require_tokenizer, shape_only
from runners.jobs.runtime import Job
from runners.jobs.stages import Stages
from runners.jobs.weights import WeightReader
from runners.jobspec import CompressSpec

FILE_NAME = "model.gguf"


def export_gguf(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> Compressed:
    """Write the file, read it back, and return the perplexity of the weights read back.

    Raises:
        ReadBackError: the file does not hold the weights that were written.
    """
    loaded = load_whole(source, "bf16")
    tokenizer = require_tokenizer(loaded, "a GGUF file")
    config, reader = loaded.model.config, WeightReader(source, loaded.model)
    target.mkdir(parents=True)
    write_gguf(target / FILE_NAME, config, reader, tokenizer, spec.gguf_type)
    parameters = dict(loaded.model.named_parameters())
    for name, weight in read_back(target / FILE_NAME, config, reader):
        parameters[name].data.copy_(weight)
    config.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    ids = held_out_of(job, loaded, source)
    perplexity = evaluate(
        loaded.model, ids, spec.evaluation_tokens, stages.via(job.emitter).advance
    )
    return Compressed(perplexity, {"gguf_bytes": float((target / FILE_NAME).stat().st_size)})


def check_gguf(source: Path, _spec: CompressSpec, job: Job) -> None:
    """Check that the model can be exported as GGUF.

    Raises:
        BadInputError: the model or tokenizer type is not supported, or the disk is too small.
    """
    check_disk(job.attempt_dir, weight_file_bytes(source))
    config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    check_writable(config)
    loaded = LoadedModel(shape_only(config), load_tokenizer(source), torch.device("cpu"))
    tokens_of(require_tokenizer(loaded, "a GGUF file"), int(config.vocab_size))

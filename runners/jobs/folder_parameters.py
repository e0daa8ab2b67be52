"""Counts the parameters that transformers builds for a folder's config, on the meta device.

Nothing is loaded, no code of the folder runs, and no GPU is used. Any environment with torch and
transformers can run it.
"""

from collections import Counter
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from runners.jobs.folder_query import answer, start
from runners.jobs.runtime import BadInputError

# The automatic classes by the models that each has; the first is meant if none is named.
CLASSES = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
)


def main() -> None:
    """Answer a query with the parameters and their bytes by dtype, or why there are none."""
    query = start()
    answer(version=transformers.__version__)
    try:
        config = query.config()
        answer(**counts(config))
    except BadInputError as error:
        answer(problem=str(error)[:240])
    except Exception as error:  # noqa: BLE001 - a model's own code, which raises anything
        answer(problem=f"{type(error).__name__}: {str(error).strip()[:200]}")


def counts(document: dict[str, object]) -> dict[str, object]:
    """Return the number of parameters of a config.json, and the bytes of each dtype.

    A quantised checkpoint's config is built without its quantisation, so only its number counts.

    Raises:
        BadInputError: transformers has no such model.
    """
    fields = {**document, "quantization_config": None}
    model_type = str(fields.pop("model_type", ""))
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = _auto_class(config).from_config(config, trust_remote_code=False)
    num_bytes: Counter[str] = Counter()
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        num_bytes[name] += parameter.numel() * parameter.element_size()
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "bytes_by_dtype": dict(num_bytes),
        "is_quantised": document.get("quantization_config") is not None,
    }


def _auto_class(config: PretrainedConfig) -> Any:  # noqa: ANN401 - one of the automatic classes
    """Return the automatic class whose model the config names, or the first that has one."""
    known = [(auto, models[type(config)]) for auto, models in CLASSES if type(config) in models]
    if not known:
        raise BadInputError(f"transformers has no language model of type {config.model_type!r}")
    architectures = getattr(config, "architectures", None) or []
    for auto, models in known:
        if {getattr(each, "__name__", "") for each in _listed(models)} & set(architectures):
            return auto
    return known[0][0]


def _listed(models: object) -> tuple[object, ...]:
    return models if isinstance(models, tuple) else (models,)


if __name__ == "__main__":
    main()

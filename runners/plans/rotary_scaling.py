"""A document's rotary scaling as arguments of the engine that serves the model."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from planner.catalog.models import find_model, rotary_embedding
from runners.jobspec.engines import ENGINES, OWN, Engine
from runners.plans.document import RopeScaling, ScalingKind
from runners.plans.launch import Launch
from runners.plans.launch_case import LaunchCase
from runners.plans.refusals import DraftProblem

FIELD = "rope_scaling"
REQUIRED = ("rope_type", "factor")
OVERRIDES = "--hf-overrides"  # takes every kind and field
# What a model's rotary embedding keeps when its scaling is replaced, by the names of config.json.
KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
TEXT_PARTS = ("text_config", "llm_config")
# What llama.cpp's server is told of a scaling; it has attention factors of its own.
GGML_FIELDS = ("original_max_position_embeddings", "rope_theta", "beta_fast", "beta_slow")


def scalings_taken(
    planned_as: str | None, model: str | dict[str, Any]
) -> Mapping[ScalingKind, tuple[str, ...]]:
    """Return the kinds of scaling that an endpoint can be told, each with its other fields.

    ``planned_as`` is the planner's engine, None for any; ``model`` a name of the catalog or a
    config.json. A model that scales each kind of its layers by itself takes none, nor does one
    that has learned positions in place of rotary ones.
    """
    try:
        rope_overrides({} if isinstance(model, str) else model, {})
    except DraftProblem:
        return {}
    shape = find_model(model)
    if shape and shape.learned_positions:
        return {}
    able = [each for each in ENGINES.values() if each.rope_flag]
    flags = {each.rope_flag for each in able if planned_as in {None, each.planned_as}}
    if OVERRIDES in flags:
        every = tuple(name for name in RopeScaling.model_fields if name not in REQUIRED)
        return dict.fromkeys(get_args(ScalingKind), every)
    return {"yarn": GGML_FIELDS} if flags else {}


def scaling_args(scaling: RopeScaling | None, launch: Launch, case: LaunchCase) -> tuple[str, ...]:
    """Return the arguments with which a launch's engine scales rotary positions.

    Raises:
        DraftProblem: what runs the model cannot be told, or not this kind.
    """
    if scaling is None:
        return ()
    engine = ENGINES[launch.engine if launch.run == "endpoint" else OWN]
    if not engine.rope_flag:
        able = " or ".join(each.title for each in ENGINES.values() if each.rope_flag)
        _refuse(
            f"{engine.title} keeps to the model's own rotary scaling, and the plan stretches the "
            f"context by model.{FIELD}. Start it as an endpoint of {able}, or leave {FIELD} out"
        )
    if engine.rope_flag in {
        each.partition("=")[0].replace("_", "-") for each in launch.engine_args
    }:
        raise DraftProblem(
            f"“Further engine arguments”: {engine.rope_flag} is set by model.{FIELD}; leave it "
            "out of engine_args.",
            "engine_args",
        )
    return _words(engine, scaling, case)


def _words(engine: Engine, scaling: RopeScaling, case: LaunchCase) -> tuple[str, ...]:
    if engine.rope_flag != OVERRIDES:
        return _ggml_words(engine, scaling)
    overrides = rope_overrides(case.config, scaling.stated)
    inner = next(iter(overrides.values()))
    parameters = inner.get("rope_parameters", inner)
    if "rope_theta" not in parameters:
        known = rotary_embedding(case.shape.id) if case.shape else None
        if known is None:
            _refuse(
                f"The base of the rotary embedding of {case.model_name} is not known here, and "
                f"{engine.title} takes 10,000 without it. Give it as model.{FIELD}.rope_theta, "
                "as the model's config.json has it"
            )
        parameters["rope_theta"] = known.base
    return engine.rope_flag, json.dumps(overrides)


def rope_overrides(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scaling changes of a config.json, within the part of its language model.

    Source: vLLM, docs/features/context_extension.md: ``rope_parameters`` replaces the model's own,
    base included.

    >>> rope_overrides({"rope_theta": 1e6}, {"rope_type": "yarn", "factor": 4.0})
    {'rope_parameters': {'rope_theta': 1000000.0, 'rope_type': 'yarn', 'factor': 4.0}}
    """
    part = next((each for each in TEXT_PARTS if isinstance(config.get(each), Mapping)), "")
    text = config[part] if part else config
    own = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if any(isinstance(each, Mapping) for each in own.values()):
        _refuse(
            "This model scales each kind of its layers by itself, and one scaling for all of them "
            f"would replace that. Leave {FIELD} out"
        )
    kept = {name: value for name in KEPT if (value := own.get(name, text.get(name))) is not None}
    changed = {"rope_parameters": {**kept, **scaling}}
    return {part: changed} if part else changed


def _ggml_words(engine: Engine, scaling: RopeScaling) -> tuple[str, ...]:
    """Return the arguments of llama.cpp, which stretches a model's context by YaRN alone.

    Source: ggml-org/llama.cpp, pull request 28030: the server's limit follows YaRN's factor.
    """
    if scaling.rope_type != "yarn" or scaling.attention_factor is not None:
        stated = "attention_factor" if scaling.rope_type == "yarn" else scaling.rope_type
        _refuse(
            f"{engine.title} stretches a context by yarn with factors of its own, and {FIELD} "
            f"states {stated}. Leave that out, or choose vLLM"
        )
    flags = {
        "--yarn-orig-ctx": scaling.original_max_position_embeddings,
        "--rope-freq-base": scaling.rope_theta,
        "--yarn-beta-fast": scaling.beta_fast,
        "--yarn-beta-slow": scaling.beta_slow,
    }
    stated_flags = [(name, f"{value:.12g}") for name, value in flags.items() if value is not None]
    words = (engine.rope_flag, "yarn", "--rope-scale", f"{scaling.factor:g}")
    return (*words, *(word for pair in stated_flags for word in pair))


def _refuse(sentence: str) -> NoReturn:
    raise DraftProblem(f"{sentence}.", FIELD)

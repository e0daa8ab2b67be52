"""Count the vision and audio encoders that a composite checkpoint holds beside its decoder.

Engines load them with the language model and in its plain dtype; the passes over images and sounds
are not costed. ``tests/planner/test_parameters.py`` compares each kind with its own
implementation.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from planner.catalog.config_reader import LARGEST, ConfigReader, Fields

# Objects of a config that describe an encoder, and those whose parts are never counted: speech
# output, query transformers, and encoders by the name of another checkpoint.
ENCODERS = ("vision_config", "audio_config", "visual", "vit_config", "speech_config")
OTHER_PARTS = (
    "talker_config",
    "code2wav_config",
    "qformer_config",
    "vq_config",
    "img_processor",
    "mm_vision_tower",
    "vision_tower_config",
)
NAMES = {
    "width": ("embed_dim", "d_model", "vt_hidden_size", "hidden_size", "width"),
    "layers": (
        "depth",
        "num_hidden_layers",
        "encoder_layers",
        "vt_num_hidden_layers",
        "num_layers",
        "layers",
    ),
    "feed_forward": ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size", "ffn_dim"),
    "merge": ("spatial_merge_size", "spatial_conv_size"),
}
CHANNELS = 3


@dataclass(frozen=True)
class Kind:
    """The structure of an encoder that its config does not state.

    ``projector`` is what maps its outputs to the language model: two matrices over merged patches
    ("merger"), two or one over single outputs ("mlp", "linear"), two over a width of its own
    ("wide"), or a family's own.
    """

    gated: bool = False
    learned_positions: bool = True
    projector: Literal[
        "merger", "mlp", "linear", "wide", "muse", "mistral3", "ernie", "glm4v", "llama4", "step3"
    ] = "mlp"
    defaults: dict[str, Any] = field(default_factory=dict)


MERGING = {"spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 14}
QWEN2_5 = Kind(
    gated=True, learned_positions=False, projector="merger", defaults={"depth": 32, **MERGING}
)
QWEN3 = Kind(
    projector="merger",
    defaults={**MERGING, "patch_size": 16, "num_position_embeddings": 2304},
)
GLM4V = Kind(gated=True, projector="glm4v", defaults={**MERGING, "num_position_embeddings": 576})
ERNIE = Kind(learned_positions=False, projector="ernie", defaults={"mlp_ratio": 4, **MERGING})
# The table of positions has one part for rows and one for columns.
GEMMA4 = Kind(gated=True, projector="linear", defaults={"num_position_embeddings": 2 * 10240})
# Two feed-forward blocks of four widths each, relative keys and a gated convolution.
CONFORMER = Kind(projector="linear", defaults={"mlp_ratio": 10})
PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
KINDS: dict[str, Kind] = {
    "clip_vision_model": Kind(),
    "siglip_vision_model": Kind(),
    "gemma3": Kind(projector="linear"),
    "gemma4": GEMMA4,
    "gemma4_audio": CONFORMER,
    "paligemma": Kind(projector="linear"),
    "idefics3": Kind(projector="linear"),
    "smolvlm": Kind(projector="linear"),
    "internvl_vision": Kind(defaults={"merge": 2}),
    "intern_vit_6b": Kind(defaults={"merge": 2}),
    "pixtral": Kind(gated=True, learned_positions=False, defaults={**PIXTRAL, "patch_size": 16}),
    "mistral3": Kind(gated=True, learned_positions=False, projector="mistral3", defaults=PIXTRAL),
    "qwen2_vl": Kind(
        learned_positions=False,
        projector="merger",
        defaults={"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, **MERGING},
    ),
    "qwen2_5_omni": QWEN2_5,
    "qwen2_5_vl": QWEN2_5,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "qwen3_omni_moe": QWEN3,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V,
    "ernie4_5_vl_moe": ERNIE,
    "ernie4_5_moe_vl": ERNIE,
    "llama4": Kind(projector="llama4"),
    "step3_vl": Kind(projector="step3"),
    "interns1": Kind(defaults={"merge": 2}),
    "lfm2_vl": Kind(
        projector="wide",
        defaults={"merge": 2, "num_position_embeddings": 256, "projector_input_dim": 2560},
    ),
    "mimo_v2": Kind(gated=True, learned_positions=False, projector="merger", defaults=MERGING),
    "muse_glimmer": Kind(
        projector="muse",
        defaults={
            "merge": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 1024,
            "projector_input_dim": 4096,
        },
    ),
    "NemotronH_Nano_VL_V2": Kind(
        projector="wide", defaults={"merge": 2, "projector_input_dim": 20480}
    ),
    "dots3_note": Kind(gated=True, learned_positions=False, projector="merger"),
    "dots3_note_audio_encoder": Kind(gated=True, learned_positions=False),
}
# Kinds whose encoder's own model type is of another projector.
BY_WHOLE = ("step3_vl", "gemma3", "paligemma", "idefics3", "smolvlm", "mistral3", "lfm2_vl")
SUFFIXES = ("_vision_encoder", "_vision_model", "_vision")


def read_towers(reader: ConfigReader) -> dict[str, Any]:
    """Return the parameters of a composite config's encoders, and the parts without a count."""
    parameters, uncounted = 0, []
    for config in reader.composites:
        for name in ENCODERS:
            if config.get(name) is None:
                continue
            if not isinstance(config[name], dict):
                raise reader.refusal(name, config[name], "an object")
            counted = _count(Fields(config[name], path=f"model.{name}", title=name), reader)
            parameters += counted
            if not counted:
                uncounted.append(name)
        uncounted += [name for name in OTHER_PARTS if config.get(name)]
    if parameters > LARGEST**2:
        raise reader.refusal("vision_config", reader.get("vision_config"), "of a usual size")
    return {"tower_parameters": parameters, "uncounted": tuple(dict.fromkeys(uncounted))}


def unknown_encoders(reader: ConfigReader) -> tuple[str, ...]:
    """Return the encoders of unknown structure, which are counted as vision transformers."""
    return tuple(
        name
        for config in reader.composites
        for name in ENCODERS
        if isinstance(config.get(name), dict)
        and _kind_name(Fields(config[name]), reader) not in KINDS
    )


def _kind_name(encoder: Fields, reader: ConfigReader) -> str:
    """Return an encoder's own model type without its suffix, or that of the whole model."""
    whole = str(reader.outer.get("model_type")).removesuffix("_text")
    own = str(encoder.get("model_type") or whole)
    if whole in BY_WHOLE:
        return whole
    shorter = [own.removesuffix(suffix) for suffix in SUFFIXES]
    return next((name for name in (own, *shorter) if name in KINDS), own)


def _value(encoder: Fields, kind: Kind, name: str, default: int | None = None) -> int | None:
    """Return a size by its common name or one of its names; the first of a list of sizes."""
    for own in NAMES.get(name, (name,)):
        value = encoder.config.get(own, kind.defaults.get(own))
        if isinstance(value, list) and value and type(value[0]) is int:
            value = value[0]
        if value is not None:
            return Fields({own: value}, path=encoder.path, title=encoder.title).integer(own)
    return kind.defaults.get(name, default)


def _count(encoder: Fields, reader: ConfigReader) -> int:
    """Return the parameters of an encoder with its projector; 0 if a size is missing."""
    kind = KINDS.get(_kind_name(encoder, reader), Kind())
    width, layers = _value(encoder, kind, "width"), _value(encoder, kind, "layers")
    inner = _value(encoder, kind, "feed_forward")
    ratio = encoder.number("mlp_ratio", kind.defaults.get("mlp_ratio", 0.0))
    if not inner and width:
        inner = int(width * ratio)
    if not width or not layers or not inner:
        return 0
    text = reader.integer("hidden_size")
    out = _value(encoder, kind, "out_hidden_size") or text
    block = out if kind.projector == "glm4v" else inner
    matrices = 4 * width * width + (3 if kind.gated else 2) * width * block
    body = layers * (matrices + 9 * width + block) + _inputs(encoder, kind, width)
    return body + _projector(encoder, kind, (width, inner, out, text))


def _inputs(encoder: Fields, kind: Kind, width: int) -> int:
    """Return the patch or sound convolutions and the position embeddings."""
    bands = _value(encoder, kind, "num_mel_bins")
    if bands:
        return CHANNELS * width * (bands + width)
    patch = _value(encoder, kind, "patch_size")
    if not patch:
        return 0
    frames = _value(encoder, kind, "temporal_patch_size", 1) or 1
    side = (_value(encoder, kind, "image_size") or 0) // patch
    positions = _value(encoder, kind, "num_position_embeddings") or side * side
    if not kind.learned_positions:
        positions = 0
    return (CHANNELS * frames * patch * patch + positions) * width


def _projector(encoder: Fields, kind: Kind, sizes: tuple[int, int, int, int]) -> int:
    """Return the parameters between an encoder and the language model."""
    width, inner, out, text = sizes
    merge = _value(encoder, kind, "merge", 1) or 1
    merged = merge * merge * width
    # Qwen2-VL states the width of the encoder's outputs as its hidden size.
    to_text = text if "embed_dim" in kind.defaults else out
    levels = 1 + len(encoder.items("deepstack_visual_indexes"))
    middle = _value(encoder, kind, "projector_input_dim") or inner
    outputs = _value(encoder, kind, "output_hidden_size") or text
    joined = _value(encoder, kind, "vision_output_dim") or middle
    return {
        "merger": levels * merged * (merged + to_text),
        "ernie": merged * (5 * merged + text),
        "glm4v": out * (out + 3 * inner + merged),
        "llama4": middle * (inner + middle) + joined * text,
        "linear": width * text,
        "wide": 2 * merged + middle * (merged + text),
        "muse": middle * (merged + middle + text),
        # Two convolutions, of 2 by 2 and 3 by 3, before the projection.
        "step3": outputs * (4 * width + 18 * outputs + 2 * text),
        "mistral3": 4 * width * width + text * (width + text),
        "mlp": text * (merged + text),
    }[kind.projector]

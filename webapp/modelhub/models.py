"""Stored models of a team, and their shapes."""

from typing import Any, NamedTuple

from django.db import models

from planner.cost.kv_cache import cache_bytes, cached_tokens_by_layer_group
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Line, NullLedger
from planner.specs.model import ModelSpec
from runners.jobspec import DemoModel
from runners.jobspec.base import LONGEST_NAME, NAME_LENGTH
from webapp.accounts.models import TeamOwned
from webapp.hosts.models import Host

# ---------------------------------------------------------------------------
# Team models in addition to the catalog: pasted configs, host folders, job outputs.
# ---------------------------------------------------------------------------


class TeamModel(TeamOwned):
    """One model of a team; with ``host`` and ``path``, its weights can be run on that host."""

    name = models.CharField(max_length=NAME_LENGTH)
    source = models.CharField(
        max_length=16,
        choices=[
            ("config", "Pasted config"),
            ("hub", "Repository"),
            ("folder", "Folder"),
            ("job", "Made by a job"),
        ],
    )
    config = models.JSONField(default=dict)  # Hugging Face config.json
    num_parameters = models.BigIntegerField(default=0)
    host = models.ForeignKey(Host, null=True, blank=True, on_delete=models.SET_NULL)
    path = models.CharField(max_length=400, blank=True)  # source "folder": a path on the host
    repository = models.CharField(max_length=LONGEST_NAME, blank=True)  # source "hub": as named
    revision = models.CharField(max_length=40, blank=True)  # its commit; empty: the newest
    attempt_id = models.CharField(max_length=26, blank=True)  # source "job"
    artefact_name = models.CharField(max_length=80, blank=True)
    weight_dtype = models.CharField(max_length=16, blank=True)
    facts = models.JSONField(default=dict, blank=True)  # perplexity, sizes, who measured them
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name

    @property
    def stored_config(self) -> dict[str, Any]:
        """Return the config of the weights as they are stored: a compressed model's says so."""
        config: dict[str, Any] = self.config
        return quantised_config(config, self.weight_dtype)


class TrustedCode(TeamOwned):
    """The own code of a repository of Hugging Face at one commit, which an admin lets jobs run."""

    repository = models.CharField(max_length=200)
    commit = models.CharField(max_length=40)
    reason = models.CharField(max_length=300, blank=True)
    allowed_by = models.CharField(max_length=150)  # user name
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["repository", "-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["team", "repository", "commit"], name="one_row_per_trusted_code"
            )
        ]

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:12]}"

    @property
    def key(self) -> str:
        """Return how hosts and the command line name it."""
        return f"{self.repository}@{self.commit}"


# ---------------------------------------------------------------------------
# Model shapes from the catalog, a config or the demo, and figures derived from a shape.
# ---------------------------------------------------------------------------


# The demo model of ``runners.jobspec`` as a Hugging Face config for the planner.


DEMO_NAME = "Slipway demo"


def demo_config(model: DemoModel | None = None) -> dict[str, Any]:
    """Return the Hugging Face config of the demo model that a training job creates."""
    return {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        **(model or DemoModel()).model_dump(exclude={"source"}),
    }


# The bits and type of a weight, by the dtype of a compressed model.
STORED_WEIGHTS = {"int8": (8, "int"), "int4": (4, "int"), "fp8": (8, "float")}
GROUP_SIZE = 64  # weights per scale, the default of our compressions


def quantised_config(config: dict[str, Any], weight_dtype: str) -> dict[str, Any]:
    """Return a config that states the format of compressed weights, as compressed-tensors has it.

    One that states a format, and one of weights of 16 bits or more, is returned as it is.
    """
    if "quantization_config" in config or weight_dtype not in STORED_WEIGHTS:
        return config
    bits, kind = STORED_WEIGHTS[weight_dtype]
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": GROUP_SIZE}
    stated = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return {**config, "quantization_config": stated}


KV_DTYPES = (("fp32", 4.0), ("bf16", 2.0), ("fp8", 1.0), ("int4", 0.5))
PARTS = (
    ("embedding", "Token embedding"),
    ("query_output", "Attention: query and output"),
    ("key_value", "Attention: keys and values"),
    ("replicated", "Latent projections"),
    ("feed_forward", "Feed-forward"),
    ("experts", "Experts"),
    ("small", "Norms, biases, routers"),
    ("head", "Output head"),
)


class Part(NamedTuple):
    """One kind of block and its number of parameters in all layers."""

    name: str
    parameters: int
    share: float


def num_parameters(shape: ModelSpec) -> int:
    """Return the number of parameters of a model."""
    return count_parameters(shape).total


def parameter_parts(shape: ModelSpec) -> list[Part]:
    """Return the parameters by kind of block, without empty kinds."""
    counts = count_parameters(shape)
    total = max(1, counts.total)
    sizes = ((name, int(getattr(counts, field))) for field, name in PARTS)
    return [Part(name, size, size / total) for name, size in sizes if size]


def kv_bytes_per_token(shape: ModelSpec) -> list[tuple[str, float]]:
    """Return the KV-cache bytes of one token of context, by dtype."""
    return [(dtype, _kv_bytes(shape, size)) for dtype, size in KV_DTYPES]


def _kv_bytes(shape: ModelSpec, element_bytes: float) -> float:
    """Return the KV-cache bytes of one token, with no sliding window full."""
    cached_tokens = cached_tokens_by_layer_group(shape, 1.0, paged=False)
    return cache_bytes(
        shape, cached_tokens, 1, element_bytes, (NullLedger(), Line("memory", "KV cache"))
    )

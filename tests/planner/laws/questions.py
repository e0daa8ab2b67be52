"""Random valid questions: catalog models on catalog devices, every goal, engine and layout."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from random import Random
from typing import get_args

from planner.catalog.devices import get_device, list_devices
from planner.catalog.engines import engine_name, generic_engines, get_engine, list_engines
from planner.catalog.models import get_model, list_models
from planner.specs.base import SparseSpec
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest, InverseRequest, PlanRequest
from planner.specs.model import AttentionLayers, LatentLayers, ModelSpec
from planner.specs.on_policy import OF_REWARDS, ON_POLICY, ON_POLICY_OBJECTIVES
from planner.specs.workload import (
    CompressMethod,
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainMethod,
    TrainWorkload,
)
from planner.workload.cluster import resolve_device
from tests.planner.laws.fields import DEVICES, Fields, some_fields

SERVING = ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "ik_llama_cpp", "exllamav2")
LOCAL = ("ktransformers", "flexgen", "gpt_fast", "transformers", "torch")
ON_POLICY_TRAINERS = ("trl", "nemo_rl", "verl")
TRAINERS = ("torch", "deepspeed", "megatron", "torchtitan", "transformers")
ON_HOST = ("llama_cpp", "ik_llama_cpp", "ktransformers")
PROMPTS = (1, 17, 512, 1000, 2046, 4096, 8192, 16_384, 32_768, 100_000, 262_016)
ANSWERS = (1, 2, 16, 128, 256, 1024)
GIB = 1024**3
OFFLOADS = ("weights_cpu", "weights_disk", "kv_cpu", "kv_disk")


class Questions:
    """Questions drawn with one seed; the same seed draws the same questions."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)  # noqa: S311 - questions, not secrets
        self._models = tuple(entry.id for entry in list_models())
        self._devices = tuple(device.id for device in list_devices())

    def cluster(self, *, nodes: int | None = None, devices: int | None = None) -> dict:
        choice = self.draw.choice
        cluster = {
            "device": choice(self._devices),
            "devices_per_node": devices or choice((1, 1, 2, 4, 8)),
            "nodes": nodes or choice((1, 1, 1, 2)),
        }
        if self.draw.random() < 0.6:
            cluster["host_memory_bytes"] = choice((32, 64, 256, 512, 2048, 4096)) * GIB
        return cluster

    def model(self) -> str:
        while True:
            name = self.draw.choice(self._models)
            if not get_model(name).is_encoder:
                return name

    def lengths(self) -> dict:
        return {
            "input_tokens": self.draw.choice(PROMPTS),
            "output_tokens": self.draw.choice(ANSWERS),
        }

    def serve(self) -> dict:
        choice = self.draw.choice
        load: dict = choice(
            (
                {},
                {},
                {"concurrency": choice((1, 8, 64, 300))},
                {"request_rate_per_second": choice((0.1, 1, 10))},
                {"burst_requests": choice((1, 32, 500))},
            )
        )
        share = {"prefix_share_ratio": 0.5} if self.draw.random() < 0.2 else {}
        return {"kind": "serve", **self.lengths(), **load, **share}

    def generate(self) -> dict:
        batch = self.draw.choice((1, 2, 3, 8, 64, 256))
        return {"kind": "generate", **self.lengths(), "batch_size": batch}

    def train(self) -> dict:
        choice = self.draw.choice
        return {
            "kind": "train",
            "sequence_length": choice((512, 2048, 4096, 8192)),
            "global_batch_size": choice((8, 16, 64)),
            "method": choice(("full", "lora", "qlora", "pretrain")),
        }

    def strategy(self, model: str, cluster: dict) -> dict:
        """Return a layout of this many devices, with formats and offload at random."""
        choice, chance = self.draw.choice, self.draw.random
        strategy: dict = {}
        count, spec = cluster["devices_per_node"] * cluster["nodes"], get_model(model)
        if chance() < 0.7:
            for axis in ("tensor", "pipeline", "data"):
                size = choice([n for n in (1, 2, 4, 8) if count % n == 0])
                strategy[f"{axis}_parallel_size"] = size
                count //= size
            if spec.is_moe and chance() < 0.6:
                ranks = choice([n for n in (1, 2, 4, 8) if count % n == 0])
                strategy["attention_data_parallel_size"] = ranks
                experts = ranks * strategy["tensor_parallel_size"]
                strategy["expert_parallel_size"] = choice((1, experts))
        if chance() < 0.5:
            strategy |= choice(
                (
                    {"weight_dtype": choice(("bf16", "fp16", "fp8", "int8", "int4"))},
                    {"quantization": choice(("awq", "gptq", "fp8", "w8a8", "nf4"))},
                    {"quantization": choice(("gguf:q4_k_m", "gguf:q8_0", "gguf:iq4_xs"))},
                )
            )
        if chance() < 0.25:
            strategy["kv_cache_dtype"] = choice(("fp16", "fp8", "int8"))
        if chance() < 0.2:
            strategy["max_batch_tokens"] = choice((512, 2048, 8192))
        if chance() < 0.2:
            strategy["chunked_prefill"] = choice((True, False))
        if chance() < 0.25:
            strategy["offload"] = {choice(OFFLOADS): choice((0.1, 0.5, 1.0))}
        return strategy

    def estimate(self) -> dict:
        """Return one question of ``planner estimate``."""
        kind, model, cluster = self.draw.random(), self.model(), self.cluster()
        if kind < 0.1:
            engine, workload, strategy = self.draw.choice(TRAINERS), self.train(), {}
        else:
            engine = self.draw.choice((*SERVING, *LOCAL))
            workload = self.serve() if kind < 0.6 else self.generate()
            strategy = self.strategy(model, cluster)
        return _question(model, cluster, workload, engine, strategy=strategy)

    def plan(self, *, training: bool = False) -> dict:
        """Return one question of ``planner plan``."""
        model, cluster = self.model(), self.cluster()
        workload = self.train() if training else self.draw.choice((self.serve, self.generate))()
        engine = self.draw.choice(TRAINERS if training else (*SERVING, "torch"))
        objective = self.draw.choice(("latency", "throughput", "balanced", "cost", "quality"))
        return _question(model, cluster, workload, engine, objective=objective, top=2)

    def offloads(self) -> list[dict]:
        """Return one question with nothing offloaded, then with growing shares."""
        share = self.draw.choice(OFFLOADS)
        engine = self.draw.choice((*ON_HOST, *ON_HOST, "vllm", "flexgen", "torch"))
        model, cluster = self.model(), self.cluster(nodes=1)
        cluster["host_memory_bytes"] = 4096 * GIB
        workload = self.draw.choice((self.serve, self.generate))()
        strategy = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        if self.draw.random() < 0.5:
            strategy["quantization"] = self.draw.choice(("gguf:q4_0", "gguf:iq4_xs", "gguf:q8_0"))
        if self.draw.random() < 0.2:
            strategy["kv_cache_dtype"] = "int8"
        places = ({}, *({"offload": {share: size}} for size in (0.25, 0.5, 1.0)))
        return [
            _question(model, cluster, workload, engine, strategy={**strategy, **place})
            for place in places
        ]

    def one_caller(self) -> list[dict]:
        """Return one batch of a single sequence, and one caller of a server."""
        engine = self.draw.choice(SERVING)
        model, cluster, lengths = self.model(), self.cluster(nodes=1, devices=1), self.lengths()
        strategy = {"data_parallel_size": 1}
        if self.draw.random() < 0.3:
            strategy["max_batch_tokens"] = self.draw.choice((512, 2048, 8192))
        return [
            _question(model, cluster, {**lengths, **kind}, engine, strategy=strategy)
            for kind in (
                {"kind": "generate", "batch_size": 1},
                {"kind": "serve", "concurrency": 1},
            )
        ]

    def batches(self) -> list[dict]:
        """Return a batch that replicas share unevenly, and the whole batch of the busiest one."""
        model, cluster = self.model(), self.cluster(nodes=1, devices=self.draw.choice((2, 4, 8)))
        ranks, batch = cluster["devices_per_node"], self.draw.choice((1, 3, 5, 9))
        engine, lengths = self.draw.choice((*SERVING, *LOCAL)), self.lengths()
        whole = -(-batch // ranks) * ranks
        return [
            _question(
                model,
                cluster,
                {"kind": "generate", **lengths, "batch_size": size},
                engine,
                strategy={"data_parallel_size": ranks, "tensor_parallel_size": 1},
            )
            for size in (batch, whole)
        ]

    def inverse(self) -> dict:
        """Return one question of ``planner inverse``."""
        kind = self.draw.choice(("longest_context", "most_users", "largest_batch"))
        engine = self.draw.choice((*SERVING, "torch"))
        workload = self.generate() if kind == "largest_batch" else self.serve()
        return _question(self.model(), self.cluster(nodes=1), workload, engine, question=kind)


# An encoder, of which the catalog has none.
ENCODER = {
    "model_type": "distilbert",
    "dim": 768,
    "hidden_dim": 3072,
    "n_layers": 6,
    "n_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
INVERSE = {
    "serve": ("longest_context", "most_users", "fewest_devices", "cheapest_instance"),
    "generate": ("longest_context", "largest_batch", "fewest_devices", "largest_model"),
    "train": ("longest_sequence", "largest_batch", "fewest_devices"),
}
ROLES = {
    "serve": {"serving", "runner"},
    "generate": {"serving", "runner"},
    "train": {"training", "runner"},
}


@cache
def models_by_family() -> dict[str, tuple[str, ...]]:
    """Return the catalog's models by what decides the formulas of their layers."""
    families = defaultdict[str, list[str]](list)
    for entry in list_models():
        families[_family_of(get_model(entry.id))].append(entry.id)
    return {family: tuple(names) for family, names in sorted(families.items())}


def _family_of(model: ModelSpec) -> str:
    groups = model.layers_by_attention
    plain = [group for group in groups if isinstance(group, AttentionLayers)]
    sparse = "mixture, " if model.is_moe else ""
    if any(isinstance(group, LatentLayers) for group in groups):
        return f"{sparse}latent"
    if len(plain) < len(groups):
        return f"{sparse}hybrid"
    return f"{sparse}windows" if any(group.window for group in plain) else f"{sparse}dense"


@cache
def engines_by_role() -> dict[str, tuple[str, ...]]:
    """Return every engine of the catalog, and those without a table of their own, by role."""
    roles = defaultdict[str, list[str]](list)
    for name in list_engines():
        roles[get_engine(name, "gpu").role].append(engine_name(name))
    for name, role in generic_engines().items():
        roles[role].append(name)
    return {role: tuple(names) for role, names in roles.items()}


# One in so many requests of a run asks for a plan, and one for a limit; the others are estimates.
PLAN_SHARE, INVERSE_SHARE = 45, 135


def fresh_questions(seed: int, count: int, *, quick: bool = False) -> Iterator["FreshQuestion"]:
    """Yield the first questions of a seed, each drawn by itself; ``quick`` ones search briefly."""
    for number in range(1, count + 1):
        ask = "estimate"
        if number % PLAN_SHARE == 0:
            ask = "inverse" if number % INVERSE_SHARE == 0 else "plan"
        yield FreshQuestion(f"{seed}/{number}", ask, quick=quick)


class FreshQuestion:
    """One question with fields at random, of any goal, family, engine and cluster.

    ``names`` are the fields that it has, with the model's family and the engine among them.
    """

    def __init__(self, seed: str, ask: str, *, quick: bool = False) -> None:
        self.seed, self.ask = seed, ask
        self.draw = Random(seed)  # noqa: S311 - questions, not secrets
        self.names: set[str] = set()
        goals = ("serve", "serve", "serve", "generate", "train", "train")
        self.goal = self.draw.choice(goals if ask == "inverse" else (*goals, "compress"))
        self.document = self._document()
        if quick and ask != "estimate" and self.goal == "train":
            # A search on unlike nodes estimates each of its layouts exactly, in ten seconds.
            self.document["cluster"].pop("other_nodes", None)
            self._take_turns(self.document["workload"])

    def _take_turns(self, workload: Fields) -> None:
        """Let a policy generate where it trains: other divisions multiply the layouts."""
        generates = workload.get("objective") in ON_POLICY_OBJECTIVES
        if not generates or "rollout" in self.document["pins"]:
            return
        for name in ("rollout_devices", "staleness"):
            workload.pop(name, None)
            self.names.discard(f"TrainWorkload.{name}")
        workload["generator"] = "colocated"

    def _teach(self, document: Fields) -> None:
        """Let a teacher of the model's own shape take the place of rewards, in half of these."""
        if len(self.seed) % 2:
            return
        work = document["workload"]
        work |= {"objective": "distillation", "teacher_model": document["model"]}
        for name in OF_REWARDS:
            work.pop(name, None)
            self.names.discard(f"TrainWorkload.{name}")
        self.names.add("TrainWorkload.teacher_model")

    def _document(self) -> Fields:
        draw = self.draw
        document = {"model": self._model(), "cluster": self._cluster(), **self._engine()}
        document["workload"] = self._workload()
        generates = document["workload"].get("objective") == "grpo"
        if generates:
            document["engine"] = draw.choice(ON_POLICY_TRAINERS)
            if document["engine"] == "trl":
                self._teach(document)
            self.names.add(f"engine: {document['engine']}")
        strategy = self._some(Strategy, most=3, closed=() if generates else ("rollout",))
        if self.ask == "estimate":
            if draw.random() < 0.3 and isinstance(document["model"], str):
                own = Questions(draw.random()).strategy(document["model"], document["cluster"])
                strategy = {**own, **strategy}
            return self._some(EstimateRequest, {**document, "strategy": strategy}, most=1)
        spec = PlanRequest if self.ask == "plan" else InverseRequest
        document = self._some(spec, {"top": 1, **document, "pins": strategy}, most=2)
        if self.ask == "inverse":
            document["question"] = draw.choice(INVERSE[self.goal])
        return document

    def _some(
        self,
        spec: type[SparseSpec],
        own: Fields | None = None,
        *,
        most: int,
        closed: Collection[str] = (),
    ) -> Fields:
        fields, names = some_fields(self.draw, spec, own, most=most, closed=closed)
        self.names |= names
        return fields

    def _model(self) -> str | Fields:
        if self.draw.random() < 0.03:
            self.names.add("model: encoder")
            return ENCODER
        family, models = self.draw.choice(list(models_by_family().items()))
        self.names.add(f"model: {family}")
        return self.draw.choice(models)

    def _engine(self) -> Fields:
        roles = engines_by_role()
        if self.draw.random() < 0.1:
            return {}
        fitting = [name for role in ROLES.get(self.goal, roles) for name in sorted(roles[role])]
        name = self.draw.choice(sorted(fitting))
        self.names.add(f"engine: {name}")
        return {"engine": name}

    def _cluster(self) -> Fields:
        draw = self.draw
        nodes = draw.choice((1, 1, 1, 2))
        count = draw.choice((1, 2, 8) if nodes == 1 else (1, 4))
        device: str | Fields = draw.choice(DEVICES)
        if draw.random() < 0.15:
            known = get_device(device).model_dump(mode="json", exclude_none=True)
            device = self._some(DeviceSpec, most=4)
            device = {**known, **device, "id": "custom"}
        own = {"device": device, "devices_per_node": count, "nodes": nodes}
        return self._some(ClusterSpec, own, most=3)

    def _workload(self) -> Fields:
        draw, few = self.draw, draw_most(self.draw)
        lengths = {"input_tokens": draw.choice(PROMPTS), "output_tokens": draw.choice(ANSWERS)}
        if self.goal == "serve":
            load = self._some(ServeWorkload, {"kind": "serve", **lengths}, most=few)
            arrivals = ("concurrency", "request_rate_per_second", "burst_requests")
            for name in [name for name in arrivals if name in load][1:]:
                del load[name]  # one kind of arrival
                self.names.discard(f"ServeWorkload.{name}")
            return load
        if self.goal == "generate":
            batch = {"batch_size": draw.choice((1, 2, 3, 8, 64, 256))}
            return self._some(GenerateWorkload, {"kind": "generate", **lengths, **batch}, most=1)
        if self.goal == "compress":
            method = draw.choice(get_args(CompressMethod))
            return self._some(CompressWorkload, {"kind": "compress", "method": method}, most=2)
        rows = {
            "kind": "train",
            "sequence_length": draw.choice((512, 2048, 4096, 8192)),
            "global_batch_size": draw.choice((8, 16, 64)),
            "method": draw.choice(("pretrain", "full", "lora", *get_args(TrainMethod))),
        }
        if draw.random() < 0.25:
            own = {"objective": "grpo", "method": draw.choice(("full", "lora", "qlora"))}
            closed = ("padding_ratio", "document_tokens", "length_schedule")
            return self._some(TrainWorkload, {**rows, **own}, most=few + 2, closed=closed)
        return self._some(TrainWorkload, rows, most=few, closed=ON_POLICY)


def draw_most(draw: Random) -> int:
    """Return how many optional fields of a workload a question has at most."""
    return draw.choice((1, 2, 4))


def _question(model: str, cluster: dict, workload: dict, engine: str, **more: object) -> dict:
    fields = {"model": model, "cluster": cluster, "workload": workload, "engine": engine, **more}
    if resolve_device(cluster["device"]).kind == "cpu":
        fields["cluster"] = {**cluster, "devices_per_node": 1}
    return fields


def device_of(document: dict) -> DeviceSpec:
    return resolve_device(document["cluster"]["device"])


def chunks_prompts(document: dict) -> bool:
    """Return whether the engine computes a long prompt in steps of limited tokens."""
    engine = get_engine(document["engine"], device_of(document).kind)
    return engine.role == "serving"

"""Random valid questions: catalog models on catalog devices, every goal, engine and layout."""

from random import Random

from planner.catalog.devices import list_devices
from planner.catalog.engines import get_engine
from planner.catalog.models import get_model, list_models
from planner.specs.cluster import DeviceSpec
from planner.workload.resolve import resolve_device

SERVING = ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "ik_llama_cpp", "exllamav2")
LOCAL = ("ktransformers", "flexgen", "gpt_fast", "transformers", "torch")
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

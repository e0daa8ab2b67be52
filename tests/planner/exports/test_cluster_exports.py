"""Cluster managers and unlike nodes: a plan's command starts where it belongs, or is refused."""

import itertools
import json
import re
import subprocess
from dataclasses import replace

import pytest
import yaml

from planner.api import plan
from planner.exports.kubernetes import COMPOSE, KUBERNETES, compose_document, object_name
from planner.exports.launch import SLURM, _limit, image_of, server_name
from planner.exports.registry import export, export_case
from planner.exports.yaml_text import yaml_text
from planner.specs.base import BadRequestError
from planner.specs.estimate import PlanRequest
from tests.planner.asking import GENERATE, LLAMA_8B
from tests.planner.asking import SERVE as ASKED
from tests.planner.exports.making import SERVE, made, trained

TWO_NODES = {"data_parallel_size": 16, "nodes": 2}
REQUIRED = {"apiVersion", "kind", "metadata"}


def test_what_is_written_as_yaml_is_read_back_the_same():
    for value in (
        {"a": {"b": [1, 2.5, True, None, "yes", "a: b", "#", ""]}, "c": [], "d": {}},
        [{"x": [{"y": 1}, {"z": "-"}]}, "text"],
        {"text": "one\n  two\n\nthree\n", "1": "2", "x y": "é"},
        ["several\nlines\n"],
    ):
        assert yaml.safe_load(yaml_text(value)) == value, value


def directives(text):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))


def test_slurm_asks_for_the_plans_nodes_and_fills_each_nodes_rank_in():
    found = directives(SLURM.text(trained(**TWO_NODES)))
    assert (found["nodes"], found["gpus-per-node"], found["ntasks-per-node"]) == ("2", "8", "1")
    assert "exclusive" in found
    assert found["time"] == _limit(86400 * 1.25 * 1.2) == "1-12:00:00"
    text = SLURM.text(trained(**TWO_NODES))
    assert "scontrol show hostnames" in text
    assert '"--rdzv-endpoint=$MASTER_ADDR:29500"' in text

    words = on_second_node(
        made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2, **DRAFT)
    )
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == "first"
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == "org/it's"
    assert words[-1] == "--headless"

    words = on_second_node(made(tensor_parallel_size=2, data_parallel_size=8, nodes=2))
    assert words[words.index("--data-parallel-size-local") + 1] == "4"
    assert words[-3:] == ["--headless", "--data-parallel-start-rank", "4"]


def test_slurm_takes_equal_segments_of_each_nvlink_domain():
    case = trained(**TWO_NODES)
    assert "segment" not in directives(SLURM.text(case))
    for nodes, domain, segment in ((2, 16, "2"), (6, 32, "3"), (16, 64, "8"), (7, 32, None)):
        cluster = case.plan.cluster.model_copy(
            update={"nodes": nodes, "nvlink_domain_devices": domain}
        )
        sizes = {"data_parallel_size": 8 * nodes, "tensor_parallel_size": 1}
        strategy = case.plan.strategy.model_copy(update=sizes)
        plan = case.plan.model_copy(update={"cluster": cluster, "strategy": strategy})
        found = directives(SLURM.text(replace(case, plan=plan))).get("segment")
        assert found == segment, (nodes, domain)


@pytest.mark.parametrize(
    "case",
    [
        trained(**TWO_NODES),
        made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2),
        made(engine="tensorrt_llm", kv_cache_dtype="fp8", tensor_parallel_size=2),
    ],
    ids=["train", "serve", "options"],
)
def test_bash_reads_every_batch_script(case, tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(SLURM.text(case))
    assert SLURM.text(case).startswith("#!/bin/bash\n# ")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


DRAFT = {"speculative": {"draft_model": "org/it's", "tokens": 5}}


def on_second_node(case):
    """What vLLM is called with when the second node runs the batch script's last command."""
    text = SLURM.text(case)
    called = 'srun() { SLURM_NODEID=1 MASTER_ADDR=first "$@"; }\nvllm() { printf "%s\\n" "$@"; }\n'
    shell = f"{called}export -f vllm\n{text[text.index('srun bash') :]}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def objects(case):
    found = list(yaml.safe_load_all(KUBERNETES.text(case)))
    assert all(found_one.keys() >= REQUIRED for found_one in found)
    return {one["kind"]: one for one in found}


def container(one):
    return one["spec"]["template"]["spec"]["containers"][0]


def test_kubernetes_serves_trains_and_mounts_with_names_that_dns_allows():
    found = objects(made(tensor_parallel_size=4, data_parallel_size=2))
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert container(found["Deployment"])["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert found["Service"]["spec"]["selector"] == labels
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels

    found = objects(made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2))
    pod = container(found["StatefulSet"])
    environment = {one["name"]: one for one in pod["env"]}

    assert found["StatefulSet"]["spec"]["replicas"] == 2
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert environment["MASTER_ADDR"]["value"] == "llama-3-1-8b-0.llama-3-1-8b"
    assert '--node-rank "$NODE_RANK"' in pod["command"][2]

    found = objects(trained(**TWO_NODES))
    spec = found["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["template"]["spec"]["subdomain"] == found["Service"]["metadata"]["name"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"

    # A volume for the checkpoint, the token of gated models, and an image that stays as it is.
    for case, mode in (
        (made(model="meta-llama/Llama-3.1-70B", tensor_parallel_size=8), "ReadWriteOnce"),
        (made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2), "ReadWriteMany"),
        (trained(**TWO_NODES), "ReadWriteMany"),
    ):
        found = objects(case)
        claim = found["PersistentVolumeClaim"]
        one = next(found[kind] for kind in ("Deployment", "StatefulSet", "Job") if kind in found)
        volumes = {each["name"]: each for each in one["spec"]["template"]["spec"]["volumes"]}
        named = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert named == claim["metadata"]["name"]
        assert claim["spec"]["accessModes"] == [mode]
        variables = {each["name"]: each for each in container(one)["env"]}
        folder = variables["HF_HOME"]["value"]
        assert {"name": "models", "mountPath": folder} in container(one)["volumeMounts"]
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
        assert not container(one)["image"].endswith(":latest")
        assert ":" in container(one)["image"]
    storage = objects(made(model="meta-llama/Llama-3.1-70B"))["PersistentVolumeClaim"]
    assert storage["spec"]["resources"]["requests"]["storage"] == "160Gi"  # 141 GB and a fifth
    case = made(device="mi300x", engine="vllm")
    assert container(objects(case)["Deployment"])["image"] == "rocm/vllm:TAG"
    assert any("for TAG" in note for note in KUBERNETES.notes(case))

    case = made(engine="tensorrt_llm", kv_cache_dtype="fp8")
    found = objects(case)
    assert "trtllm-options.yaml" in found["ConfigMap"]["data"]
    assert {"name": "files", "mountPath": "/workspace"} in container(found["Deployment"])[
        "volumeMounts"
    ]

    for model, expected in (
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("meta-llama/Llama-3.1-8B", "llama-3-1-8b"),
    ):
        assert object_name(made(model=model)) == expected, (model, expected)


def test_compose_reserves_devices_opens_the_port_and_carries_the_options():
    document = yaml.safe_load(COMPOSE.text(made(tensor_parallel_size=2)))
    service = document["services"]["serve"]
    (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert reserved == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert service["ports"] == ["8000:8000"]
    assert service["command"][:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]

    service = compose_document(made(device="mi300x"))["services"]["serve"]
    assert service["devices"] == ["/dev/kfd", "/dev/dri"]
    assert "deploy" not in service

    document = compose_document(made(engine="tensorrt_llm", kv_cache_dtype="fp8"))
    assert (
        document["services"]["serve"]["configs"][0]["target"] == "/workspace/trtllm-options.yaml"
    )
    assert "dtype: fp8" in document["configs"]["trtllm-options"]["content"]

    case = made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2)
    service = compose_document(case)["services"]["serve"]
    assert service["environment"]["NODE_RANK"] == "${NODE_RANK}"
    assert '--node-rank "$$NODE_RANK"' in service["command"][2]
    assert service["network_mode"] == "host"


def test_a_training_container_has_its_script_with_the_layout():
    document = compose_document(trained(data_parallel_size=8, zero_stage=3))
    service = document["services"]["train"]
    [script] = [one["content"] for one in document["configs"].values()]
    assert '"reshard_after_forward": true' in script
    assert service["configs"][0]["target"] == f"/workspace/{service['command'][-1]}"
    assert "ports" not in service
    assert "$" not in script  # Compose would fill it in


def test_the_server_is_the_plans_own_and_what_has_no_image_or_length_says_so():
    for engine, device, server in (
        ("sglang", "h100-sxm-80gb", "sglang"),
        ("torch", "h100-sxm-80gb", "vllm"),
        ("torch", "cpu-xeon-8480-2s", "llama_cpp"),
        ("torch", "m2-max", "llama_cpp"),
    ):
        assert server_name(made(engine=engine, device=device)) == server, (engine, device, server)

    case = made(device="m2-max", engine="llama_cpp")
    assert image_of(case) is None
    assert any("put your own for IMAGE" in note for note in COMPOSE.notes(case))

    text = SLURM.text(made(SERVE, tensor_parallel_size=2))
    assert "--time" not in text
    assert "no time limit" in text


PAIR = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "a100-sxm4-40gb"}]}
UNEQUAL = {"device": "h100-sxm-80gb", "devices_per_node": 2, "other_nodes": [{"device": "l40s"}]}
MIXED_VENDORS = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "mi300x-192gb"}]}
REPLICAS = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "weight_dtype": "bf16"}
STAGES = {**REPLICAS, "pipeline_parallel_size": 2}


def case(cluster=PAIR, pins=REPLICAS, workload=ASKED):
    """Return the best plan over all nodes."""
    request = PlanRequest.model_validate(
        {
            "model": LLAMA_8B,
            "cluster": cluster,
            "workload": workload,
            "engine": "vllm",
            "objective": "throughput",
            "pins": pins,
            "top": 9,
        }
    )
    best = next(one for one in plan(request).plans if one.cluster.other_nodes)
    return export_case(request, best)


def test_replicas_are_a_server_for_each_kind_with_its_share_and_part_of_the_callers():
    for workload, name in itertools.product(
        (ASKED, {**GENERATE, "batch_size": 32}), ("vllm", "sglang", "tensorrt_llm", "llama_cpp")
    ):
        found = export(name, case(workload=workload))
        assert found.text.count('if [ "$KIND" = ') == 2, (workload, name)
        assert "H100 SXM5 80GB + 1 x NVIDIA A100" in found.text, (workload, name)

    found = export("vllm", case())
    (told,) = (one for one in found.notes if "router" in one)
    shares = [int(word.rstrip("%")) for word in told.split() if word.endswith("%")]
    assert len(shares) == 2
    assert sum(shares) == 100
    assert shares[0] > shares[1]

    text = export("vllm", case()).text
    words = text.split()
    most = [int(words[at + 1]) for at, word in enumerate(words) if word == "--max-num-seqs"]
    assert len(most) == 2
    assert most[0] > most[1]
    assert 16 <= sum(most) <= 17


def test_a_node_starts_the_server_of_its_own_kind_alone(tmp_path):
    text = export("vllm", case()).text
    script = tmp_path / "serve.sh"
    script.write_text("vllm() { echo started; }\n" + text)
    for kind, count in (("1", 1), ("2", 1), ("3", 0)):
        ran = subprocess.run(
            ["bash", "-u", script], env={"KIND": kind}, capture_output=True, text=True, check=False
        )
        assert ran.stdout.count("started") == count


def test_uneven_layers_of_a_pipeline_are_said_or_refused_by_name():
    asked = case(pins=STAGES)
    layers = asked.plan.memory.per_stage_layers
    text = export("vllm", asked).text
    assert layers[0] > layers[1]
    assert f"export VLLM_PP_LAYER_PARTITION={layers[0]},{layers[1]}\n" in text
    assert "--nnodes 2" in text

    for name in ("sglang", "tensorrt_llm", "llama_cpp", "slurm", "kubernetes"):
        with pytest.raises(BadRequestError, match="choose among vllm") as caught:
            export(name, case(pins=STAGES))
        assert caught.value.field == "format", name


def test_what_cannot_run_unlike_nodes_is_refused_or_not_offered():
    for name in ("slurm", "kubernetes", "compose"):
        with pytest.raises(BadRequestError, match="cannot express this plan"):
            export(name, case())

    asked = case(UNEQUAL, {**STAGES, "pipeline_parallel_size": 3})
    assert asked.plan.exports == ()
    with pytest.raises(BadRequestError, match="choose among none"):
        export("vllm", asked)

    exports = case(MIXED_VENDORS).plan.exports
    assert "vllm" in exports
    assert "tensorrt_llm" not in exports


def test_the_measurement_names_the_hardware_of_both_kinds():
    measure = export("vllm", case()).measure
    assert "1 x NVIDIA H100 SXM5 80GB + 1 x NVIDIA A100" in measure

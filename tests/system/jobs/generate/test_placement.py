"""Weights that are not all in memory write what weights in memory write."""

import pytest

from runners.jobs.runtime import BadInputError
from runners.jobspec import DemoModel, DemoPrompts
from runners.jobspec.generate import LayerStreaming, MappedWeights
from tests.system.jobs.generate.reading import outputs

PILE = DemoPrompts(count=5, input_tokens=24, shortest=4)
DEFAULTS = {"prompts": PILE, "batch_size": 4, "output_tokens": 12}


@pytest.fixture(scope="module")
def resident(generate):
    return generate("resident")


@pytest.mark.equality
@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("look_ahead", [True, False])
def test_layers_read_in_every_pass_write_the_same(generate, resident, layers, look_ahead):
    asked = LayerStreaming(layers_resident=layers, look_ahead=look_ahead)

    run = generate(f"stream-{layers}-{look_ahead}", offload=asked)

    assert outputs(run) == outputs(resident)


@pytest.mark.equality
def test_layers_from_host_memory_write_the_same(generate, resident):
    run = generate("host-memory", offload=LayerStreaming(layers_from="host_memory"))

    assert outputs(run) == outputs(resident)


@pytest.mark.equality
def test_streamed_layers_run_under_guesses_and_packed_batches_too(generate, resident):
    asked = LayerStreaming()

    runs = [
        generate("stream-packed", offload=asked, batching="packed"),
        generate("stream-guess", offload=asked, speculation={"method": "lookup", "tokens": 3}),
    ]

    assert [outputs(run) for run in runs] == [outputs(resident)] * 2


@pytest.mark.equality
def test_weights_mapped_to_disk_by_accelerate_write_the_same(generate, resident):
    run = generate("mapped", offload=MappedWeights(memory_bytes=300_000))

    assert outputs(run) == outputs(resident)
    assert "parts on disk" in run.bodies("result")[0]["notes"]["offload"]
    assert run.measured["parameter_bytes"] < resident.measured["parameter_bytes"]


def test_the_result_says_which_layers_were_where_and_counts_only_what_was_held(generate, resident):
    run = generate("told", offload=LayerStreaming(layers_resident=1))

    said = run.bodies("result")[0]["notes"]["offload"]
    assert said.startswith("1 of 2 layers stay, 1 come from disk in every pass")
    assert run.measured["parameter_bytes"] < resident.measured["parameter_bytes"]


def test_a_model_without_a_folder_cannot_be_streamed(generate):
    with pytest.raises(BadInputError, match="offload reads weights from a model folder"):
        generate("no-folder", model=DemoModel(), offload=LayerStreaming())

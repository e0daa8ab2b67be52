"""Kernels of a training: attention by blocks, compiled layers, products in 8-bit floats."""

import itertools

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from transformers import GptOssConfig, GptOssForCausalLM

from planner.cost.roofline import block_pairs
from planner.workload.training_exchange import FLEX_BLOCK_TOKENS, ROUNDING_BYTES, ROUNDINGS
from runners.jobs.loading import fresh_model, use_attn_implementation
from runners.jobs.runtime import BadInputError
from runners.jobs.train.job import _kernel_notes
from runners.jobs.train.kernels import (
    EVALUATION_ATTENTION,
    NAME,
    BlockAttention,
    CompiledLayers,
    evaluation_attention,
    set_attention,
    use_fp8_linear_layers,
    with_plain_linear_layers,
)
from runners.jobs.train.rows import IGNORED
from runners.jobs.train.trainer import Trainer
from runners.jobspec import SampleOptions
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.test_rows import batches, documents
from tests.runners.jobs.train.training import tiny_trainer

CPU = torch.device("cpu")
ROW = 640
LENGTHS = (131, 150, 97, 62, 200, 128, 113, 90, 140, 169)  # they end in the middle of blocks


def model_of(heads, keys, hidden, **changes):
    torch.manual_seed(5)
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": hidden}
    config = {**TINY_CONFIG, **shape, "max_position_embeddings": ROW, **changes}
    return fresh_model(config, torch.float32).eval()


def packed():
    """Return two rows of several documents."""
    found = documents(*(each + 1 for each in LENGTHS))
    return batches(found, SampleOptions(), ROW).micro_batch(0, 0)


def loss_and_logits(model, batch, *, narrow):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        logits = model(**batch.inputs).logits.float()
    return cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED), (
        logits[batch.labels != IGNORED]
    )


def test_what_is_judged_attends_as_it_will_be_loaded_and_counts_no_blocks():
    model, batch = model_of(4, 4, 64), packed()
    blocks = BlockAttention(model)
    assert blocks.computed_ratio is None
    assert "blocks" not in blocks.note()

    with use_attn_implementation(model, EVALUATION_ATTENTION):
        assert model.config._attn_implementation == EVALUATION_ATTENTION
        loss_and_logits(model, batch, narrow=False)
    assert model.config._attn_implementation == NAME
    assert blocks.computed_ratio is None


def test_a_trainer_judges_aside_and_notes_what_its_masks_left_out(make_job):
    trainer: Trainer = tiny_trainer(make_job(tiny_training(max_steps=8)))
    trainer.blocks = blocks = BlockAttention(trainer.model)
    ways = []
    trainer.held_out.validation = lambda model: (
        ways.append(model.config._attn_implementation) or {"validation_loss": 1.0}
    )
    trainer.state.step = 4
    trainer.evaluator.after_step(trainer.state)

    assert (ways, trainer.model.config._attn_implementation) == ([EVALUATION_ATTENTION], NAME)
    assert _kernel_notes(trainer)["attention"] == blocks.note()


def test_the_other_ways_are_as_they_were():
    for asked, way in (("auto", "eager"), ("flash", "sdpa"), ("eager",) * 2):
        model = model_of(4, 4, 64)
        assert set_attention(model, asked, CPU) is None, (asked, way)
        assert model.config._attn_implementation == way, (asked, way)


def test_a_model_without_sdpa_is_evaluated_by_the_plain_product():
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = GptOssConfig(**sizes, num_key_value_heads=1, num_local_experts=2, vocab_size=64)
    for model, way in ((model_of(4, 4, 64), "sdpa"), (GptOssForCausalLM(config), "eager")):
        model.set_attn_implementation(evaluation_attention(model))
        assert model.config._attn_implementation == way, way
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        model.set_attn_implementation(EVALUATION_ATTENTION)


def test_layers_that_cannot_are_refused_with_the_way_out():
    for changes, words in (
        (
            {"attention_dropout": 0.1},
            "LlamaForCausalLM has attention_dropout 0.1, which must be 0",
        ),
        ({"head_dim": 8}, "has a head_dim of 8, which must be at least 16"),
    ):
        with refused(
            BadInputError, rf"attention is flex, .*{words}.*; choose flash", (changes, words)
        ):
            BlockAttention(model_of(4, 4, 64, **changes))


def test_what_attends_in_ways_of_its_own_is_refused_by_name():
    for changes, words in (
        ({"layout": {"context_parallel_size": 2}}, "a layout that divides layers, sequences"),
        ({"layout": {"tensor_parallel_size": 2}}, "a layout that divides layers, sequences"),
        ({"layout": {"pipeline_parallel_size": 2}}, "a layout that divides layers, sequences"),
        ({"compiled": True}, "compiled.*; choose flash"),
        ({"activation_recomputation": "selective"}, "activation_recomputation.*; choose flash"),
    ):
        with refused(ValidationError, f"flex does not go with {words}", changes):
            tiny_training(attention="flex", **changes)
    shards = {"data_parallel_size": 2, "zero_stage": 3}
    kept = tiny_training(attention="flex", layout=shards, gradient_accumulation_steps=2)
    assert kept.attention == "flex"


def test_the_planner_counts_the_blocks_that_masks_of_packed_rows_have():
    """Its length is that of the document that a token is of: long ones weigh more."""
    for mean, spread in ((200, 0.4), (700, 0.3), (2500, 0.5), (60, 0.2)):
        row, draw = 8192, np.random.default_rng(mean)
        needed, weighted, size = 0, [], FLEX_BLOCK_TOKENS
        for _ in range(40):
            lengths = np.maximum(1, draw.lognormal(np.log(mean), spread, row).astype(int))
            ends = np.minimum(np.cumsum(lengths), row)
            begins = [0, *ends[ends < row].tolist()]
            whole = np.diff([*begins, row])
            weighted.append((whole**2).sum() / row)
            first = np.searchsorted(begins, np.arange(0, row, size), side="right") - 1
            starts = np.array(begins)[first] // size
            needed += int((np.arange(row // size) - starts + 1).sum())

        planned = block_pairs(
            row_tokens=row, document_tokens=round(np.mean(weighted)), block_tokens=size
        )

        assert planned == pytest.approx(needed / 40 * size**2, rel=0.1), (mean, spread)
        plain = block_pairs(row_tokens=row, document_tokens=row, block_tokens=size)
        assert plain == pytest.approx(row * (row + size) / 2, rel=0.01), (mean, spread)
        assert all(
            block_pairs(row_tokens=row, document_tokens=d, block_tokens=size)
            <= block_pairs(row_tokens=row, document_tokens=d + 1, block_tokens=size)
            for d, _ in itertools.pairwise(range(1, 1000, 37))
        ), (mean, spread)


# Fused kernels of a training: compiled layers and fused attention learn what plain ones learn.


def test_what_compiling_brought_is_told_from_steps_that_were_steady():
    layers = object.__new__(CompiledLayers)
    layers._layers = [1, 2]
    said = layers.note([9.0, 3.0, 1.0, 1.2, 30.0, 0.9, 0.5, 0.6, 0.55])
    assert said == (
        "2 layers by torch.compile from step 5 on, which took 30.0 s: a step of 1.100 s as it "
        "was takes 0.550 s, 2.00 times as fast"
    )
    assert layers.note([1.0] * 5).endswith("too few steps to say what it brought")


def test_layers_run_as_they_are_while_something_is_judged(tmp_path):
    model = fresh_model(TINY_CONFIG, torch.float32)
    layers = CompiledLayers(model, tmp_path)
    for each in layers._layers:
        each._compiled_call_impl = lambda *_args, **_kwargs: pytest.fail("compiled")

    with layers.uncompiled(), torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))

    assert all(each._compiled_call_impl for each in layers._layers)
    layers.end()
    assert not any(each._compiled_call_impl for each in layers._layers)


def test_a_host_or_a_model_that_cannot_compile_is_told_by_name(tmp_path, make_job, monkeypatch):
    model = fresh_model(TINY_CONFIG, torch.float32)
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(BadInputError, match="LlamaForCausalLM has no layers to compile"):
        CompiledLayers(model, tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        BadInputError, match=r"compiled needs the compiler g\+\+, which this host lacks"
    ):
        tiny_trainer(make_job(tiny_training(compiled=True)))


def test_what_cannot_be_compiled_is_refused_by_name():
    for changes, words in (
        ({"optimizer": "qft"}, "do not go with optimizer qft; leave compiled out"),
        ({"activation_offload": "disk"}, "activation_offload disk"),
        ({"activation_recomputation": "selective"}, "recomputation selective"),
        ({"layout": {"tensor_parallel_size": 2}}, "compiled requires plain data parallelism"),
    ):
        with refused(ValidationError, words, (changes, words)):
            tiny_training(compiled=True, **changes)


# Products in 8-bit floats learn what bf16 learns, however ranks and recomputation share them.


def test_products_round_their_operands_and_are_judged_unrounded():
    model = fresh_model(TINY_CONFIG, torch.float32).eval()
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        use_fp8_linear_layers(model, CPU)
        judged = model(input_ids=ids).logits
        rounded = model.train()(input_ids=ids).logits
        left = with_plain_linear_layers(model).train()(input_ids=ids).logits

    assert torch.equal(judged, plain)
    assert torch.equal(left, plain)
    far = (rounded - plain).norm() / plain.norm()
    assert 0.005 < far < 0.1
    assert not any(isinstance(each, Float8Linear) for each in model.modules())


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators but products read and write, those of 8-bit tensors too."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(each, Float8TrainingTensor) for each in tree_leaves((args, kwargs))):
            with self:
                return Float8TrainingTensor.__torch_dispatch__(func, types, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        given, made = (
            {
                each.untyped_storage().data_ptr(): each
                for each in tree_leaves(what)
                if is_large(each)
            }
            for what in (args, found)
        )
        if func is not torch.ops.aten.mm.default and not given.keys() & made.keys():
            self.moved += sum(each.nbytes for each in (*given.values(), *made.values()))
        return found


def is_large(each):
    return isinstance(each, torch.Tensor) and each.numel() > 1


def test_the_planner_counts_the_bytes_that_rounding_moves():
    """Forward and backward, an operand of a product goes through memory so often."""
    tokens, width, out = 512, 256, 384
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(width, out, bias=False)
    model.get_output_embeddings = lambda: None
    use_fp8_linear_layers(model, CPU)
    inputs = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)

    with Traffic() as traffic:
        model.train()
        model.layer(inputs).backward(torch.randn(tokens, out, dtype=torch.bfloat16))

    operands = tokens * (width + out) + width * out
    assert traffic.moved == pytest.approx(ROUNDING_BYTES * ROUNDINGS * operands, rel=0.1)


def test_what_does_not_go_with_narrow_products_is_refused_by_name():
    for changes, words in (
        ({"optimizer": "qft"}, "fp8 does not go with optimizer qft; choose bf16"),
        ({"quantized": {"method": "qat", "bits": 8}}, "quantized"),
        ({"layout": {"tensor_parallel_size": 2}}, "a layout that divides layers"),
        ({"layout": {"pipeline_parallel_size": 2}}, "a layout that divides layers"),
    ):
        with refused(ValidationError, words, (changes, words)):
            tiny_training(compute_dtype="fp8", **changes)


def test_a_gpu_without_such_units_and_a_model_of_odd_sides_are_told_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    model = fresh_model(TINY_CONFIG, torch.float32)

    with pytest.raises(BadInputError, match=r"capability 8\.9 or newer, and NVIDIA A100 has 8\.0"):
        use_fp8_linear_layers(model, torch.device("cuda"))

    odd = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(BadInputError, match="no linear layer whose sides are multiples of 16"):
        use_fp8_linear_layers(
            fresh_model({**TINY_CONFIG, **odd, "intermediate_size": 72}, torch.float32), CPU
        )

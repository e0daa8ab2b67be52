"""Products in 8-bit floats learn what bf16 learns, however ranks and recomputation share them."""

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from planner.workload.training_kernels import ROUNDING_BYTES, ROUNDINGS
from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.train.kernels import narrow_products, widened
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training

CPU = torch.device("cpu")


def test_products_round_their_operands_and_are_judged_unrounded():
    model = fresh_model(TINY_CONFIG, torch.float32).eval()
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        narrow_products(model, CPU)
        judged = model(input_ids=ids).logits
        rounded = model.train()(input_ids=ids).logits
        left = widened(model).train()(input_ids=ids).logits

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
    narrow_products(model, CPU)
    inputs = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)

    with Traffic() as traffic:
        model.train()
        model.layer(inputs).backward(torch.randn(tokens, out, dtype=torch.bfloat16))

    operands = tokens * (width + out) + width * out
    assert traffic.moved == pytest.approx(ROUNDING_BYTES * ROUNDINGS * operands, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "qft"}, "fp8 does not go with optimizer qft; choose bf16"),
        ({"quantized": {"method": "qat", "bits": 8}}, "quantized"),
        ({"layout": {"tensor_parallel_size": 2}}, "a layout that divides layers"),
        ({"layout": {"pipeline_parallel_size": 2}}, "a layout that divides layers"),
    ],
)
def test_what_does_not_go_with_narrow_products_is_refused_by_name(changes, words):
    with pytest.raises(ValidationError, match=words):
        tiny_training(compute_dtype="fp8", **changes)


def test_a_gpu_without_such_units_and_a_model_of_odd_sides_are_told_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    model = fresh_model(TINY_CONFIG, torch.float32)

    with pytest.raises(BadInputError, match=r"capability 8\.9 or newer, and NVIDIA A100 has 8\.0"):
        narrow_products(model, torch.device("cuda"))

    odd = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(BadInputError, match="no linear layer whose sides are multiples of 16"):
        narrow_products(
            fresh_model({**TINY_CONFIG, **odd, "intermediate_size": 72}, torch.float32), CPU
        )

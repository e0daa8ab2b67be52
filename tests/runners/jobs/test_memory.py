"""Bytes that tensors hold, exactly, and the peak that a process reached."""

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import DynamicCache

from runners.jobs.loading import fresh_model
from runners.jobs.memory import PeakMeter, cache_bytes, model_bytes, tensor_bytes
from tests.runners.jobs.tiny import TINY_CONFIG


def test_a_plain_tensor_holds_elements_times_their_size():
    assert tensor_bytes(torch.zeros(3, 5, dtype=torch.bfloat16)) == 30


def test_an_int8_tensor_holds_one_byte_each_and_its_scales():
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    quantize_(linear, Int8WeightOnlyConfig())

    held = tensor_bytes(linear.weight)

    assert 64 * 32 < held <= 64 * 32 + 32 * 4 + 32


def test_a_packed_nf4_tensor_holds_half_a_byte_each_and_its_scales():
    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(
        64, 64, bias=False, quant_type="nf4", compress_statistics=False
    )
    linear = linear.to("cpu")
    state = linear.weight.quant_state

    held = tensor_bytes(linear.weight)

    assert linear.weight.dtype == torch.uint8
    assert held == 64 * 64 // 2 + tensor_bytes(state.absmax) + tensor_bytes(state.code)


def test_a_model_holds_its_parameters_at_their_width():
    model = fresh_model(TINY_CONFIG, torch.float32)
    parameters = sum(each.numel() for each in model.parameters())

    buffers = sum(each.numel() * each.element_size() for each in model.buffers())

    assert model_bytes(model) == 4 * parameters + buffers


def test_tied_weights_count_once():
    tied = fresh_model({**TINY_CONFIG, "tie_word_embeddings": True}, torch.float32)
    untied = fresh_model(TINY_CONFIG, torch.float32)

    assert model_bytes(untied) - model_bytes(tied) == 4 * 512 * 64


def test_a_cache_holds_keys_and_values_of_every_layer():
    model = fresh_model(TINY_CONFIG, torch.float32)
    cache = DynamicCache(config=model.config)

    model(input_ids=torch.zeros(3, 10, dtype=torch.long), past_key_values=cache, use_cache=True)

    layers, batch, kv_heads, tokens, head_dim = 2, 3, 2, 10, 16
    assert cache_bytes(cache) == 2 * layers * batch * kv_heads * tokens * head_dim * 4


def test_the_peak_remembers_what_was_freed_again():
    meter = PeakMeter(torch.device("cpu"))

    big = torch.ones(64 * 2**20 // 4)
    del big
    peak = meter.read()

    assert peak.bytes - peak.start_bytes >= 60 * 2**20


def test_the_peak_says_how_it_was_taken():
    assert PeakMeter(torch.device("cpu")).read().how.startswith("peak resident memory since")

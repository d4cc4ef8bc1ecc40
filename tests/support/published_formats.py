"""Every published format of quantized checkpoints: its config, and a writer of its matrices."""

from __future__ import annotations

import format_writers as writers
import torch

AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}


AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "data_type": "int",
    "act_bits": 16,
    "extra_config": {"lm_head": {"bits": 16}},
}


compressed = writers.compressed_config


W8A8 = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}}


STATIC_W8A8 = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": False}}


STATIC_FLOAT8 = {"input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}


FLOAT8 = {
    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


EXACT = {
    "awq-g32": (AWQ | {"group_size": 32}, writers.awq(32)),
    "awq-g64": (AWQ | {"group_size": 64, "modules_to_not_convert": ["lm_head"]}, writers.awq(64)),
    "awq-all": (AWQ | {"group_size": -1}, writers.awq(-1)),
    "gptq4-g32": (GPTQ | {"bits": 4, "group_size": 32}, writers.gptq(4, 32)),
    "gptq4-all": (
        GPTQ | {"bits": 4, "group_size": -1, "sym": True},
        writers.gptq(4, -1, symmetric=True),
    ),
    "gptq4-labelled-wrong": (
        GPTQ | {"bits": 4, "group_size": 32, "sym": True},
        writers.gptq(4, 32, version=2, symmetric=True),
    ),
    "gptq8-v2-labelled-wrong": (
        GPTQ | {"bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
        writers.gptq(8, 32, symmetric=True),
    ),
    "gptq-skip-rules": (
        GPTQ | {"bits": 4, "group_size": 32, "dynamic": {"-:.*lm_head.*": {}}},
        writers.gptq(4, 32),
    ),
    "auto-round-gptq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "sym": False},
        writers.gptq(4, 32),
    ),
    "auto-round-awq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
        writers.awq(32),
    ),
    "awq-unquantized-routers": (
        AWQ | {"group_size": 32, "modules_to_not_convert": ["gate", "lm_head"]},
        writers.awq(32),
    ),
    "gptq8-g64": (GPTQ | {"bits": 8, "group_size": 64}, writers.gptq(8, 64)),
    "gptq-v2": (
        GPTQ | {"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        writers.gptq(4, 32, version=2),
    ),
    "gptq-zero-biases": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        writers.gptq(4, 32, with_bias=True),
    ),
    "packed4-g32": (compressed("pack-quantized", 4, "group", 32), writers.packed_integers(4, 32)),
    "packed4-asymmetric": (
        compressed("pack-quantized", 4, "group", 64, symmetric=False),
        writers.packed_integers(4, 64, symmetric=False, scale_dtype=torch.float16),
    ),
    "packed4-channel": (
        compressed("pack-quantized", 4, "channel"),
        writers.packed_integers(4, None),
    ),
    "packed8-channel": (
        compressed("pack-quantized", 8, "channel", symmetric=False),
        writers.packed_integers(8, None, symmetric=False),
    ),
    "w8a8": (compressed("int-quantized", 8, "channel", **W8A8), writers.plain_integers(None)),
    "w8a8-asymmetric": (
        compressed("int-quantized", 8, "channel", symmetric=False, **W8A8),
        writers.plain_integers(None, symmetric=False),
    ),
    "int8-g32": (compressed("int-quantized", 8, "group", 32), writers.plain_integers(32)),
    "naive4-g16": (
        compressed("naive-quantized", 4, "group", 16),
        writers.plain_integers(16, bits=4),
    ),
    "float8-tensor": (
        compressed("float-quantized", 8, "tensor", type="float", **FLOAT8),
        writers.float8("tensor"),
    ),
    "float8-channel": (
        compressed("float-quantized", 8, "channel", type="float", **FLOAT8),
        writers.float8("channel"),
    ),
    "float8-block": (
        compressed("float-quantized", 8, "block", type="float", block_structure=[64, 32]),
        writers.float8("block"),
    ),
    "fp8-block": (
        FP8 | {"weight_block_size": [64, 32]},
        writers.float8("block", ".weight_scale_inv"),
    ),
    "fp8-tensor": (FP8, writers.float8("tensor")),
    "fp8-channel": (FP8, writers.float8("channel")),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, writers.nvfp4),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        writers.with_fixed_scales(writers.float8("tensor"), "input_scale"),
    ),
    "fp8-static": (
        FP8 | {"activation_scheme": "static"},
        writers.with_fixed_scales(writers.float8("tensor"), "input_scale", "k_scale", "v_scale"),
    ),
    "float8-static": (
        compressed("float-quantized", 8, "tensor", type="float", **STATIC_FLOAT8)
        | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
        writers.with_fixed_scales(writers.float8("tensor"), "input_scale", "k_scale", "v_scale"),
    ),
    "w8a8-static": (
        compressed("int-quantized", 8, "channel", **STATIC_W8A8),
        writers.with_fixed_scales(writers.plain_integers(None), "input_scale", "input_zero_point"),
    ),
    "packed-nvfp4": (
        compressed("nvfp4-pack-quantized", 4, "tensor_group", 16, type="float"),
        writers.packed_nvfp4,
    ),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, writers.bnb_int8),
}


BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}


ROUNDED_AGAIN = {
    "gptq-act-order": (
        GPTQ | {"bits": 4, "group_size": 32, "desc_act": True},
        writers.gptq(4, 32, act_order=True),
    ),
    "packed4-act-order": (
        compressed("pack-quantized", 4, "group", 32, actorder="group"),
        writers.packed_integers(4, 32, act_order=True),
    ),
    "nf4": (BNB4, writers.bnb_4bit("nf4", nested=False)),
    "nf4-nested": (BNB4, writers.bnb_4bit("nf4", nested=True)),
    "nf4-b128": (BNB4, writers.bnb_4bit("nf4", nested=False, block=128)),
    "fp4-nested": (BNB4, writers.bnb_4bit("fp4", nested=True)),
}

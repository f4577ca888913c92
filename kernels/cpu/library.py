"""The compiled library's interface: its structures, field by field as in the C++ sources, and its functions."""

from __future__ import annotations

import ctypes

_long, _float, _pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class CPages(ctypes.Structure):
    _fields_ = [("k", _pointer), ("v", _pointer)] + [
        (name, _long) for name in ("num_blocks", "num_heads", "block_size", "head_size", "format")
    ]


class CSpec(ctypes.Structure):
    _fields_ = [("scale", _float), ("window", _long), ("softcap", _float), ("sinks", _pointer)]


class CBatch(ctypes.Structure):
    _fields_ = [(name, _long) for name in ("num_tokens", "num_seqs", "max_blocks")] + [
        (name, _pointer) for name in ("positions", "slots", "query_start", "seq_lens", "block_tables")
    ]


class CAttentionCall(ctypes.Structure):
    _fields_ = [(name, _pointer) for name in ("q", "k", "v", "out")] + [
        ("num_heads", _long),
        ("pages", CPages),
        ("spec", CSpec),
        ("batch", CBatch),
    ]


class CDecoderConfig(ctypes.Structure):
    _fields_ = (
        [
            (name, _long)
            for name in (
                *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "vocab_size"),
                *("rotary_dim", "activation", "embedding_format"),
            )
        ]
        + [(name, _float) for name in ("rms_norm_eps", "attention_scale", "attention_factor")]
        + [(name, _pointer) for name in ("inv_freq", "final_norm", "embedding", "head")]
    )


class CDecoderLayer(ctypes.Structure):
    _fields_ = [
        (name, _pointer) for name in ("qkv", "o", "gate_up", "down", "input_norm", "post_norm", "q_norm", "k_norm")
    ] + [("window", _long)]


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the types: without them it would cut pointers to 32 bits."""
    signatures = {
        "ps_describe": (ctypes.c_char_p, []),
        "ps_pool_create": (_pointer, [ctypes.c_int]),
        "ps_pool_free": (None, [_pointer]),
        "ps_pool_size": (ctypes.c_int, [_pointer]),
        "ps_linear_create": (_pointer, [_pointer, ctypes.c_int, _long, _long, ctypes.c_int, _pointer, _long, _pointer]),
        "ps_linear_create_quantised": (_pointer, [_pointer, ctypes.c_int, _long, _long, ctypes.c_int, _pointer, _pointer]),
        "ps_quantise": (ctypes.c_int, [_pointer, ctypes.c_int, ctypes.c_int, _long, _long, _pointer, _pointer]),
        "ps_linear_free": (None, [_pointer]),
        "ps_linear_bytes": (_long, [_pointer]),
        "ps_linear_run": (None, [_pointer, _pointer, _pointer, _long, _pointer]),
        "ps_linear_best": (None, [_pointer, _pointer, _pointer, _long, _pointer, _pointer]),
        "ps_attention_run": (ctypes.c_int, [_pointer, _pointer]),
        "ps_decoder_create": (_pointer, [_pointer, _pointer]),
        "ps_decoder_free": (None, [_pointer]),
        "ps_decoder_forward": (ctypes.c_int, [_pointer, _pointer, _pointer, _pointer, _pointer, _pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

"""Paged attention on GPUs: writes K and V and attends by the Triton kernels, in two launches a layer and one more a step."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, AttentionSpec, LayerCache
from pagestream.kernels.attention_plan import (
    AttentionConfig,
    AttentionPlan,
    AttentionWorkspace,
    choose_config,
    make_plan,
    make_workspace,
)
from pagestream.kernels.kv_format import is_quantised
from pagestream.kernels.paged_attention import paged_attention
from pagestream.kernels.reshape_and_cache import reshape_and_cache


class TritonAttention:
    """One for all layers of a model, for launches on one stream.

    Pages are [G, K, D] in order, or the 8-bit layout of kernels.kv_format; they may hold anything where no token was written.
    The work list of a step is made once for each window among its layers.  Under CUDA graph capture it is made anew, inside the
    graph, so that a replay reads the lengths of its own step: give each captured graph a metadata object of its own, run once
    eagerly before the capture, and pad with sequences that have no query tokens and with slot -1.
    """

    def __init__(
        self, *, max_seq_len: int, exact: bool = False, config: AttentionConfig | None = None, num_slots: int | None = None
    ):
        """max_seq_len: no sequence may be longer.  exact: see choose_config; config and num_slots replace the chosen ones."""
        self._max_seq_len = max_seq_len
        self._exact = exact
        self._config = config
        self._num_slots = num_slots
        self._workspaces: dict[tuple[int, int, int, torch.device, AttentionConfig], AttentionWorkspace] = {}
        self._planned_for: tuple[AttentionMetadata, bool] | None = None
        self._plans: dict[tuple[int, AttentionConfig, int], AttentionPlan] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """As the protocol says."""
        q, k, v = (
            x if x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 else x.contiguous() for x in (q, k, v)
        )
        reshape_and_cache(q, k, v, cache.k, cache.v, metadata.slot_mapping)
        return self._attend(q, cache, metadata, spec)

    def rotate_and_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec, *,
        table: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        """forward, with the heads' norms and rotary in the launch that writes K and V; q is overwritten.

        table [max_seq_len, R] float32 from kernels.reshape_and_cache.rotary_table; q_norm, k_norm [D]; q, k, v with the heads of
        a token one after another, as slices of the QKV linear's rows have them.
        """
        reshape_and_cache(
            q, k, v, cache.k, cache.v, metadata.slot_mapping,
            positions=metadata.positions, table=table, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        return self._attend(q, cache, metadata, spec)

    def _attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        num_heads, num_kv_heads, head_size = q.shape[1], cache.k.shape[1], q.shape[2]
        per_kv = num_heads // num_kv_heads
        arch, num_sms = device_facts(q.device)
        config = self._config or choose_config(
            head_size, per_kv, arch=arch, quantised=is_quantised(cache.k.dtype), exact=self._exact
        )
        key = (num_heads, num_kv_heads, head_size, q.device, config)
        if key not in self._workspaces:
            self._workspaces[key] = make_workspace(
                num_heads, num_kv_heads, head_size, config, q.device,
                max_seq_len=self._max_seq_len, num_sms=num_sms, num_slots=self._num_slots,
            )  # fmt: skip
        workspace = self._workspaces[key]
        plan = self._plan(metadata, config, workspace, per_kv, q.shape[0], spec.window)
        # On a CPU the kernels run in Triton's interpreter, which cannot multiply bfloat16.
        upcast = q.device.type == "cpu" and q.dtype == torch.bfloat16
        return paged_attention(
            q, cache.k, cache.v, metadata.block_tables, plan, workspace, config,
            scale=spec.scale, softcap=spec.softcap, sinks=spec.sinks, upcast=upcast,
        )  # fmt: skip

    def _plan(
        self,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        workspace: AttentionWorkspace,
        per_kv: int,
        num_tokens: int,
        window: int | None,
    ) -> AttentionPlan:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._planned_for is None or self._planned_for[0] is not metadata or self._planned_for[1] != capturing:
            self._planned_for = (metadata, capturing)
            self._plans.clear()
        key = (window or 0, config, per_kv)
        if key not in self._plans:
            self._plans[key] = make_plan(
                metadata.seq_lens, metadata.query_start, config, workspace,
                heads_per_kv=per_kv, num_tokens=num_tokens, max_query_len=metadata.max_query_len, window=window,
            )  # fmt: skip
        return self._plans[key]


def device_facts(device: torch.device) -> tuple[int | str, int]:
    """What choose_config calls the architecture, and the number of multiprocessors; a CPU stands for the interpreter."""
    if device.type == "cpu":
        return 90, 1
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0], properties.multi_processor_count
    return properties.major * 10 + properties.minor, properties.multi_processor_count

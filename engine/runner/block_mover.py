"""Copies of blocks by a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.core.step_plan import BlockCopy
from pagestream.kernels.copy_blocks import address_table, copy_blocks
from pagestream.kernels.transfer import HostLink


class KernelMover:
    """A BlockMover in one launch for all layers, that nobody waits for; the host pool must be pinned.

    Knows a pool by its address: pools are few and never move.
    """

    def __init__(self, link: HostLink, device: torch.device):
        self._link = link
        self._device = device
        self._tables: dict[int, Tensor] = {}

    def __call__(self, source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None:
        (pairs,) = self._link.upload([np.array([(copy.source, copy.target) for copy in copies], np.int64)])
        copy_blocks(self._table(source), self._table(target), pairs, source[0, 0, 0].nbytes)

    def _table(self, pool: Tensor) -> Tensor:
        if pool.data_ptr() not in self._tables:
            self._tables[pool.data_ptr()] = address_table(list(pool.flatten(0, 1)), self._device)
        return self._tables[pool.data_ptr()]

"""Feeds a ragged batch to a CausalLM in chunks, teacher-forced, and gives back the logits of every position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, LayerCache
from pagestream.engine.models.base import CausalLM

BLOCK_SIZE = 16


class Teacher:
    """Sequences over a shuffled pool of pages whose unused slots are NaN."""

    def __init__(self, model: CausalLM, prompts: list[list[int]], *, seed: int = 0):
        self.model = model
        self.prompts = prompts
        shape = model.shape
        needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
        num_blocks = sum(needed) + 2
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = list(torch.split(order[: sum(needed)], needed))
        pages = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_size)
        self.cache = [
            LayerCache(k=torch.full(pages, math.nan, dtype=model.kv_dtype), v=torch.full(pages, math.nan, dtype=model.kv_dtype))
            for _ in range(shape.num_layers)
        ]
        self.done = [0] * len(prompts)

    def step(self, sizes: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next so many tokens of some sequences; returns their logits."""
        ranges = {s: (self.done[s], min(self.done[s] + size, len(self.prompts[s]))) for s, size in sizes.items()}
        ids = [token for s, (start, end) in ranges.items() for token in self.prompts[s][start:end]]
        positions = torch.cat([torch.arange(start, end) for start, end in ranges.values()])
        slots = torch.cat(
            [self.tables[s][(p := torch.arange(start, end)) // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, (start, end) in ranges.items()]
        )
        lengths = [end - start for start, end in ranges.values()]
        tables = torch.zeros(len(ranges), max(len(self.tables[s]) for s in ranges), dtype=torch.int32)
        for row, (s, (_, end)) in enumerate(ranges.items()):
            used = -(-end // BLOCK_SIZE)
            tables[row, :used] = self.tables[s][:used]
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=slots,
            query_start=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor([end for _, end in ranges.values()], dtype=torch.int32),
            block_tables=tables,
            max_query_len=max(lengths),
            max_seq_len=max(end for _, end in ranges.values()),
        )
        logits = self.model.logits(self.model.forward(torch.tensor(ids), self.cache, metadata))
        for s, (_, end) in ranges.items():
            self.done[s] = end
        return dict(zip(ranges, logits.split(lengths), strict=True))

    def run(self, chunks: list[int]) -> list[Tensor]:
        """All sequences side by side, the next chunk of each per step; the last chunk size is repeated."""
        parts: list[list[Tensor]] = [[] for _ in self.prompts]
        number = 0
        while any(done < len(prompt) for done, prompt in zip(self.done, self.prompts, strict=True)):
            size = chunks[min(number, len(chunks) - 1)]
            waiting = {s: size for s, prompt in enumerate(self.prompts) if self.done[s] < len(prompt)}
            for s, logits in self.step(waiting).items():
                parts[s].append(logits)
            number += 1
        return [torch.cat(part) for part in parts]


def alone(model: CausalLM, prompt: list[int]) -> Tensor:
    """The prompt as one chunk of a batch of one."""
    return Teacher(model, [prompt], seed=1).run([len(prompt)])[0]


def random_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]

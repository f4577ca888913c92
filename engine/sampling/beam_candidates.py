"""A beam's likeliest next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagestream.engine.core.beam_search import num_candidates
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Candidate
from pagestream.engine.sampling.candidates import top_candidates


def beam_candidates(
    logprobs: Tensor, processed: Tensor, params: Sequence[SamplingParams], eos_token_ids: frozenset[int]
) -> list[tuple[Candidate, ...]]:
    """Of each row as many as its search looks at, or as are to be shown, likeliest first.

    logprobs [R, V] float32 are the model's own and are changed; processed [R, V] are the logits after all processors, of which
    only counts what they have ruled out: as in transformers, the others' logprobs do not rise for it.
    """
    logprobs.masked_fill_(torch.isneginf(processed), -torch.inf)
    counts = [max(num_candidates(one, eos_token_ids), one.logprobs or 0) for one in params]
    top = top_candidates(logprobs, max(counts))
    found = []
    for count, token_ids, scores in zip(counts, top.token_ids, top.scores, strict=True):
        pairs = zip(token_ids[:count].tolist(), scores[:count].tolist(), strict=True)
        found.append(tuple((token_id, score) for token_id, score in pairs if score > -torch.inf))
    return found

"""Our attention inside a model of transformers, and what a model must be like for that to be right.

transformers calls an attention function, looked up by name at each call, after the rotary embedding.  Ours finds the step it
belongs to in a context variable: not every model hands extra arguments down to its attention.  No mask function is registered
under the same name, so no mask is built: pages and lengths say who sees whom.  What a mask would have said beyond "causal" is
therefore found out before: a first run under a second name, for which masks are built, tells each layer's mask apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, LayerCache
from pagestream.engine.core.errors import StartError

PAGED = "pagestream"  # no masks
PROBING = "pagestream_probe"  # masks are built
NUM_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer handed to attention: q [T, H, D]; k, v [T, G, D]."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    is_causal: bool


class Attend(Protocol):
    def __call__(self, call: AttentionCall) -> Tensor: ...  # [T, H, Dv]


CURRENT: ContextVar[Attend] = ContextVar("pagestream_attention")


def attention_function(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls.  query [1, H, T, D]; key, value [1, G, T, D]; returns [1, T, H, D]."""
    scale = options.get("scaling")
    call = AttentionCall(
        layer=module.layer_idx,
        q=query.transpose(1, 2)[0].contiguous(),
        k=key.transpose(1, 2)[0].contiguous(),
        v=value.transpose(1, 2)[0].contiguous(),
        mask=attention_mask,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        window=options.get("sliding_window"),
        is_causal=bool(getattr(module, "is_causal", True)),
    )
    return CURRENT.get()(call)[None], None


def run_with(attend: Attend, run: Callable[[], Any]) -> Any:
    """Call `run` with its attention going to `attend`."""
    token = CURRENT.set(attend)
    try:
        return run()
    finally:
        CURRENT.reset(token)


@dataclass(slots=True)
class Step:
    """Attention of one step: the layer's pages, and the spec that the probe found for the layer."""

    backend: AttentionBackend
    cache: Sequence[LayerCache]
    metadata: AttentionMetadata
    windows: tuple[int | None, ...]

    def __call__(self, call: AttentionCall) -> Tensor:
        spec = AttentionSpec(scale=call.scale, window=self.windows[call.layer], softcap=call.softcap, sinks=call.sinks)
        return self.backend.forward(call.q, call.k, call.v, self.cache[call.layer], self.metadata, spec)


@dataclass(slots=True)
class Probe:
    """Records what each layer asks of attention, and answers zeros."""

    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return call.q.new_zeros(*call.q.shape[:2], call.v.shape[-1])


class MaskReader:
    """Stands in for the mask functions of transformers: remembers which window each mask means.

    A mask is known again by its storage, because models slice it on the way to attention.  One that can't be served is refused
    only where a layer uses it: some models make a mask for every kind of layer that their class knows.
    """

    def __init__(self) -> None:
        self.num_positions = 1
        self.made: list[tuple[Tensor, int | None | StartError]] = []

    def begin(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self.made = []

    def __call__(
        self, *, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], device: Any = None, **options: Any
    ) -> Tensor:
        window: int | None | StartError
        try:
            window = window_of(mask_function, self.num_positions)
        except StartError as error:
            window = error
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device or "cpu")
        self.made.append((mask, window))
        return mask

    def window(self, call: AttentionCall) -> int | None:
        """What the call's mask means; raises StartError for one that can't be served, or that the model made by itself."""
        if call.mask is None:
            if not call.is_causal:
                raise StartError("its attention is not causal")
            return call.window
        for mask, window in self.made:
            if mask.untyped_storage().data_ptr() == call.mask.untyped_storage().data_ptr():
                if isinstance(window, StartError):
                    raise window
                return window
        raise StartError("it builds attention masks of its own")


MASKS = MaskReader()  # of this process, because the registry of transformers is too


def window_of(mask_function: Callable[..., Tensor], num_positions: int) -> int | None:
    """The window of a causal mask, None for a full one; raises StartError for a mask that is neither."""
    keys = torch.arange(num_positions)
    nothing = torch.zeros(1, 1, dtype=torch.long)

    def visible(query: int) -> Tensor:
        return mask_function(nothing, nothing, torch.tensor([[query]]), keys[None])[0].expand(num_positions)

    try:
        seen = int(visible(num_positions - 1).sum())
        window = None if seen == num_positions else seen
        near = [] if window is None else [window - 1, window, window + 1, 2 * window, 3 * window - 1]
        for query in sorted({0, 1, 2, 3, 17, num_positions // 3, num_positions // 2, num_positions - 2, num_positions - 1, *near}):
            if 0 <= query < num_positions:
                expected = (keys <= query) & (keys > query - (window or num_positions))
                if not torch.equal(visible(query).bool(), expected):
                    raise StartError("it needs an attention mask that is neither causal nor a sliding window")
    except (RuntimeError, IndexError, TypeError) as error:
        raise StartError(f"it needs an attention mask that can't be read ({type(error).__name__})") from error
    return window


def register() -> None:
    """Make both names known to transformers; doing it again changes nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PAGED, attention_function)
    ALL_ATTENTION_FUNCTIONS.register(PROBING, attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBING, MASKS)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the probe found."""

    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]


def probe(model: Any, run: Callable[[], Any], *, num_layers: int, num_positions: int) -> AttentionShape:
    """Find out how a model uses attention, by running it on a few tokens with masks and again without.

    Raises StartError, its message a clause about "it", for a model that pages can't serve.
    """
    MASKS.begin(num_positions)
    with_masks, without_masks = Probe(), Probe()
    model.set_attn_implementation(PROBING)
    run_with(with_masks, run)
    model.set_attn_implementation(PAGED)
    run_with(without_masks, run)
    calls = sorted(with_masks.calls, key=lambda call: call.layer)
    layers = [call.layer for call in calls]
    if layers != list(range(num_layers)) or len(without_masks.calls) != num_layers:
        raise StartError(f"only {len(set(layers))} of its {num_layers} layers use attention that can be paged, each once")
    if any(call.mask is not None for call in without_masks.calls):
        raise StartError("it builds attention masks of its own")
    sizes = {(call.k.shape[1], call.k.shape[2], call.v.shape[2]) for call in calls}
    if len(sizes) > 1:
        raise StartError("its layers have keys of different sizes")
    num_kv_heads, head_size, value_size = sizes.pop()
    if value_size != head_size:
        raise StartError("its values have another size than its keys")
    windows = tuple(MASKS.window(call) for call in calls)
    return AttentionShape(
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        windows=tuple(None if window is None or window >= num_positions else window for window in windows),
    )

"""Any other model of transformers as a CausalLM: its modules as they are, with our attention under them.

A step is one row [1, T] of tokens with explicit positions and no cache of transformers.  What can't be served rightly that way
is refused at the start, with the reason.  On a CPU the modules' rows are kept independent of one another (hf_rows.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagestream.engine.attention.base import AttentionBackend, AttentionMetadata, LayerCache
from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.models.base import as_logits
from pagestream.engine.models.checkpoint import Checkpoint
from pagestream.engine.models.decoder_config import architecture
from pagestream.engine.models.hf_attention import NUM_PROBE_TOKENS, PAGED, AttentionShape, Step, probe, register, run_with
from pagestream.engine.models.hf_refusals import check_config, check_linears, first_line, max_positions, refusal
from pagestream.engine.models.hf_rows import RowIndependent, linear_weight, replace_linears
from pagestream.engine.models.linear import FixedRowsLinear, LinearMakers
from pagestream.engine.models.linear_blocks import BYTES_OF_KIND, HEAD_BITS, KIND_OF_BITS
from pagestream.engine.models.tensor_source import expect_shape


class Tap(nn.Module):
    """Around the decoder of a ...ForCausalLM, so that what comes behind it can be run by itself.

    The head of some models scales or caps its logits; run this way, the model does it itself.
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.hidden: Tensor | None = None  # set: answer this instead of computing
        self.output_class: Any = None  # of the decoder's answers; what a model reads besides the hidden states is None in it

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.hidden is None:
            output = self.inner(*args, **options)
            self.output_class = type(output)
            return output
        return self.output_class(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class TransformersLM:
    """A CausalLM."""

    def __init__(
        self,
        model: Any,
        tap: Tap,
        shape: ModelShape,
        windows: tuple[int | None, ...],
        attention: AttentionBackend,
        kv_dtype: torch.dtype,
    ):
        self.model = model
        self.tap = tap
        self.shape = shape
        self.windows = windows
        self.attention = attention
        self.kv_dtype = kv_dtype
        self.is_cpu = next(tap.parameters()).device.type == "cpu"

    @torch.no_grad()
    def forward(self, input_ids: Tensor, cache: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        step = Step(self.attention, cache, metadata, self.windows)
        with self.rows():
            return run_with(step, functools.partial(decode, self.tap, input_ids, metadata.positions))

    @torch.no_grad()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        with self.rows():
            return as_logits(head_logits(self.model, self.tap, hidden), out)

    def rows(self) -> contextlib.AbstractContextManager[Any]:
        return RowIndependent() if self.is_cpu else contextlib.nullcontext()


def decode(tap: Tap, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Hidden states of one row of tokens, [T, hidden]."""
    return tap(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, return_dict=True).last_hidden_state[0]


def head_logits(model: Any, tap: Tap, hidden: Tensor) -> Tensor:
    tap.hidden = hidden[None]
    try:
        logits = model(input_ids=torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device), use_cache=False).logits
    finally:
        tap.hidden = None
    return logits[0]


def load_transformers(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionBackend,
    kv_dtype: torch.dtype | None = None,
    linears: LinearMakers | None = None,
) -> TransformersLM:
    """Load a checkpoint that the lean decoder does not compute; `linears` packs its linears (None: on a CPU fixed rows).

    Raises StartError naming the architecture and why it can't be served.
    """
    name = architecture(checkpoint.config)
    register()
    model_config = read_config(checkpoint, config, name)
    check_config(model_config, name, config)
    if checkpoint.bits is not None:
        check_linears(model_config, name, config)
    model = load_model(checkpoint, config, model_config, name, dtype).to(device).eval()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_held = count_held(model, checkpoint.bits, dtype)
    tap = insert_tap(model, name)
    if linears is not None or device.type == "cpu":
        replace_linears(model, linears or LinearMakers(FixedRowsLinear, FixedRowsLinear), model.get_output_embeddings())
    if device.type == "cpu" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # expert after expert, which RowIndependent reaches; the grouped ones it does not
    text_config = model_config.get_text_config()
    positions = max_positions(text_config)
    served = min(config.max_model_len or positions, positions)
    found = probe_model(model, tap, name, num_layers=text_config.num_hidden_layers, num_positions=served)
    shape = ModelShape(
        vocab_size=found.vocab_size,
        max_model_len=positions,
        num_layers=text_config.num_hidden_layers,
        num_kv_heads=found.attention.num_kv_heads,
        head_size=found.attention.head_size,
        eos_token_ids=checkpoint.eos_token_ids(found.vocab_size),
        num_parameters=num_parameters,
        weight_bytes=round(sum(count * BYTES_OF_KIND.get(kind, dtype.itemsize) for kind, count in num_held.items())),
        weights_held_as=tuple(num_held.most_common()),
    )
    return TransformersLM(model, tap, shape, found.attention.windows, attention, kv_dtype or dtype)


def read_config(checkpoint: Checkpoint, config: ModelConfig, name: str) -> Any:
    """The config as transformers has it; raises StartError where it does not know the architecture."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(checkpoint.files.folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # anything may come out of a model's own code
        hint = "" if config.trust_remote_code else "; a model with code of its own needs --trust-remote-code"
        raise StartError(f"architecture {name} is not supported: {first_line(error)}{hint}") from error


def count_held(model: Any, bits: int | None, dtype: torch.dtype) -> Counter[str]:
    """Weights by how they will be held; a head that is converted is another copy than the embedding that it was tied to."""
    plain = str(dtype).removeprefix("torch.")
    if bits is None:
        return Counter({plain: sum(parameter.numel() for parameter in model.parameters())})
    head = model.get_output_embeddings()
    linears = {module: weight for module in model.modules() if (weight := linear_weight(module)) is not None}
    num_held = Counter({KIND_OF_BITS[HEAD_BITS]: linears[head].numel()} if head in linears else {})
    num_held[KIND_OF_BITS[bits]] += sum(weight.numel() for module, weight in linears.items() if module is not head)
    converted = {id(module.weight) for module in linears if module is not head}
    is_tied = head in linears and head.weight is model.get_input_embeddings().weight
    kept = (parameter for parameter in model.parameters() if id(parameter) not in converted and (is_tied or parameter is not head.weight))
    num_held[plain] += sum(parameter.numel() for parameter in kept)
    return num_held


def load_model(checkpoint: Checkpoint, config: ModelConfig, model_config: Any, name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": PAGED, "trust_remote_code": config.trust_remote_code}
    try:
        if config.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed or 0)
                return AutoModelForCausalLM.from_config(model_config, **options)
        # Sizes that differ are reported, not raised: so the report below names the tensor.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.files.folder), config=model_config, local_files_only=True, **options
        )
    except Exception as error:  # anything may come out of a model's own code
        raise StartError(f"could not load {name} from {checkpoint.files.folder}: {first_line(error)}") from error
    model, report = loaded
    # With either, transformers would go on with random weights.
    if keys := sorted(map(str, report.get("missing_keys") or ())):
        raise StartError(f"the checkpoint in {checkpoint.files.folder} has no tensor {', '.join(keys[:3])}")
    for key, stored, expected in sorted(report.get("mismatched_keys") or ()):
        expect_shape(key, tuple(stored), tuple(expected), checkpoint.files.model)
    return model


def insert_tap(model: Any, name: str) -> Tap:
    """Put a Tap around the innermost decoder, wherever the model keeps it."""
    from transformers import PreTrainedModel

    decoder = model.get_decoder()
    if decoder is model:  # some classes name the part that they keep otherwise than their base class expects
        decoder = next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)
    path = next((path for path, module in model.named_modules() if module is decoder), "")
    if not path:
        raise refusal(name, "its decoder can't be told from its head")
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise refusal(name, "it takes no positions")
    parent, _, attribute = path.rpartition(".")
    tap = Tap(decoder)
    setattr(model.get_submodule(parent), attribute, tap)
    return tap


@dataclass(frozen=True, slots=True)
class Probed:
    attention: AttentionShape
    vocab_size: int


def probe_model(model: Any, tap: Tap, name: str, *, num_layers: int, num_positions: int) -> Probed:
    """Run the model on a few tokens to see that it can be served; raises StartError saying why not."""
    device = next(tap.parameters()).device
    tokens = torch.arange(NUM_PROBE_TOKENS, device=device)
    hidden: list[Tensor] = []
    try:
        with torch.no_grad():
            found = probe(
                model,
                lambda: hidden.append(decode(tap, tokens, tokens)),
                num_layers=num_layers,
                num_positions=num_positions,
            )
            vocab_size = head_logits(model, tap, hidden[-1]).shape[-1]
    except StartError as error:
        raise refusal(name, str(error)) from error
    except Exception as error:
        raise refusal(name, f"it does not run with attention over pages ({type(error).__name__}: {first_line(error)})") from error
    return Probed(attention=found, vocab_size=vocab_size)

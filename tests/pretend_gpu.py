"""Tensors that are on a GPU as far as torch's rules go, on machines without one: what mixes devices is refused as CUDA would.

Within `pretend_gpu()` whatever is asked for on GPU is a PretendGpuTensor: it says that it is there, computes on the CPU, and is
refused by what takes no GPU's tensors, or tensors of two devices.  Kernels cannot be launched on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
# A torch without CUDA refuses to index what claims to lie there; of the devices that it knows, this one has no data either.
GPU = torch.device("meta")
aten = torch.ops.aten
MAY_MIX = {aten.copy_.default, aten._to_copy.default}
MAY_HAVE_HOST_INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class PretendGpuTensor(Tensor):
    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> PretendGpuTensor:
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=GPU
        )
        tensor.host = host
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.host.tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"on a pretended GPU: {self.host!r}"


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_on_gpu = any(isinstance(tensor, PretendGpuTensor) for tensor in tensors)
    if is_on_gpu and func not in MAY_MIX:
        looked_at = [args[0]] if func in MAY_HAVE_HOST_INDICES else tensors
        hosts = [tensor for tensor in looked_at if not isinstance(tensor, PretendGpuTensor) and tensor.dim() > 0]
        if hosts:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found the GPU and cpu, {list(hosts[0].shape)}")
    device = kwargs.get("device")
    if device is not None:
        is_on_gpu = torch.device(device) == GPU
        kwargs = kwargs | {"device": torch.device("cpu")}
    if func is aten.copy_.default:
        is_on_gpu = isinstance(args[0], PretendGpuTensor)
    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    result = func(*host_args, **host_kwargs)
    if func._schema.is_mutable:
        written = [argument for argument, formal in zip(args, func._schema.arguments, strict=False) if is_written(formal)]
        written += [kwargs[formal.name] for formal in func._schema.arguments if is_written(formal) and formal.name in kwargs]
        return written[0] if len(written) == 1 else tuple(written)
    return on_gpu(result) if is_on_gpu else result


def is_written(formal: Any) -> bool:
    return formal.alias_info is not None and formal.alias_info.is_write


def to_host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, PretendGpuTensor) else leaf


def on_gpu(result: Any) -> Any:
    return tree_map(lambda leaf: PretendGpuTensor(leaf) if isinstance(leaf, Tensor) else leaf, result)


class _PretendGpu(TorchFunctionMode):
    """Sees what is asked for on GPU before torch looks for a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Of numbers and lists among these arguments torch makes tensors by itself, which would have no data.
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]), *args[2:])
        if func in (Tensor.__setitem__, torch.where):
            args = (*args[:2], *(torch.tensor(value) if isinstance(value, int | float) else value for value in args[2:]))
        if func is Tensor.to and not isinstance(args[0], PretendGpuTensor):
            places = [place for place, argument in enumerate(args) if is_gpu(argument)]
            if places or is_gpu(kwargs.get("device")):
                args = tuple(CPU if place in places else argument for place, argument in enumerate(args))
                return PretendGpuTensor(func(*args, **kwargs | ({} if places else {"device": CPU})).clone())
        elif is_gpu(kwargs.get("device")):
            return on_gpu(func(*map(to_host, args), **kwargs | {"device": CPU}))
        return func(*args, **kwargs)


def is_gpu(argument: Any) -> bool:
    return isinstance(argument, (torch.device, str)) and str(argument) == GPU.type


@contextmanager
def pretend_gpu() -> Iterator[None]:
    with _PretendGpu():
        yield

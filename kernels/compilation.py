"""Compiling before serving, in threads, and noticing what is compiled afterwards.

A kernel is compiled at its first launch with arguments of a kind; while serving, that is a pause of seconds in somebody's answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

ALIGNMENT = 16  # bytes; pointers of that alignment are of another kind than others
MOST_NEAR_BYTES = (1 << 31) - 1  # pointers into no more storage are of another kind too, on AMD's GPUs

logger = logging.getLogger(__name__)


class StandIn(MockTensor):
    """What a kernel's compilation wants to know of a tensor that lies as tensors usually do."""

    def __init__(self, tensor: Tensor):
        super().__init__(tensor.dtype)
        self.is_near = tensor.untyped_storage().nbytes() <= MOST_NEAR_BYTES

    def ptr_range(self) -> int:  # type: ignore[override]
        return 0 if self.is_near else MOST_NEAR_BYTES + 1


@dataclass(frozen=True, slots=True)
class NotedLaunch:
    """A launch that was not made: its kernel, and stand-ins for its arguments."""

    kernel: Any  # triton's JITFunction
    args: tuple[Any, ...]
    grid: Any
    options: dict[str, Any]

    @property
    def kind(self) -> str:
        """Launches of one kind need no compilation more than once; whole numbers count by what they are compiled in as."""
        stand_ins = [kind_of(argument) for argument in self.args]
        return f"{id(self.kernel)} {stand_ins} {sorted(self.options.items())}"

    def compile(self) -> Any:
        """Triton's CompiledKernel; from its cache where there is one."""
        return self.kernel.run(*self.args, grid=self.grid, warmup=True, **self.options)


def kind_of(argument: Any) -> Any:
    if isinstance(argument, StandIn):
        return f"{argument.dtype}, near: {argument.is_near}"
    if isinstance(argument, Tensor):
        return f"unaligned {argument.dtype}"
    if isinstance(argument, int) and not isinstance(argument, bool):
        return f"int 1: {argument == 1}, by 16: {argument % 16 == 0}"
    return type(argument)


@contextmanager
def launches_noted() -> Iterator[list[NotedLaunch]]:
    """Within it nothing is launched: every launch is noted instead, without the memory of its tensors.

    For the start of a process, before other threads launch anything.  What kernels would have written is left as it was.
    """
    noted: list[NotedLaunch] = []
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        noted.append(NotedLaunch(self, tuple(map(stand_in, args)), grid, options))

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        JITFunction.run = original  # type: ignore[method-assign]


def stand_in(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.data_ptr() % ALIGNMENT == 0:
        return StandIn(argument)
    return argument


def compile_noted(launches: list[NotedLaunch], num_threads: int, compiled: Callable[[], object]) -> int:
    """Compile each kind of launch once; calls `compiled` after each.  Returns how many kinds there were."""
    return len(compile_in_threads(list({launch.kind: launch for launch in launches}.values()), num_threads, compiled))


def compile_in_threads(launches: Sequence[NotedLaunch], num_threads: int, compiled: Callable[[], object] = lambda: None) -> list[Any]:
    """Triton's CompiledKernel of each launch, loaded where there is a GPU to launch it on; calls `compiled` after each."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def compile_one(launch: NotedLaunch) -> Any:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        kernel = launch.compile()
        load(kernel)
        return kernel

    def told(future: Future[Any]) -> None:
        compiled()

    with parsed_in_turn(), ThreadPoolExecutor(num_threads, thread_name_prefix="pagestream-compile") as pool:
        futures = [pool.submit(compile_one, launch) for launch in launches]
        for future in futures:
            future.add_done_callback(told)
        return [future.result() for future in futures]


def load(kernel: Any) -> Any:
    """Do what Triton leaves to a kernel's first launch, and return what launches it; None with a driver that only compiles.

    Besides loading the code, Triton 3.6 has the system's compiler build a launcher then, which takes a quarter of a second.
    """
    return kernel.run if hasattr(driver.active, "launcher_cls") else None


@contextmanager
def parsed_in_turn() -> Iterator[None]:
    """Within it one thread at a time has Python parse a kernel's source.

    Two at it ended now and then in a SystemError under Python 3.11, "AST constructor recursion depth mismatch": the depth in a
    syntax tree is counted for all threads together.
    """
    parsed: Any = next(one for one in JITFunction.__mro__ if "parse" in vars(one))
    original = parsed.parse
    turn = threading.Lock()

    def parse(self: Any) -> Any:
        with turn:
            return original(self)

    parsed.parse = parse
    try:
        yield
    finally:
        parsed.parse = original


class CompilationCounter:
    """Counts what Triton compiles in this process from its making on; to be made when all is compiled that should be needed."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self._next = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._hook

    def _hook(self, **what: Any) -> Any:
        self.num_compiled += 1
        logger.warning("kernel %s was compiled while serving: its step had to wait", what["fn"].name)
        return self._next(**what) if self._next is not None else None

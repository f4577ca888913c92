"""What can be known of a kernel without a GPU: compile its real launches for one, and read the machine code.

`launches_compiled(target)` makes every launcher in this folder compile instead of run, through Triton's own binder, so that what
is measured and counted is exactly what a launch on that GPU would use.  Needs no driver; must not run in the interpreter.

The model (kernels/README.md): a loop of n instructions in w warps that moves b bytes can issue at most
b / (n w) * SMs * 4 schedulers * clock bytes per second, and Little's law bounds the rate by the bytes in flight.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagestream.kernels.compilation import NotedLaunch, compile_in_threads

H200_ISSUE_RATE = 132 * 4 * 1.755e9  # warp instructions a second
H200_REGISTERS, H200_SHARED_BYTES, H200_WARPS = 65536, 228 * 1024, 64  # of an SM
MI300_SIMDS, MI300_REGISTERS, MI300_SHARED_BYTES = 4, 512, 64 * 1024  # of a compute unit; registers of a lane
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

Listing = list[tuple[int, str]]  # addresses and instructions


class CompileOnlyDriver:
    """Enough of a driver for a launch that stops after compiling."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that was compiled instead of run."""

    name: str
    kernel: Any  # triton's CompiledKernel
    fresh: bool  # it was compiled for this launch and not found among those of earlier ones


@contextmanager
def launches_compiled(target: GPUTarget) -> Iterator[list[Launch]]:
    """Within it every launch compiles for `target` and is appended to the list that this yields."""
    launches: list[Launch] = []
    original = JITFunction.run
    fresh: list[str] = []
    device_caches: list[JITFunction] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self not in device_caches:
            # Another target may have filled the cache of this process under the same device number.
            device_caches.append(self)
            self.device_caches.clear()
        before = len(fresh)
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        launches.append(Launch(self.fn.__name__, kernel, len(fresh) > before))
        return kernel

    previous_hook = knobs.runtime.jit_post_compile_hook
    previous_driver = driver._active
    driver.set_active(CompileOnlyDriver(target))
    knobs.runtime.jit_post_compile_hook = lambda **kwargs: fresh.append(kwargs["fn"].name)
    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
        knobs.runtime.jit_post_compile_hook = previous_hook
        driver._active = previous_driver
        for function in device_caches:
            function.device_caches.clear()


def compiled(launches: Sequence[NotedLaunch], target: GPUTarget) -> list[Any]:
    """Triton's CompiledKernel of each launch, by as many threads as there are cores."""
    with launches_compiled(target):
        return compile_in_threads(launches, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class StaticFigures:
    """Of one compiled kernel; the loop is the largest innermost one with matrix instructions, else the largest innermost one."""

    name: str
    registers: int
    spill_bytes: int  # NVIDIA: a thread's stack, which holds nothing else; AMD: spilled vector registers
    shared_bytes: int
    num_warps: int
    loop_instructions: int
    loop: tuple[str, ...]  # its instructions
    matrix_unit: str  # mma, wgmma, tcgen05, mfma or none

    def count_in_loop(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.loop)

    def issue_bound(self, loop_bytes: float) -> float:
        """Bytes a second that an H200 could at best issue this loop for."""
        return loop_bytes / (self.loop_instructions * self.num_warps) * H200_ISSUE_RATE

    @property
    def programs_per_sm(self) -> int:
        """Of an H200, or of a compute unit where the code is AMD's."""
        if self.matrix_unit == "mfma":
            by_registers = MI300_SIMDS * (MI300_REGISTERS // (-(-self.registers // 8) * 8)) // self.num_warps
            return min(by_registers, MI300_SHARED_BYTES // max(self.shared_bytes, 1))
        by_registers = H200_REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.num_warps)
        return min(by_registers, H200_SHARED_BYTES // (self.shared_bytes + 1024), H200_WARPS // self.num_warps)


def figures_of(kernels: Sequence[Any]) -> list[StaticFigures]:
    """Of triton's CompiledKernels for one target, in their order."""
    if not kernels:
        return []
    if "amdgcn" in kernels[0].asm:
        return [_amd_figures(kernel) for kernel in kernels]
    codes = [machine_code(kernel.asm["cubin"]) for kernel in kernels]
    listings = disassembled(codes, kernels[0].metadata.target.arch)
    return [_nvidia_figures(kernel, listing) for kernel, listing in zip(kernels, listings, strict=True)]


def _amd_figures(kernel: Any) -> StaticFigures:
    text = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    body = tuple(line.strip() for line in text.splitlines() if re.match(r"\s+[vsgdb][_a-z]", line))
    # vgpr_count includes the accumulation registers: on these GPUs both are one file.
    return StaticFigures(
        kernel.name, number("vgpr_count"), number("vgpr_spill_count") + number("private_segment_fixed_size"),
        kernel.metadata.shared, kernel.metadata.num_warps, 0, body, "mfma" if "v_mfma" in text else "none",
    )  # fmt: skip


def _nvidia_figures(kernel: Any, listing: Listing) -> StaticFigures:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "k.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        # Of the code itself: which assembler made it, and with which options, is each Triton's own affair.
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert usage is not None, "cuobjdump tells no registers"
    registers, spills = int(usage.group(1)), int(usage.group(2))
    loop = largest_loop(listing)
    units = (("tcgen05", "UTC.*MMA"), ("wgmma", "GMMA"), ("mma", "[HIDQ]MMA"))
    unit = next((unit for unit, pattern in units if any(re.search(pattern, text) for _, text in listing)), "none")
    return StaticFigures(kernel.name, registers, spills, kernel.metadata.shared, kernel.metadata.num_warps, len(loop), loop, unit)


def machine_code(cubin: bytes) -> bytes:
    """The instructions of the one function in an ELF file of a kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(count)]
    first_name = sections[names][4]
    (code,) = (part for part in sections if cubin.startswith(b".text.", first_name + part[0]))
    return cubin[code[4] : code[4] + code[5]]


def disassembled(codes: Sequence[bytes], arch: int) -> list[Listing]:
    """What some functions consist of; addresses, and branches to them, go on from one function to the next.

    All in one call: the disassembler takes longer to start than for a function.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        name = f"SM{arch}{'a' if arch >= 90 else ''}"
        sass = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "--binary", name, file.name], capture_output=True, text=True, check=True
        ).stdout
    found = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)]
    ends = list(accumulate(len(code) for code in codes))
    return [
        [(address, text) for address, text in found if end - len(code) <= address < end]
        for code, end in zip(codes, ends, strict=True)
    ]  # fmt: skip


def innermost_loops(listing: Listing) -> list[tuple[str, ...]]:
    """The instructions between a backward branch and its target, where no other such pair lies between."""
    loops = []
    for address, text in listing:
        branch = re.search(r"\bBRA(?:\.\w+)*\s+(?:`\()?(?:\S+,\s*)?0x([0-9a-f]+)", text)
        if branch and int(branch.group(1), 16) < address:
            loops.append((int(branch.group(1), 16), address))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [tuple(text for address, text in listing if low <= address <= high) for low, high in inner]


def largest_loop(listing: Listing) -> tuple[str, ...]:
    """Of the innermost ones, and of those with matrix instructions where there are such."""
    bodies = innermost_loops(listing)
    with_matrix = [body for body in bodies if any("MMA" in text for text in body)]
    return max(with_matrix or bodies, key=len, default=())

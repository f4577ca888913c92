"""The CPU operators in every build that this machine can run, its own best first."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagestream.kernels.cpu.ops import CpuOps, load_ops

BUILDS: dict[str, tuple[str, tuple[str, ...]]] = {"native": ("native", ())}
if platform.machine() == "x86_64":
    BUILDS["no-amx"] = ("native", ("PS_NO_AMX",))
    if "avx2" in Path("/proc/cpuinfo").read_text().split():
        BUILDS["avx2"] = ("x86-64-v3", ())
    BUILDS["portable"] = ("x86-64", ())


@pytest.fixture(scope="session", autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    """The reference computations are tiny, and torch's threads would wait for the operators' own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=BUILDS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    march, defines = BUILDS[request.param]
    found = load_ops(2, march, defines)
    assert found is not None, "these tests need a C++ compiler"
    return found

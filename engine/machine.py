"""What torch sees of this machine, in words, for reports."""

from __future__ import annotations

import torch


def machine_facts() -> dict[str, str]:
    return {
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "torch threads": str(torch.get_num_threads()),
        "oneDNN": str(torch.backends.mkldnn.is_available()),
        "CUDA build": torch.version.cuda or "no",
    }


def gpu_facts() -> dict[str, str]:
    """One entry a GPU; empty without one."""
    found = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found[str(index)] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, compute capability {capability}"
    return found

"""`pagestream env`: what a report of a problem should say about the machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

PACKAGES = (
    "pagestream", "torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "gguf", "fastapi", "uvicorn", "pydantic",
    "sse-starlette", "prometheus-client", "typer", "httpx",
)  # fmt: skip


def environment(as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:
    """Describe this machine: versions, processors, memory, GPUs, what was detected.  Holds no secret: only names of variables."""
    found = describe()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for section, entries in found.items():
        print(f"{section}:")
        for name, value in entries.items():
            print(f"  {name}: {value}")


def describe() -> dict[str, dict[str, Any]]:
    return {
        "system": {"platform": platform.platform(), "python": platform.python_version(), "libc": " ".join(platform.libc_ver())},
        "packages": {name: installed(name) for name in PACKAGES},
        "processor": {
            "model": processor(),
            "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": memory(),
            "compiler": first_line("g++", "--version"),
            **torch_facts(),
        },
        "gpus": gpus(),
        # Their values may be keys.
        "variables": {name: "set" for name in sorted(os.environ) if name.startswith(("PAGESTREAM_", "HF_", "OMP_", "CUDA_"))},
    }


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    for line in lines_of("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> str:
    sizes = {line.partition(":")[0]: int(line.split()[1]) for line in lines_of("/proc/meminfo") if line.startswith("Mem")}
    if not sizes:
        return "not known"
    return f"{sizes['MemTotal'] / 2**20:.1f} GiB, {sizes['MemAvailable'] / 2**20:.1f} GiB of it available"


def lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "not found"
    told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return (told.stdout or told.stderr).strip().partition("\n")[0]


def torch_facts() -> dict[str, str]:
    from pagestream.engine import machine_facts

    return machine_facts()


def gpus() -> dict[str, str]:
    from pagestream.engine import gpu_facts

    return gpu_facts() or {"found": "none"}

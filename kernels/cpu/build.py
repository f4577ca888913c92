"""Compile the CPU operators with the system's own C++ compiler, once per machine, and load them.

The library is kept in the user's cache folder under a name made of everything that shapes it (sources, compiler, flags,
the processor's features), so a change of any of them builds anew and nothing is ever overwritten.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# No contraction: where a product and a sum are fused must not depend on which copy of a loop the compiler is looking at.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread")


class BuildFailed(Exception):
    """There is no compiler, or it refused; the message says which, with the end of its output."""


def build(march: str = "native", defines: tuple[str, ...] = ()) -> Path:
    """Return the path of the compiled operators, compiling them if the cache has none for this machine.

    `march` and `defines` choose another variant of the same sources than the machine's best: PS_NO_AMX leaves out the tile
    registers.  Two processes may build at once; each moves its finished file into place, and either file serves.
    Raises BuildFailed.
    """
    compiler = find_compiler()
    # ARM's compilers name the processor with -mcpu.
    target = f"-mcpu={march}" if platform.machine() in ("aarch64", "arm64") else f"-march={march}"
    flags = (*FLAGS, target, *(f"-D{name}" for name in defines))
    library = cache_dir() / f"cpu-ops-{cache_key(compiler, flags)}.so"
    if library.exists():
        return library
    logger.info("compiling the CPU operators for this machine, once")  # half a minute in which nothing else is to be seen
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=library.parent, prefix=library.stem, suffix=".partial")
    os.close(handle)
    try:
        command = [*compiler, *flags, str(SOURCE_DIR / "ops.cpp"), "-o", partial]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildFailed(f"{shlex.join(compiler)} exited with {done.returncode}: {done.stderr[-2000:]}")
        os.replace(partial, library)
    finally:
        Path(partial).unlink(missing_ok=True)
    logger.info("compiled the CPU operators into %s", library)
    return library


def load(march: str = "native", defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Build if need be and load.  Raises BuildFailed, also where the machine refuses what the compiler thought it has."""
    library = ctypes.CDLL(str(build(march, defines)))
    if library.ps_init() == 0:
        return library
    # The system keeps the tile registers to itself.
    if "PS_NO_AMX" in defines:
        raise BuildFailed("the compiled operators do not run on this machine")
    return load(march, (*defines, "PS_NO_AMX"))


def find_compiler() -> list[str]:
    """The command that CXX holds, a launcher or options of its own included, else the first of the usual names.

    Raises BuildFailed, also where CXX names no program: another compiler than the one asked for is not taken in its place.
    """
    asked = os.environ.get("CXX", "")
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise BuildFailed(f"CXX is {asked!r}, which is no command: {error}") from error
    if words:
        if path := shutil.which(words[0]):
            return [path, *words[1:]]
        raise BuildFailed(f"CXX is {asked!r}, and there is no program {words[0]}; unset it, or name a C++ compiler")
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildFailed("no C++ compiler found; set CXX or install g++")


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "pagestream"


def cache_key(compiler: Sequence[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    for part in ("\0".join(compiler).encode(), version, "\0".join(flags).encode(), cpu_features().encode()):
        digest.update(part + b"\0")
    return digest.hexdigest()[:20]


def cpu_features() -> str:
    """What -march=native looks at, as far as the system tells: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() in wanted}
    return f"{platform.machine()} {platform.processor()} {sorted(found.items())}"

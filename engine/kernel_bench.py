"""The door to the GPU kernels' own benchmark, for those who may not import them."""

from __future__ import annotations

from pathlib import Path


def bench_kernels(json_file: Path | None = None, *, quick: bool = False) -> None:
    """Times every kernel on a GPU; without one, prints what the compiled code tells.  Both go to `json_file` too, where given."""
    from pagestream.kernels.bench import main

    main([*(["--json", str(json_file)] if json_file else []), *(["--quick"] if quick else [])])

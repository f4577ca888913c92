"""Makes up for what keeps an older Triton's interpreter from running beside a newer NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def accept_tensors_as_bounds() -> None:
    """Let range() take numbers that a kernel computed.  To be called before the first launch; where it works anyway, no more.

    Triton up to 3.6 turns such a number, an array of one element, into an int in a way that NumPy from 2.5 on refuses.
    """
    try:
        int(np.zeros(1, np.int32))
    except TypeError:
        from triton.runtime import interpreter

        original = interpreter._patch_lang_tensor

        def patch(tensor: Any, scope: Any) -> None:
            original(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch

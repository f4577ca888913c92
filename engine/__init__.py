"""The engine: everything from a prompt to its tokens.  These names are public; all else is the engine's own."""

import os
from typing import TYPE_CHECKING, Any

# Read when torch is imported.  Its threads otherwise wait busily for milliseconds after each of their few uses, on cores where the
# engine's own threads compute meanwhile: that made a step a tenth longer.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from pagestream.engine.core.config import EngineConfig, PreemptionMode, SchedulerLimits
from pagestream.engine.core.errors import (
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EngineFault,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    StartError,
)
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.outputs import CompletionOutput, FinishReason, RequestOutput, Usage, fold
from pagestream.engine.core.request import Begun, Fault, Pooling
from pagestream.engine.core.sampling_params import Constraint, SamplingParams
from pagestream.engine.core.step_plan import TokenLogprobs
from pagestream.engine.core.timeline import RequestTimeline
from pagestream.engine.engine_args import EngineArgs
from pagestream.engine.metrics import EngineListener, QueuePlace, RequestInfo, RequestStats, StepStats
from pagestream.engine.simulated_machine import CostModel, Machine
from pagestream.engine.simulation import Report, capacity, simulate
from pagestream.engine.trace import PoissonLoad, TraceRequest, read_trace, write_trace

if TYPE_CHECKING:
    from pagestream.engine.async_llm_engine import AsyncLLMEngine
    from pagestream.engine.kernel_bench import bench_kernels
    from pagestream.engine.live_view import EngineView, LiveBlock, LivePool, LiveRequest, LiveTotals
    from pagestream.engine.llm import LLM
    from pagestream.engine.llm_engine import LLMEngine
    from pagestream.engine.machine import gpu_facts, machine_facts
    from pagestream.engine.measure import measure_machine
    from pagestream.engine.output_stream import OutputStream
    from pagestream.engine.roofline import time_decode_steps

# Imported when asked for: they bring torch with them, which takes seconds.
LAZY = {
    "LLM": "pagestream.engine.llm",
    "LLMEngine": "pagestream.engine.llm_engine",
    "AsyncLLMEngine": "pagestream.engine.async_llm_engine",
    "OutputStream": "pagestream.engine.output_stream",
    "EngineView": "pagestream.engine.live_view",
    "LiveBlock": "pagestream.engine.live_view",
    "LivePool": "pagestream.engine.live_view",
    "LiveRequest": "pagestream.engine.live_view",
    "LiveTotals": "pagestream.engine.live_view",
    "gpu_facts": "pagestream.engine.machine",
    "machine_facts": "pagestream.engine.machine",
    "measure_machine": "pagestream.engine.measure",
    "time_decode_steps": "pagestream.engine.roofline",
    "bench_kernels": "pagestream.engine.kernel_bench",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "Begun",
    "ClientError",
    "CompletionOutput",
    "Constraint",
    "ContextLengthExceeded",
    "CostModel",
    "DeadlineExceeded",
    "EngineArgs",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineFault",
    "EngineListener",
    "EngineView",
    "Fault",
    "FinishReason",
    "InvalidRequest",
    "LLMEngine",
    "LiveBlock",
    "LivePool",
    "LiveRequest",
    "LiveTotals",
    "Machine",
    "ModelShape",
    "OutputStream",
    "Overloaded",
    "PoissonLoad",
    "Pooling",
    "PreemptionMode",
    "QueuePlace",
    "Report",
    "RequestFailed",
    "RequestInfo",
    "RequestOutput",
    "RequestStats",
    "RequestTimeline",
    "SamplingParams",
    "SchedulerLimits",
    "StartError",
    "StepStats",
    "TokenLogprobs",
    "TraceRequest",
    "Usage",
    "bench_kernels",
    "capacity",
    "fold",
    "gpu_facts",
    "machine_facts",
    "measure_machine",
    "read_trace",
    "simulate",
    "time_decode_steps",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(LAZY[name]), name)

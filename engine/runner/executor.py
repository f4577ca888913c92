"""Who executes a plan: this process.  Tests put a fake in its place."""

from __future__ import annotations

from typing import Protocol

from pagestream.engine.core.step_plan import StepPlan, StepResult


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Do what the plan says, in its order.  May be called again with the same plan, or with parts of it, after it raised."""

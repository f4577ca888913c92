"""Does what a StepPlan says: tensors, copies, forward, sample."""

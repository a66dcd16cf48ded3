"""A simulated server that runs the orchestrator itself, over stages that book device time."""

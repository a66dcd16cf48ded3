"""Training of the demo model; docs/demo_model.md has its method and results."""

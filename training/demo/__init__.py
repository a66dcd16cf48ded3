"""How the demo model came to talk. What became of it is told in docs/demo_model.md."""

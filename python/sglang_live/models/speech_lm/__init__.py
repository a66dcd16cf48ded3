"""What language models that speak have in common, whatever their family."""

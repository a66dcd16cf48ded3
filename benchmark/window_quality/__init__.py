"""What a bounded session costs in quality, on a real language model without an engine."""

"""What a device's work costs, as figures of a file: the modelled device of tests and benchmarks."""

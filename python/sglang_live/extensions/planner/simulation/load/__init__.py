"""What users do, drawn before a run, and what is measured of them; also in benchmark.load."""

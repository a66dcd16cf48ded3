"""Benchmarks of others, unchanged, on a running server: adapters for their transports.

Their packages are not among this project's requirements:

    pip install --no-deps --target DIR voicebench==0.2.0 voice-evals==0.2.1 jiwer rapidfuzz
    PYTHONPATH=DIR python -m benchmark.third_party.run_voicebench --url http://127.0.0.1:30000
"""

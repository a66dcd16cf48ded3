"""`python -m sglang_live.extensions.batches FILE.jsonl`: run a batch and write its results."""

import sys

from sglang_live.environment import start_in_utf8_mode
from sglang_live.extensions.batches.client import main

if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())

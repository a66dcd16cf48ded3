"""The server, without any report of next uses: a thinker then evicts by least recent use.

    python -m benchmark.load.without_hints --model-path demo …

The reference of benchmark.voice_pressure for the policy `next-use`.
"""

import sys

from lab.launch_server import main
from sglang_live.orchestrator.sessions import VoiceSession

if __name__ == "__main__":
    VoiceSession.report_next_use = lambda *_args: None
    sys.exit(main())

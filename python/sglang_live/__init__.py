"""sglang_live: realtime speech conversation on SGLang runtimes."""

__version__ = "0.1.0"

import os

# onnxruntime's wheel reports to its maker over the network and leaves a file in TMPDIR; it looks
# at this once, when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

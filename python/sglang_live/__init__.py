"""sglang_live: realtime speech conversation on SGLang runtimes."""

__version__ = "0.1.0"

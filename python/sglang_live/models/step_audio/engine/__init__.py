"""Model class and processor that SGLang loads (SGLANG_EXTERNAL_MODEL_PACKAGE points here)."""

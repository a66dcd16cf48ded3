"""Model classes that SGLang loads (SGLANG_EXTERNAL_MODEL_PACKAGE points here)."""

"""Routes of custom voices, and bounds of their recordings."""

PATH = "/v1/audio/voices"
# Path and method.
ROUTES = ((PATH, "POST"), (f"{PATH}/{{id}}", "GET"), (f"{PATH}/{{id}}", "DELETE"))
# OpenAI's.
MAX_S, MAX_BYTES = 30.0, 10 << 20

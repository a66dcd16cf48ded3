"""Routes of SGLang's own API that pass the gateway, and what each of them is."""

from collections.abc import Mapping

CHAT = "/v1/chat/completions"
OPEN_SESSION, CLOSE_SESSION = "/open_session", "/close_session"
ABORT, FLUSH, HEALTH = "/abort_request", "/flush_cache", "/health_generate"
SERVER_INFO = ("/server_info", "/get_server_info")
MODEL_INFO = ("/model_info", "/get_model_info")
# An explicit list: SGLang also serves routes that load weights, profile or stop the engine.
ROUTES: Mapping[str, tuple[str, ...]] = {
    "/generate": ("POST", "PUT"),
    CHAT: ("POST",),
    "/v1/completions": ("POST",),
    "/v1/tokenize": ("POST",),
    "/v1/detokenize": ("POST",),
    "/get_model_info": ("GET",),
    "/model_info": ("GET",),
    "/get_server_info": ("GET",),
    "/server_info": ("GET",),
    HEALTH: ("GET",),
    FLUSH: ("POST",),
    OPEN_SESSION: ("POST",),
    CLOSE_SESSION: ("POST",),
    ABORT: ("POST",),
}
# Those by which a model answers: they count as answers.
ANSWERING = ("/generate", CHAT, "/v1/completions")
# Those that are charged; the health check has the model write a token.
LIMITED = (*ANSWERING, HEALTH)
# Those whose bodies name a model.
OF_A_MODEL = (CHAT, "/v1/completions")

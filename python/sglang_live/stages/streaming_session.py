"""A streaming session of SGLang's engine: open it, append to it, close it."""

import io

import soundfile as sf

from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.models.prompt import Append
from sglang_live.stages.engine_host import EngineHost

# SGLang requires a bound on a session's text; here sessions are bounded in tokens.
_UNBOUNDED_CHARS = 1 << 40


async def open_session(host: EngineHost, name: str) -> None:
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    request = OpenSessionReqInput(
        capacity_of_str_len=_UNBOUNDED_CHARS, session_id=name, streaming=True
    )
    await host.engine.tokenizer_manager.open_session(request, None)


async def close_session(host: EngineHost, name: str) -> None:
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    request = CloseSessionReqInput(session_id=name)
    await host.engine.tokenizer_manager.close_session(request, None)


def append_request(name: str, append: Append, sampling: dict) -> dict:
    """Arguments of the request that appends to the session and generates behind it."""
    request: dict = {"sampling_params": sampling, "session_params": {"id": name}}
    if append.clip is None:
        return request | {"input_ids": list(append.token_ids)}
    return request | {"prompt": append.text, "audio_data": [wav_bytes(append.clip)]}


def wav_bytes(clip: AudioPart) -> bytes:
    out = io.BytesIO()
    sf.write(out, clip.pcm, INPUT_RATE_HZ, format="WAV", subtype="PCM_16")
    return out.getvalue()

"""Audio on its way into the thinker: decoded without torchaudio, and never dropped in silence."""

import base64
import io
from urllib.parse import unquote, urlparse

import numpy as np
import soundfile as sf
import soxr
import torch


def load_audio(audio_file: str | bytes, sr: int | None = None, mono: bool = True) -> np.ndarray:
    """Decode one clip of a request.

    Args:
        audio_file: file bytes, `data:` URI, http(s) URL, `file://` URL or path. Whether local and
            remote media are allowed at all was decided in the gateway.
        sr: rate wanted, Hz; 16000 when None.
    Returns:
        [n_samples] float32 in [-1, 1] ([n_samples, n_channels] when not mono).
    Raises:
        ValueError: if the bytes are no audio that libsndfile reads, or hold no sample.
    """
    rate_hz = sr or 16_000
    source = _source(audio_file)
    try:
        audio, file_rate_hz = sf.read(source, dtype="float32")
    except sf.LibsndfileError as error:
        raise ValueError(f"Could not decode audio: {error}") from error
    if mono and audio.ndim > 1:
        audio = audio.mean(axis=1)
    if file_rate_hz != rate_hz and len(audio):
        audio = soxr.resample(audio, file_rate_hz, rate_hz)
    if not len(audio):
        raise ValueError("Could not decode audio: it holds no samples")
    return np.ascontiguousarray(audio, dtype=np.float32)


def placeholder_spans(input_ids: torch.Tensor, mm_token_id: int) -> list[tuple[int, int]]:
    """Runs of mm_token_id in input_ids [n], as inclusive (first, last) pairs."""
    hit = (input_ids == mm_token_id).to(torch.int8)
    edge = torch.diff(torch.nn.functional.pad(hit, (1, 1)))
    first = (edge == 1).nonzero(as_tuple=True)[0]
    last = (edge == -1).nonzero(as_tuple=True)[0] - 1
    return list(zip(first.tolist(), last.tolist(), strict=True))


async def check_audio_landed(original, processor, image_data, input_text, request_obj, *a, **kw):
    """Around a processor: every clip of the request must own a non-empty run of placeholders.

    Raises:
        ValueError: naming how many of how many clips the prompt has room for.
    """
    result = await original(processor, image_data, input_text, request_obj, *a, **kw)
    n_clips = len(request_obj.audio_data or [])
    if n_clips:
        items = result.mm_items if result is not None else []
        n_landed = sum(len(item.offsets or []) for item in items if item.is_audio())
        if n_landed != n_clips:
            raise ValueError(
                f"the prompt has a place for {n_landed} of {n_clips} audio clips; "
                "the chat template must emit audio placeholders"
            )
    return result


def _source(audio_file: str | bytes):
    if isinstance(audio_file, bytes):
        return io.BytesIO(audio_file)
    if not isinstance(audio_file, str):
        raise ValueError(f"Invalid audio: {type(audio_file).__name__}")
    if audio_file.startswith("data:"):
        try:
            return io.BytesIO(base64.b64decode(audio_file.partition(",")[2], validate=True))
        except ValueError as error:
            raise ValueError("Could not decode audio: bad base64") from error
    if audio_file.startswith(("http://", "https://")):
        from sglang.srt.utils.common import download_remote_media

        return io.BytesIO(download_remote_media(audio_file, timeout=5))
    if audio_file.startswith("file://"):
        return unquote(urlparse(audio_file).path)
    return audio_file

"""Audio input of the thinker: decoded within bounds, and never dropped without an error."""

import asyncio
import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import soundfile as sf
import torch

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.sound.clip_form import MAX_ADDED_S, ClipForm
from sglang_live.sound.decoder import MAX_CLIP_S, Limits, decode_samples, duration_s

# Bound of a file that is given by path; 10 minutes of stereo float at 48 kHz.
_MAX_FILE_BYTES = 256 << 20


def load_audio(audio_file: str | bytes, sr: int | None = None, mono: bool = True) -> np.ndarray:
    """Decode one clip of a request.

    Args:
        audio_file: file bytes, `data:` URI, http(s) URL, `file://` URL or path. The gateway
            decides whether local and remote media are allowed.
        sr: output rate in Hz; None: 16000.
    Returns:
        [n_samples] float32 in [-1, 1] ([n_samples, n_channels] when not mono).
    Raises:
        ValueError: if the bytes are not audio, have no sample, or exceed the limits.
    """
    # The longest clip may have been brought into its form.
    limits = Limits(max_s=MAX_CLIP_S + MAX_ADDED_S)
    try:
        return decode_samples(_read(audio_file), rate_hz=sr or 16_000, limits=limits, mono=mono)
    except (BadInputError, OSError) as error:
        raise ValueError(f"Could not decode audio: {error}") from error


def placeholder_spans(input_ids: torch.Tensor, mm_token_id: int) -> list[tuple[int, int]]:
    """Runs of mm_token_id in input_ids [n], as inclusive (first, last) pairs."""
    hit = (input_ids == mm_token_id).to(torch.int8)
    edge = torch.diff(torch.nn.functional.pad(hit, (1, 1)))
    first = (edge == 1).nonzero(as_tuple=True)[0]
    last = (edge == -1).nonzero(as_tuple=True)[0] - 1
    return list(zip(first.tolist(), last.tolist(), strict=True))


async def check_audio_landed(
    original: Callable[..., Any],
    processor: Any,
    image_data: Any,
    input_text: Any,
    request_obj: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Around a processor: every clip of the request must have its own run of placeholders, and is
    brought into the form that the model hears.

    Raises:
        ValueError: the prompt has placeholders for a different number of clips, or the clips
            together exceed the bound of one clip.
    """
    clips, form = request_obj.audio_data or [], ClipForm.of(vars(processor.hf_config))
    if len(clips) > 1 or (form is not None and any(isinstance(clip, str) for clip in clips)):
        request_obj.audio_data = await asyncio.to_thread(_prepared, clips, form)
    result = await original(processor, image_data, input_text, request_obj, *args, **options)
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


def _prepared(clips: list[Any], form: ClipForm | None) -> list[Any]:
    """Fetch the clips, and bring those of clients into the form.

    Together they are bounded like one: all are decoded in memory at once, and hundreds of small
    compressed files of silence would take gigabytes.
    """
    fetched, left_s = [], MAX_CLIP_S
    for clip in clips:
        data = clip
        if isinstance(clip, str | bytes):
            try:
                data, limits = _read(clip), Limits(max_s=left_s)
                # Bytes come from a session of the stage, which knows what of a message they are.
                if form is None or isinstance(clip, bytes):
                    left_s -= duration_s(data, limits)
                else:
                    samples = decode_samples(data, rate_hz=INPUT_RATE_HZ, limits=limits)
                    left_s -= len(samples) / INPUT_RATE_HZ
                    data = _wav_bytes(form.of_clip(samples))
            except (BadInputError, OSError) as error:
                raise ValueError(f"Could not decode audio: {error}") from error
        fetched.append(data)
    return fetched


def _wav_bytes(samples: np.ndarray) -> bytes:
    out = io.BytesIO()
    sf.write(out, samples, INPUT_RATE_HZ, format="WAV", subtype="FLOAT")
    return out.getvalue()


def _read(audio_file: str | bytes) -> bytes:
    if isinstance(audio_file, bytes):
        return audio_file
    if not isinstance(audio_file, str):
        raise ValueError(f"Invalid audio: {type(audio_file).__name__}")
    if audio_file.startswith("data:"):
        try:
            return base64.b64decode(audio_file.partition(",")[2], validate=True)
        except ValueError as error:
            raise ValueError("Could not decode audio: bad base64") from error
    if audio_file.startswith(("http://", "https://")):
        from sglang.srt.utils.common import download_remote_media

        return download_remote_media(audio_file, timeout=5)
    is_url = audio_file.startswith("file://")
    with Path(unquote(urlparse(audio_file).path) if is_url else audio_file).open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"Invalid audio: the file has more than {_MAX_FILE_BYTES} bytes")
    return data

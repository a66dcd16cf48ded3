"""Transcripts with times: OpenAI's verbose_json, subtitles as SRT and WebVTT, words.

In: segments of a transcript. Out: the body of a response.
"""

import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_live.core import HeardToken
from sglang_live.gateway.transcribe import Segment


def verbose_json(
    segments: Sequence[Segment], granularities: Iterable[str], **head: Any
) -> dict[str, Any]:
    """head: what stands before the segments."""
    body: dict[str, Any] = {**head, "text": text_of(segments)}
    if "segment" in granularities:
        body["segments"] = [_segment_json(n, segment) for n, segment in enumerate(segments)]
    if "word" in granularities:
        tokens = [token for segment in segments for token in segment.tokens]
        body["words"] = [
            {"word": word, "start": round(begin_s, 3), "end": round(end_s, 3)}
            for word, begin_s, end_s in words_of(tokens)
        ]
    return body


def text_of(segments: Sequence[Segment]) -> str:
    return " ".join(segment.text for segment in segments)


def srt(segments: Sequence[Segment]) -> str:
    blocks = (
        f"{n}\n{_clock(one.begin_s, ',')} --> {_clock(one.end_s, ',')}\n{one.text}\n"
        for n, one in enumerate(segments, 1)
    )
    return "\n".join(blocks)


def vtt(segments: Sequence[Segment]) -> str:
    blocks = (
        f"{_clock(one.begin_s, '.')} --> {_clock(one.end_s, '.')}\n{one.text}\n" for one in segments
    )
    return "\n".join(("WEBVTT\n", *blocks))


def words_of(tokens: Sequence[HeardToken]) -> list[tuple[str, float, float]]:
    """Each word with its begin and end, in seconds. Scripts without spaces have words of whole
    characters."""
    words: list[tuple[bytes, float, float]] = []
    for token in tokens:
        begins = not words or token.piece[:1] == b" " or _is_unspaced(words[-1][0], token.piece)
        if begins:
            words.append((token.piece, token.begin_s, token.end_s))
        else:
            said, begin_s, _ = words[-1]
            words[-1] = said + token.piece, begin_s, token.end_s
    found = ((said.decode(errors="ignore").strip(), begin, end) for said, begin, end in words)
    return [(word, begin_s, end_s) for word, begin_s, end_s in found if word]


def _is_unspaced(before: bytes, piece: bytes) -> bool:
    """Whether a piece without a space begins a word: a wide character, behind whole ones."""
    try:
        before.decode()
        first = piece.decode()[:1]
    except UnicodeDecodeError:
        return False
    return bool(first) and unicodedata.east_asian_width(first) == "W"


def _segment_json(n: int, segment: Segment) -> dict[str, Any]:
    """What a server without OpenAI's model does not know is null."""
    said, tokens = segment.text.encode(), segment.tokens
    return {
        "id": n,
        "seek": 0,
        "start": round(segment.begin_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": sum(t.logprob for t in tokens) / len(tokens) if tokens else None,
        "compression_ratio": round(len(said) / len(zlib.compress(said)), 3),
        "no_speech_prob": None,
    }


def _clock(at_s: float, point: str) -> str:
    ms = round(1000 * at_s)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"

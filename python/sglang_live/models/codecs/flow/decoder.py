"""Codes to sound by flow matching, over streams: one code of 40 ms a frame.

In: frames of a code. Out: samples at 24 kHz.
Owner: VocoderEngine holds one FlowStream per job and batches them through one FlowDecoder.
A stream's chunks are those of CosyVoice: the first ends where prompt and chunk are a multiple of 25
codes, to which attention is cut; then 50, and 100 at a time. The last one sees the whole stream, as
in the reference. A flow that was not trained with such cuts has no exact chunks: its streams are
decoded whole, when they have ended.
Source: FunAudioLLM/CosyVoice (cli/model.py: CosyVoice2Model), whose chunks grow from stream to
stream, because it counts them in the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.flow import AHEAD, CHUNK, LONGEST_CHUNK
from sglang_live.models.codecs.flow.encoder import UPSAMPLING
from sglang_live.models.codecs.flow.graphs import FlowGraphs
from sglang_live.models.codecs.flow.mels import FlowInput, FlowVoice, TokenFlow
from sglang_live.models.codecs.flow.recording import voice_in
from sglang_live.models.codecs.hift import Hift, HiftState
from sglang_live.models.cuda_graphs import Capture
from sglang_live.models.speech_lm.frame_decoder import check_codes
from sglang_live.policy.chunks import ChunkRule

# Of a voice, as CosyVoice writes it (add_zero_shot_spk, save_spkinfo): codes, mel and speaker of a
# recording.
VOICE_PARTS = "flow_prompt_speech_token", "prompt_speech_feat", "flow_embedding"


@dataclass(slots=True, eq=False)
class FlowStream:
    """The state of one stream. Dropping it frees everything but its voice, which others share.

    Attributes:
        rule: see VoiceStream.
        codes: [n] int64 on the CPU, all that came.
    """

    voice: FlowVoice
    rule: ChunkRule
    codes: Tensor
    sound: HiftState = field(default_factory=HiftState)

    @property
    def n_frames(self) -> int:
        return len(self.voice.codes) + len(self.codes)


class FlowDecoder:
    """A VoiceDecoder. Not thread-safe per stream, safe across streams.

    Attributes:
        voices, n_quantizers, n_tail_frames: see VoiceDecoder.
        has_flow: whether from_pretrained takes `flow_dtype`: that of the flow's weights and layers.
            None: as all others. HiFT's, and what flows, keep theirs.
    """

    n_quantizers = n_tail_frames = 1
    has_flow = True

    def __init__(
        self,
        flow: TokenFlow,
        hift: Hift,
        voices: Mapping[str, FlowVoice],
        *,
        is_whole: bool = False,
        silence: Sequence[int] = (),
    ):
        """
        Args:
            is_whole: whether streams are decoded when they have ended.
            silence: codes behind the last one of a stream.
        """
        self._flow, self._hift, self._voices = flow, hift, voices
        self._is_whole = is_whole
        self._silence = torch.tensor(silence, dtype=torch.int64)
        self.voices = tuple(voices)

    def new_stream(self, voice: str, speaker: np.ndarray | None = None) -> FlowStream:
        """speaker: [n] float32 of a voice that is none of the decoder's (recording.values_of).

        Raises:
            BadInputError: there is no such voice, or another model made it.
        """
        known = self._known(voice) if speaker is None else self._brought(speaker)
        rule = ChunkRule(first=CHUNK, second=CHUNK, most=CHUNK)
        if not self._is_whole:
            first = CHUNK + -len(known.codes) % CHUNK + AHEAD
            rule = ChunkRule(first=first, second=2 * CHUNK, growth=2, most=LONGEST_CHUNK)
        return FlowStream(known, rule, torch.empty(0, dtype=torch.int64))

    def _known(self, voice: str) -> FlowVoice:
        if voice not in self._voices:
            raise BadInputError(f"there is no voice {voice!r}; there are {', '.join(self.voices)}")
        return self._voices[voice]

    @torch.inference_mode()
    def _brought(self, speaker: np.ndarray) -> FlowVoice:
        codes, mel, embedding = voice_in(speaker)
        self.check_codes(codes[:, None])
        return self._flow.voice(codes, mel, embedding)

    def use_graphs(self, max_streams: int, capture: Capture | None = None) -> FlowGraphs:
        """See TokenFlow. HiFT runs kernel by kernel: its launches take less time than the steps of
        the flow, which the device computes meanwhile."""
        return self._flow.use_graphs(max_streams, capture)

    def check_codes(self, codes: Tensor) -> None:
        """See frame_decoder.check_codes."""
        check_codes(codes, self.n_quantizers, self._flow.n_codes)

    @torch.inference_mode()
    def decode(self, streams: list[FlowStream], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decode the next chunk of several streams; their states change together or not at all.

        Args:
            streams: of any ages.
            codes: [n_frames, 1] int64 of each stream, as many as its rule says; or fewer, with
                END_CODE behind the last one.
        Returns:
            [n_samples] in [-1, 1] of each, on the decoder's device.
        Raises:
            ValueError: if a stream is repeated, or the numbers do not fit.
        """
        if len(codes) != len(streams) or len(set(streams)) != len(streams):
            raise ValueError(f"{len(codes)} chunks do not fit {len(streams)} different streams")
        ends = [bool(chunk[-1, 0] == END_CODE) for chunk in codes]
        said = [
            torch.cat((stream.codes, chunk[: len(chunk) - is_end, 0]))
            for stream, chunk, is_end in zip(streams, codes, ends, strict=True)
        ]
        waves = [torch.empty(0, device=self._flow.device)] * len(streams)
        sounds = [stream.sound for stream in streams]
        if due := [i for i, is_end in enumerate(ends) if is_end or not self._is_whole]:
            mels = self._flow.mels([self._input(streams[i], said[i], ends[i]) for i in due])
            states = [sounds[i] for i in due]
            fresh = [mel[:, state.n_columns :] for mel, state in zip(mels, states, strict=True)]
            found = self._hift.vocode(states, fresh, [ends[i] for i in due])
            for i, (wave, state) in zip(due, found, strict=True):
                waves[i], sounds[i] = wave, state
        for stream, all_codes, sound in zip(streams, said, sounds, strict=True):
            stream.codes, stream.sound = all_codes, sound
        return waves

    def _input(self, stream: FlowStream, said: Tensor, is_end: bool) -> FlowInput:
        if is_end:
            return FlowInput(stream.voice, torch.cat((said, self._silence)), n_ahead=0, chunk=0)
        return FlowInput(stream.voice, said, AHEAD, CHUNK)


def flow_voice(
    flow: TokenFlow, known: Mapping[str, Tensor], names: Sequence[str], spare: int, source: str
) -> FlowVoice:
    """Args, Raises: as voice_parts."""
    return flow.voice(*voice_parts(flow.n_codes, known, names, spare, source))


def voice_parts(
    n_codes: int, known: Mapping[str, Tensor], names: Sequence[str], spare: int, source: str
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Args:
        n_codes: of the codebook.
        known: what a file knows of a voice.
        names: in it of the recording's codes and mel, and of the speaker.
        spare: columns of mel that there may be behind the last code.
        source: for errors.
    Returns:
        Those three: [n] int64, [n_columns, n_mels] and [width].
    Raises:
        BadInputError: the voice lacks something, or its parts do not fit each other.
    """
    try:
        codes, mel, embedding = (known[name] for name in names)
        codes, mel, embedding = codes.flatten().long(), mel.flatten(0, -2), embedding.flatten()
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{source} is no voice for a flow: {error}") from error
    if not 0 <= len(mel) - UPSAMPLING * len(codes) <= spare:
        raise BadInputError(f"{source}: {len(codes)} codes do not fit {len(mel)} columns of mel")
    check_codes(codes[:, None], 1, n_codes)
    return codes, mel, embedding

"""What SGLang does with the clips of a request to Step-Audio 2 before its scheduler sees them."""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.multimodal.processors.base_processor import (
    BaseMultimodalProcessor,
    MultimodalSpecialTokens,
)

from sglang_live.models.step_audio.engine.thinker import Qwen2AudioForConditionalGeneration
from sglang_live.models.step_audio.family import AUDIO_PLACE
from sglang_live.models.step_audio.hearing import LogMel, n_tokens


class StepAudioProcessor(BaseMultimodalProcessor):
    models = (Qwen2AudioForConditionalGeneration,)

    def __init__(
        self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any
    ):
        super().__init__(hf_config, server_args, _processor, *args)
        self._place = self._tokenizer.convert_tokens_to_ids(AUDIO_PLACE)
        self._mels = LogMel(hf_config.audio_encoder_config["n_mels"])
        self._tokens = MultimodalSpecialTokens(
            audio_token=AUDIO_PLACE, audio_token_id=self._place
        ).build(_processor)

    async def process_mm_data_async(
        self, image_data: Any, audio_data: Any, input_text: Any, *args: Any, **kwargs: Any
    ) -> MultimodalProcessorOutput | None:
        """A placeholder becomes as many as its clip has tokens."""
        if not audio_data:
            return None
        loaded = await self.load_mm_data(input_text, self._tokens, audio_data=audio_data)
        clips = iter(loaded.audios)
        ids: list[int] = []
        items = []
        for token in self._tokenizer.encode(loaded.input_text, add_special_tokens=False):
            if token != self._place:
                ids.append(token)
                continue
            mels = self._mels(torch.from_numpy(next(clips)))
            begin, n = len(ids), n_tokens(mels.shape[1])
            ids += [token] * n
            items.append(
                MultimodalDataItem(
                    modality=Modality.AUDIO, feature=mels, offsets=[(begin, begin + n - 1)]
                )
            )
        return MultimodalProcessorOutput(mm_items=items, input_ids=ids, audio_token_id=self._place)

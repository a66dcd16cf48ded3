"""transformers' own Qwen3-Omni on the same weights, whose greedy outputs the stages reproduce."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from transformers import AutoProcessor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass
class Reference:
    model: Qwen3OmniMoeForConditionalGeneration
    processor: object

    @staticmethod
    def load(path: Path) -> "Reference":
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        return Reference(model.eval(), AutoProcessor.from_pretrained(path))

    @property
    def image_id(self) -> int:
        return self.model.thinker.config.image_token_id

    @property
    def video_id(self) -> int:
        return self.model.thinker.config.video_token_id

    def inputs(
        self,
        text: str,
        clips: list[np.ndarray],
        pictures: Sequence[Image] = (),
        videos: Sequence[np.ndarray] = (),
    ) -> dict:
        """
        clips: int16 at 16 kHz, one per placeholder in text; so are pictures and videos.
        videos: of two frames a second, [n_frames, height, width, 3].
        """
        audio = [clip.astype(np.float32) / 32768 for clip in clips]
        return dict(
            self.processor(
                text=[text],
                audio=audio or None,
                images=list(pictures) or None,
                videos=[torch.from_numpy(v).permute(0, 3, 1, 2) for v in videos] or None,
                videos_kwargs={"fps": 2.0},
                return_tensors="pt",
                padding=True,
                audio_kwargs={"truncation": False},
            )
        )

    @torch.no_grad()
    def think(self, inputs: dict, n_tokens: int) -> list[int]:
        """Greedy response; end tokens are ignored."""
        out = self.model.thinker.generate(
            **inputs, max_new_tokens=n_tokens, do_sample=False, eos_token_id=-1
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    @torch.no_grad()
    def logprobs(self, inputs: dict, sink: int, seen_from: list[int]) -> torch.Tensor:
        """[n_tokens, vocabulary] of one pass over a whole conversation with bounded attention.

        inputs: input_ids, and under "clips" and "pictures" the result of `inputs()` for each
            message with audio, and with pictures.
        seen_from: token i attends to the first `sink` tokens, and from seen_from[i] to itself.
        """
        thinker, ids = self.model.thinker, inputs["input_ids"]
        embeds = thinker.get_input_embeddings()(ids)
        if clips := inputs.get("clips"):
            heard = [
                thinker.get_audio_features(
                    clip["input_features"], clip["feature_attention_mask"]
                ).last_hidden_state
                for clip in clips
            ]
            embeds[ids == thinker.config.audio_token_id] = torch.cat(heard).to(embeds.dtype)
        grids, seen = None, {}
        if found := inputs.get("pictures"):
            grids = torch.cat([each["image_grid_thw"] for each in found])
            patches = torch.cat([each["pixel_values"] for each in found])
            pictures = thinker.get_image_features(patches, grids, return_dict=True)
            is_image = ids == thinker.config.image_token_id
            embeds[is_image] = torch.cat(tuple(pictures.pooler_output)).to(embeds.dtype)
            deep = [torch.cat(tuple(layer)) for layer in pictures.deepstack_features]
            seen = {"visual_pos_masks": is_image, "deepstack_visual_embeds": deep}
        at = torch.arange(ids.shape[1])
        attended = (at < sink) | (at >= torch.tensor(seen_from)[:, None])
        attended &= at <= at[:, None]
        mask = torch.zeros(attended.shape).masked_fill(~attended, torch.finfo(torch.float32).min)
        # Text and audio advance by one on all three axes.
        positions = at.expand(3, 1, -1)
        if grids is not None:
            lengths = [each["feature_attention_mask"].sum(-1) for each in inputs.get("clips") or ()]
            positions, _ = thinker.get_rope_index(
                ids,
                image_grid_thw=grids,
                attention_mask=torch.ones_like(ids),
                audio_seqlens=torch.cat(lengths) if lengths else None,
            )
        states = thinker.model(
            inputs_embeds=embeds,
            attention_mask=mask[None, None],
            position_ids=positions.long(),
            **seen,
        ).last_hidden_state
        return torch.log_softmax(thinker.lm_head(states[0]).float(), dim=-1)

    @torch.no_grad()
    def speak(
        self,
        inputs: dict,
        n_tokens: int,
        n_frames: int,
        sight: Callable[[int, int], tuple[int, int]] | None = None,
    ) -> tuple[list[int], np.ndarray]:
        """A response's ids and the codes [n_frames, 16] of its speech.

        The reference drops the last response token, which usually is the end token.
        sight: prompt's length and frame -> (sink, seen_from): the frame attends to positions
            before `sink`, and from seen_from to itself. None: it attends to all.
        """
        talker, captured = self.model.talker, {}
        predictor = talker.code_predictor
        talk, predict, step = talker.generate, predictor.generate, talker.model.forward

        def greedy_predict(**kwargs):
            kwargs |= {"do_sample": False, "top_k": None, "top_p": None}
            return predict(**kwargs)

        def capture(**kwargs):
            captured["result"] = talk(**kwargs)
            return captured["result"]

        def step_with_sight(**kwargs):
            place = kwargs["past_key_values"].get_seq_length()
            if kwargs["inputs_embeds"].shape[1] > 1:
                captured["n_prompt"] = kwargs["inputs_embeds"].shape[1]
            elif sight is not None:
                n_prompt, at = captured["n_prompt"], torch.arange(place + 1)
                sink, seen_from = sight(n_prompt, place - n_prompt)
                hidden = (at >= sink) & (at < seen_from)
                mask = torch.zeros(place + 1).masked_fill(hidden, torch.finfo(torch.float32).min)
                kwargs["attention_mask"] = mask[None, None, None]
            return step(**kwargs)

        talker.generate, predictor.generate = capture, greedy_predict
        talker.model.forward = step_with_sight
        try:
            sequence, _ = self.model.generate(
                **inputs,
                speaker="ethan",
                thinker_max_new_tokens=n_tokens,
                thinker_do_sample=False,
                thinker_eos_token_id=-1,
                talker_max_new_tokens=n_frames + 1,
                talker_do_sample=False,
                talker_top_k=None,
                talker_top_p=None,
                talker_temperature=None,
            )
        finally:
            talker.generate, predictor.generate, talker.model.forward = talk, predict, step
        states = captured["result"].hidden_states
        codes = torch.stack([h[-1] for h in states if h[-1] is not None], dim=1)[0]
        n_prompt = inputs["input_ids"].shape[1]
        return sequence[0, n_prompt:].tolist(), codes.numpy()


def chat(system: str, *turns: tuple[str, str]) -> str:
    """ChatML of a conversation, with the beginning of a response. turns: (role, content)."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    for role, content in turns:
        text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"

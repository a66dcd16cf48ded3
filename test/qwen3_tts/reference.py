"""Qwen3-TTS as its reference computes it (qwen_tts 0.1), in plain PyTorch, for one stream.

The package needs an older transformers. Its talker and code predictor are dense Qwen3 layers, for
which transformers' own are taken; everything around them, and the codec's decoder, is restated.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3Model

MIN_NEW_TOKENS, REPETITION_PENALTY, N_CONTROLS = 2, 1.05, 1024


class Reference:
    def __init__(self, path: Path):
        self.config = json.loads((path / "config.json").read_text())
        self.talker_config = self.config["talker_config"]
        self._weights = load_file(path / "model.safetensors")
        self._talker = self._qwen3(self.talker_config, "talker.model.")
        predictor = self.talker_config["code_predictor_config"]
        self._predictor = self._qwen3(predictor, "talker.code_predictor.model.")
        codec = path / "speech_tokenizer"
        self.codec = Codec(
            json.loads((codec / "config.json").read_text())["decoder_config"],
            load_file(codec / "model.safetensors"),
        )

    def _qwen3(self, config: dict, prefix: str) -> Qwen3Model:
        names = (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
            "num_key_value_heads rms_norm_eps hidden_act"
        )
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        sizes = {name: config[name] for name in names.split()}
        model = Qwen3Model(Qwen3Config(vocab_size=1, rope_parameters=rope, **sizes)).float()
        of_layers = {
            name.removeprefix(prefix): weight.float()
            for name, weight in self._weights.items()
            if name.startswith(prefix) and "embedding" not in name
        }
        missing, unexpected = model.load_state_dict(of_layers, strict=False)
        assert missing == ["embed_tokens.weight"] and not unexpected
        return model.eval()

    def _weight(self, name: str) -> Tensor:
        return self._weights[f"talker.{name}"].float()

    def _text(self, ids: list[int]) -> Tensor:
        x = self._weight("model.text_embedding.weight")[ids]
        for n, act in ((1, F.silu), (2, lambda x: x)):
            name = f"text_projection.linear_fc{n}"
            x = act(F.linear(x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias")))
        return x

    def _code(self, ids: list[int]) -> Tensor:
        return self._weight("model.codec_embedding.weight")[ids]

    def prompt(self, role: list[int], first: int, voice: str | Tensor) -> Tensor:
        """[n, hidden], with non_streaming_mode=False and the language "auto".

        voice: a preset one, or the embedding of a cloned one, [hidden] (x_vector_only_mode).
        """
        c, talker = self.config, self.talker_config
        language = [
            talker["codec_nothink_id"],
            talker["codec_think_bos_id"],
            talker["codec_think_eos_id"],
        ]
        if isinstance(voice, str) and (dialect := talker["spk_is_dialect"][voice]):
            language = [
                talker["codec_think_id"],
                talker["codec_think_bos_id"],
                talker["codec_language_id"][dialect],
                talker["codec_think_eos_id"],
            ]
        preset = isinstance(voice, str)
        speaker = self._code([talker["spk_id"][voice]]) if preset else voice[None]
        ends = self._code([talker["codec_pad_id"], talker["codec_bos_id"]])
        codes = torch.cat((self._code(language), speaker, ends))
        pads = [c["tts_pad_token_id"]] * (len(codes) - 2)
        text = self._text([*pads, c["tts_bos_token_id"], first])
        return torch.cat((self._text(role), text + codes))

    @torch.no_grad()
    def speak(
        self, role: list[int], text: list[int], voice: str | Tensor, n_frames: int
    ) -> list[list[int]]:
        """Greedy codes of at most n_frames frames, fewer if the talker ends before.

        role: ids of `<|im_start|>assistant\\n`. text: ids of the words.
        """
        talker, cache, seen = self.talker_config, DynamicCache(), set()
        trailing = [*text[1:], self.config["tts_eos_token_id"]]
        allowed = torch.zeros(talker["vocab_size"])
        allowed[-N_CONTROLS:] = -torch.inf
        allowed[talker["codec_eos_token_id"]] = 0
        frames: list[list[int]] = []
        inputs = self.prompt(role, text[0], voice)
        while True:
            states = self._talker(inputs_embeds=inputs[None], past_key_values=cache)
            hidden = states.last_hidden_state[0, -1]
            logits = F.linear(hidden, self._weight("codec_head.weight"))
            for code in seen:
                was = logits[code]
                logits[code] = was / REPETITION_PENALTY if was > 0 else was * REPETITION_PENALTY
            logits += allowed
            if len(frames) < MIN_NEW_TOKENS:
                logits[talker["codec_eos_token_id"]] = -torch.inf
            code = int(logits.argmax())
            if code == talker["codec_eos_token_id"] or len(frames) == n_frames:
                return frames
            seen.add(code)
            codes, embeds = self._residual(hidden, code)
            n = len(frames)
            pad = self.config["tts_pad_token_id"]
            said = self._text([trailing[n] if n < len(trailing) else pad])
            inputs = (embeds + said[0])[None]
            frames.append([code, *codes])

    def _residual(self, hidden: Tensor, code: int) -> tuple[list[int], Tensor]:
        """The other codes of a frame, and the sum of the embeddings of all its codes."""
        embeds = [self._code([code])[0]]
        codes: list[int] = []
        for step in range(self.talker_config["num_code_groups"] - 1):
            x = torch.stack([hidden, *embeds])
            if "talker.code_predictor.small_to_mtp_projection.weight" in self._weights:
                narrow = "code_predictor.small_to_mtp_projection"
                x = F.linear(x, self._weight(f"{narrow}.weight"), self._weight(f"{narrow}.bias"))
            state = self._predictor(inputs_embeds=x[None]).last_hidden_state[0, -1]
            head = self._weight(f"code_predictor.lm_head.{step}.weight")
            codes.append(int(F.linear(state, head).argmax()))
            table = self._weight(f"code_predictor.model.codec_embedding.{step}.weight")
            embeds.append(table[codes[-1]])
        return codes, torch.stack(embeds).sum(0)


class Codec:
    """The decoder of the 12.5 Hz codec, over a whole stream."""

    def __init__(self, config: dict, weights: dict[str, Tensor]):
        self._config = config
        self._weights = {name.removeprefix("decoder."): w.float() for name, w in weights.items()}

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """codes: [n_frames, n_quantizers] int64. Returns [n_samples]."""
        x = self._lookup("rvq_first", codes[:, :1]) + self._lookup("rvq_rest", codes[:, 1:])
        x = self._transform(self._conv("pre_conv.", x.T).T).T
        for n, factor in enumerate(self._config["upsampling_ratios"]):
            x = self._next(f"upsample.{n}.1.", self._up(f"upsample.{n}.0.", x, factor))
        x = self._conv("decoder.0.", x)
        for n, rate in enumerate(self._config["upsample_rates"], 1):
            at = f"decoder.{n}.block."
            x = self._up(f"{at}1.", self._snake(f"{at}0.", x), rate)
            for unit, dilation in ((2, 1), (3, 3), (4, 9)):
                here = f"{at}{unit}."
                y = self._conv(f"{here}conv1.", self._snake(f"{here}act1.", x), dilation)
                x = x + self._conv(f"{here}conv2.", self._snake(f"{here}act2.", y))
        last = len(self._config["upsample_rates"]) + 1
        wave = self._conv(f"decoder.{last + 1}.", self._snake(f"decoder.{last}.", x))
        return wave[0].clamp(-1, 1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _lookup(self, part: str, codes: Tensor) -> Tensor:
        at, found = f"quantizer.{part}.", 0
        for n, column in enumerate(codes.T):
            book = f"{at}vq.layers.{n}._codebook."
            usage = self._weights[f"{book}cluster_usage"].clamp(min=1e-5)
            found = found + (self._weights[f"{book}embedding_sum"] / usage[:, None])[column]
        return F.linear(found, self._weights[f"{at}output_proj.weight"][..., 0])

    def _conv(self, at: str, x: Tensor, dilation: int = 1) -> Tensor:
        """Causal, over [channels, n]."""
        weight, bias = self._weights[f"{at}conv.weight"], self._weights[f"{at}conv.bias"]
        groups = x.shape[0] // weight.shape[1]
        x = F.pad(x, ((weight.shape[2] - 1) * dilation, 0))
        return F.conv1d(x[None], weight, bias, dilation=dilation, groups=groups)[0]

    def _up(self, at: str, x: Tensor, stride: int) -> Tensor:
        """A transposed convolution, trimmed at its end."""
        weight, bias = self._weights[f"{at}conv.weight"], self._weights[f"{at}conv.bias"]
        return F.conv_transpose1d(x[None], weight, bias, stride=stride)[0, :, : x.shape[1] * stride]

    def _snake(self, at: str, x: Tensor) -> Tensor:
        alpha, beta = (self._weights[f"{at}{name}"].exp()[:, None] for name in ("alpha", "beta"))
        return x + (x * alpha).sin() ** 2 / (beta + 1e-9)

    def _next(self, at: str, x: Tensor) -> Tensor:
        y = self._conv(f"{at}dwconv.", x).T
        norm = self._weights[f"{at}norm.weight"], self._weights[f"{at}norm.bias"]
        y = F.layer_norm(y, y.shape[-1:], *norm, eps=1e-6)
        y = self._linear(f"{at}pwconv2", F.gelu(self._linear(f"{at}pwconv1", y)))
        return x + (self._weights[f"{at}gamma"] * y).T

    def _transform(self, x: Tensor) -> Tensor:
        """[n, latent] -> the same, with a sliding window."""
        c, at = self._config, "pre_transformer."
        x, heads = self._linear(f"{at}input_proj", x), (len(x), -1, c["head_dim"])
        place = torch.arange(len(x))
        seen = (place <= place[:, None]) & (place > place[:, None] - c["sliding_window"])
        half = torch.arange(0, c["head_dim"], 2) / c["head_dim"]
        angle = torch.outer(place.float(), c["rope_theta"] ** -half).repeat(1, 2)
        for layer in range(c["num_hidden_layers"]):
            here = f"{at}layers.{layer}."
            y = self._norm(f"{here}input_layernorm", x)
            q, k, v = (
                self._linear(f"{here}self_attn.{p}_proj", y).view(heads).transpose(0, 1)
                for p in "qkv"
            )
            y = F.scaled_dot_product_attention(
                _rotated(q, angle), _rotated(k, angle), v, attn_mask=seen, enable_gqa=True
            )
            y = self._linear(f"{here}self_attn.o_proj", y.transpose(0, 1).flatten(1))
            x = x + self._weights[f"{here}self_attn_layer_scale.scale"] * y
            y = self._norm(f"{here}post_attention_layernorm", x)
            gate, up = (self._linear(f"{here}mlp.{p}_proj", y) for p in ("gate", "up"))
            y = self._linear(f"{here}mlp.down_proj", F.silu(gate) * up)
            x = x + self._weights[f"{here}mlp_layer_scale.scale"] * y
        return self._linear(f"{at}output_proj", self._norm(f"{at}norm", x))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, eps = self._weights[f"{name}.weight"], self._config["rms_norm_eps"]
        return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()

"""The Qwen3-Omni talker as an SGLang model (models/speech_lm/engine/talker.py)."""

from collections.abc import Iterable

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models.qwen2_moe import Qwen2MoeModel
from sglang.srt.models.qwen3_moe import Qwen3MoeDecoderLayer
from torch import Tensor, nn

from sglang_live.models.host_copy import copy_to
from sglang_live.models.qwen3_omni.parts import THINKER_EMBEDDING
from sglang_live.models.speech_lm.code_predictor import CodePredictor
from sglang_live.models.speech_lm.engine.steps import has_pictures
from sglang_live.models.speech_lm.engine.talker import Projection, SpeechLM
from sglang_live.models.speech_lm.engine.weights import WeightNames, load_talker_weights
from sglang_live.models.speech_lm.sampler import Repetition, Sampler
from sglang_live.models.speech_lm.talker_state import TalkerStream

# Fixed in the reference (transformers, talker.prepare_inputs_for_generation).
TOP_K, PREDICTOR_TOP_P = 50, 0.8
N_CONTROL_IDS = 1024


class _SharedExpertMoe(nn.Module):
    """Routed experts plus one expert of all tokens, weighted by a sigmoid gate."""

    def __init__(self, layer_id: int, config, quant_config=None, prefix: str = ""):
        super().__init__()
        inner = config.shared_expert_intermediate_size
        self.gate = ReplicatedLinear(
            config.hidden_size, config.num_experts, bias=False, prefix=f"{prefix}.gate"
        )
        self.topk = TopK(
            top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob, layer_id=layer_id
        )
        self.experts = get_moe_impl_class(quant_config)(
            layer_id=layer_id,
            top_k=config.num_experts_per_tok,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            inplace=False,  # the shared expert reads the same input afterwards
        )
        self.topk.bind_runner_backend(
            self.experts.runner_backend, routing_method_type=self.experts.routing_method_type
        )
        self.shared_gate_up = MergedColumnParallelLinear(
            config.hidden_size, [inner] * 2, bias=False, prefix=f"{prefix}.shared_gate_up"
        )
        self.shared_down = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=False,
            reduce_results=False,
            prefix=f"{prefix}.shared_down",
        )
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self._act = SiluAndMul()

    def forward(self, x: Tensor, forward_batch=None) -> Tensor:
        if x.shape[0] == 0:
            return x
        router_logits, _ = self.gate(x)
        routed = self.experts(x, self.topk(x, router_logits))
        shared, _ = self.shared_down(self._act(self.shared_gate_up(x)[0]))
        # The decoder layer sums it over the ranks.
        return routed + torch.sigmoid(self.shared_gate(x)) * shared


# Of SGLang's attention: kernels that rotate by positions of one axis, and do more.
_FUSED = (
    "compatible_with_fused_kv_buffer",
    "use_fused_qk_norm_rope",
    "use_fused_qk_norm_rope_cpu",
)


class _TalkerLayer(Qwen3MoeDecoderLayer):
    """Qwen3-MoE's attention and norms. The feed-forward part differs, and the rotary embedding of a
    prefill with pictures, whose positions have three axes. The one of SGLang that has them for all
    would cost every step the kernels that rotate a key and store it.
    """

    def __init__(self, config, layer_id: int, start_layer: int = 0, quant_config=None, **kwargs):
        super().__init__(config, layer_id, start_layer, quant_config, **kwargs)
        self.mlp = _SharedExpertMoe(
            layer_id, config, quant_config, prefix=f"{kwargs.get('prefix', '')}.mlp"
        )
        plain = self.self_attn.rotary_emb
        self._three_axes = get_rope(
            plain.head_size,
            rotary_dim=plain.rotary_dim,
            max_position=config.max_position_embeddings,
            base=plain.base,
            rope_scaling={
                "rope_type": "default",
                "mrope_section": config.talker["mrope_section"],
                "mrope_interleaved": True,  # so in the reference, whatever the configuration says
            },
        )

    def forward(self, positions: Tensor, *args, **kwargs):
        if positions.ndim == 1:
            return super().forward(positions, *args, **kwargs)
        attention = self.self_attn
        kept = {name: getattr(attention, name) for name in ("rotary_emb", *_FUSED)}
        try:
            attention.rotary_emb = self._three_axes
            for name in _FUSED:
                setattr(attention, name, False)
            return super().forward(positions, *args, **kwargs)
        finally:
            for name, value in kept.items():
                setattr(attention, name, value)


class Qwen3OmniTalker(SpeechLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        talker = config.talker
        super().__init__(
            config,
            Qwen2MoeModel(config, quant_config, prefix="model", decoder_layer_type=_TalkerLayer),
            CodePredictor(
                talker["code_predictor_config"],
                sampler=Sampler(top_k=TOP_K, top_p=PREDICTOR_TOP_P),
            ),
            sampler=Sampler(top_k=TOP_K, repetition=Repetition()),
            n_control_ids=N_CONTROL_IDS,
            text_vocab=talker["thinker_vocab_size"],
            text_widths=(talker["thinker_hidden_size"], config.intermediate_size),
        )
        widths = (talker["thinker_hidden_size"], config.intermediate_size, config.hidden_size)
        self.hidden_projection = Projection(*widths)

    def _place_audio(self, out: Tensor, stream: TalkerStream, prefix: int) -> None:
        """Write projected thinker states to the audio positions inside this chunk."""
        if (found := stream.audio_in(prefix, prefix + len(out))) is not None:
            rows, at = found
            states = copy_to(rows, out.device, out.dtype)
            out[copy_to(at, out.device)] = self.hidden_projection(states)

    def sees(self, forward_batch) -> bool:
        """Whether a prefill has pictures, for which no graph is captured."""
        return has_pictures(forward_batch, self.streams)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.prepare(load_talker_weights(self, weights, weight_names(self.config.num_experts)))


def weight_names(n_experts: int) -> WeightNames:
    return WeightNames(
        # The talker projects text through the thinker's embedding table.
        embedding=THINKER_EMBEDDING,
        renamed=(
            ("model.codec_embedding.", "model.embed_tokens."),
            ("shared_expert_gate.", "shared_gate."),
            ("shared_expert.down_proj.", "shared_down."),
        ),
        stacked=(
            ("shared_expert.gate_proj", "shared_gate_up", 0),
            ("shared_expert.up_proj", "shared_gate_up", 1),
        ),
        experts=FusedMoE.make_expert_params_mapping(
            ckpt_gate_proj_name="gate_proj",
            ckpt_down_proj_name="down_proj",
            ckpt_up_proj_name="up_proj",
            num_experts=n_experts,
        ),
    )


EntryClass = Qwen3OmniTalker

"""The part of names.NAMES that concerns models, their graphs, and the platform."""

from lab.upstream.comparison import Upstream

ENGINE_NAMES = (
    Upstream(
        "sglang.srt.platforms.interface.SRTPlatform",
        functions={
            "get_default_attention_backend": "self",
            "is_pin_memory_available": "self, device=",
            "get_graph_runner_cls": "self",
            "get_full_graph_backend_cls": "self",
            "apply_server_args_defaults": "self, server_args",
        },
        attributes="_enum capabilities",
        used_in="bridge/platform/cpu.py",
    ),
    Upstream(
        "sglang.srt.platforms.interface.SRTPlatform",
        functions={
            "apply_server_args_defaults": "self, server_args",
            "get_graph_runner_cls": "self",
            "get_group_coordinator_device": "self, local_rank",
            "get_dispatch_key_name": "self",
            "init_backend": "self",
        },
        attributes="capabilities",
        used_in="bridge/platform/cuda.py",
    ),
    Upstream(
        "sglang.srt.utils.common",
        functions={"is_cuda": "", "is_cuda_alike": ""},
        used_in="bridge/platform/cuda.py",
    ),
    Upstream(
        "sglang.kernels.fused_op.BaseFusedOp",
        functions={"register_oot_forward": "op_cls, fn, platform_key"},
        used_in="bridge/platform/native_moe.py",
    ),
    Upstream(
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod",
        functions={"forward_native": "self, layer, dispatch_output"},
        used_in="bridge/platform/native_moe.py",
    ),
    Upstream(
        "sglang.srt.model_executor.model_runner.ModelRunner",
        functions={
            "max_shared_logits_buffer_rows": "self",
        },
        attributes="sampling_observer model graph_shared_output",
        used_in="bridge",
    ),
    Upstream(
        "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoeForConditionalGeneration",
        functions={
            "__init__": "self, config, quant_config=, prefix=",
        },
        attributes="thinker",
        used_in="models/qwen3_omni/engine/thinker.py",
    ),
    Upstream(
        "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration",
        functions={
            "get_audio_feature": "self, items",
            "forward": (
                "self, input_ids, positions, forward_batch, get_embedding=, pp_proxy_tensors="
            ),
        },
        attributes="audio_tower model",
        used_in="models/qwen3_omni/engine/thinker.py",
    ),
    Upstream(
        "sglang.srt.managers.schedule_batch.MultimodalDataItem",
        functions={
            "is_audio": "self",
        },
        attributes="offsets feature",
        used_in="models/qwen3_omni/engine/thinker.py",
    ),
    Upstream(
        "sglang.srt.models.qwen3_omni_moe",
        functions={
            "_get_feat_extract_output_lengths": "input_lengths",
        },
        used_in="models/qwen3_omni/engine/thinker.py",
    ),
    Upstream(
        "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoeAudioEncoder",
        functions={
            "forward": "self, input_features, feature_lens=, aftercnn_lens=",
        },
        attributes=(
            "n_window n_window_infer conv_chunksize conv2d1 conv2d2 conv2d3 conv_out "
            "positional_embedding layers ln_post proj1 act proj2"
        ),
        used_in="models/qwen3_omni/engine/thinker.py",
    ),
    Upstream(
        "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoeAudioEncoderLayer",
        functions={
            "forward": "self, hidden_states, cu_seqlens, **kwargs",
        },
        attributes="self_attn self_attn_layer_norm final_layer_norm activation_fn fc1 fc2",
        used_in="models/qwen3_omni/engine/thinker.py",
    ),
    Upstream(
        "sglang.srt.layers.attention.vision",
        functions={
            "prepare_vision_attention_metadata": (
                "cu_seqlens, device, *, max_seqlen=, packed_indptrs=, sequence_lengths=, "
                "flashinfer_max_seqlen="
            ),
        },
        used_in="models/qwen3_omni/engine/thinker.py",
    ),
    Upstream(
        "sglang.srt.model_executor.runner_utils.capture_mode",
        functions={
            "get_is_capture_mode": "",
        },
        used_in="models/speech_lm/engine/talker.py",
    ),
    Upstream(
        "sglang.srt.layers.moe.ep_moe.layer",
        functions={
            "get_moe_impl_class": "quant_config",
        },
        used_in="models/qwen3_omni/engine/talker.py",
    ),
    Upstream(
        "sglang.srt.models.qwen3_moe.Qwen3MoeDecoderLayer",
        functions={
            "__init__": (
                "self, config, layer_id, start_layer=, quant_config=, prefix=, alt_stream="
            ),
        },
        used_in="models/qwen3_omni/engine/talker.py",
    ),
    Upstream(
        "sglang.srt.layers.moe.fused_moe_triton.FusedMoE",
        functions={
            "make_expert_params_mapping": (
                "ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name, num_experts"
            ),
        },
        used_in="models/qwen3_omni/engine/talker.py",
    ),
)

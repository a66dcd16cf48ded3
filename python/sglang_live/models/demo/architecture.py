"""The demo model's configuration: exactly Qwen3-Omni's architecture, in other sizes."""

from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_omni_moe import Qwen3OmniMoeConfig

from sglang_live.models.demo.location import DemoSize


def config_of(tokenizer: PreTrainedTokenizerFast, size: DemoSize) -> Qwen3OmniMoeConfig:
    """The configuration of a whole model; special tokens are those of `tokenizer`."""
    token_id = tokenizer.convert_tokens_to_ids
    head_dim, codes = size.head_dim, size.codebook_size
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.thinker_layers,
        "num_attention_heads": size.hidden // head_dim,
        "num_key_value_heads": size.hidden // head_dim // 2,
        "head_dim": head_dim,
        "moe_intermediate_size": size.hidden // 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": rope,
    }
    media = {
        "audio_token_id": token_id("<|audio_pad|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "audio_start_token_id": token_id("<|audio_start|>"),
    }
    thinker = {
        "text_config": text,
        # n_window as published: encoder windows decide which audio chunks are exact.
        "audio_config": {
            "d_model": size.encoder_hidden,
            "encoder_layers": size.encoder_layers,
            "encoder_attention_heads": size.encoder_hidden // 16,
            "encoder_ffn_dim": 2 * size.encoder_hidden,
            "output_dim": size.hidden,
            "num_mel_bins": 128,
            "downsample_hidden_size": size.encoder_channels,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
        },
        # Three deepstack layers: the runtime assumes that number.
        "vision_config": {
            "depth": 3,
            "hidden_size": size.vision_hidden,
            "intermediate_size": 2 * size.vision_hidden,
            "num_heads": size.vision_hidden // 16,
            "out_hidden_size": size.hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "vision_end_token_id": token_id("<|vision_end|>"),
        "audio_end_token_id": token_id("<|audio_end|>"),
        "user_token_id": token_id("user"),
        "pad_token_id": tokenizer.pad_token_id,
        **media,
    }
    talker = {
        "text_config": {
            **text,
            "vocab_size": codes + 1024,
            "num_hidden_layers": size.talker_layers,
            "shared_expert_intermediate_size": size.hidden // 2,
        },
        "code_predictor_config": {
            "vocab_size": codes,
            "hidden_size": size.hidden,
            "intermediate_size": 2 * size.hidden,
            "num_hidden_layers": size.predictor_layers,
            "num_attention_heads": size.hidden // head_dim,
            "num_key_value_heads": size.hidden // head_dim // 2,
            "head_dim": head_dim,
            "num_code_groups": 16,
        },
        "num_code_groups": 16,
        "thinker_hidden_size": size.hidden,
        "accept_hidden_layer": size.thinker_layers // 2,
        "spatial_merge_size": 2,
        "codec_eos_token_id": codes + 102,
        "codec_nothink_id": codes + 107,
        "codec_think_bos_id": codes + 108,
        "codec_think_eos_id": codes + 109,
        "codec_pad_id": codes + 100,
        "codec_bos_id": codes + 101,
        "speaker_id": {"chelsie": codes + 253, "ethan": codes + 254, "aiden": codes + 255},
        **media,
    }
    code2wav = {
        "hidden_size": size.codec_hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 2 * size.codec_hidden,
        "codebook_size": codes,
        "num_quantizers": 16,
        "decoder_dim": size.decoder_dim,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "sliding_window": size.codec_window,
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=code2wav,
        enable_audio_output=True,
        im_start_token_id=token_id("<|im_start|>"),
        im_end_token_id=token_id("<|im_end|>"),
        tts_pad_token_id=token_id("<tts_pad>"),
        tts_bos_token_id=token_id("<tts_text_bos>"),
        tts_eos_token_id=token_id("<tts_text_eod>"),
        system_token_id=token_id("system"),
        user_token_id=token_id("user"),
        assistant_token_id=token_id("assistant"),
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config

"""The trained demo model's sizes: small enough to ship, large enough to speak."""

from sglang_live.models.demo.location import DemoSize

N_CODEBOOKS = 16
FRAME_SAMPLES = 1920  # 80 ms at 24 kHz
# One training conversation in a thousand is longer. Up to here answers are right as often as in
# short ones, and from 900 tokens on hardly any is.
GOOD_TOKENS = 600

SIZE = DemoSize(
    vocab=2048,
    hidden=128,
    head_dim=32,
    encoder_hidden=128,
    encoder_layers=5,
    encoder_channels=24,
    vision_hidden=16,  # never used in conversation, so as small as it can be
    thinker_layers=4,
    talker_layers=3,
    predictor_layers=2,
    codec_hidden=128,
    decoder_dim=128,
    codebook_size=256,
    codec_window=8,
)

"""Which numbers of ranks a checkpoint can be divided among."""

import json

import pytest

from sglang_live.errors import BadInputError
from sglang_live.models.demo.location import TRAINED
from sglang_live.models.qwen3_omni.family import check_ranks

# Of Qwen3-Omni-30B-A3B.
PUBLISHED = {
    "thinker_config": {
        "text_config": {
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
        },
        "audio_config": {"encoder_attention_heads": 20},
        "vision_config": {"num_heads": 16},
    },
    "talker_config": {
        "text_config": {
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 768,
        },
    },
}


@pytest.fixture
def published(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    return tmp_path


def test_the_published_model_and_the_demo_run_on_two_and_four_ranks(published):
    for n_ranks in (1, 2, 4):
        for stage in ("thinker", "talker", "vocoder"):
            check_ranks(published, stage, "--tp-size", n_ranks)
    for stage in ("thinker", "talker"):
        check_ranks(TRAINED, stage, "--tp-size", 2)


@pytest.mark.parametrize(
    ("stage", "n_ranks", "complaint"),
    [
        ("thinker", 3, "--tp-size: this model's num_attention_heads is 32, .* among 3 ranks"),
        ("thinker", 8, r"audio_config.encoder_attention_heads is 20, .* among 8 ranks"),
        ("talker", 32, "num_attention_heads is 16"),
        ("thinker", 0, "takes a number from 1, got 0"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_the_size(
    published, stage, n_ranks, complaint
):
    with pytest.raises(BadInputError, match=complaint):
        check_ranks(published, stage, "--tp-size", n_ranks)

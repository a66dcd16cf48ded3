"""The family of cascades whose voice is a speaking language model: they have a talker stage."""

from pathlib import Path

from sglang_live.models.cascade.family import Cascade
from sglang_live.models.family import family_at, read_json


class SpokenCascade(Cascade):
    talker = "sglang_live.models.cascade.parts:load_talker"
    decoder = "sglang_live.models.cascade.parts:TalkerDecoder"
    voice = None

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        if stage == "thinker":
            super().check_ranks(path, stage, flag, n_ranks)
            return
        talker = read_json(path / "config.json")["talker"]
        family_at(talker["family"]).check_ranks(Path(talker["path"]), stage, flag, n_ranks)


FAMILY = SpokenCascade()

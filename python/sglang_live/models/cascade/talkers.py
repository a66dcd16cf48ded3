"""A talker that speaks for the language model of a cascade, found in a directory. Without torch."""

import os
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.models.checkpoint_files import check_checkpoint
from sglang_live.models.family import ModelFacts, claiming_family, read_json


def find_talker(given: str, *families: str) -> ModelFacts | None:
    """
    Args:
        given: as voice: a directory, or the name of another kind of voice.
        families: modules of model families outside this package.
    Returns:
        None: it is no checkpoint of a model family.
    Raises:
        BadInputError: its family does not speak the text of other models, or a file of it is
            missing or broken.
    """
    path = Path(os.path.expanduser(given))
    if not (path / "config.json").is_file():
        return None
    family = claiming_family(read_json(path / "config.json"), *families)
    if family is None:
        return None
    facts = family.facts(path.resolve())
    if not facts.talker_reads_text or facts.has_thinker:
        raise BadInputError(f"{path} speaks for its own thinker alone: give it as --model-path")
    check_checkpoint(facts.weights)
    return facts

"""A recogniser or a voice as it is found before its stage loads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.models.packages.pins import Package


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """
    Attributes:
        load: "module:attribute" of the function that loads it from its directory or file.
        path: that directory or file. None: the directory of `package`.
        package: with its weights, or None.
        packages: what else it needs, by the keywords under which `load` takes their directories.
        offers: names of a voice's voices; codes of a recogniser's languages.
    """

    load: str
    path: Path | None = None
    package: Package | None = None
    packages: Mapping[str, Package] = field(default_factory=dict)
    offers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesKind:
    """A kind of recogniser or voice that users have as files.

    Attributes:
        holds: the files that make one, for errors.
        claims: whether a path is one.
        read: describes a path that is claimed. Raises BadInputError if a file is missing or broken,
            or something that must be installed is not.
    """

    holds: str
    claims: Callable[[Path], bool]
    read: Callable[[Path], SpeechModel]

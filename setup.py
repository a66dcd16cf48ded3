"""Package, extras and entry points. Settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent

# Folders of the repository root that are installed inside the package.
PATCHES = "sglang_live.sgl_patches"
KERNELS = "sglang_live.kernels"


def version() -> str:
    # Read, not imported: the package's requirements are not installed at build time.
    text = (ROOT / "python/sglang_live/__init__.py").read_text("utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


def pinned(file_name: str) -> list[str]:
    """The requirement lines of a file in requirements/."""
    lines = (ROOT / "requirements" / file_name).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned_sglang() -> str:
    """As published: pip would prefer a release's version (below), as the later one."""
    [line] = [line for line in pinned("cpu_no_deps.txt") if line.startswith("sglang==")]
    return f"{line},!={line.partition('==')[2]}+nodeps"


def released() -> list[str]:
    """cpu_no_deps.txt as pip can install it.

    A release has wheels of these without the requirements that cannot be met on a CPU
    (scripts/release.sh). Their local version says so, and no index has it: pip then stops at once,
    and does not download SGLang's CUDA stack.
    """
    without = ("sglang==", "pipecat-ai==")
    return [
        f"{line}+nodeps" if line.startswith(without) else line for line in pinned("cpu_no_deps.txt")
    ]


def package_folders() -> dict[str, str]:
    """Folder of each package outside python/."""
    # kernels/ itself is not among them: python/sglang_live/kernels/__init__.py says why.
    kernels = {
        f"{KERNELS}.{name}": "kernels/" + name.replace(".", "/")
        for name in find_packages("kernels")
    }
    return {PATCHES: "sgl_patches", **kernels}


# A folder without __init__.py, so that a server starts without it.
EXTENSIONS = find_namespace_packages("python", include=["sglang_live.extensions*"])

setup(
    name="sglang-live",
    version=version(),
    description="A server for realtime speech conversation with Omni models, on SGLang",
    long_description=(ROOT / "README.md").read_text("utf-8")
    if (ROOT / "README.md").exists()
    else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=[*find_packages("python"), *EXTENSIONS, *package_folders()],
    package_dir={"": "python", **package_folders()},
    package_data={
        "sglang_live": [
            "py.typed",
            "gateway/web/*",
            "interaction/turn_end.json",
            "interaction/turn_words.json",
            "assets/*",
            "models/demo/*.txt",
            "models/demo/trained/*",
            "extensions/planner/device_model/*.toml",
            "extensions/planner/simulation/data/*.json",
        ]
    },
    install_requires=[
        "aiohttp",
        "fastapi",
        "jsonschema>=4.20",
        "msgspec",
        "numpy",
        "onnx>=1.19",
        "onnxruntime>=1.20",
        "orjson",
        "pillow",
        "pybase64",
        "python-multipart",
        "prometheus-client",
        "psutil",
        "pyzmq>=25.1.2",
        "setproctitle",
        "silero-vad>=6.2",
        "soundfile>=0.13",
        "soxr>=1.0",
        # Older ones build the path that the proxy compares with its list from the Host header.
        "starlette>=1.10",
        "uvicorn",
        "uvloop",
        "websockets>=14",
        "yarl",
    ],
    extras_require={
        "cpu": [*pinned("cpu.txt"), *released()],
        "cuda": [pinned_sglang(), *pinned("cuda.txt")],
        "media": pinned("media.txt"),
        "webrtc": pinned("webrtc.txt"),
        "journal": pinned("journal.txt"),
        "cluster": pinned("cluster.txt"),
        "whisper": pinned("whisper.txt"),
        "test": pinned("test.txt"),
        "bench": pinned("bench.txt"),
        "training": pinned("training.txt"),
    },
    entry_points={
        "console_scripts": ["sglang-live = sglang_live.__main__:main"],
        "sglang.srt.platforms": [
            "sglang_live_cpu = sglang_live.bridge.platform.cpu:activate",
            "sglang_live_cuda = sglang_live.bridge.platform.cuda:activate",
        ],
        "sglang.srt.plugins": ["sglang_live = sglang_live.bridge.plugin:register"],
    },
)

"""Import of a fetched package's own Python code, without installing it."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType


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

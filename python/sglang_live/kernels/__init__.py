"""GPU kernels: one folder each, kept in kernels/ at the top of the repository.

The folder there has no __init__.py, and must not get one: `python -m` run in the repository
would then find it under the name `kernels`, which belongs to a package that transformers
looks for, and transformers fails on one without a version.
"""

from pathlib import Path

# Installed from a wheel the kernels lie beside this file; in a checkout they do not.
_CHECKOUT = Path(__file__).parents[3]
if (_CHECKOUT / "setup.py").is_file():
    __path__.append(str(_CHECKOUT / "kernels"))

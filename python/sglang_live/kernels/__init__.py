"""GPU kernels: one folder each, in kernels/ at the top of the repository.

That folder must not have an __init__.py: `python -m`, run in the repository, would then find it
under the name `kernels`. transformers searches a package of that name, and fails on one without
a version.
"""

from pathlib import Path

# In a wheel the kernels are beside this file; in a checkout they are not.
_CHECKOUT = Path(__file__).parents[3]
if (_CHECKOUT / "setup.py").is_file():
    __path__.append(str(_CHECKOUT / "kernels"))

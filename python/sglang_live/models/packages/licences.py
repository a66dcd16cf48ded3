"""Licences of the packages whose files are downloaded at first use."""

from collections.abc import Iterable

from sglang_live.models.packages.pins import PACKAGES, Package


def licence_line(package: Package) -> str:
    """One line about a package, for the terminal."""
    return f"{package.name} {package.version}: {package.holds}; {package.licence}; {package.source}"


def licence_notice(packages: Iterable[Package] = PACKAGES) -> str:
    """The paragraphs about these packages, as in NOTICE."""
    return "\n".join(
        f"  {package.name} {package.version}, {package.licence}\n"
        f"      {package.holds}.\n"
        f"      {package.source}\n"
        for package in packages
    )

"""What was found: as text, and as JUnit XML for machines."""

from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

Outcome = Literal["passed", "failed", "skipped", "expected", "repaired"]
# A deviation that is gone must leave the list.
BAD: tuple[Outcome, ...] = ("failed", "repaired")


@dataclass(frozen=True, slots=True)
class Result:
    """
    what: the claim. why: of any outcome but passed.
    """

    profile: str
    name: str
    what: str
    outcome: Outcome
    why: str
    took_s: float


def as_text(result: Result) -> str:
    line = f"{result.outcome:8}  {result.profile}/{result.name}  ({result.took_s:.1f} s)"
    if result.outcome == "passed":
        return line
    return f"{line}\n          {result.what}\n          {result.why}"


def summary(results: list[Result]) -> str:
    lines = []
    for profile in dict.fromkeys(result.profile for result in results):
        outcomes = [result.outcome for result in results if result.profile == profile]
        counts = ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes))
        lines.append(f"{profile}: {counts}")
    return "\n".join(lines)


def as_junit(results: list[Result]) -> str:
    root = ElementTree.Element("testsuites", name="conformance")
    for profile in dict.fromkeys(result.profile for result in results):
        found = [result for result in results if result.profile == profile]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=profile,
            tests=str(len(found)),
            failures=str(sum(result.outcome in BAD for result in found)),
            skipped=str(sum(result.outcome in ("skipped", "expected") for result in found)),
            errors="0",
        )
        for result in found:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=profile,
                name=result.name,
                time=f"{result.took_s:.3f}",
            )
            if result.outcome in BAD:
                ElementTree.SubElement(case, "failure", message=result.why)
            elif result.outcome != "passed":
                ElementTree.SubElement(case, "skipped", message=result.why)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)

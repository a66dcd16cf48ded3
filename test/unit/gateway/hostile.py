"""Hostile schemas of functions' parameters."""

from hypothesis import strategies as st

from sglang_live.gateway import tool_schema


def doubled(depth: int) -> dict:
    """A schema of which each definition refers to the next one twice."""
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return {"$defs": {**twice, f"d{depth}": {}}, "$ref": "#/$defs/d0"}


_DRAFT_4 = "http://json-schema.org/draft-04/schema#"
HOSTILE_SCHEMAS = (
    doubled(40),
    {"$schema": _DRAFT_4, "enum": [{"n": n} for n in range(1500)]},
    {"$schema": []},
    {"properties": {"x": {"$schema": {}}}},
    {"$ref": "#/allOf/x", "allOf": [{}]},
    {"$ref": "#", "not": {"$ref": "#"}},
    {"$ref": "#"},
    {"allOf": [{"not": {}}] * 2000},
)

KEYWORDS = sorted({*tool_schema._FORMS, *tool_schema._POINTERS, *tool_schema._NAMES, "const"})
_SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["x", "string", "#", ""])
)
_REFERENCES = st.sampled_from(
    ["#", "#/$defs/x", "#/allOf/0", "#/allOf/x", "#/properties", "#a", "~"]
)


def _values(inner):
    tables = st.dictionaries(st.sampled_from(["x", "y", "$ref", "$schema"]), inner, max_size=2)
    return st.lists(inner, max_size=3) | tables


ANY = st.recursive(_SCALARS | _REFERENCES, _values, max_leaves=6)


def schemas():
    """Schemas whose keywords have valid and invalid values."""
    return st.recursive(
        ANY,
        lambda inner: st.dictionaries(
            st.sampled_from(KEYWORDS), inner | _values(inner), max_size=3
        ),
        max_leaves=12,
    )

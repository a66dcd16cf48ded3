"""Drawn schemas of functions' parameters, with everything that a forced call can enforce."""

import random
from typing import Any

_NAMES = ("city", "unit", "n", "a b", "größe", 'q"x', "time_zone", "x", "kind", "tags", "Name-1")
_WORDS = ("north", "northwest", "a", "", "é", 'say "hi"', "tab\there", "1", "süd")
_PATTERNS = (
    "^[a-z]+$",
    "^a{2,5}b?$",
    r"^\d{3}-\d{4}$",
    "^(red|green|blue)$",
    "[A-Z][a-z]*",
    r"^\w+@\w+\.\w+$",
    "^.*$",
    "^[^x]{2,6}$",
    "^([a-f0-9]{2}:)+[a-f0-9]{2}$",
    "(ab|c)*d",
    r"^\S+ \S+$",
    'x"y|z\\\\',
)
_FORMATS = (
    "date",
    "time",
    "date-time",
    "email",
    "uuid",
    "ipv4",
    "uri",
    "hostname",
    "duration",
    "nonsense",
)


class SchemaMaker:
    """Draws schemas; the same seed gives the same ones."""

    def __init__(self, seed: int):
        self._draw = random.Random(seed)

    def function(self, name: str) -> dict[str, Any]:
        draw = self._draw
        parameters: dict[str, Any] | None
        kind = draw.random()
        if kind < 0.05:
            parameters = None
        elif kind < 0.1:
            parameters = {}
        else:
            self._defs: dict[str, Any] = {}
            parameters = self._object(draw.choice((1, 2, 2, 3)))
            if self._defs:
                parameters["$defs"] = self._defs
        form: dict[str, Any] = {"type": "function", "name": name, "description": f"Calls {name}."}
        return form if parameters is None else form | {"parameters": parameters}

    def _schema(self, depth: int) -> Any:
        makers = [self._string, self._number, self._integer, self._literal]
        if depth > 0:
            makers += [self._array, self._object, self._choice, self._reference, self._any]
        return self._draw.choice(makers)(depth)

    def _string(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        found: dict[str, Any] = {"type": "string"}
        kind = draw.randrange(8)
        if kind == 0:
            found["pattern"] = draw.choice(_PATTERNS)
        elif kind == 1:
            found["format"] = draw.choice(_FORMATS)
        elif kind == 2:
            found["minLength"] = draw.randrange(30)
        elif kind == 3:
            found["maxLength"] = draw.choice((0, 1, 5, 80, 1024))
        elif kind == 4:
            found |= {"minLength": draw.randrange(5), "maxLength": draw.randrange(5, 20)}
        return found

    def _integer(self, depth: int) -> dict[str, Any]:
        draw, low = self._draw, self._draw.choice((-1000, -7, 0, 1, 12, 10**9))
        found: dict[str, Any] = {"type": "integer"}
        kind = draw.randrange(6)
        if kind in (0, 2):
            found["minimum"] = low
        if kind in (1, 2):
            found["maximum"] = low + draw.choice((0, 5, 1000, 10**12))
        if kind == 3:
            found["multipleOf"] = draw.choice((1, 2, 5, 12))
        if kind == 4:
            found |= {"exclusiveMinimum": low, "exclusiveMaximum": low + 10}
        return found

    def _number(self, depth: int) -> dict[str, Any]:
        draw, low = self._draw, self._draw.choice((-10.5, -1, 0, 0.25, 99))
        found: dict[str, Any] = {"type": "number"}
        if draw.random() < 0.4:
            found[draw.choice(("minimum", "exclusiveMinimum"))] = low
        if draw.random() < 0.4:
            found[draw.choice(("maximum", "exclusiveMaximum"))] = low + draw.choice((0.5, 3, 1e6))
        return found

    def _literal(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        values: list[Any] = [*_WORDS, 0, -3, 1.5, True, False, None, [1, "a"], {"k": [None]}]
        kind = draw.randrange(4)
        if kind == 0:
            return {"const": draw.choice(values)}
        if kind == 1:
            return {"enum": draw.sample(values, draw.randrange(1, 6))}
        if kind == 2:
            return {"type": "string", "enum": draw.sample(_WORDS, draw.randrange(1, 5))}
        return {
            "type": draw.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))
        }

    def _array(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        found: dict[str, Any] = {"type": "array"}
        if draw.random() < 0.9:
            found["items"] = self._schema(depth - 1)
        if draw.random() < 0.2:
            found["prefixItems"] = [self._schema(depth - 1) for _ in range(draw.randrange(1, 3))]
            found["items"] = draw.choice((False, {"type": "string"}))
        elif draw.random() < 0.3:
            found["minItems"] = draw.randrange(4)
        elif draw.random() < 0.3:
            found["maxItems"] = draw.choice((0, 1, 4, 1000))
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        found: dict[str, Any] = {"type": "object"}
        kind = draw.random()
        if kind < 0.75:
            names = draw.sample(_NAMES, draw.randrange(1, 5))
            found["properties"] = {name: self._schema(depth - 1) for name in names}
            found["required"] = [name for name in names if draw.random() < 0.6]
        if kind > 0.6:
            more = draw.random()
            if more < 0.4:
                found["additionalProperties"] = draw.choice((True, False, {"type": "integer"}))
            elif more < 0.6 and "properties" not in found:
                keys = draw.choice(("^x_[a-z]+$", "^[a-z]$"))
                found |= {"patternProperties": {keys: self._schema(depth - 1)}}
                found["additionalProperties"] = False
            elif more < 0.8 and "properties" not in found:
                found["additionalProperties"] = self._schema(depth - 1)
                found["propertyNames"] = draw.choice(
                    (
                        {"type": "string", "pattern": "^[a-z]{1,4}$"},
                        {"maxLength": 3, "type": "string"},
                    )
                )
        if draw.random() < 0.1:
            found[draw.choice(("minProperties", "maxProperties"))] = 1
        return found

    def _choice(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        sides = [self._schema(depth - 1) for _ in range(draw.randrange(1, 4))]
        kind = draw.choice(("anyOf", "anyOf", "oneOf", "allOf"))
        return {kind: sides[:1] if kind == "allOf" else sides}

    def _reference(self, depth: int) -> dict[str, Any]:
        draw, name = self._draw, f"d{len(self._defs)}"
        self._defs[name] = {}
        if draw.random() < 0.5:
            self._defs[name] = self._schema(depth - 1)
        else:  # a tree or a list, which can end
            value, link = self._schema(0), {"$ref": f"#/$defs/{name}"}
            more = {"type": "array", "items": link} if draw.random() < 0.5 else link
            self._defs[name] = {
                "type": "object",
                "properties": {"value": value, "more": more},
                "required": ["value"],
            }
        return {"$ref": f"#/$defs/{name}"}

    def _any(self, depth: int) -> Any:
        return self._draw.choice(({}, True, {"type": "array"}, {"type": "object"}))

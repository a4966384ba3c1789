"""A small JSON Schema checker with the keywords that the policy's schema uses."""

import re

TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
ANNOTATIONS = {"$schema", "title", "description", "$defs"}


def same(left, right):
    return left == right and isinstance(left, bool) is isinstance(right, bool)


class Checker:
    """Says whether values satisfy a schema; an unknown keyword is an error of the test."""

    def __init__(self, schema):
        self.root = schema

    def valid(self, value, schema=None):
        schema = self.root if schema is None else schema
        if isinstance(schema, bool):
            return schema
        checks = (key for key in schema if key not in ANNOTATIONS | {"then", "else"})
        return all(self.keyword(key, value, schema) for key in checks)

    def keyword(self, key, value, schema):
        return getattr(self, "on_" + key.removeprefix("$"))(schema[key], value, schema)

    def on_ref(self, ref, value, schema):
        return self.valid(value, self.root["$defs"][ref.removeprefix("#/$defs/")])

    def on_type(self, names, value, schema):
        return any(TYPES[name](value) for name in ([names] if isinstance(names, str) else names))

    def on_enum(self, allowed, value, schema):
        return any(same(item, value) for item in allowed)

    def on_const(self, allowed, value, schema):
        return same(allowed, value)

    def on_pattern(self, pattern, value, schema):
        return not isinstance(value, str) or re.search(pattern, value) is not None

    def on_minLength(self, size, value, schema):
        return not isinstance(value, str) or len(value) >= size

    def on_minimum(self, bound, value, schema):
        return not TYPES["number"](value) or value >= bound

    def on_minItems(self, size, value, schema):
        return not isinstance(value, list) or len(value) >= size

    def on_maxItems(self, size, value, schema):
        return not isinstance(value, list) or len(value) <= size

    def on_uniqueItems(self, unique, value, schema):
        if not isinstance(value, list):
            return True
        return not any(same(a, b) for i, a in enumerate(value) for b in value[:i])

    def on_items(self, item, value, schema):
        return not isinstance(value, list) or all(self.valid(each, item) for each in value)

    def on_minProperties(self, size, value, schema):
        return not isinstance(value, dict) or len(value) >= size

    def on_maxProperties(self, size, value, schema):
        return not isinstance(value, dict) or len(value) <= size

    def on_required(self, names, value, schema):
        return not isinstance(value, dict) or all(name in value for name in names)

    def on_properties(self, properties, value, schema):
        if not isinstance(value, dict):
            return True
        return all(self.valid(value[key], properties[key]) for key in value if key in properties)

    def on_patternProperties(self, patterns, value, schema):
        if not isinstance(value, dict):
            return True
        return all(
            self.valid(item, inner)
            for key, item in value.items()
            for pattern, inner in patterns.items()
            if re.search(pattern, key)
        )

    def on_additionalProperties(self, inner, value, schema):
        if not isinstance(value, dict):
            return True
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        return all(
            self.valid(item, inner)
            for key, item in value.items()
            if key not in known and not any(re.search(pattern, key) for pattern in patterns)
        )

    def on_propertyNames(self, inner, value, schema):
        return not isinstance(value, dict) or all(self.valid(key, inner) for key in value)

    def on_anyOf(self, forms, value, schema):
        return any(self.valid(value, form) for form in forms)

    def on_oneOf(self, forms, value, schema):
        return sum(self.valid(value, form) for form in forms) == 1

    def on_allOf(self, forms, value, schema):
        return all(self.valid(value, form) for form in forms)

    def on_not(self, form, value, schema):
        return not self.valid(value, form)

    def on_if(self, condition, value, schema):
        branch = "then" if self.valid(value, condition) else "else"
        return self.valid(value, schema.get(branch, True))

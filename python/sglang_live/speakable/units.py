"""Names of currencies, units and scales."""

import re

# Sign: singular, plural, singular and plural of the hundredth part.
CURRENCIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "$": ("dollar", "dollars", ("cent", "cents")),
    "€": ("euro", "euros", ("cent", "cents")),
    "£": ("pound", "pounds", ("penny", "pence")),
    "¥": ("yen", "yen", ()),
    "₹": ("rupee", "rupees", ("paisa", "paise")),
    "₽": ("ruble", "rubles", ()),
    "₩": ("won", "won", ()),
    "¢": ("cent", "cents", ()),
    "₿": ("bitcoin", "bitcoins", ()),
}
CODES = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹"}
SCALES = {
    "k": "thousand", "K": "thousand", "m": "million", "M": "million", "mn": "million",
    "B": "billion", "bn": "billion", "T": "trillion", "tn": "trillion", "thousand": "thousand",
}  # fmt: skip

_UNITS = {
    "km": "kilometer", "m": "meter", "cm": "centimeter", "mm": "millimeter", "nm": "nanometer",
    "µm": "micrometer", "μm": "micrometer", "ft": "foot", "yd": "yard", "mi": "mile",
    "kg": "kilogram", "g": "gram", "mg": "milligram", "µg": "microgram", "μg": "microgram",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "L": "liter", "l": "liter", "mL": "milliliter",
    "ml": "milliliter", "tsp": "teaspoon", "tbsp": "tablespoon", "gal": "gallon",
    "h": "hour", "hr": "hour", "hrs": "hour", "min": "minute", "mins": "minute", "s": "second",
    "sec": "second", "secs": "second", "ms": "millisecond", "µs": "microsecond",
    "μs": "microsecond", "ns": "nanosecond", "yr": "year", "yrs": "year",
    "GB": "gigabyte", "MB": "megabyte", "KB": "kilobyte", "kB": "kilobyte", "TB": "terabyte",
    "PB": "petabyte", "GiB": "gibibyte", "MiB": "mebibyte", "KiB": "kibibyte", "Gb": "gigabit",
    "Mb": "megabit", "kb": "kilobit", "W": "watt", "kW": "kilowatt", "MW": "megawatt",
    "GW": "gigawatt", "mW": "milliwatt", "V": "volt", "kV": "kilovolt", "mV": "millivolt",
    "mA": "milliamp", "N": "newton", "J": "joule", "kJ": "kilojoule", "MJ": "megajoule",
    "cal": "calorie", "kcal": "kilocalorie", "px": "pixel", "ha": "hectare",
    "pt": "point", "pts": "point", "dB": "decibel",
    "Ω": "ohm", "atm": "atmosphere", "Pa": "pascal", "kPa": "kilopascal", "mol": "mole",
}  # fmt: skip
# Same in singular and plural.
_FIXED = {
    "Hz": "hertz", "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz",
    "mph": "miles per hour", "fps": "frames per second", "rpm": "R P M", "Gbps": "gigabits per "
    "second", "Mbps": "megabits per second", "kbps": "kilobits per second", "kWh": "kilowatt hours",
    "Wh": "watt hours", "mAh": "milliamp hours", "hPa": "hectopascal", "am": "A M", "pm": "P M",
    "bps": "bits per second", "ppm": "parts per million",
}  # fmt: skip
_DEGREES = {"°C": "Celsius", "°F": "Fahrenheit", "°": "", "℃": "Celsius", "℉": "Fahrenheit"}
_POWERS = {"2": "square", "3": "cubic"}
_PLURALS = {"foot": "feet", "hertz": "hertz"}

_LONGEST_FIRST = sorted((*_UNITS, *_FIXED), key=len, reverse=True)
_ONE = "|".join(map(re.escape, _LONGEST_FIRST))
_PER = "h|hr|s|sec|min|day|week|month|year|yr|m|kg|L|l|user|hour|minute|second|person|token"
UNIT_PATTERN = rf"(?:{_ONE})(?:\s?/\s?(?:{_PER}))?|[kc]?m[23]|°\s?[CF]|[℃℉°]"


def unit(text: str, *, singular: bool) -> str:
    """The name of what UNIT_PATTERN finds."""
    upper, _, lower = text.partition("/")
    words = _named(upper.strip(), singular=singular)
    return f"{words} per {_named(lower.strip(), singular=True)}" if lower else words


def _named(text: str, *, singular: bool) -> str:
    text = text.replace(" ", "")
    if text in _DEGREES:
        return f"{'degree' if singular else 'degrees'} {_DEGREES[text]}".strip()
    power = next((mark for mark in _POWERS if text.endswith(mark)), "")
    text = text.removesuffix(power)
    if text in _FIXED:
        words = _FIXED[text]
    elif text in _UNITS:
        words = _UNITS[text] if singular else _PLURALS.get(_UNITS[text], f"{_UNITS[text]}s")
    else:
        words = text
    return f"{_POWERS[power]} {words}" if power else words

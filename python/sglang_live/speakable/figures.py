"""Words of what a number is part of: money, shares, units, ranges, ordinals, versions.

In: text without markdown, in which dates and times are words already. Out: text without digits.
"""

import re
from collections.abc import Callable

from sglang_live.speakable.numbers import bare, cardinal, number, ordinal, plural, year

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


_N = r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
# Behind a currency, m is no meter.
_SCALE = r"(?:\s?(million|billion|trillion|thousand|mn|bn|tn|[kKmMBT])(?![\w'’]))?"
_SIGN = "".join(map(re.escape, CURRENCIES))
# What follows 9x where it is a product, and no multiple.
_ALGEBRA = r"\s+(?:plus|minus|equals|squared|cubed|to the power|less|greater|over)\b"
_CODES = "|".join(CODES)
Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _scale(text: str | None) -> str:
    return SCALES.get(text, text) if text else ""


def _is_kind(found: re.Match[str]) -> bool:
    """Whether an amount says of what kind a thing is, not how much: a five dollar bill."""
    before = found.string[max(0, found.start() - 4) : found.start()]
    return re.search(r"(?:\A|\s)[aA]n?\s\Z", before) is not None


def _money(found: re.Match[str]) -> str:
    return _amount(found[1], found[2], found[3], single=_is_kind(found))


def _amount(sign: str, text: str, scale: str | None, *, single: bool = False) -> str:
    one, many, hundredth = CURRENCIES[sign]
    many = one if single else many
    if scale:
        return f" {number(text)} {_scale(scale)} {many} "
    whole, _, part = text.replace(",", "").partition(".")
    if len(part) != 2 or not hundredth:
        return f" {number(text)} {one if text == '1' else many} "
    cents = hundredth[part != "01"]
    small = f"{cardinal(int(part))} {cents}"
    large = f"{number(whole)} {one if whole == '1' else many}" if whole else ""
    if not int(part):
        return f" {large} "
    return f" {large} and {small} " if whole and int(whole) else f" {small} "


def _with_unit(found: re.Match[str]) -> str:
    single = found[1] == "1" or _is_kind(found) or "-" in found[0]
    return f" {number(found[1])} {unit(found[2], singular=single)} "


def _scaled(found: re.Match[str]) -> str:
    return f" {number(found[1])} {SCALES[found[2]]} "


def _decade(found: re.Match[str]) -> str:
    n = int(found[1])
    if n < 100:
        return f" {plural(cardinal(n))} "
    return f" {plural(year(n))} "


def _ordinal(found: re.Match[str]) -> str:
    return f" {ordinal(int(found[1].replace(',', '')))} "


_NAMED_PARTS = {2: ("half", "halves"), 4: ("quarter", "quarters")}
_LARGEST_PART = 20


def _fraction(found: re.Match[str]) -> str:
    whole, above, below = found[1], int(found[2]), int(found[3])
    if (above, below) in ((24, 7), (9, 11), (50, 50)):
        words = f"{cardinal(above)} {cardinal(below)}"
    elif below in (0, 1) or below > _LARGEST_PART or above >= below:
        words = f"{number(found[2])} over {number(found[3])}"
    else:
        one, many = _NAMED_PARTS.get(below, (ordinal(below), ordinal(below) + "s"))
        words = f"{cardinal(above)} {one if above == 1 else many}"
    if found[4]:
        words = f"{words} {unit(found[4], singular=not whole)}"
    return f" {bare(whole)} and {words} " if whole else f" {words} "


def _version(found: re.Match[str]) -> str:
    parts = found[1].split(".")
    return " " + (" dot " if len(parts) == 4 else " point ").join(map(number, parts)) + " "


def _plain(found: re.Match[str]) -> str:
    return f" {bare(found[0])} "


def _grouped(found: re.Match[str]) -> str:
    whole = re.sub(r"[ '’.]", ",", found[1])
    return f"{whole}.{found[2]}" if found[2] else whole


# Numbers as others than Americans write them, made into theirs. Dots are groups only where a comma
# follows them, and a comma is a decimal one only where groups, a unit or a currency say so.
_FOREIGN: tuple[Rule, ...] = (
    (
        re.compile(
            r"(?<![\w.,+'’-])([1-9]\d{0,2}(?:[ '’]\d{3})+)(?:[.,](\d{1,2}))?(?![\d'’]|[.,]\d)"
        ),
        _grouped,
    ),
    (re.compile(r"(?<![\w.,])(\d{1,3}(?:\.\d{3})+),(\d{1,2})(?![\d,])"), _grouped),
    (
        re.compile(
            rf"(?<![\d.,])(\d{{1,3}}),(\d{{1,2}})(?=\s?(?:[{_SIGN}%]|{_CODES}\b|(?:{UNIT_PATTERN})(?![\w°'’])))"
        ),
        r"\1.\2",
    ),
    (re.compile(rf"(?<=[{_SIGN}])(\s?\d{{1,3}}),(\d{{1,2}})(?![\d,])"), r"\1.\2"),
)
# Bounds on counts of digits: what is longer is an identifier, and _plain says its digits.
_RULES: tuple[Rule, ...] = (
    (re.compile(rf"\b({_CODES})\s?(?=\d)"), lambda found: CODES[found[1]]),
    (re.compile(rf"({_N})\s?({_CODES})\b"), lambda found: CODES[found[2]] + found[1]),
    # Ranges: the unit of both numbers stands behind the second one.
    (
        re.compile(rf"([{_SIGN}])\s?({_N}){_SCALE}\s?[-–—]\s?\1?({_N})(?![\d-])"),
        lambda found: f"{found[2]} {_scale(found[3])} to {found[1]}{found[4]}",
    ),
    (re.compile(rf"(?<=[\d%CFs])\s?[–—]\s?(?=[{_SIGN}+]?\d)"), " to "),
    (re.compile(r"(?<![\w.-])(\d+(?:[.,]\d+)*[%x]?)-(?=\d+(?:[.,]\d+)*(?![\w-]*-))"), r"\1 to "),
    (
        re.compile(r"(?<=\d)/(kg|g|lb|oz|GB|TB|L|mi|km|min|hr)\b"),
        lambda found: f" per {unit(found[1], singular=True)}",
    ),
    (re.compile(r"(?<=[\d%])/yr\b"), " per year "),
    (re.compile(r"(?<=[\d%])/(?=(?:hour|day|week|month|year|user|person|night|unit)\b)"), " per "),
    (re.compile(r"(?<=°[CF])/(?=\d)|(?<=[a-z])/(?=\d)"), ", "),
    # A sign that is part of its number, not one that stands between two.
    (re.compile(rf"(?<![\w)\].,}}])[-−](?=[{_SIGN}]?\.?\d)"), " minus "),
    (re.compile(rf"(?<![\w)\].,}}])\+(?=[{_SIGN}]?\.?\d)"), " plus "),
    (re.compile(r"~\s?(?=[$€£]?\d)"), " about "),
    (re.compile(rf"(?:\b(?:US|AU|CA|NZ|C|A))?([{_SIGN}])\s?({_N}){_SCALE}(?!\d)"), _money),
    (
        re.compile(rf"(?<![\w.,])({_N}){_SCALE}\s?([€£₹₽$¢])(?![\w\d])"),
        lambda found: _amount(found[3], found[1], found[2]),
    ),
    (re.compile(rf"(?<![\w.,])({_N})\s?%"), lambda found: f" {number(found[1])} percent "),
    (re.compile(r"(?<![\w.])(?:['’])?(1\d\d0|20\d0|[2-9]0)['’]?s(?!\w)"), _decade),
    (
        re.compile(
            r"(?<![\w./])(?:(\d{1,4})[ -])?(\d{1,4})[/⁄](\d{1,4})(?![\w/]|\.\d)"
            rf"(?:\s{{1,2}}({UNIT_PATTERN})(?![\w°'’/]))?"
        ),
        _fraction,
    ),
    (re.compile(rf"(?<![\w.,])({_N})[ -]?({UNIT_PATTERN})(?![\w°'’])"), _with_unit),
    (re.compile(rf"(?<![\w.,])({_N})\s?(thousand|mn|bn|tn)(?![\w'’-])"), _scaled),
    # A larger number in front of the letter is a model's, and so is the resolution of a display.
    (
        re.compile(
            r"(?<![\w.,])(?![48]K\s(?:TV|UHD|video|display|monitor|screen|resolution|camera))"
            r"(\d{1,3}(?:\.\d+)?)\s?([kKMBT])(?![\w'’-]|\.\w|(?<=[BMT])\s[A-Z])"
        ),
        _scaled,
    ),
    (
        re.compile(rf"(?<![\w.,])(?<!plus )(?<!minus )(?<!equals )({_N})[x×](?![\w×]|{_ALGEBRA})"),
        lambda found: f" {number(found[1])} times ",
    ),
    (re.compile(r"(?<![\w.])(\d{1,3}(?:,\d{3}){0,3}|\d{1,15})(?:st|nd|rd|th)(?!\w)"), _ordinal),
    (re.compile(r"(?<=\d)(?:[x×]| [x×] )(?=\d)"), " by "),
    (re.compile(r"(?<![\w.])[vV]\.?\s?(?=\d)"), " version "),
    (re.compile(r"(?<![\d.])(\d+(?:\.\d+){2,})"), _version),
    (re.compile(r"(?<=\d)\+(?!\s?[\w(])"), " plus "),
    (re.compile(r"(?<=[^\W\d_])-(?=\d)|(?<=\d)-(?=[^\W\d_])"), " "),
    (re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d+|(?<!\w)\.\d+"), _plain),
    (re.compile(r"(?<=[a-z])\s+['’]s\b"), "'s"),
    (re.compile(r"°"), " degrees "),
    (re.compile(r"(?<=\w) ?%"), " percent "),
)


def without_digits(text: str) -> str:
    """The text with words in place of all numbers that ASCII digits write."""
    for pattern, replacement in (*_FOREIGN, *_RULES):
        text = pattern.sub(replacement, text)
    return text

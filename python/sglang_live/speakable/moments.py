"""Words of dates, times of day and telephone numbers.

In: text without markdown. Out: the same with words in their place; other digits as they are.
"""

import re
from calendar import monthrange
from collections.abc import Callable

from sglang_live.speakable.numbers import cardinal, clock, digits, listed, ordinal, year

MONTHS = listed(
    "January February March April May June July August September October November December"
)
SHORT_MONTHS = {month[:3]: month for month in MONTHS} | {"Sept": "September"}
_MONTH = rf"({'|'.join([*MONTHS, *sorted(SHORT_MONTHS, key=len, reverse=True)])})\.?(?![a-z])"
_DAY = r"(0?[1-9]|[12]\d|3[01])"
_YEAR = r"([12]\d{3})"
_HALF = r"(?:\s?([aApP])\.?[mM](?:\.(?=\s+[a-z]|[,;:)])|(?![\w.])|(?=\.)))"


def _month(text: str) -> str:
    return SHORT_MONTHS.get(text.rstrip("."), text)


def _date(month: str, day: str, year_text: str | None) -> str:
    words = f"{month} {ordinal(int(day))}"
    return f" {words}, {year(int(year_text))}" if year_text else f" {words}"


def _numbered(found: re.Match[str], year_text: str, month: int, day: int) -> str:
    """A date in figures; what is none in the calendar stays as it is."""
    if not (1 <= month <= 12 and 1 <= day <= monthrange(int(year_text), month)[1]):
        return found[0]
    return _date(MONTHS[month - 1], str(day), year_text) + " "


def _iso(found: re.Match[str]) -> str:
    return _numbered(found, found[1], int(found[2]), int(found[3])) + ("at " if found[4] else "")


def _slashed(found: re.Match[str]) -> str:
    """Month first, as in America, where the numbers allow it."""
    month, day = int(found[1]), int(found[2])
    if month > 12:
        month, day = day, month
    return _numbered(found, found[3] if len(found[3]) == 4 else f"20{found[3]}", month, day)


def _dotted(found: re.Match[str]) -> str:
    return _numbered(found, found[3], int(found[2]), int(found[1]))


def _month_first(found: re.Match[str]) -> str:
    return _date(_month(found[1]), found[2], found[3]) + " "


def _day_first(found: re.Match[str]) -> str:
    month, day, of = _month(found[3]), found[1], found[2]
    if not of:
        return _date(month, day, found[4]) + " "
    words = f" {ordinal(int(day))} of {month}"
    return f"{words}, {year(int(found[4]))} " if found[4] else f"{words} "


def _month_and_year(found: re.Match[str]) -> str:
    return f"{_month(found[1])} {year(int(found[2]))} "


def _time(found: re.Match[str]) -> str:
    hour, minute, second, half = int(found[1]), int(found[2]), found[3], found[4]
    if hour > 24 or minute > 59:
        return found[0]
    words = clock(hour, minute)
    if half:
        words = f"{words.removesuffix(' o' + chr(39) + 'clock')} {half.upper()} M"
    if second:
        words += f" and {cardinal(int(second))} seconds"
    return f" {words} "


_LEAST_DIGITS = 7  # of a telephone number


def _groups(text: str) -> str:
    return ", ".join(digits(group) for group in re.findall(r"\d+", text))


def _telephone(found: re.Match[str]) -> str:
    if sum(char.isdigit() for char in found[0]) < _LEAST_DIGITS:
        return found[0]
    groups = _groups(found[0])
    return f" plus {groups} " if found[0].startswith("+") else f" {groups} "


def _height(found: re.Match[str]) -> str:
    inches = f" {cardinal(int(found[2]))}" if found[2] else ""
    return f" {cardinal(int(found[1]))} {'foot' if inches else 'feet'}{inches} "


_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?<![\d-])([12]\d{3})-(\d{2})-(\d{2})(?:([T ])(?=\d{1,2}:\d)|(?![\d-]))"), _iso),
    (re.compile(r"(?<![\d/])([12]\d{3})/(\d{2})/(\d{2})()(?![\d/])"), _iso),
    (re.compile(r"(?<![\d.])(\d{1,2})\.(\d{1,2})\.(\d{4})(?!\.?\d)"), _dotted),
    (re.compile(r"(?<![\d/.])(\d{1,2})/(\d{1,2})/(\d{4}|\d{2})(?![\d/])"), _slashed),
    (
        re.compile(
            rf"\b{_MONTH}\s{{1,3}}{_DAY}(?:st|nd|rd|th)?(?!\d|:\d|[.,]\d|%)(?:,?\s{{1,3}}{_YEAR}(?!\d))?"
        ),
        _month_first,
    ),
    (
        re.compile(rf"(?<![\d.,$])\b{_DAY}(?:st|nd|rd|th)?(\sof)?\s{_MONTH}(?:,?\s{_YEAR}(?!\d))?"),
        _day_first,
    ),
    (re.compile(rf"\b{_MONTH}\s{_YEAR}(?!\d)"), _month_and_year),
    # Telephone numbers: groups of three and four digits, or a sign and many groups.
    (
        re.compile(
            r"(?<![\w.,$-])(?:\+?\d{1,3}[ .-])?(?:\(\d{3}\)\s?|\d{3}[ .-])\d{3}[ .-]\d{4}(?![\d-])"
        ),
        _telephone,
    ),
    (
        re.compile(
            r"(?<![\w.,$-])\+\d{1,14}(?:[ ./-]?\(\d{1,5}\)\d{0,5}|[ ./-]\d{1,8}){0,6}(?![\d-])"
        ),
        _telephone,
    ),
    (
        re.compile(r"(?<![\w.,$-])(?:\(0\d{1,5}\)|0\d{1,5})(?:[ /-]{1,2}\d{2,8}){1,5}(?![\d-])"),
        _telephone,
    ),
    (
        re.compile(r"\b((?i:tel|phone|fax)[.:]*\s)(\d{2,8}(?:[ -]\d{2,8}){1,5})(?![\d-])"),
        lambda found: found[1] + _groups(found[2]),
    ),
    (re.compile(r"(?<![\w.,$-])[2-9]\d{2}-\d{3}[1-9](?![\w-])"), _telephone),
    (re.compile(r"(?<![\w.,$-])\d+(?:-\d+){2,}(?![\w-])"), _telephone),
    (re.compile(r"(?<![\w.,])(\d)['′](?:\s?(\d{1,2})[\"″])?(?!\w)"), _height),
)
_DAY_NAMES = {
    "Mon": "Monday", "Tue": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Fri": "Friday",
    "Sat": "Saturday", "Sun": "Sunday",
}  # fmt: skip
_DAYS = re.compile(
    rf"\b({'|'.join(_DAY_NAMES)})\.?\s?[-–]\s?({'|'.join(_DAY_NAMES)})\b(?:\.(?!\s*$))?"
)
# Jan, Mar, Jun and Jul are words and names too, unless a range begins with them.
_ALONE = re.compile(
    r"\b((?:Feb|Apr|Aug|Sept|Sep|Oct|Nov|Dec)(?![a-z])|(?:Jan|Mar|Jun|Jul)(?=\.?\s?[-–]))\b"
)
_SPAN = re.compile(rf"(\d{{1,2}}(?::\d{{2}})?{_HALF}?)\s?[-–—]\s?(?=\d{{1,2}}(?::\d{{2}}|{_HALF}))")
_TIME = re.compile(rf"(?<![\d:.,])(\d{{1,2}}):(\d{{2}})(?::(\d{{2}})(?:\.\d+)?)?{_HALF}?(?![\d:])")
_HOUR = re.compile(rf"(?<![\d:.,])(\d{{1,2}}){_HALF}")
_RATIO = re.compile(r"(?<![\d:])(\d{1,3}):(\d{1,3})(?![\d:])")
_BARE_HALF = re.compile(r"\b([aApP])\.[mM]\.(?=\s+[a-z]|[,;:)])|\b([aApP])\.[mM](?=\.)")


def without_moments(text: str) -> str:
    """The text with words in place of dates, times and telephone numbers."""
    if re.search(r"\d", text):
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        text = _SPAN.sub(r"\1 to ", text)
        text = _TIME.sub(_time, text)
        text = _HOUR.sub(lambda found: f" {cardinal(int(found[1]))} {found[2].upper()} M ", text)
        text = _RATIO.sub(r"\1 to \2", text)
    text = _ALONE.sub(lambda found: _month(found[1]), text)
    text = _DAYS.sub(lambda found: f"{_DAY_NAMES[found[1]]} to {_DAY_NAMES[found[2]]}", text)
    return _BARE_HALF.sub(lambda found: f"{(found[1] or found[2]).upper()} M", text)

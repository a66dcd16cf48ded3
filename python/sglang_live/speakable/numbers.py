"""English words of numbers: cardinals, ordinals, decimals, years, digits.

American English, short scale.
"""


def listed(text: str) -> list[str]:
    """The words of a long list, which is easier to read and to change as one text."""
    return text.split()


_ONES = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = ("", "thousand", "million", "billion", "trillion", "quadrillion")
# Beyond this number of digits a number is an identifier, and its digits are said.
MAX_DIGITS = 3 * len(_SCALES)
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def _below_hundred(n: int) -> str:
    if n < 20:
        return _ONES[n]
    tens, ones = divmod(n, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def _below_thousand(n: int) -> str:
    hundreds, rest = divmod(n, 100)
    words = [f"{_ONES[hundreds]} hundred"] if hundreds else []
    if rest or not hundreds:
        words.append(_below_hundred(rest))
    return " ".join(words)


def cardinal(n: int) -> str:
    """
    Raises:
        ValueError: if n is negative or has more than MAX_DIGITS digits.
    """
    if not 0 <= n < 10**MAX_DIGITS:
        raise ValueError(f"cardinals have at most {MAX_DIGITS} digits and no sign, got {n}")
    if n == 0:
        return _ONES[0]
    words: list[str] = []
    for scale in _SCALES:
        n, group = divmod(n, 1000)
        if group:
            words.insert(0, f"{_below_thousand(group)} {scale}".rstrip())
    return " ".join(words)


def ordinal(n: int) -> str:
    """The ordinal of what cardinal() accepts, with its errors."""
    words = cardinal(n)
    start = max(words.rfind(" "), words.rfind("-")) + 1
    last = words[start:]
    if last in _ORDINALS:
        return words[:start] + _ORDINALS[last]
    return words[:start] + (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")


def digits(text: str) -> str:
    """One word for each ASCII digit of the text."""
    return " ".join(_ONES[int(char)] for char in text if char in "0123456789")


def year(n: int) -> str:
    """A year of four digits: nineteen oh five, two thousand nine, twenty twenty-four."""
    century, rest = divmod(n, 100)
    if not 1000 <= n < 10000 or n // 10 % 100 == 0:
        return cardinal(n)
    if rest == 0:
        return f"{_below_hundred(century)} hundred"
    return f"{_below_hundred(century)} {_two_digits(rest)}"


def _two_digits(n: int) -> str:
    return _below_hundred(n) if n > 9 else f"oh {_ONES[n]}"


def plural(words: str) -> str:
    """The plural of a number: nineties, hundreds, sixes."""
    if words.endswith("y"):
        return f"{words[:-1]}ies"
    return f"{words}es" if words.endswith(("s", "x")) else f"{words}s"


def number(text: str) -> str:
    """The number that ASCII digits, with commas and one decimal point, stand for."""
    whole, _, part = text.replace(",", "").partition(".")
    if len(whole) > MAX_DIGITS or (len(whole) > 1 and whole.startswith("0")):
        words = digits(whole)
    else:
        words = cardinal(int(whole)) if whole else ""
    return f"{words} point {digits(part)}".strip() if part else words


def bare(text: str) -> str:
    """A number that no unit follows: four digits without comma are said as a year is."""
    if len(text) == 4 and text.isdigit() and 1100 <= int(text) < 2100:
        return year(int(text))
    # Telephone numbers and identifiers are understood digit by digit only.
    if text.isdigit() and len(text) >= 10:
        return digits(text)
    return number(text)


def clock(hour: int, minute: int) -> str:
    """A time of day, without what says which half of it: ten thirty, ten oh five, ten o'clock."""
    if minute:
        return f"{cardinal(hour)} {_two_digits(minute)}"
    return f"{cardinal(hour)} o'clock" if 0 < hour < 13 else f"{cardinal(hour)} hundred"

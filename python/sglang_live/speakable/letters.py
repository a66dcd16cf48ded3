"""Words of abbreviations, acronyms and Roman numerals.

In: text without digits. Out: the same; what is spelled has a space between its letters.
"""

import re
from collections.abc import Callable

from sglang_live.speakable.numbers import cardinal, listed, ordinal

_NAME = r"(?=\s+(?:[A-Z]|and\s+(?:Mrs|Ms|Dr)\b))"
TITLES = {
    "Dr": "Doctor", "Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Prof": "Professor",
    "St": "Saint", "Mt": "Mount", "Ft": "Fort", "Gen": "General", "Col": "Colonel",
    "Sgt": "Sergeant", "Capt": "Captain", "Lt": "Lieutenant", "Maj": "Major", "Cpl": "Corporal",
    "Adm": "Admiral", "Cmdr": "Commander", "Rev": "Reverend", "Fr": "Father",
    "Msgr": "Monsignor", "Gov": "Governor", "Sen": "Senator", "Rep": "Representative",
    "Pres": "President", "Hon": "Honorable", "Supt": "Superintendent", "Atty": "Attorney",
}  # fmt: skip
_PHRASES = {
    r"[eE]\.\s?g\.": "for example", r"[iI]\.\s?e\.": "that is", r"vs\.?": "versus",
    r"approx\.": "approximately", r"cf\.": "compare", r"ca\.": "about", r"est\.": "estimated",
    r"incl\.": "including", r"esp\.": "especially", r"resp\.": "respectively",
    r"et al\.": "and others", r"a\.k\.a\.": "also known as", r"aka": "also known as",
    r"IPv(?=\s?\d|\s)": "I P version",
    r"WWII": "World War two", r"WWI": "World War one",
    r"w\.r\.t\.": "with respect to", r"min\.(?=\s+[a-z])": "minimum",
    r"max\.(?=\s+[a-z])": "maximum",
    r"ASAP": "as soon as possible", r"FYI": "for your information", r"TL;DR": "in short",
    r"PhD|Ph\.D\.": "P H D", r"OK": "okay",
}  # fmt: skip
# A full stop that also ends a sentence stays.
_ENDING = {
    "etc": "et cetera", "Etc": "et cetera", "Jr": "Junior", "Sr": "Senior", "Inc": "Incorporated",
    "Ltd": "Limited", "Corp": "Corporation", "Co": "Company", "Ave": "Avenue",
    "Blvd": "Boulevard", "Rd": "Road", "Ln": "Lane", "Hwy": "Highway", "Pkwy": "Parkway",
    "Apt": "Apartment", "Ste": "Suite", "Bldg": "Building", "Dept": "Department",
    "Bros": "Brothers", "Univ": "University", "Assn": "Association", "Govt": "Government",
    "Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday",
    "Thu": "Thursday", "Thurs": "Thursday", "Fri": "Friday",
}  # fmt: skip
NUMBERED = {"No": "number", "no": "number", "Nos": "numbers", "Fig": "figure", "fig": "figure",
             "Vol": "volume", "vol": "volume", "pp": "pages", "p": "page", "Ch": "chapter",
             "Sec": "section", "Eq": "equation", "Figs": "figures"}  # fmt: skip

# Said as words; any other capitals are spelled.
_PRONOUNCED = frozenset(
    listed(
        "NASA NATO UNESCO UNICEF OPEC FIFA NAFTA RAM ROM LAN WAN PIN SIM GIF ASCII JPEG "
        "LASER RADAR SONAR AIDS COVID SARS BERT LLAMA CUDA REST CRUD SAAS ACID SCUBA SWAT "
        "BIOS CAPTCHA MIDI NASDAQ POTUS FEMA OSHA HIPAA YOLO LIDAR ASEAN GAAP GUI JSON ZIP YAML"
    )
)
_RESPELLED = {"JSON": "jason", "GUI": "gooey", "JPEG": "jay peg", "SAAS": "sass", "OK": "okay"}
# Written in capitals for emphasis: words, though they are short.
_SHOUTED = frozenset(
    listed(
        "A I ALL AND ANY ARE AS AT BAD BE BEST BIG BUT BUY BY CAN DAY DID DO DONE EACH "
        "EVEN EVER FOR FROM FREE FUN GET GO GOOD HAD HAS HAVE HE HER HIS HOT HOW IF IN "
        "INTO IS ITS JUST KEY LOVE MAKE MANY MAY MORE MOST MUCH MUST MY NEED NEVER NEW NO "
        "NOT NOTE NOW OF OFF OLD ON ONE ONLY OR OUR OUT OWN REAL SAME SEE SHE SO STOP SUM "
        "TAKE THAN THAT THE THEN THEY THIS TIME TIP TO TOO TOP TRY TRUE TWO UP USE VERY "
        "WANT WAS WAY WE WELL WERE WHAT WHEN WHO WHY WILL WITH YES YET YOU YOUR ALSO BOTH "
        "BACK FIRST LAST LESS ALWAYS STEP FALSE NULL HELLO"
    )
)
_KNOWN = frozenset(
    listed(
        "USA UK EU UN US GPU CPU TPU API AI ML LLM TTS URL HTML CSS SQL HTTP HTTPS XML "
        "PDF USB FAQ CEO CTO CFO DNA RNA FBI CIA DIY ATM GPS TV PC IT HR PR VIP BBC CNN "
        "IBM MIT UCLA KV VAT GDP NGO SSD HDD IDE SDK CLI SSH TCP IP UDP DNS VPN AWS GCP "
        "OS UI UX PM AM ID CO"
    )
)
_CAPITALS = re.compile(r"(?<![\w'’])([A-Z]{2,}(?:[A-Z&]*[A-Z])?)(['’]?s)?(?![\w])")
_SPELLED_PAIR = re.compile(r"(?<=\b[A-Z])-(?=[A-Z]\b)")
_INITIALS = re.compile(r"(?<![\w.])((?:[A-Z]\.){2,}(?:[A-Z](?!\w))?)(['’]s)?")
_INITIAL = re.compile(r"(?<![\w.'’])(?<![A-Z] )([A-Z])\.(?=\s+(?:[A-Z][^\W\d_]|[A-Z]\.))")
_NEXT_SENTENCE = re.compile(
    r"\s*$|\s+(?:The|A|An|It|In|This|That|He|She|They|We|I|You|But|And|So|If|When|There|These|For|"
    r"As|However|Its|His|Her|My|Our|What|How|Why|Where|At|On|To|Then)\b"
)
# L, C, D and M alone are rather letters; and before a small letter, I is a person.
_ROMAN = (
    r"(?![LCDM]\b)(?!I\s+[a-z])(?=[IVXLCDM])"
    r"((?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3}))(?![\w'’])"
)
_ROMAN_PART = re.compile(
    r"\b(Chapter|Part|Section|Book|Volume|Act|Scene|Phase|Type|Class|Grade|Level|Stage|Title|"
    r"Episode|Round|Article|Appendix|Figure|Table|Step|Unit|World War|Super Bowl|Mark|Rocky|"
    r"Apollo|Gemini|Final Fantasy|chapter|part|section|act|scene|phase|type|stage)\s+" + _ROMAN
)
_KINGS = (
    "Louis|Henry|Charles|George|Edward|William|James|Elizabeth|Richard|John Paul|Pius|Benedict|"
    "Philip|Frederick|Catherine|Napoleon|Ramses|Ramesses|Alexander|Nicholas|Peter|Leo|Gregory|"
    "Innocent|Urban|Clement|Mary|Robert|Ivan|Otto|Ptolemy|Cleopatra|Thutmose|Ferdinand|Gustav|"
    "Carlos|Felipe|Juan Carlos|Franz Joseph|Wilhelm|Friedrich|Constantine|Leopold|Albert|Xerxes|"
    "Darius|Harald|Christian|Maximilian|Sixtus|Paul|Francis|Joseph"
)
_ROMAN_KING = re.compile(rf"\b({_KINGS})\s+" + _ROMAN)
_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def roman(text: str) -> int:
    """The value of a Roman numeral in capitals."""
    values = [_VALUES[char] for char in text]
    following = [*values[1:], 0]
    return sum(-a if a < b else a for a, b in zip(values, following, strict=True))


def without_roman(text: str) -> str:
    """Cardinals after what is numbered, ordinals after the names of monarchs."""
    text = _ROMAN_PART.sub(lambda found: f"{found[1]} {cardinal(roman(found[2]))}", text)
    return _ROMAN_KING.sub(lambda found: f"{found[1]} the {ordinal(roman(found[2]))}", text)


_BEFORE_DIGITS = re.compile(rf"(?<![\w.])({'|'.join(NUMBERED)})\.\s?(?=\d)")


def without_number_signs(text: str) -> str:
    """Words for No. 5, Fig. 3 and pp. 10."""
    return _BEFORE_DIGITS.sub(lambda found: f"{NUMBERED[found[1]]} ", text)


def _ends_sentence(found: re.Match[str]) -> bool:
    return _NEXT_SENTENCE.match(found.string, found.end()) is not None


def _ending(found: re.Match[str]) -> str:
    stop = "." if _ends_sentence(found) else ""
    return _ENDING[found[1]] + stop


def _initials(found: re.Match[str]) -> str:
    letters = " ".join(found[1].replace(".", ""))
    ends = found[1].endswith(".") and _ends_sentence(found)
    return letters + (found[2] or "") + ("." if ends else "")


_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    *((re.compile(rf"(?<![\w.]){short}(?!\w)"), words) for short, words in _PHRASES.items()),
    (
        re.compile(rf"\b({'|'.join(TITLES)})\.{_NAME}"),
        lambda found: TITLES[found[1]],
    ),
    (re.compile(rf"(?<![\w.])({'|'.join(_ENDING)})\.(?!\w)"), _ending),
    (re.compile(r"\b([A-Z][a-z]+) St\b\.?(?!\s+[A-Z])"), r"\1 Street"),
    (_INITIALS, _initials),
    (_INITIAL, lambda found: found[1] if not _ends_sentence(found) else found[0]),
)


def without_abbreviations(text: str) -> str:
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _is_shouting(text: str) -> bool:
    words = [word for word in re.findall(r"[^\W\d_]{2,}", text) if word.isascii()]
    return len(words) > 2 and sum(word.isupper() for word in words) > 0.7 * len(words)


def without_acronyms(text: str) -> str:
    """The text with acronyms spelled, and words in capitals as other words are."""
    shouting = _is_shouting(text)

    def said(found: re.Match[str]) -> str:
        word, end = found[1].replace("&", ""), found[2] or ""
        if word in _RESPELLED:
            return _RESPELLED[word] + end
        if word in _PRONOUNCED:
            return word + end
        if word in _KNOWN and not (shouting and word in ("IT", "US", "AM")):
            return _spelled(word, end)
        has_vowel = any(char in "AEIOUY" for char in word)
        if word in _SHOUTED or (has_vowel and (shouting or len(word) > 4)):
            return word.lower() + end
        return _spelled(word, end) if len(word) <= 6 else word.lower() + end

    return _SPELLED_PAIR.sub(" ", _CAPITALS.sub(said, text))


def _spelled(word: str, end: str) -> str:
    return " ".join(word) + (f"'{end[-1]}" if end else "")

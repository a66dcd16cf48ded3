"""What is said of what: cases by kind."""

import pytest

from sglang_live.speakable.style import SpeechStyle
from sglang_live.speakable.words import wording_of

CASES = {
    "integers": [
        ("3 cats, 21 dogs", "three cats, twenty-one dogs."),
        ("1,234,567", "one million two hundred thirty-four thousand five hundred sixty-seven."),
        ("0 or 100 or 12345", "zero or one hundred or twelve thousand three hundred forty-five."),
        ("agent 007", "agent zero zero seven."),
        ("id 123456789012", "id one two three four five six seven eight nine zero one two."),
        ("-5 and +5", "minus five and plus five."),
        ("a 4K TV", "a four K T V."),
        ("5M users, 10k steps, 7B", "five million users, ten thousand steps, seven billion."),
    ],
    "groups by spaces": [
        ("1 234 567 people", "one million two hundred thirty-four thousand five hundred "
         "sixty-seven people."),
        ("10\u202f000 or 12\u00a0345 km", "ten thousand or twelve thousand three hundred "
         "forty-five kilometers."),
        ("1'250 and 1 234,5 kg", "one thousand two hundred fifty and one thousand two hundred "
         "thirty-four point five kilograms."),
        ("in 2024 100 of 3 000", "in twenty twenty-four one hundred of three thousand."),
        ("10,5 km, 20,50 €, €1.234,56", "ten point five kilometers, twenty euros and fifty cents, "
         "one thousand two hundred thirty-four euros and fifty-six cents."),
    ],
    "decimals": [
        ("3.14", "three point one four."),
        ("about .5", "about point five."),
        ("~0.05", "about zero point zero five."),
        ("version 1.2.3, v2.0", "version one point two point three, version two point zero."),
        ("at 10.0.0.1", "at ten dot zero dot zero dot one."),
    ],
    "ordinals": [
        ("the 1st, 2nd, 3rd, 12th", "the first, second, third, twelfth."),
        ("the 21st and 100th", "the twenty-first and one hundredth."),
    ],
    "years": [
        ("2024, 2007 and 1905", "twenty twenty-four, two thousand seven and nineteen oh five."),
        ("the 1990s and '80s", "the nineteen nineties and eighties."),
        ("1900 and 2000", "nineteen hundred and two thousand."),
        ("2020-2021", "twenty twenty to twenty twenty-one."),
    ],
    "money": [
        ("$3.50", "three dollars and fifty cents."),
        ("€5, £1.01, $0.99", "five euros, one pound and one penny, ninety-nine cents."),
        ("3 million dollars", "three million dollars."),
        ("$3.5 million", "three point five million dollars."),
        ("$5k, $2B", "five thousand dollars, two billion dollars."),
        ("$1 or a $5 bill", "one dollar or a five dollar bill."),
        ("$10-15, $20/month", "ten to fifteen dollars, twenty dollars per month."),
        ("$5/kg, EUR 5, 5 USD", "five dollars per kilogram, five euros, five dollars."),
        ("100€ and 1,000.00 $", "one hundred euros and one thousand dollars."),
    ],
    "scales of money": [
        ("£1.5m, €3bn, $2k", "one point five million pounds, three billion euros, two thousand "
         "dollars."),
        ("£1.5m-£2m and $2.5k–3k", "one point five million to two million pounds and two point "
         "five thousand to three thousand dollars."),
        ("USD 5m, 5 m long", "five million dollars, five meters long."),
    ],
    "identifiers": [
        ("Order #A12-9 shipped", "Order number A one two, nine shipped."),
        ("PO-2024-0017, BA2490", "P O, two zero two four, zero zero one seven, B A two four nine "
         "zero."),
        ("DE89 3704 0044 0532 0130 00", "D E eight nine, three seven zero four, zero zero four "
         "four, zero five three two, zero one three zero, zero zero."),
        ("#7, #100DaysOfCode", "number seven, hashtag one hundred DaysOfCode."),
        ("COVID-19, F-16, MP3", "COVID nineteen, F sixteen, M P three."),
        ("2001:db8::1, 10.0.0.0/8", "two zero zero one, D B eight, one, ten dot zero dot zero dot "
         "zero slash eight."),
    ],
    "percent": [("5% of 10.5 %", "five percent of ten point five percent."),
                ("10-20%", "ten to twenty percent.")],
    "units": [
        ("60 km/h", "sixty kilometers per hour."),
        ("25°C, 90°", "twenty-five degrees Celsius, ninety degrees."),
        ("77 °F", "seventy-seven degrees Fahrenheit."),
        ("a 12 oz cup, a 10-km run", "a twelve ounce cup, a ten kilometer run."),
        ("8GB, 1 kg, 5 kg", "eight gigabytes, one kilogram, five kilograms."),
        ("5 km2", "five square kilometers."),
        ("20 m², 9.8 m/s^2", "twenty meters squared, nine point eight meters per second squared."),
        ("1/2 tsp, 1½ lb", "one half teaspoon, one and one half pounds."),
        ("5'10\"", "five foot ten."),
        ("3x faster, 1920x1080", "three times faster, nineteen twenty by one thousand eighty."),
    ],
    "times": [
        ("10:30 am", "ten thirty A M."),
        ("at 9 p.m. The end", "at nine P M. The end."),
        ("10:00, 10:05, 14:30", "ten o'clock, ten oh five, fourteen thirty."),
        ("9am–5pm, Mon–Fri", "nine A M to five P M, Monday to Friday."),
        ("9:00-17:00", "nine o'clock to seventeen hundred."),
        ("a ratio of 3:1", "a ratio of three to one."),
    ],
    "dates": [
        ("2024-05-06", "May sixth, twenty twenty-four."),
        ("May 6, 2024", "May sixth, twenty twenty-four."),
        ("6 May 2024 or Jan. 5th", "May sixth, twenty twenty-four or January fifth."),
        ("25.12.2023", "December twenty-fifth, twenty twenty-three."),
        ("2023/12/25", "December twenty-fifth, twenty twenty-three."),
        ("Jan–Mar 2024", "January to March twenty twenty-four."),
        ("2024's best", "twenty twenty-four's best."),
        ("in Feb. 2018", "in February twenty eighteen."),
        ("on 5/6/2024", "on May sixth, twenty twenty-four."),
        ("2024-05-06T10:30", "May sixth, twenty twenty-four at ten thirty."),
        ("2024-15-40", "two zero two four, one five, four zero."),
        ("2023-02-29 or 2024-02-29", "two zero two three, zero two, two nine or February "
         "twenty-ninth, twenty twenty-four."),
        ("the 5th of May 2024", "the fifth of May, twenty twenty-four."),
    ],
    "digit groups": [
        ("555-123-4567", "five five five, one two three, four five six seven."),
        ("+1 (555) 123-4567", "plus one, five five five, one two three, four five six seven."),
        ("+49 30 1234567", "plus four nine, three zero, one two three four five six seven."),
        ("+49 (0)30 123456", "plus four nine, zero, three zero, one two three four five six."),
        ("+4930123456", "plus four nine three zero one two three four five six."),
        ("(030) 123456, 0800 123 456", "zero three zero, one two three four five six, zero eight "
         "zero zero, one two three, four five six."),
        ("Tel. 555 12 34", "Tel. five five five, one two, three four."),
        ("+5 or -3", "plus five or minus three."),
        ("call 555-1234", "call five five five, one two three four."),
    ],
    "fractions": [
        ("1/2, 3/4, 7/8, 2/3", "one half, three quarters, seven eighths, two thirds."),
        ("1 1/2 cups, ½ cup", "one and one half cups, one half cup."),
        ("a 50/50 chance", "a fifty fifty chance."),
        ("24/7", "twenty-four seven."),
        ("22/7", "twenty-two over seven."),
    ],
    "ranges": [("3-5, 10–20", "three to five, ten to twenty."),
               ("1 - 10 people", "one to ten people.")],
    "Roman numerals": [
        ("Chapter IV, Louis XIV", "Chapter four, Louis the fourteenth."),
        ("World War II", "World War two."),
        ("Episode V", "Episode five."),
        ("I am V", "I am V."),
        ("Part I think", "Part I think."),
        ("Type C and Vitamin D", "Type C and Vitamin D."),
    ],
    "maths": [
        ("2 + 2 = 4", "two plus two equals four."),
        ("5 - 3 = 2", "five minus three equals two."),
        ("x^2, x², y^3, 2^10", "x squared, x squared, y cubed, two to the power of ten."),
        ("a² + b² = c²", "a squared plus b squared equals c squared."),
        ("5! = 120", "five factorial equals one hundred twenty."),
        ("$O(n^2)$ and 1{,}000", "O of n squared and one thousand."),
        ("3 × 4 ≤ 12", "three times four less than or equal to twelve."),
        ("f'(x), 10⁻³", "f prime of x, ten to the power of minus three."),
        ("6.02e23", "six point zero two times ten to the power of twenty-three."),
        ("2 * 3 * 4", "two times three times four."),
        ("f(x) = 4x^3 - 9x - 14", "f of x equals four x cubed minus nine x minus fourteen."),
        ("a < b > c", "a less than b greater than c."),
        ("A → B -> C", "A to B to C."),
        ("O(n), sin(x)", "O of n, sin of x."),
        (r"\(A = \pi r^2\)", "A equals pi r squared."),
        (r"\begin{align} a &= b \end{align}", "a equals b."),
        (r"$\frac{a}{b} \leq \sqrt{2}$", "a over b less than or equal to square root of two."),
        (r"$$\frac{1}{2} \times 4$$", "one half times four."),
        ("α + β", "alpha plus beta."),
    ],
    "abbreviations": [
        ("Dr. Smith and Mrs. Jones", "Doctor Smith and Missus Jones."),
        ("e.g. this, i.e. that", "for example this, that is that."),
        ("cats vs. dogs, approx. 5", "cats versus dogs, approximately five."),
        ("milk, eggs, etc. The end", "milk, eggs, et cetera. The end."),
        ("Mr. and Mrs. Smith", "Mister and Missus Smith."),
        ("E.g., this. Etc.", "for example, this. et cetera."),
        ("A. B. Smith", "A B Smith."),
        ("A is after B. B is before C.", "A is after B. B is before C."),
        ("St. Paul, No. 5, pp. 3-4", "Saint Paul, number five, pages three to four."),
        ("Ms. Ray and Maj. Brown", "Miz Ray and Major Brown."),
        ("on Main St. in Rome, Apt. 5", "on Main Street in Rome, Apartment five."),
        ("See you on Mon. or Thurs. evening", "See you on Monday or Thursday evening."),
        ("I said no. He ate a fig.", "I said no. He ate a fig."),
    ],
    "acronyms": [
        ("USA, GPU and NASA", "U S A, G P U and NASA."),
        ("the U.S. government", "the U S government."),
        ("in the U.S. The end", "in the U S. The end."),
        ("GPUs, the CEO's JSON APIs", "G P U's, the C E O's jason A P I's."),
        ("AT&T, R&D, salt & pepper", "A T and T, R and D, salt and pepper."),
        ("GPT-4o, MP3, H2O, COVID-19", "G P T four o, M P three, H two O, COVID nineteen."),
        ("IPv6, UTF-8, HTTP/2", "I P version six, U T F eight, H T T P two."),
        ("do NOT do it, IMPORTANT", "do not do it, important."),
        ("HOW TO USE THIS GPU", "how to use this G P U."),
    ],
    "addresses": [
        ("https://www.example.com/a/b-c?d=1#e.", "example dot com."),
        ("www.test.org, or sub.site.co.uk", "test dot org, or sub dot site dot co dot U K."),
        ("github.com/sgl-project/sglang", "github dot com slash sgl project slash sglang."),
        ("john.doe@example.com!", "john dot doe at example dot com!"),
        ("<https://a.io>", "a dot I O."),
    ],
    "files and code": [
        ("main.py, config.json", "main dot pie, config dot jason."),
        ("docs/kv.md, .venv", "docs kv dot M D, dot venv."),
        ("in /usr/local/bin", "in usr local bin."),
        ("call `foo_bar(x)`", "call foo bar x."),
        ("`getUserName()`", "get User Name."),
        ("run `python -m app --port 80`", "run python m app port eighty."),
        ("`x == 1`", "x equals one."),
        ("C++, C#, .NET, Node.js", "C plus plus, C sharp, dot net, Node dot J S."),
    ],
    "markdown": [
        ("**bold**, *it*, _it_, __b__, ~~no~~", "bold, it, it, b, no."),
        ("# Title #", "Title."),
        ("see [the docs](https://a.b/c_(d)) now", "see the docs now."),
        ("![a cat](cat.png)", "a cat."),
        ("- milk\n- eggs\n* bread", "milk. eggs. bread."),
        ("1. Mix\n2) Bake\na) Eat", "one. Mix. two. Bake. a: Eat."),
        ("- [x] done\n- [ ] open", "done. open."),
        ("> quoted\n> text", "quoted text."),
        ("above\n\n---\n\nbelow", "above. below."),
        ("Title\n=====\ntext", "Title. text."),
        ("a fact[1][2], a note[^3]", "a fact, a note."),
        ("let me see…\n\n1. Milk", "let me see. one. Milk."),
        ("wrapped\nline", "wrapped line."),
        (r"\*not\* 2\. bold", "not two. bold."),
        ("snake_case_name", "snake case name."),
    ],
    "HTML": [("<b>hi</b> &amp; bye<br>now", "hi and bye. now."), ("a<!-- b -->c", "a c."),
             ("&nbsp;5&nbsp;km", "five kilometers.")],
    "pictures": [("Hi 😀👍🏽 there 🇩🇪", "Hi there."),
                 ("Fine :) or ;-) or <3 then", "Fine or or then."),
                 ("1️⃣ first", "one first.")],
    "signs": [
        ("“quoted” ‘single’ it’s", "quoted single it's."),
        ("#1 and #tag", "number one and hashtag tag."),
        ("@bob w/ it, w/o me", "at bob with it, without me."),
        ("yes — no – maybe - so", "yes, no, maybe, so."),
        ("Well... what?!", "Well, what?"),
        ("one (or two) of them", "one, or two, of them."),
        ("item(s)", "items."),
        ("and/or, TCP/IP", "and or, T C P I P."),
        ("* _ ~ ` | \\ { } [ ]", ""),
    ],
    "scripts": [("Привет world", "world."), ("café naïve Łódź", "café naïve Łódź."),
                ("你好, hello", "hello."), ("٣ things", "three things."), ("ﬁne Ａ", "fine A.")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [pytest.param(*case, id=f"{kind}: {case[0]}") for kind in CASES for case in CASES[kind]],
)
def test_what_is_said(text, words):
    assert wording_of(text).words == words


def test_letters_of_other_scripts_are_counted():
    speech = wording_of("The word Привет and 你好")
    assert (speech.words, speech.n_unspeakable) == ("The word and.", 8)


def test_a_voice_speaks_the_scripts_that_it_is_given():
    style = SpeechStyle(scripts=frozenset(("LATIN", "CYRILLIC", "GREEK")))
    assert wording_of("Привет α 你", style) == wording_of("Привет α 你", style)
    assert wording_of("Привет α 你", style).words == "Привет α."


def test_diacritics_are_folded_for_a_voice_that_wants_it():
    words = wording_of("Café, Łódź, straße, x̂", SpeechStyle(folds=True)).words
    assert words == "Cafe, Lodz, strasse, x."


def test_a_text_inside_of_a_sentence_gets_no_full_stop():
    assert wording_of("and then", closes=False).words == "and then"


def test_marks_of_lines_are_text_inside_of_a_line():
    assert wording_of("5. Then", starts_line=True).words == "five. Then."
    assert wording_of("# 5 of them", starts_line=False).words == "number five of them."

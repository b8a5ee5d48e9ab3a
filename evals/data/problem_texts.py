"""Words and sentences of the generated word problems, as data.

A frame turns one *subject* into another ("own": things somebody has, "cost": dollars to pay, ...) and says how the
running value v changes. Its lines are worked in order; in each expression v is the value before the frame (for an
opening: a number drawn), w the result of the line before, n and m are drawn, digits stand for themselves.
Sentence fields: {p} {q} two people, {he} {his} {him} of p, {things} {box} {boxes} {item} {other} {place} nouns,
{calc} / {money} the worked calculation without / with a dollar sign.
"""

from __future__ import annotations

from dataclasses import dataclass


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


WOMEN: tuple[str, ...] = _split(
    """
    Alice Amy Anna Ava Bella Betty Carla Carol Cindy Claire Diana Ella Emily Emma Eva Fatima Grace Hannah Helen
    Irene Jane Janet Jasmine Jen Jenny Jessica Julia Julie Karen Kate Kim Laura Leah Lily Linda Lisa Lucy Maria
    Marie Martha Mary Mia Mina Nancy Natalie Nina Olivia Pam Rachel Rosa Ruth Sally Samantha Sara Sarah Sophia
    Susan Tina Wendy Zoe
    """
)
MEN: tuple[str, ...] = _split(
    """
    Aaron Adam Alan Albert Ali Andrew Anton Ben Bill Bob Brad Brian Carl Carlos Charlie Chris Dan Daniel David
    Dennis Eric Ethan Frank Fred Gary George Greg Hank Harry Henry Ivan Jack Jacob James Jason Jeff Jerry Jim Joe
    John Jose Josh Juan Kevin Kyle Larry Leo Liam Lucas Luis Mark Martin Max Michael Mike Nathan Nick Noah Omar
    Oscar Paul Pete Peter Phil Ralph Ravi Ray Rick Robert Roger Ryan Sam Simon Steve Ted Tim Toby Tom Tony Victor
    Will William Zack
    """
)
THINGS: tuple[str, ...] = _split(
    """
    apples oranges bananas pears peaches plums lemons mangoes cherries grapes strawberries carrots potatoes
    tomatoes onions eggs cookies muffins cupcakes donuts candies lollipops sandwiches marbles stickers stamps
    coins cards balls balloons books magazines notebooks pencils pens crayons markers erasers beads buttons
    ribbons flowers roses tulips seeds shells stones feathers toys dolls puzzles bricks nails screws bottles cans
    cups plates spoons candles towels shirts socks hats scarves bracelets necklaces photos postcards tickets
    badges
    """
)
BOXES: tuple[tuple[str, str], ...] = (
    ("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("jar", "jars"), ("crate", "crates"), ("pack", "packs"),
    ("drawer", "drawers"), ("carton", "cartons"), ("tray", "trays"), ("bucket", "buckets"),
)  # fmt: skip
ITEMS: tuple[str, ...] = (
    "bike", "tent", "lamp", "chair", "table", "jacket", "dress", "sweater", "backpack", "camera", "phone", "radio",
    "game", "guitar", "drum", "kayak", "scooter", "skateboard", "helmet", "watch", "clock", "mirror", "carpet", "shelf",
    "printer", "keyboard", "speaker", "blender", "toaster", "ladder",
)  # fmt: skip
PLACES: tuple[str, ...] = (
    "the attic", "the garden", "the kitchen", "the garage", "the park", "the school yard", "the car", "the library",
    "the cellar", "the classroom", "the shed", "the hallway",
)  # fmt: skip


Line = tuple[str, str]


@dataclass(frozen=True)
class Frame:
    """One sentence of a problem and the lines of the answer that it asks for."""

    needs: str
    gives: str
    text: str
    lines: tuple[Line, ...]


def _frame(needs: str, gives: str, text: str, *lines: Line) -> Frame:
    return Frame(needs, gives, text, lines)


_HAS = "{p} has {calc} {things}"
_IN_ALL = "{p} has {calc} {things} in all."
_LEFT = "{p} has {calc} {things} left."
_OTHER = "{q} has {calc} {things}."
_PAIR = "Together they have {calc} {things}."

# fmt: off
OPENINGS: tuple[Frame, ...] = (
    # things somebody has
    _frame("", "own", "{p} has {v} {things}."),
    _frame("", "own", "{p} starts the week with {v} {things}."),
    _frame("", "own", "There are {v} {things} in {p}'s {box}."),
    _frame("", "own", "{p} finds {v} {things} in {place}."),
    _frame("", "own", "{p} has {n} {boxes} with {m} {things} in each {box}.", ("n*m", _HAS + " in the {boxes}.")),
    _frame("", "own", "{p} collects {n} {things} every day for {m} days.", ("n*m", "{p} collects {calc} {things}.")),
    _frame("", "own", "{p} packs {n} {things} an hour and works for {m} hours.", ("n*m", "{p} packs {calc} {things}.")),
    _frame("", "own", "{p} has {n} red {things} and {m} blue {things}.", ("n+m", _IN_ALL)),
    _frame("", "own", "{p} lays out {things} in {n} rows of {m}.", ("n*m", "{p} lays out {calc} {things}.")),
    _frame("", "own", "{p} gets {n} {things} on Monday and {m} more on Tuesday.", ("n+m", "{p} gets {calc} {things}.")),
    _frame("", "own", "{p} collects {v} {things} on Saturday and twice as many on Sunday.",
           ("v*2", "On Sunday {p} collects {calc} {things}."), ("v+w", _IN_ALL)),
    _frame("", "own", "{p} makes {v} {things} in the morning and half as many in the afternoon.",
           ("v/2", "In the afternoon {p} makes {calc} {things}."), ("v+w", "{p} makes {calc} {things} in all.")),
    # dollars to pay
    _frame("", "cost", "{p} buys {n} {things} for ${m} each.", ("n*m", "The {things} cost {money}.")),
    _frame("", "cost", "{p} orders a {item} for ${n} and a {other} for ${m}.", ("n+m", "The order costs {money}.")),
    _frame("", "cost", "{p} wants to buy a {item} that costs ${v}."),
    _frame("", "cost", "{p} rents a {item} for {n} days at ${m} a day.", ("n*m", "The rent is {money}.")),
    _frame("", "cost", "{p} takes {n} friends to a show where a ticket costs ${m}, and pays for the friends.",
           ("n*m", "The tickets cost {money}.")),
    _frame("", "cost", "A {item} costs ${v} and a {other} costs twice as much. {p} buys both.",
           ("v*2", "The {other} costs {money}."), ("v+w", "Both cost {money}.")),
    # dollars somebody has
    _frame("", "cash", "{p} has ${v}."),
    _frame("", "cash", "{p} saved ${v} in {his} piggy bank."),
    _frame("", "cash", "{p} earns ${n} an hour and works for {m} hours.", ("n*m", "{p} earns {money}.")),
    _frame("", "cash", "{p} sells {n} {things} for ${m} each.", ("n*m", "{p} gets {money} for the {things}.")),
    _frame("", "cash", "{p} gets ${n} from {his} aunt and ${m} from {his} uncle.", ("n+m", "{p} gets {money}.")),
    _frame("", "cash", "{p} saves ${n} a week for {m} weeks.", ("n*m", "{p} saves {money}.")),
    _frame("", "cash", "{p} mows {n} lawns and is paid ${m} for each lawn.", ("n*m", "{p} earns {money} by mowing.")),
    # miles somebody goes
    _frame("", "miles", "{p} drives {n} miles an hour for {m} hours.", ("n*m", "{p} drives {calc} miles.")),
    _frame("", "miles", "{p} runs {n} miles every day for {m} days.", ("n*m", "{p} runs {calc} miles.")),
    _frame("", "miles", "{p} rides {n} miles before lunch and {m} miles after lunch.",
           ("n+m", "{p} rides {calc} miles that day.")),
    _frame("", "trip", "{p} is on a trip of {v} miles."),
    # pages and minutes
    _frame("", "pages", "{p} is reading a book with {v} pages."),
    _frame("", "pages", "{p}'s book has {n} chapters of {m} pages each.", ("n*m", "The book has {calc} pages.")),
    _frame("", "minutes", "{p} practices the piano {n} minutes a day for {m} days.",
           ("n*m", "{p} practices for {calc} minutes.")),
    _frame("", "minutes", "{p} needs {n} minutes for math homework and {m} minutes for reading.",
           ("n+m", "{p} needs {calc} minutes for both.")),
    # people, students, trees
    _frame("", "people", "There are {v} people on a train."),
    _frame("", "people", "A train has {n} cars with {m} people in each car.",
           ("n*m", "There are {calc} people on the train.")),
    _frame("", "students", "A class has {n} boys and {m} girls.", ("n+m", "There are {calc} students in the class.")),
    _frame("", "students", "A school has {n} classes of {m} students.",
           ("n*m", "There are {calc} students in the school.")),
    _frame("", "age", "An oak is {n} years old. An elm is {m} years older than the oak.",
           ("n+m", "The elm is {calc} years old.")),
    _frame("", "age", "An oak is {m} years old. An elm is {n} times as old as the oak.",
           ("n*m", "The elm is {calc} years old.")),
    # tanks and farms
    _frame("", "liters", "A tank holds {v} liters of water."),
    _frame("", "liters", "A pump fills a tank with {n} liters a minute for {m} minutes.",
           ("n*m", "The pump brings {calc} liters.")),
    _frame("", "animals", "A farm has {n} cows and {m} sheep.", ("n+m", "The farm has {calc} animals.")),
    _frame("", "animals", "A farm has {v} chickens and three times as many ducks.",
           ("v*3", "The farm has {calc} ducks."), ("v+w", "The farm has {calc} birds in all.")),
)

EVENTS: tuple[Frame, ...] = (
    _frame("own", "own", "{he} buys {n} more {things}.", ("v+n", "{p} has {calc} {things} after buying more.")),
    _frame("own", "own", "{q} gives {him} {n} more {things}.", ("v+n", _HAS + " after the gift.")),
    _frame("own", "own", "{he} wins {n} more {things} in a game.", ("v+n", _HAS + " after the game.")),
    _frame("own", "own", "{he} gives {n} {things} to {q}.", ("v-n", _LEFT)),
    _frame("own", "own", "{he} loses {n} of the {things}.", ("v-n", _LEFT)),
    _frame("own", "own", "{he} sells {n} of the {things}.", ("v-n", "After the sale {p} has {calc} {things} left.")),
    _frame("own", "own", "{he} leaves {n} {things} in {place}.", ("v-n", _LEFT)),
    _frame("own", "own", "{he} gives half of the {things} to {q}.",
           ("v/2", "{p} gives away {calc} {things}."), ("v-w", _LEFT)),
    _frame("own", "own", "{he} sells a third of the {things}.", ("v/3", "{p} sells {calc} {things}."), ("v-w", _LEFT)),
    _frame("own", "own", "{he} loses a quarter of the {things}.",
           ("v/4", "{p} loses {calc} {things}."), ("v-w", _LEFT)),
    _frame("own", "own", "By the end of the month {he} has {n} times as many {things}.",
           ("v*n", _HAS + " at the end of the month.")),
    _frame("own", "own", "{he} buys {n} {boxes} with {m} {things} in each.",
           ("n*m", "{p} buys {calc} {things}."), ("v+w", _IN_ALL)),
    _frame("own", "own", "{he} gives {n} {things} to each of {m} friends.",
           ("n*m", "{p} gives away {calc} {things}."), ("v-w", _LEFT)),
    _frame("own", "other", "{q} has {n} more {things} than {p}.", ("v+n", _OTHER)),
    _frame("own", "other", "{q} has {n} fewer {things} than {p}.", ("v-n", _OTHER)),
    _frame("own", "other", "{q} has {n} times as many {things} as {p}.", ("v*n", _OTHER)),
    _frame("own", "other", "{q} has half as many {things} as {p}.", ("v/2", _OTHER)),
    _frame("own", "pair", "{q} has {n} {things}.", ("v+n", _PAIR)),
    _frame("own", "pair", "{q} has {n} more {things} than {p}.", ("v+n", _OTHER), ("v+w", _PAIR)),
    _frame("own", "pair", "{q} has {n} fewer {things} than {p}.", ("v-n", _OTHER), ("v+w", _PAIR)),
    _frame("own", "pair", "{q} has twice as many {things} as {p}.", ("v*2", _OTHER), ("v+w", _PAIR)),
    _frame("own", "pair", "{q} has a third as many {things} as {p}.",
           ("v/3", _OTHER), ("v+w", _PAIR)),
    _frame("own", "gap", "{q} has {n} times as many {things} as {p}.",
           ("v*n", _OTHER), ("w-v", "{q} has {calc} more {things} than {p}.")),
    _frame("own", "share", "{he} shares all the {things} equally among {n} friends.",
           ("v/n", "Each friend gets {calc} {things}.")),
    _frame("own", "boxes", "{he} puts all the {things} into {boxes} of {n}.", ("v/n", "{p} needs {calc} {boxes}.")),
    _frame("own", "cash", "{he} sells all the {things} for ${n} each.", ("v*n", "{p} gets {money} for the {things}.")),
    _frame("pair", "pair", "Then they buy {n} more {things} together.",
           ("v+n", "They have {calc} {things} after that.")),
    _frame("pair", "pair", "Then they give away {n} {things}.", ("v-n", "They have {calc} {things} left.")),
    _frame("pair", "halves", "They put the {things} together and split them equally.",
           ("v/2", "Each of them gets {calc} {things}.")),
    _frame("cost", "change", "{he} pays with ${n}.", ("n-v", "{p} gets {money} in change.")),
    _frame("cost", "cost", "Shipping costs another ${n}.", ("v+n", "With shipping it costs {money}.")),
    _frame("cost", "cost", "{he} has a coupon for ${n} off.", ("v-n", "With the coupon it costs {money}.")),
    _frame("cost", "cost", "Everything is sold at half price.", ("v/2", "At half price it costs {money}.")),
    _frame("cost", "cost", "{he} also buys a bag for ${n}.", ("v+n", "With the bag it costs {money}.")),
    _frame("cost", "each", "{he} splits the cost equally among {n} people.", ("v/n", "Each person pays {money}.")),
    _frame("cost", "need", "{he} already has ${n}.", ("v-n", "{p} needs {money} more.")),
    _frame("need", "weeks", "{he} saves ${n} a week.", ("v/n", "{p} needs {calc} weeks.")),
    _frame("need", "need", "{his} grandfather gives {him} ${n}.", ("v-n", "{p} still needs {money}.")),
    _frame("cash", "cash", "{he} spends ${n} on a {item}.", ("v-n", "{p} has {money} left.")),
    _frame("cash", "cash", "{he} spends half of the money.", ("v/2", "{p} has {money} left.")),
    _frame("cash", "cash", "{he} earns ${n} more.", ("v+n", "{p} has {money} then.")),
    _frame("cash", "cash", "{he} buys {n} tickets for ${m} each.",
           ("n*m", "The tickets cost {money}."), ("v-w", "{p} has {money} left.")),
    _frame("cash", "cash", "{q} gives {him} ${n}.", ("v+n", "{p} has {money} after the gift.")),
    _frame("cash", "count", "{he} spends all the money on tickets for ${n} each.",
           ("v/n", "{p} can buy {calc} tickets.")),
    _frame("miles", "miles", "Then {he} goes {n} miles more.", ("v+n", "{p} goes {calc} miles in all.")),
    _frame("miles", "miles", "The next week {he} goes twice as far.",
           ("v*2", "The next week {p} goes {calc} miles."), ("v+w", "{p} goes {calc} miles in all.")),
    _frame("miles", "hours", "{q} rides the same way at {n} miles an hour.", ("v/n", "{q} needs {calc} hours.")),
    _frame("trip", "trip", "{he} drives {n} miles before the first stop.", ("v-n", "{calc} miles are left.")),
    _frame("trip", "trip", "{he} drives {n} miles an hour for {m} hours.",
           ("n*m", "{p} drives {calc} miles."), ("v-w", "{calc} miles are left.")),
    _frame("pages", "pages", "{he} reads {n} pages on Monday.", ("v-n", "{p} has {calc} pages left.")),
    _frame("pages", "pages", "{he} reads {n} pages a day for {m} days.",
           ("n*m", "{p} reads {calc} pages."), ("v-w", "{p} has {calc} pages left.")),
    _frame("pages", "days", "After that {he} reads {n} pages a day.", ("v/n", "{p} needs {calc} days.")),
    _frame("minutes", "minutes", "{q} needs {n} minutes less than {p}.", ("v-n", "{q} needs {calc} minutes.")),
    _frame("minutes", "minutes", "Then {he} spends {n} minutes on drawing.", ("v+n", "That makes {calc} minutes.")),
    _frame("people", "people", "At the next stop {n} people get on.", ("v+n", "There are {calc} people then.")),
    _frame("people", "people", "At the next stop {n} people get off.", ("v-n", "There are {calc} people then.")),
    _frame("people", "people", "At the next stop half of the people get off.", ("v/2", "{calc} people stay.")),
    _frame("students", "students", "{n} students are sick today.", ("v-n", "{calc} students are there.")),
    _frame("students", "students", "{n} new students join.", ("v+n", "There are {calc} students then.")),
    _frame("students", "groups", "They form groups of {n}.", ("v/n", "They form {calc} groups.")),
    _frame("students", "needed", "Each student gets {n} {things}.", ("v*n", "They get {calc} {things}.")),
    _frame("age", "later", "Now think of the time {n} years from now.", ("v+n", "The elm will be {calc} years old.")),
    _frame("liters", "liters", "{p} takes {n} liters out of the tank.", ("v-n", "{calc} liters are left.")),
    _frame("liters", "liters", "Rain adds {n} liters to the tank.", ("v+n", "There are {calc} liters then.")),
    _frame("liters", "buckets", "{p} empties the tank with a bucket of {n} liters.",
           ("v/n", "{p} fills the bucket {calc} times.")),
    _frame("animals", "animals", "The farmer sells {n} of them.", ("v-n", "{calc} animals are left.")),
    _frame("animals", "animals", "Then {n} young animals are born.", ("v+n", "There are {calc} animals then.")),
    _frame("animals", "feed", "Each animal eats {n} pounds of food a week.", ("v*n", "They eat {calc} pounds a week.")),
)
# fmt: on

QUESTIONS: dict[str, tuple[str, ...]] = {
    "own": ("How many {things} does {p} have now?", "How many {things} does {he} have then?"),
    "other": ("How many {things} does {q} have?",),
    "pair": ("How many {things} do they have together?", "How many {things} do {p} and {q} have in all?"),
    "gap": ("How many more {things} does {q} have than {p}?",),
    "share": ("How many {things} does each friend get?",),
    "halves": ("How many {things} does each of them get?",),
    "boxes": ("How many {boxes} does {p} need?",),
    "cost": ("How much does {p} pay?", "How many dollars does {he} have to pay?"),
    "change": ("How much change does {p} get?", "How many dollars does {he} get back?"),
    "each": ("How much does each person pay?",),
    "need": ("How much more money does {p} need?",),
    "weeks": ("How many weeks does {p} have to save?",),
    "cash": ("How much money does {p} have now?", "How many dollars does {he} have in the end?"),
    "count": ("How many tickets can {p} buy?",),
    "miles": ("How many miles does {p} go in all?", "How far does {he} go in miles?"),
    "hours": ("How many hours does {q} need?",),
    "trip": ("How many miles are left?", "How many more miles does {p} have to drive?"),
    "pages": ("How many pages are in the rest of the book?", "How many pages does {p} have left to read?"),
    "days": ("In how many days does {p} finish the book?",),
    "minutes": ("How many minutes is that?", "How many minutes does that make?"),
    "people": ("How many people are on the train now?",),
    "students": ("How many students are there now?",),
    "groups": ("How many groups do they form?",),
    "needed": ("How many {things} do they get in all?",),
    "age": ("How old is the elm?",),
    "later": ("How old will the elm be then?",),
    "liters": ("How many liters are in the tank now?",),
    "buckets": ("How many times does {p} fill the bucket?",),
    "animals": ("How many animals are on the farm now?",),
    "feed": ("How many pounds of food do they eat in a week?",),
}

"""The words that the generated problems are filled with, as data."""

from __future__ import annotations


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

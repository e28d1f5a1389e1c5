"""The short lists of ordinary words in the paragraphs; training and the held-out set share them."""

CLOSED: dict[str, tuple[str, ...]] = {
    "trade": tuple(
        "baker smith weaver potter miller tailor painter fisher doctor teacher clerk farmer guard "
        "cook sailor carpenter gardener hunter librarian shepherd".split()
    ),
    "colour": tuple("red blue green yellow black white brown purple silver golden grey".split()),
    "goods": tuple(
        "honey silk cheese salt glass pottery wine bread copper wool tea rope paper soap".split()
    ),
}
BEASTS = tuple("goats sheep hens geese cows ponies bees cats dogs ducks pigs mules".split())
WARES = tuple("lamp chair table coat book clock rug kettle drum mirror saddle boat".split())
PARTS = tuple("bridges towers mills wells gates markets schools inns".split())

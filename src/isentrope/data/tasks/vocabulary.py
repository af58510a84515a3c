"""Neutral filler text, and words to name needles, people and places with."""

PARAGRAPHS = """
The morning was mild and the window stood open. A light wind moved the curtain and let it fall again. On the table
lay a newspaper, a pencil and half an orange. Somebody had left the radio on in the next room. The kettle took its
time, as it always did. Outside, a cyclist rang his bell and turned the corner. The trees along the street had kept
most of their leaves. Two neighbours talked about the weather and agreed that it might change.

The road to the lake runs between fields for an hour. There is a bench where the path divides, and most people rest
on it. In summer the grass is cut twice, in spring not at all. A wooden fence keeps the sheep away from the
vegetables. The water is cold until July and pleasant after that. Boats are tied to the pier with thick ropes. When
the bell of the chapel is heard, it is time to walk back. Nobody minds if the walk takes longer than planned.

In the workshop every tool has a hook of its own. The plane hangs beside the saw, and the saw beside the window.
Shavings are swept up in the evening and burned in the stove. A chair needs four legs of the same length, which is
harder than it sounds. The glue dries overnight under a heavy book. Visitors are asked to shut the door, because of
the draught. On the shelf stands a row of jars with screws of every size. The apprentice sorts them when there is
nothing else to do.

The library opens late on Mondays. Its reading room smells of paper and floor polish. Someone always sits near the
heater with a large atlas. The clock above the entrance is a little slow, and everyone allows for it. Books come
back with train tickets and dried flowers between their pages. A quiet voice answers the telephone. When it rains,
the room fills up within minutes. By closing time the chairs are all in their places again.

Bread is baked before sunrise and sold before noon. The baker knows what most people will ask for. Flour settles on
everything, even on the leaves of the plant by the till. Children look at the cakes and their parents look at the
prices. In winter the glass of the door is clouded from top to bottom. A small dog waits outside and watches every
customer leave. The last loaf goes to the man from the post office. Then the shutters come down and the street is
still.

The train follows the river for most of the way. After the second tunnel the valley becomes wide. Passengers read,
sleep or count the bridges. A trolley with tea and sandwiches passes through twice. At the small stations hardly
anyone gets on. The conductor wears his cap even in the heat. Toward evening the hills turn blue and then grey.
Whoever travels to the end of the line has a long walk ahead.
"""
NOISE = (
    "The lamp is on. The door is shut. Rain falls on the roof and runs into the gutter. A clock ticks in the hall. "
    "Nothing else happens, and the day goes by."
)  # a few short sentences, for a haystack that repeats them
FILLER = "\n\n".join(" ".join(paragraph.split()) for paragraph in PARAGRAPHS.split("\n\n"))

ADJECTIVE_LIST = """
amber brisk calm distant early faded gentle golden hollow humble ivory jolly keen little mellow narrow nimble olive
patient pale quiet rapid rusty scarlet silent silver simple slender solid steady sunny swift tender tidy velvet
violet warm wide winding young
"""
ADJECTIVES = tuple(ADJECTIVE_LIST.split())

NOUN_LIST = """
anchor apple arrow autumn basket beacon bench blanket bottle branch bridge bucket butter button cabin camera candle
canvas carpet castle cellar cherry chimney circle copper corner cotton cradle curtain desert diamond donkey dragon
eagle engine falcon feather fiddle finger flower forest fountain garden ginger glacier guitar hammer harbour helmet
honey island jacket jungle kettle kitchen ladder lantern lemon letter lizard magnet marble meadow mirror monkey
mountain mustard napkin needle orchard oyster paddle palace parrot pebble pencil pepper pigeon pillow planet pocket
puzzle rabbit ribbon river rocket saddle sailor salmon shadow shelter shovel signal spider spoon station stone
summer tailor temple thunder ticket tiger timber tower tractor trumpet tunnel turtle valley violin wagon walnut
weather whistle willow window winter wizard yellow zebra
"""
NOUNS = tuple(NOUN_LIST.split())

PEOPLE = (
    "Agnes", "Bertram", "Cosima", "Dexter", "Edwina", "Florian", "Gideon", "Hester", "Imogen", "Jasper", "Konrad",
    "Lavinia",
)  # fmt: skip
PLACES = ("attic", "barn", "cellar", "chapel", "garage", "kitchen", "library", "orchard")
OBJECTS = ("apple", "basket", "hammer", "lantern", "pillow", "trumpet")

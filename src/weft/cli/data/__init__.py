"""`weft data`: trains tokenizers, packs text into token stores, and transforms stores. One file per sub-verb."""

HELP = "train tokenizers, pack text into token stores, transform stores"
GROUP = "data"
GROUPS = ("make", "look", "work")  # of its sub-verbs

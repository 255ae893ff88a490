"""`weft data`: trains tokenizers, packs text into token stores, and transforms stores. Each module is a subcommand."""

HELP = "train tokenizers, pack text into token stores, transform stores"
GROUP = "data"
GROUPS = ("make", "look", "work")  # groups of the subcommands
